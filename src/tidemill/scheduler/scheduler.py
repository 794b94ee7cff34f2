"""The scheduler: what runs next, and where its KV lies. `advance` is the whole loop."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

import numpy as np

from tidemill.config import EngineConfig
from tidemill.scheduler.kv_cache import KVCache
from tidemill.scheduler.outbox import Outbox, token_logprobs
from tidemill.scheduler.planner import PlannedStep, Planner, PromptRow, StepKind
from tidemill.scheduler.queue import WaitingQueue
from tidemill.scheduler.requests import Capacity, Request, State, make_request, queue_full
from tidemill.scheduler.running import Running
from tidemill.scheduler.slots import I64, Recipients, SlotTable
from tidemill.wire.link import RunnerLink
from tidemill.wire.messages import (
    ErrorInfo,
    FinishReason,
    RunnerReady,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from tidemill.wire.plan import I32, Logprobs, StepResult

FINISH_REASONS: dict[int, FinishReason] = {1: "stop", 2: "length"}  # StepResult.finished
HISTORY = 4096  # times kept for whoever asks; the inline engine may have nobody who does


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Gauges of this moment, then counters since the scheduler was made."""

    running: int
    waiting: int
    pages_used: int  # held by running requests, shared ones counted once
    pages_cached: int  # in the tree, and evictable
    pages_free: int
    steps: dict[StepKind, int]
    preemptions: int
    prompt_tokens: int  # of requests that started
    cached_tokens: int  # those of prompt_tokens that were found in the cache
    generated_tokens: int
    planning_seconds: float
    device_seconds: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One finished step, for histograms."""

    kind: StepKind
    planning_seconds: float
    device_seconds: float


class Scheduler:
    """Continuous batching over a paged, prefix-shared KV cache, planned ahead of the runner.

    Not thread-safe: one loop calls the request methods and then `advance`. The request methods
    only note what is wanted; nothing reaches the runner but in `advance`.
    """

    def __init__(self, config: EngineConfig, ready: RunnerReady, link: RunnerLink) -> None:
        self._config = config
        self._requests: dict[int, Request] = {}  # everything that has not ended
        self._queue = WaitingQueue()
        self._outbox = Outbox()
        self._arrivals = 0
        self._step = 0
        self._flights: deque[tuple[PlannedStep, float]] = deque()
        self._steps: dict[StepKind, int] = {"prefill": 0, "decode": 0, "mixed": 0}
        self._preemptions = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._planning_seconds = 0.0
        self._device_seconds = 0.0
        self._step_times: deque[StepTimes] = deque(maxlen=HISTORY)
        self._queue_times: deque[float] = deque(maxlen=HISTORY)
        self._link: RunnerLink | None = None
        self.attach(ready, link)

    # --- the loop -----------------------------------------------------------------------------

    def advance(self) -> dict[int, TokenBatch]:
        """One turn: take finished results, plan while run-ahead allows, hand out the output.

        Returns a TokenBatch for each detokenizer that has something to hear. Raises RunnerGone
        when the runner died: call `runner_lost` then; no output is lost.
        """
        self._collect()
        self._plan_ahead()
        return self._outbox.take()

    def _collect(self) -> None:
        """Take in every result that is there."""
        while self._link is not None and (result := self._link.poll()) is not None:
            step, planning_seconds = self._flights.popleft()
            if result.step != step.plan.step:
                raise RuntimeError(f"step {step.plan.step} was due, got {result.step}")
            device_seconds = result.device_us * 1e-6
            self._device_seconds += device_seconds
            self._step_times.append(StepTimes(step.kind, planning_seconds, device_seconds))
            for row, logprobs in zip(step.prompt_rows, result.prompt_logprobs, strict=True):
                self._take_prompt_logprobs(row, logprobs[1])
            self._take_tokens(step, result)

    def _plan_ahead(self) -> None:
        """Plan and send steps until `run_ahead` of them wait behind the one that executes."""
        while self._link is not None and len(self._flights) <= self._config.run_ahead:
            began = time.perf_counter()
            step = self._planner.plan(self._step)
            seconds = time.perf_counter() - began
            self._planning_seconds += seconds
            if step is None:
                return
            self._step += 1
            self._steps[step.kind] += 1
            self._flights.append((step, seconds))
            self._link.send(step.plan)
            for request, cached in step.admitted:
                self._announce(request, cached)

    # --- requests -----------------------------------------------------------------------------

    def submit(self, message: Submit) -> None:
        """Queue a new or resumed sequence. Never raises for a bad one: its end says why."""
        self.abort(message.rid)
        self._outbox.forget(message)
        resumed = message.attempt > 0 or len(message.output_ids) > 0
        if not resumed and len(self._queue) >= self._config.max_waiting_requests:
            self._refuse(message, queue_full(self._config.max_waiting_requests))
            return
        made = make_request(message, self._arrivals, self._capacity, self._config.seed)
        if isinstance(made, ErrorInfo):
            self._refuse(message, made)
            return
        ended = made.ended_by()
        if ended is not None:
            self._outbox.start(message, cached_tokens=0)
            self._outbox.end(message, ended[0], ended[1])
            return
        self._arrivals += 1
        made.submitted_at = time.monotonic()
        self._requests[message.rid] = made
        self._queue.push(made)

    def abort(self, rid: int) -> None:
        """Forget a request, whatever it is doing. The detokenizer forgets it too and tells nobody;
        unknown ids are ignored."""
        request = self._requests.get(rid)
        if request is not None:
            self._abort(request)

    def stopped(self, rid: int, attempt: int) -> None:
        """A detokenizer found a stop string, and has told the server."""
        request = self._requests.get(rid)
        if request is not None and request.submit.attempt == attempt:
            self._end(request)

    def worker_gone(self, worker: int) -> None:
        """Abort all requests of a server worker that died."""
        for request in list(self._requests.values()):
            if request.submit.worker == worker:
                self._abort(request)

    # --- the runner ---------------------------------------------------------------------------

    def runner_lost(self) -> None:
        """The runner died, and with it the KV cache and every step in flight. Running requests
        wait again; they resume from their known tokens once a runner is attached."""
        self._link = None
        self._flights.clear()
        for request in sorted(self._running.by_slot.values(), key=lambda each: each.rank):
            self._running.leave(request, State.WAITING, self._step - 1)
            self._queue.push(request)
        self._preemptions += self._planner.preemptions

    def attach(self, ready: RunnerReady, link: RunnerLink) -> None:
        """Start with an empty KV cache on a runner that is ready. What no longer fits ends."""
        if self._link is not None:
            raise RuntimeError("a runner is attached already")
        self._capacity = Capacity.of(ready)
        self._cache = KVCache(ready.num_pages, ready.page_size, self._config.prefix_cache)
        budget = min(ready.max_batch_tokens, self._config.max_batch_tokens or 2**31)
        slots = SlotTable.create(
            slots=ready.max_running_requests,
            max_len=self._capacity.tokens,
            page_size=ready.page_size,
        )
        self._running = Running(slots, self._cache)
        self._planner = Planner(self._running, self._queue, self._cache, budget)
        self._link = link
        for request in list(self._queue):
            again = make_request(request.submit, 0, self._capacity, self._config.seed)
            if isinstance(again, ErrorInfo):
                self._end(request)
                self._refuse(request.submit, again)
            else:
                request.max_len = again.max_len

    # --- state --------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether some request has not ended, or output waits for `advance` to return it."""
        return bool(self._requests or self._flights or self._outbox)

    @property
    def in_flight(self) -> int:
        """Steps sent whose results have not come back."""
        return len(self._flights)

    @property
    def stats(self) -> SchedulerStats:
        cached, free = self._cache.tree.evictable, self._cache.pool.free
        return SchedulerStats(
            running=len(self._running),
            waiting=len(self._queue),
            pages_used=self._cache.pool.num_pages - free - cached,
            pages_cached=cached,
            pages_free=free,
            steps=dict(self._steps),
            preemptions=self._preemptions + self._planner.preemptions,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            planning_seconds=self._planning_seconds,
            device_seconds=self._device_seconds,
        )

    def take_step_times(self) -> list[StepTimes]:
        """Steps that finished since the last call, at most the last HISTORY."""
        taken = list(self._step_times)
        self._step_times.clear()
        return taken

    def take_queue_times(self) -> list[float]:
        """Seconds from submission to admission, of requests admitted since the last call, at
        most the last HISTORY."""
        taken = list(self._queue_times)
        self._queue_times.clear()
        return taken

    # --- results ------------------------------------------------------------------------------

    def _take_tokens(self, step: PlannedStep, result: StepResult) -> None:
        """Hand out a step's tokens, but for slots that were vacated since it was planned."""
        table, who = self._running.slots, step.recipients
        tokens, finished, logprobs = result.tokens, result.finished, result.logprobs
        rows: I64 | None = None
        if self._running.departures != step.departures:
            rows = (table.epoch[who.slots] == who.epochs).nonzero()[0]
            who = Recipients.of(table, who.slots[rows])
            tokens, finished = tokens[rows], finished[rows]
        slots = who.slots
        known = table.known[slots]
        table.ids[slots, known] = tokens
        table.known[slots] = known + 1
        self._generated_tokens += len(slots)
        entries = None
        if logprobs is not None:
            entries = self._token_logprobs(slots, tokens, logprobs, rows)
        self._outbox.tokens(who, tokens, entries)
        if not finished.any():
            return
        for at in finished.nonzero()[0].tolist():
            request = self._running.by_slot[int(slots[at])]
            reason = FINISH_REASONS[int(finished[at])]
            stop_token = int(tokens[at]) if reason == "stop" else None
            self._outbox.end(request.submit, reason, stop_token)
            self._end(request)

    def _token_logprobs(
        self, slots: I64, tokens: I32, logprobs: Logprobs, rows: I64 | None
    ) -> list[TokenLogprobs | None]:
        """For each slot what its request asked for. `rows`: where they are in `logprobs`."""
        entries: list[TokenLogprobs | None] = [None] * len(slots)
        wanted = self._running.slots.logprobs[slots]
        for at in np.flatnonzero(wanted >= 0).tolist():
            row = at if rows is None else int(rows[at])
            entries[at] = token_logprobs(logprobs, row, int(tokens[at]), int(wanted[at]))
        return entries

    def _take_prompt_logprobs(self, row: PromptRow, logprobs: Logprobs) -> None:
        """Entry i of `logprobs` is about prompt position row.start + 1 + i."""
        request, table = row.request, self._running.slots
        if request.slot < 0 or table.epoch[request.slot] != row.epoch:
            return
        wanted = request.params.prompt_logprobs or 0
        entries = [
            token_logprobs(logprobs, at, int(table.ids[request.slot, row.start + 1 + at]), wanted)
            for at in range(request.prompt_logprobs_sent - row.start, len(logprobs.chosen))
        ]
        if entries:
            request.prompt_logprobs_sent += len(entries)
            self._outbox.prompt_logprobs(request.submit, entries)

    # --- beginnings and ends ------------------------------------------------------------------

    def _announce(self, request: Request, cached: int) -> None:
        """A request runs for the first time since its Submit: the detokenizer hears of it."""
        if request.announced:
            return
        request.announced = True
        self._queue_times.append(time.monotonic() - request.submitted_at)
        self._prompt_tokens += request.prompt_len
        self._cached_tokens += cached
        self._outbox.start(request.submit, cached)

    def _refuse(self, submit: Submit, error: ErrorInfo) -> None:
        self._outbox.start(submit, cached_tokens=0)  # says where the end is to go
        self._outbox.end(submit, "error", error=error)

    def _abort(self, request: Request) -> None:
        self._end(request)
        self._outbox.end(request.submit, "abort")

    def _end(self, request: Request) -> None:
        """Free what a request holds."""
        del self._requests[request.rid]
        if request.state is State.RUNNING:
            self._running.leave(request, State.ENDED, self._step - 1)
        else:
            self._queue.end(request)
