"""Chat templates: Jinja in a sandbox, as models publish them.

A template is the model author's code. It runs without access to anything but the messages, and
whatever it raises is the client's error, not the server's.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError
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


class ChatTemplate:
    """One compiled template. `tokens` are names like bos_token that it may use."""

    def __init__(self, source: str, tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        try:
            self._template = environment.from_string(source)
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
        final = prepared[-1]["content"] if prepared else ""
        if continue_final_message:
            if add_generation_prompt:
                raise ChatError(
                    "continue_final_message and add_generation_prompt exclude each other",
                    "continue_final_message",
                )
            if not isinstance(final, str) or not final.strip():
                raise ChatError("continue_final_message needs a final message with text")
        try:
            text = self._template.render(
                **(self._tokens | template_kwargs),
                messages=prepared,
                tools=tools,
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
        role = message.get("role")
        if role not in ROLES:
            raise ChatError(
                f"unknown role {role!r}; there are {', '.join(ROLES)}", f"messages[{index}].role"
            )
        made = dict(message)
        if role == "developer" and not self._knows_developer:
            made["role"] = "system"
        content = made.get("content")
        if isinstance(content, list):
            made["content"] = "".join(str(part.get("text", "")) for part in content)
        elif content is None:
            made["content"] = ""
        return made


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: Jinja's own filter escapes HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
