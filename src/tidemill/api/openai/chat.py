"""POST /v1/chat/completions."""

from __future__ import annotations

import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from tidemill.api.engine_client import EngineClient
from tidemill.api.errors import APIError
from tidemill.api.http import read_body
from tidemill.api.metrics import ServerMetrics
from tidemill.api.openai import protocol
from tidemill.api.openai.generation import Job, Prompt, require_model, require_ready
from tidemill.api.openai.logprobs import chat_logprobs, prompt_logprobs
from tidemill.api.openai.protocol import ChatRequest
from tidemill.api.openai.streaming import ChunkWriter, EventStream, whole
from tidemill.wire.messages import LogprobText, TextDelta, TokenizeChat


async def chat_completions(request: Request) -> Response:
    began = time.perf_counter()
    client: EngineClient = request.app.state.client
    metrics: ServerMetrics = request.app.state.metrics
    body = protocol.decode(await read_body(request), ChatRequest)
    require_model(client, body.model)
    params = protocol.sampling_params(body, client.config.max_choices)
    call = TokenizeChat(
        call=client.new_id(),
        worker=client.worker,
        messages=protocol.plain_messages(body.messages),
        template_kwargs=body.chat_template_kwargs or {},
        add_generation_prompt=protocol.adds_generation_prompt(body),
        continue_final_message=body.continue_final_message,
    )
    require_ready(client)
    answer = await client.ask(call)
    if answer.error is not None:
        raise APIError.of(answer.error)
    job = Job(
        client,
        metrics,
        "chat",
        [Prompt(answer.prompts[0], answer.eos_ids)],
        params,
        began=began,
        priority=body.priority,
        param="messages",
    )
    if body.stream:
        return EventStream(job, ChatEvents(job, body), metrics)
    return await whole(request, job, ChatAnswer(job, body))


def _head(job: Job, body: ChatRequest, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": kind,
        "created": job.created,
        "model": body.model,
    }


class ChatAnswer:
    """A chat completion in one piece."""

    def __init__(self, job: Job, body: ChatRequest) -> None:
        self._job = job
        self._body = body
        self._texts: list[list[str]] = [[] for _ in range(job.choices)]
        self._logprobs: list[list[LogprobText]] = [[] for _ in range(job.choices)]
        self._last: dict[int, TextDelta] = {}
        self._prompt: list[LogprobText | None] | None = None

    def add(self, choice: int, delta: TextDelta) -> None:
        self._texts[choice].append(delta.text)
        self._logprobs[choice] += delta.logprobs or ()
        self._last[choice] = delta
        self._prompt = self._prompt or delta.prompt_logprobs  # the same for all choices

    def result(self) -> dict[str, Any]:
        choices = [self._choice(choice) for choice in range(self._job.choices)]
        made = _head(self._job, self._body, "chat.completion")
        made |= {"choices": choices, "usage": self._job.tally.usage()}
        if self._body.prompt_logprobs is not None:
            made["prompt_logprobs"] = prompt_logprobs(self._prompt)
        return made

    def _choice(self, choice: int) -> dict[str, Any]:
        content = "".join(self._texts[choice])
        logprobs = self._logprobs[choice]
        return {
            "index": choice,
            "message": {"role": "assistant", "content": content, "refusal": None},
            "logprobs": chat_logprobs(logprobs) if self._body.logprobs else None,
            "finish_reason": self._last[choice].finish,
            "stop_reason": self._last[choice].stop_reason,
        }


class ChatEvents:
    """A chat completion as events: for each choice its role, its text, its finish reason."""

    def __init__(self, job: Job, body: ChatRequest) -> None:
        options = body.stream_options or protocol.StreamOptions()
        self._job = job
        self._usage = options.include_usage
        self._continuous = options.continuous_usage_stats
        self._logprobs = bool(body.logprobs)
        self._plain = not (self._logprobs or self._continuous)
        head = _head(job, body, "chat.completion.chunk")
        self._writer = ChunkWriter(head, b'"delta":{"content":', b"}", self._usage)
        self._opened: set[int] = set()

    def encode(self, choice: int, delta: TextDelta) -> bytes:
        made = b""
        if choice not in self._opened:
            self._opened.add(choice)
            made = self._chunk(choice, {"role": "assistant", "content": ""})
        if self._plain:
            made += self._writer.text(choice, delta.text) if delta.text else b""
        elif delta.text or delta.logprobs:
            logprobs = chat_logprobs(delta.logprobs) if self._logprobs else None
            made += self._chunk(choice, {"content": delta.text}, logprobs=logprobs)
        if delta.finish is not None:
            end = {"finish_reason": delta.finish, "stop_reason": delta.stop_reason}
            made += self._chunk(choice, {}, **end)
        return made

    def close(self) -> bytes:
        return self._writer.chunk([], self._job.tally.usage()) if self._usage else b""

    def _chunk(self, choice: int, delta: dict[str, Any], **more: Any) -> bytes:
        made = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None} | more
        return self._writer.chunk([made], self._job.tally.usage() if self._continuous else None)
