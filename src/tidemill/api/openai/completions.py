"""POST /v1/completions."""

from __future__ import annotations

import secrets
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from tidemill.api.engine_client import EngineClient
from tidemill.api.errors import APIError, unsupported
from tidemill.api.http import read_body
from tidemill.api.metrics import ServerMetrics
from tidemill.api.openai import protocol
from tidemill.api.openai.generation import Job, Prompt, require_model, require_ready
from tidemill.api.openai.logprobs import completion_logprobs, prompt_logprobs
from tidemill.api.openai.protocol import CompletionRequest
from tidemill.api.openai.streaming import ChunkWriter, EventStream, whole
from tidemill.wire.messages import TextDelta, TokenizeText, ids_to_bytes

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    began = time.perf_counter()
    client: EngineClient = request.app.state.client
    metrics: ServerMetrics = request.app.state.metrics
    body = protocol.decode(await read_body(request), CompletionRequest)
    require_model(client, body.model)
    params = protocol.sampling_params(body, client.config.max_choices)
    if body.echo and params.logprobs is not None:
        if params.prompt_logprobs not in (None, params.logprobs):
            raise unsupported("prompt_logprobs", " with echo, unless it equals logprobs")
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
    ready = require_ready(client)
    prompts = await _prompts(client, body)
    if params.max_tokens is None:
        # A default must not refuse a prompt that fits.
        room = ready.max_model_len - max(prompt.length for prompt in prompts)
        tokens = max(params.min_tokens, min(DEFAULT_MAX_TOKENS, room), 1)
        params = msgspec.structs.replace(params, max_tokens=tokens)
    job = Job(
        client,
        metrics,
        "completions",
        prompts,
        params,
        began=began,
        priority=body.priority,
        echo=bool(body.echo),
    )
    if body.stream:
        return EventStream(job, CompletionEvents(job, body), metrics)
    return await whole(request, job, CompletionAnswer(job, body))


async def _prompts(client: EngineClient, body: CompletionRequest) -> list[Prompt]:
    """The request's prompts as ids. EOS ids come from the tokenizer, whatever the form."""
    items = _items(body.prompt)
    if len(items) > client.config.max_choices:
        raise APIError(
            400,
            f"at most {client.config.max_choices} prompts in one request, got {len(items)}",
            "prompt",
        )
    texts = [item for item in items if isinstance(item, str)]
    answer = await client.ask(TokenizeText(call=client.new_id(), worker=client.worker, texts=texts))
    if answer.error is not None:
        raise APIError.of(answer.error)
    if len(texts) == len(items):
        return [Prompt(ids, answer.eos_ids) for ids in answer.prompts]
    vocab = require_ready(client).vocab_size
    made = []
    encoded = iter(answer.prompts)
    for item in items:
        if isinstance(item, str):
            made.append(Prompt(next(encoded), answer.eos_ids))
            continue
        outside = [token for token in item if not 0 <= token < vocab]
        if outside:
            raise APIError(
                400,
                f"token ids must be between 0 and {vocab - 1}, got {outside[0]}",
                "prompt",
                "invalid_value",
            )
        made.append(Prompt(ids_to_bytes(item), answer.eos_ids))
    return made


def _items(given: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts one by one. Raises APIError for a mixture that means nothing."""
    if isinstance(given, str):
        return [given]
    ids = [item for item in given if isinstance(item, int)]
    if ids and len(ids) == len(given):
        return [ids]
    if ids:
        raise APIError(400, "prompt mixes token ids with texts or lists", "prompt", "invalid_type")
    if not given:
        raise APIError(400, "the prompt is empty: it needs at least one token", "prompt")
    return [item for item in given if not isinstance(item, int)]


def _head(job: Job, body: CompletionRequest) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": job.created,
        "model": body.model,
    }


class _Echo:
    """Puts what is echoed of the prompt in front of one choice's first piece."""

    def __init__(self, body: CompletionRequest) -> None:
        self._logprobs = body.logprobs is not None
        self._echo = bool(body.echo)
        self._length = 0  # characters so far

    def take(self, delta: TextDelta) -> tuple[str, dict[str, list[Any]] | None]:
        """The delta's text and log-probabilities, the echoed prompt's included."""
        prompt_text = delta.prompt_text or ""
        text, logprobs = prompt_text + delta.text, None
        if self._logprobs:
            prompt = (delta.prompt_logprobs or []) if self._echo else []
            logprobs = completion_logprobs(prompt, prompt_text, delta.logprobs or [], self._length)
        self._length += len(text)
        return text, logprobs


class CompletionAnswer:
    """A completion in one piece."""

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self._job = job
        self._body = body
        self._echoes = [_Echo(body) for _ in range(job.choices)]
        self._texts: list[list[str]] = [[] for _ in range(job.choices)]
        self._choices: list[dict[str, Any]] = [
            {"index": choice, "text": "", "logprobs": None} for choice in range(job.choices)
        ]

    def add(self, choice: int, delta: TextDelta) -> None:
        made = self._choices[choice]
        text, logprobs = self._echoes[choice].take(delta)
        self._texts[choice].append(text)
        if made["logprobs"] is None:
            made["logprobs"] = logprobs
        elif logprobs is not None:
            for key, values in logprobs.items():
                made["logprobs"][key] += values
        made["finish_reason"] = delta.finish
        made["stop_reason"] = delta.stop_reason
        if self._body.prompt_logprobs is not None and delta.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs)

    def result(self) -> dict[str, Any]:
        for made, texts in zip(self._choices, self._texts, strict=True):
            made["text"] = "".join(texts)
        return _head(self._job, self._body) | {
            "choices": self._choices,
            "usage": self._job.tally.usage(),
        }


class CompletionEvents:
    """A completion as events: pieces of text, the last of a choice with its finish reason."""

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        options = body.stream_options or protocol.StreamOptions()
        self._job = job
        self._usage = options.include_usage
        self._continuous = options.continuous_usage_stats
        self._plain = body.logprobs is None and not self._continuous
        self._writer = ChunkWriter(_head(job, body), b'"text":', b"", self._usage)
        self._echoes = [_Echo(body) for _ in range(job.choices)]

    def encode(self, choice: int, delta: TextDelta) -> bytes:
        text, logprobs = self._echoes[choice].take(delta)
        if delta.finish is None:
            if not (text or logprobs):
                return b""
            if self._plain:
                return self._writer.text(choice, text)
        made = {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": delta.finish,
            "stop_reason": delta.stop_reason,
        }
        return self._writer.chunk([made], self._job.tally.usage() if self._continuous else None)

    def close(self) -> bytes:
        return self._writer.chunk([], self._job.tally.usage()) if self._usage else b""
