"""POST /v1/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from tidemill.api.engine_client import EngineClient
from tidemill.api.errors import APIError
from tidemill.api.http import json_response, read_body
from tidemill.api.metrics import ServerMetrics
from tidemill.api.openai import protocol
from tidemill.api.openai.generation import (
    Job,
    Prompt,
    require_model,
    require_ready,
    while_connected,
)
from tidemill.api.openai.logprobs import completion_logprobs, prompt_logprobs
from tidemill.api.openai.protocol import CompletionRequest
from tidemill.api.openai.streaming import ChunkWriter, guarded
from tidemill.wire.messages import TextDelta, TokenizeText, ids_to_bytes

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    client: EngineClient = request.app.state.client
    metrics: ServerMetrics = request.app.state.metrics
    body = protocol.decode(await read_body(request), CompletionRequest)
    require_model(client, body.model)
    params = protocol.sampling_params(body, client.config.max_choices)
    if params.max_tokens is None:
        tokens = max(DEFAULT_MAX_TOKENS, params.min_tokens)
        params = msgspec.structs.replace(params, max_tokens=tokens)
    if body.echo and params.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=params.logprobs)
    require_ready(client)
    prompts = await _prompts(client, body)
    job = Job(
        client,
        metrics,
        "completions",
        prompts,
        params,
        priority=body.priority,
        echo=bool(body.echo),
    )
    if body.stream:
        return StreamingResponse(guarded(_events(job, body)), media_type="text/event-stream")
    return json_response(await while_connected(request, _whole(job, body)))


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


class _Choice:
    """The pieces of one answer, with the prompt in front when echoed."""

    def __init__(self, body: CompletionRequest) -> None:
        self._body = body
        self.length = 0  # characters so far
        self.prompt_logprobs: list[Any] | None = None

    def take(self, delta: TextDelta) -> tuple[str, dict[str, Any] | None]:
        """The delta's text and log-probabilities, the echoed prompt's included."""
        text = (delta.prompt_text or "") + delta.text
        entries: list[Any] | None = None
        if self._body.logprobs is not None:
            echoed = (delta.prompt_logprobs or []) if self._body.echo else []
            entries = [*echoed, *(delta.logprobs or [])]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = [*(self.prompt_logprobs or []), *delta.prompt_logprobs]
        made = completion_logprobs(entries, self.length)
        self.length += len(text)
        return text, made


async def _whole(job: Job, body: CompletionRequest) -> dict[str, Any]:
    made: list[dict[str, Any]] = [
        {"index": i, "text": "", "logprobs": None, "finish_reason": None, "stop_reason": None}
        for i in range(len(job.generations))
    ]
    states = [_Choice(body) for _ in made]
    with job:
        async for news in job.deltas():
            for index, delta in news:
                choice = made[index]
                text, logprobs = states[index].take(delta)
                choice["text"] += text
                if choice["logprobs"] is None:
                    choice["logprobs"] = logprobs
                elif logprobs is not None:
                    for key, values in logprobs.items():
                        choice["logprobs"][key] += values
                choice["finish_reason"] = delta.finish
                choice["stop_reason"] = delta.stop_reason
    if body.prompt_logprobs is not None:
        for choice, state in zip(made, states, strict=True):
            choice["prompt_logprobs"] = prompt_logprobs(state.prompt_logprobs)
    return _head(job, body) | {"choices": made, "usage": job.tally.usage()}


async def _events(job: Job, body: CompletionRequest) -> AsyncIterator[bytes]:
    options = body.stream_options or protocol.StreamOptions()
    usage, continuous = options.include_usage, options.continuous_usage_stats
    writer = ChunkWriter(_head(job, body), b'"text":', b"", usage)
    plain = body.logprobs is None and not continuous
    states = [_Choice(body) for _ in job.generations]
    with job:
        async for news in job.deltas():
            out = []
            for index, delta in news:
                text, logprobs = states[index].take(delta)
                if plain and delta.finish is None:
                    if text:
                        out.append(writer.text(index, text))
                    continue
                choice = {
                    "index": index,
                    "text": text,
                    "logprobs": logprobs,
                    "finish_reason": delta.finish,
                    "stop_reason": delta.stop_reason,
                }
                out.append(writer.chunk([choice], job.tally.usage() if continuous else None))
            if out:
                yield b"".join(out)
        if usage:
            yield writer.chunk([], job.tally.usage())
