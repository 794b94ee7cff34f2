"""What chat and text completions share: admission, running n × prompts sequences, usage."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request

from tidemill.api.engine_client import EngineClient, Generation
from tidemill.api.errors import APIError
from tidemill.api.metrics import ServerMetrics
from tidemill.wire.messages import RunnerReady, TextDelta
from tidemill.wire.sampling import InvalidParam, SamplingParams, check_vocabulary, for_choice


@dataclass(slots=True)
class Prompt:
    ids: bytes
    eos_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.ids) // 4


@dataclass(slots=True)
class Tally:
    """Token counts of one request, for `usage`."""

    prompt: int
    cached: int = 0
    completion: dict[int, int] = field(default_factory=dict)  # by choice

    def usage(self) -> dict[str, Any]:
        completion = sum(self.completion.values())
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def require_ready(client: EngineClient) -> RunnerReady:
    """Raises APIError(503) unless requests are taken. A degraded engine takes them: they wait."""
    state = client.snapshot.state
    if state == "draining":
        raise APIError(503, "the server is shutting down", code="draining")
    if state == "starting" or client.ready is None:
        raise APIError(503, "the model is still loading; see /health", code="starting")
    return client.ready


def require_model(client: EngineClient, model: str | None) -> None:
    known = client.config.model_name
    if model is not None and model != known:
        raise APIError(404, f"no model {model!r}; {known!r} is served", "model", "model_not_found")


def fit(params: SamplingParams, prompt: Prompt, ready: RunnerReady, param: str) -> SamplingParams:
    """The parameters with max_tokens set. Raises APIError where prompt and answer do not fit."""
    if prompt.length == 0:
        raise APIError(400, "the prompt is empty: it needs at least one token", param)
    room = ready.max_model_len - prompt.length
    wanted = params.max_tokens or 1
    if wanted > room:
        asked = f"{params.max_tokens} for the answer" if params.max_tokens else "room for an answer"
        raise APIError(
            400,
            f"this model's context is {ready.max_model_len} tokens; the prompt has "
            f"{prompt.length} and the request asks for {asked}",
            param if room < 1 else "max_tokens",
            "context_length_exceeded",
        )
    import msgspec

    return msgspec.structs.replace(params, max_tokens=params.max_tokens or room)


class Job:
    """All sequences of one HTTP request. Choice i·n + j is the j-th answer to prompt i.

    Use as a context manager: leaving it, however, aborts what still runs, so a client that goes
    away frees its sequences.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        endpoint: str,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        priority: int = 0,
        param: str = "prompt",
        echo: bool = False,
    ) -> None:
        ready = require_ready(client)
        if params.n * len(prompts) > client.config.max_choices:
            raise APIError(
                400,
                f"n times the number of prompts must be at most {client.config.max_choices}, "
                f"got {params.n} x {len(prompts)}",
                "n",
            )
        fitted = [fit(params, prompt, ready, param) for prompt in prompts]
        try:
            check_vocabulary(params, ready.vocab_size)
        except InvalidParam as error:
            raise APIError(400, str(error), error.param, "invalid_value") from None
        self._client = client
        self._metrics = metrics
        self._endpoint = endpoint
        self._began = time.perf_counter()
        self.tally = Tally(sum(prompt.length for prompt in prompts))
        self.created = int(time.time())
        self.generations: list[Generation] = []
        self._cached = [0] * len(prompts)
        self._n = params.n
        self._first: dict[int, float] = {}
        for prompt, own in zip(prompts, fitted, strict=True):
            for choice in range(own.n):
                generation = client.submit(
                    prompt.ids,
                    for_choice(own, choice, prompt.eos_ids),
                    priority=priority,
                    want_prompt_text=echo,
                )
                self.generations.append(generation)

    def __enter__(self) -> Job:
        self._metrics.open_requests.inc()
        return self

    def __exit__(self, *_: object) -> None:
        self._metrics.open_requests.dec()
        for generation in self.generations:
            if not generation.ended:
                self._metrics.ended(self._endpoint, "abort")
            self._client.abort(generation)

    async def deltas(self) -> AsyncIterator[list[tuple[int, TextDelta]]]:
        """News of all choices, as (choice, delta), until the last has ended. What is ready at
        once comes at once. Raises APIError for a choice that failed."""
        if len(self.generations) == 1:
            generation = self.generations[0]
            while not generation.ended or generation.deltas:
                yield [(0, self._count(0, delta)) for delta in await generation.next()]
            return
        waiting = {
            asyncio.create_task(generation.news.wait()): index
            for index, generation in enumerate(self.generations)
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                news = []
                for task in sorted(done, key=lambda task: waiting[task]):
                    index = waiting.pop(task)
                    generation = self.generations[index]
                    news += [(index, self._count(index, d)) for d in await generation.next()]
                    if not generation.ended:
                        waiting[asyncio.create_task(generation.news.wait())] = index
                yield news
        finally:
            for task in waiting:
                task.cancel()

    def _count(self, index: int, delta: TextDelta) -> TextDelta:
        """Keep the books: usage, metrics, errors."""
        if delta.error is not None:
            outcome = "refused" if delta.error.status < 500 else "error"
            self._metrics.ended(self._endpoint, outcome)
            raise APIError.of(delta.error)
        now = time.perf_counter()
        if index not in self._first:
            self._first[index] = now
            self._metrics.ttft.observe(now - self._began)
            prompt = index // self._n
            self._cached[prompt] = max(self._cached[prompt], delta.cached_tokens)
            self.tally.cached = sum(self._cached)
        self.tally.completion[index] = delta.generated
        if delta.finish is not None:
            self._metrics.ended(self._endpoint, delta.finish)
            self._metrics.latency.observe(now - self._began)
            if delta.generated > 1:
                self._metrics.tpot.observe((now - self._first[index]) / (delta.generated - 1))
        return delta


async def until_disconnect(request: Request) -> None:
    """Returns when the client is gone. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class ClientGone(Exception):
    """Nobody waits for the answer."""


async def while_connected(request: Request, work: Any) -> Any:
    """The result of the coroutine `work`; cancels it and raises ClientGone if the client goes."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_disconnect(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
