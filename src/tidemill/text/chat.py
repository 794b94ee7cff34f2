"""Chat templates: Jinja in a sandbox, as models publish them.

A template is the model author's code. It runs without access to anything but the messages, and
whatever it raises is the client's error, not the server's.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tidemill.wire.errors import ModelError
from tidemill.wire.messages import ErrorInfo

ROLES = ("system", "developer", "user", "assistant", "tool")
# What the engine itself passes to the template, which a client may not replace.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class ChatError(ValueError):
    """The messages cannot be rendered; `info` is what the client gets."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.info = ErrorInfo(status=400, message=message, param=param, code="invalid_messages")


class _Generation(Extension):
    """`{% generation %}` … `{% endgeneration %}` marks an assistant's words for training. Here it
    is only what is inside."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `tokens` are names like bos_token that it may use."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
            self._takes_parts = _loops_over_content(environment.parse(source))
        except TemplateSyntaxError as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from None
        self._tokens = tokens
        self._knows_developer = "developer" in source

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        """The prompt's text. Raises ChatError."""
        if reserved := RESERVED & template_kwargs.keys():
            raise ChatError(
                f"chat_template_kwargs must not set {', '.join(sorted(reserved))}",
                "chat_template_kwargs",
            )
        prepared = [self._prepare(index, message) for index, message in enumerate(messages)]
        final = _text(prepared[-1]["content"]) if prepared else ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    "continue_final_message",
                )
            if not final.strip():
                raise ChatError("continue_final_message needs a final message with text")
        try:
            text = self._template.render(
                **(self._tokens | template_kwargs),
                messages=prepared,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatError(f"the chat template refused the messages: {error}") from None
        except (AttributeError, RecursionError, MemoryError) as error:
            raise ChatError(f"the chat template failed: {type(error).__name__}: {error}") from None
        if continue_final_message:
            # The prompt ends where the final message does: what the template closes it with goes.
            at = text.rfind(final.strip())
            if at < 0:
                raise ChatError("the chat template alters the final message: it cannot go on")
            text = text[: at + len(final.strip())]
        return text

    def _prepare(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(message, dict):
            raise ChatError("a message is an object with role and content", f"messages[{index}]")
        role = message.get("role")
        if role not in ROLES:
            raise ChatError(
                f"unknown role {role!r}; there are {', '.join(ROLES)}", f"messages[{index}].role"
            )
        made = dict(message)
        if role == "developer" and not self._knows_developer:
            made["role"] = "system"
        content = message.get("content")
        _check_content("" if content is None else content, f"messages[{index}].content")
        if not self._takes_parts or content is None:
            made["content"] = _text(content or "")
        return made


def _check_content(content: Any, where: str) -> None:
    if not isinstance(content, str | list):
        raise ChatError(f"{where} must be a text or a list of text parts", where)
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            raise ChatError(f"{where} holds something else than text parts", where)


def _text(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether a template can take a message's content as a list of parts."""
    return any(
        (isinstance(loop.iter, nodes.Getattr) and loop.iter.attr == "content")
        or (
            isinstance(loop.iter, nodes.Getitem)
            and isinstance(loop.iter.arg, nodes.Const)
            and loop.iter.arg.value == "content"
        )
        for loop in template.find_all(nodes.For)
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes HTML. The arguments are transformers'."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
