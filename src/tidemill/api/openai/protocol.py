"""Request bodies of OpenAI's protocol, and the way from them to sampling parameters.

Decoding is strict: a field that is not here is refused, and a field that is here but would need
something the engine does not do is refused by name. Fields that ask for nothing (`user`,
`metadata`, `store: false`, a default `service_tier`) are accepted.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from tidemill.api.errors import APIError, unsupported
from tidemill.wire.sampling import InvalidParam, SamplingParams


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    priority: int = 0
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    # Accepted: they change nothing in the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, and refused unless they ask for nothing.
    response_format: dict[str, Any] | None = None
    structured_outputs: Any = None
    guided_json: Any = None


class TextPart(msgspec.Struct, forbid_unknown_fields=True):
    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    audio: Any = None
    function_call: Any = None
    annotations: Any = None
    reasoning_content: str | None = None


class ChatRequest(Sampling, kw_only=True):
    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class CompletionRequest(Sampling, kw_only=True):
    prompt: str | list[str | int | list[int]]  # one text or its ids, or several of either
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


_AT = re.compile(r"^(.*) - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"(unknown|missing required) field `(.*?)`")


T = TypeVar("T")


def decode(body: bytes, kind: type[T]) -> T:
    """Parse a request body. Raises APIError(400) that names the field."""
    if not body.strip():
        raise APIError(400, "the request body is empty; a JSON object is expected")
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        message, param, code = str(error), None, "invalid_type"
        if found := _AT.match(message):
            message, param = found[1], found[2] or None
        if field := _FIELD.search(message):
            param = f"{param}.{field[2]}" if param else field[2]
            code = "unknown_parameter" if field[1] == "unknown" else "missing_parameter"
        where = f" (in {param})" if param and f"`{param}`" not in message else ""
        raise APIError(400, f"{message}{where}", param, code) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise APIError(
            400, f"the request body is not valid JSON: {error}", code="invalid_json"
        ) from None


def sampling_params(request: ChatRequest | CompletionRequest, max_choices: int) -> SamplingParams:
    """The request's parameters, within their limits. Raises APIError that names the field.

    `max_tokens` is None where the request leaves it to the endpoint.
    """
    _refuse_unsupported(request)
    stop = () if request.stop is None else request.stop
    if request.n is not None and request.n > max_choices:
        raise APIError(400, f"n must be at most {max_choices}, got {request.n}", "n")
    values: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": 0 if request.top_k == -1 else request.top_k,  # -1: vLLM's way to switch it off
        "min_p": request.min_p,
        "presence_penalty": request.presence_penalty,
        "frequency_penalty": request.frequency_penalty,
        "repetition_penalty": request.repetition_penalty,
        "logit_bias": _logit_bias(request.logit_bias),
        "seed": request.seed,
        "n": request.n,
        "max_tokens": _max_tokens(request),
        "min_tokens": request.min_tokens,
        "ignore_eos": request.ignore_eos,
        "stop": (stop,) if isinstance(stop, str) else tuple(stop),
        "stop_token_ids": tuple(request.stop_token_ids or ()),
        "include_stop_str_in_output": request.include_stop_str_in_output,
        "skip_special_tokens": request.skip_special_tokens,
        "logprobs": _logprobs(request),
        "prompt_logprobs": request.prompt_logprobs,
    }
    params = SamplingParams(**{key: v for key, v in values.items() if v is not None})
    try:
        params.validate()
    except InvalidParam as error:
        param = error.param
        if isinstance(request, ChatRequest):
            if param == "logprobs":
                param = "top_logprobs"
            if param == "max_tokens" and request.max_completion_tokens is not None:
                param = "max_completion_tokens"
        raise APIError(400, str(error), param, "invalid_value") from None
    return params


def _refuse_unsupported(request: ChatRequest | CompletionRequest) -> None:
    if (request.response_format or {}).get("type", "text") != "text":
        raise unsupported("response_format", " except {'type': 'text'}")
    if request.service_tier not in (None, "auto", "default"):
        raise unsupported("service_tier", " except 'auto' and 'default'")
    names = ["structured_outputs", "guided_json"]
    if isinstance(request, CompletionRequest):
        if request.best_of not in (None, request.n or 1):
            raise unsupported("best_of", " unless it equals n")
        names += ["suffix"]
    else:
        if request.modalities not in (None, ["text"]):
            raise unsupported("modalities", " except ['text']")
        if request.tool_choice not in (None, "none"):
            raise unsupported("tool_choice", " except 'none'")
        names += ["tools", "functions", "function_call", "audio", "prediction"]
        names += ["reasoning_effort", "verbosity", "web_search_options"]
    for name in names:
        if getattr(request, name):
            raise unsupported(name)
    if request.stream_options is not None and not request.stream:
        raise APIError(400, "stream_options needs stream: true", "stream_options")
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        raise unsupported("stream_options.include_obfuscation")
    if request.stream and request.prompt_logprobs is not None:
        raise unsupported("prompt_logprobs", " with stream: true")
    if request.store:
        raise unsupported("store", ": nothing is stored")
    if not -(2**31) <= request.priority < 2**31:
        raise APIError(400, "priority must be a 32-bit integer", "priority")


def _max_tokens(request: ChatRequest | CompletionRequest) -> int | None:
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise APIError(
            400, "max_tokens and max_completion_tokens differ; give one", "max_completion_tokens"
        )
    return request.max_completion_tokens


def _logprobs(request: ChatRequest | CompletionRequest) -> int | None:
    if not isinstance(request, ChatRequest):
        return request.logprobs
    if request.top_logprobs is not None and not request.logprobs:
        raise APIError(400, "top_logprobs needs logprobs: true", "top_logprobs")
    return (request.top_logprobs or 0) if request.logprobs else None


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    for key in given or ():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise APIError(
                400, f"logit_bias: keys must be token ids, got {key[:40]!r}", "logit_bias"
            )
    return {int(key): value for key, value in given.items()} if given else None


def adds_generation_prompt(request: ChatRequest | TokenizeRequest) -> bool:
    """Whether the template opens the assistant's turn: by default, unless one is continued."""
    if request.add_generation_prompt is None:
        return not request.continue_final_message
    return request.add_generation_prompt


def plain_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them. Raises APIError for what the engine cannot take."""
    if not messages:
        raise APIError(400, "messages must hold at least one message", "messages")
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role}
    for name in ("audio", "function_call", "tool_calls"):
        if getattr(message, name):
            raise APIError(
                400, f"{where}.{name} is not supported", f"{where}.{name}", "unsupported_parameter"
            )
    content = message.content
    if isinstance(content, list):
        for index, part in enumerate(content):
            place = f"{where}.content[{index}]"
            if part.type not in ("text", "input_text"):
                raise APIError(
                    400,
                    f"{place}: parts of type {part.type!r} are not supported; text is",
                    f"{place}.type",
                    "unsupported_parameter",
                )
            if part.text is None:
                raise APIError(400, f"{place}: a text part needs text", f"{place}.text")
        made["content"] = [{"type": "text", "text": part.text} for part in content]
    elif content is None and message.role != "assistant":
        raise APIError(400, f"{where} needs content", f"{where}.content")
    else:
        made["content"] = content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            made[name] = value
    return made
