"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

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
from tidemill.api.openai.logprobs import chat_logprobs, prompt_logprobs
from tidemill.api.openai.protocol import ChatRequest
from tidemill.api.openai.streaming import ChunkWriter, guarded
from tidemill.wire.messages import TextDelta, TokenizeChat


async def chat_completions(request: Request) -> Response:
    client: EngineClient = request.app.state.client
    metrics: ServerMetrics = request.app.state.metrics
    body = protocol.decode(await read_body(request), ChatRequest)
    require_model(client, body.model)
    params = protocol.sampling_params(body, client.config.max_choices)
    messages = protocol.plain_messages(body.messages)
    require_ready(client)
    generation_prompt = body.add_generation_prompt
    answer = await client.ask(
        TokenizeChat(
            call=client.new_id(),
            worker=client.worker,
            messages=messages,
            template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=(
                not body.continue_final_message if generation_prompt is None else generation_prompt
            ),
            continue_final_message=body.continue_final_message,
        )
    )
    if answer.error is not None:
        raise APIError.of(answer.error)
    prompt = Prompt(answer.prompts[0], answer.eos_ids)
    job = Job(client, metrics, "chat", [prompt], params, priority=body.priority, param="messages")
    if body.stream:
        return StreamingResponse(guarded(_events(job, body)), media_type="text/event-stream")
    return json_response(await while_connected(request, _whole(job, body)))


def _head(job: Job, body: ChatRequest, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": job.created,
        "model": body.model,
    }


async def _whole(job: Job, body: ChatRequest) -> dict[str, Any]:
    texts = [""] * len(job.generations)
    last: dict[int, TextDelta] = {}
    logprobs: dict[int, list[Any]] = {}
    prompts: list[Any] | None = None
    with job:
        async for news in job.deltas():
            for index, delta in news:
                texts[index] += delta.text
                last[index] = delta
                logprobs.setdefault(index, []).extend(delta.logprobs or ())
                if delta.prompt_logprobs is not None and index == 0:
                    prompts = [*(prompts or []), *delta.prompt_logprobs]
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": chat_logprobs(logprobs[index]) if body.logprobs else None,
            "finish_reason": last[index].finish,
            "stop_reason": last[index].stop_reason,
        }
        for index, text in enumerate(texts)
    ]
    made = _head(job, body, "chat.completion") | {"choices": choices, "usage": job.tally.usage()}
    if prompts is not None:
        made["prompt_logprobs"] = prompt_logprobs(prompts)
    return made


async def _events(job: Job, body: ChatRequest) -> AsyncIterator[bytes]:
    options = body.stream_options or protocol.StreamOptions()
    usage, continuous = options.include_usage, options.continuous_usage_stats
    head = _head(job, body, "chat.completion.chunk")
    writer = ChunkWriter(head, b'"delta":{"content":', b"}", usage)
    opened: set[int] = set()
    with job:
        async for news in job.deltas():
            out = []
            for index, delta in news:
                now = job.tally.usage() if continuous else None
                if index not in opened:
                    opened.add(index)
                    first = {"role": "assistant", "content": ""}
                    out.append(writer.chunk([_choice(index, first)], now))
                if delta.text and not body.logprobs and not continuous:
                    out.append(writer.text(index, delta.text))
                elif delta.text or delta.logprobs:
                    choice = _choice(index, {"content": delta.text})
                    choice["logprobs"] = chat_logprobs(delta.logprobs) if body.logprobs else None
                    out.append(writer.chunk([choice], now))
                if delta.finish is not None:
                    choice = _choice(index, {})
                    choice |= {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
                    out.append(writer.chunk([choice], now))
            if out:
                yield b"".join(out)
        if usage:
            yield writer.chunk([], job.tally.usage())


def _choice(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
