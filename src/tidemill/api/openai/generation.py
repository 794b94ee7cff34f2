"""What chat and text completions share: admission, running n × prompts sequences, usage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tidemill.api.engine_client import EngineClient, Generation, Inbox
from tidemill.api.errors import APIError
from tidemill.api.metrics import ServerMetrics
from tidemill.wire.messages import RunnerReady, TextDelta
from tidemill.wire.sampling import InvalidParam, SamplingParams, check_vocabulary, for_choice


@dataclass(slots=True)
class Prompt:
    ids: bytes  # int32
    eos_ids: tuple[int, ...]

    @property
    def length(self) -> int:
        return len(self.ids) // 4


@dataclass(slots=True)
class Tally:
    """Token counts of one request, for `usage`."""

    prompt: int
    cached: dict[int, int] = field(default_factory=dict)  # by prompt
    completion: dict[int, int] = field(default_factory=dict)  # by choice

    def usage(self) -> dict[str, Any]:
        completion = sum(self.completion.values())
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": completion,
            "total_tokens": self.prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached.values())},
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
    wanted = params.max_tokens or max(1, params.min_tokens)
    if wanted > room:
        asked = f"{wanted} for the answer" if wanted > 1 else "room for an answer"
        wrong = "min_tokens" if params.min_tokens == wanted else "max_tokens"
        raise APIError(
            400,
            f"this model's context is {ready.max_model_len} tokens; the prompt has "
            f"{prompt.length} and the request asks for {asked}",
            param if room < 1 else wrong,
            "context_length_exceeded",
        )
    return msgspec.structs.replace(params, max_tokens=params.max_tokens or room)


class Job:
    """All sequences of one HTTP request. Choice i·n + j is the j-th answer to prompt i.

    A context manager: entering submits the sequences, leaving it, however, aborts those that
    still run. So a client that goes away frees them, whatever moment it picks.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: ServerMetrics,
        endpoint: str,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        began: float,
        priority: int = 0,
        param: str = "prompt",
        echo: bool = False,
    ) -> None:
        """`began`: when the request came, in time.perf_counter's seconds. `param`: the field that
        the prompts are from. Raises APIError for what can never run; submits nothing yet."""
        ready = require_ready(client)
        if params.n * len(prompts) > client.config.max_choices:
            raise APIError(
                400,
                f"n times the number of prompts must be at most {client.config.max_choices}, "
                f"got {params.n} x {len(prompts)}",
                "n",
            )
        self._prompts = [(prompt, fit(params, prompt, ready, param)) for prompt in prompts]
        try:
            check_vocabulary(params, ready.vocab_size)
        except InvalidParam as error:
            raise APIError(400, str(error), error.param, "invalid_value") from None
        self._client = client
        self._metrics = metrics
        self.endpoint = endpoint
        self._began = began
        self._priority = priority
        self._echo = echo
        self._n = params.n
        self._inbox = Inbox()
        self._first: dict[int, float] = {}  # when a choice's first token came
        self._generations: list[Generation] = []
        self.choices = params.n * len(prompts)
        self.created = int(time.time())
        self.tally = Tally(sum(prompt.length for prompt in prompts))

    def __enter__(self) -> Job:
        self._metrics.open_requests.inc()
        try:
            for prompt, params in self._prompts:
                for nth in range(self._n):
                    self._submit(prompt, for_choice(params, nth, prompt.eos_ids))
        except BaseException:
            self._close()
            raise
        return self

    def _submit(self, prompt: Prompt, params: SamplingParams) -> None:
        generation = self._client.submit(
            prompt.ids,
            params,
            self._inbox,
            choice=len(self._generations),
            priority=self._priority,
            want_prompt_text=self._echo,
        )
        self._generations.append(generation)

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        self._metrics.open_requests.dec()
        for generation in self._generations:
            if not generation.ended:
                self._metrics.ended(self.endpoint, "abort")
            self._client.abort(generation)

    async def news(self) -> AsyncIterator[Iterator[tuple[int, TextDelta]]]:
        """What comes of all choices, until the last has ended. What is ready at once comes at
        once. The pieces raise APIError for a choice that failed."""
        left = self.choices
        while left:
            news = await self._inbox.take()
            left -= sum(delta.finish is not None for _, delta in news)
            yield self._counted(news)

    def _counted(self, news: list[tuple[int, TextDelta]]) -> Iterator[tuple[int, TextDelta]]:
        """Keep the books, one delta after the other: usage, metrics, errors."""
        for choice, delta in news:
            if delta.error is not None:
                raise APIError.of(delta.error)
            self.tally.completion[choice] = delta.generated
            if choice not in self._first:
                self._begin(choice, delta)
            if delta.finish is not None:
                self._finish(choice, delta)
            yield choice, delta

    def _begin(self, choice: int, delta: TextDelta) -> None:
        self._first[choice] = now = time.perf_counter()
        self._metrics.ttft.observe(now - self._began)
        prompt = choice // self._n
        self.tally.cached[prompt] = max(self.tally.cached.get(prompt, 0), delta.cached_tokens)

    def _finish(self, choice: int, delta: TextDelta) -> None:
        assert delta.finish is not None
        now = time.perf_counter()
        self._metrics.ended(self.endpoint, delta.finish)
        self._metrics.latency.observe(now - self._began)
        if delta.generated > 1:
            self._metrics.tpot.observe((now - self._first[choice]) / (delta.generated - 1))
