"""Planning one step: decode rows first, then prefill chunks, then admissions, under one budget
of tokens (continuous batching, Orca 2022; chunked prefill, Sarathi-Serve 2024)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from tidemill.scheduler.kv_cache import KVCache
from tidemill.scheduler.queue import WaitingQueue
from tidemill.scheduler.requests import Request, State
from tidemill.scheduler.running import Running
from tidemill.scheduler.slots import I64, Recipients
from tidemill.wire.plan import EMPTY, I32, RowFlags, SlotInit, StepPlan

StepKind = Literal["prefill", "decode", "mixed"]


@dataclass(slots=True)
class PromptRow:
    """A row that reports log-probabilities of its request's prompt."""

    row: int
    request: Request
    epoch: int
    start: int


@dataclass(slots=True)
class PlannedStep:
    """A plan, and what is needed to read its result."""

    plan: StepPlan
    kind: StepKind
    recipients: Recipients
    departures: int  # `Running.departures` when the step was planned
    prompt_rows: list[PromptRow]
    admitted: list[tuple[Request, int]]  # with the tokens that were cached


@dataclass(slots=True)
class DecodeBatch:
    """The slots that decode together, and what stays the same while they do."""

    key: tuple[int, bytes]
    slots: I64
    rows: I32  # the plan's rows, but for the positions
    recipients: Recipients


@dataclass(slots=True)
class Draft:
    """A plan in the making: lists that most steps leave empty."""

    step: int
    budget: int
    decode: DecodeBatch
    rows: list[tuple[int, int, int, int]] = field(default_factory=list)
    tokens: list[I32] = field(default_factory=list)
    admit: list[SlotInit] = field(default_factory=list)
    pages: list[I32] = field(default_factory=list)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)
    prompt_rows: list[PromptRow] = field(default_factory=list)
    admitted: list[tuple[Request, int]] = field(default_factory=list)


class Planner:
    def __init__(
        self, running: Running, queue: WaitingQueue, cache: KVCache, max_batch_tokens: int
    ) -> None:
        self._running = running
        self._slots = running.slots
        self._queue = queue
        self._cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._refused: tuple[Request | None, int, int] | None = None
        self.preemptions = 0
        self._batch = self._decode_batch(np.empty(0, dtype=np.int64), (-1, b""))

    def plan(self, step: int) -> PlannedStep | None:
        """The next step, or None if there is nothing to run."""
        draft = self._decode(step)
        self._continue_prefills(draft)
        self._admit(draft)
        self._cache.end_step()
        return self._finish(draft)

    # --- decode -------------------------------------------------------------------------------

    def _decode(self, step: int) -> Draft:
        """One row for each request that has a token to come."""
        slots = self._slots
        while True:
            wanted = slots.planned < slots.goal
            growing = ((slots.planned == slots.room) & wanted).nonzero()[0]
            if len(growing) <= self._cache.available:
                break
            self._preempt(step)
        key = (self._running.departures, wanted.tobytes())
        if key != self._batch.key:
            self._batch = self._decode_batch(wanted.nonzero()[0], key)
        batch = self._batch
        draft = Draft(step, self._max_batch_tokens - len(batch.slots), batch)
        if len(growing):
            draft.pages.append(slots.add_pages(growing, self._cache.allocate(len(growing))))
        return draft

    def _decode_batch(self, slots: I64, key: tuple[int, bytes]) -> DecodeBatch:
        rows = np.empty((len(slots), 4), dtype=np.int32)
        rows[:, 0], rows[:, 2], rows[:, 3] = slots, 1, RowFlags.SAMPLE
        return DecodeBatch(key, slots, rows, Recipients.of(self._slots, slots))

    def _preempt(self, step: int) -> None:
        """Send the last in rank back to the queue. Its pages go to the tree, so if nobody needs
        them before it returns, it goes on where it was.

        The first in rank is never preempted while others run, so somebody always gets on. Alone,
        a request has the whole cache, which holds it (or it would have been refused).
        """
        if len(self._running) < 2:
            raise RuntimeError("the KV cache is full, and one request holds it all: a leak")
        request = self._running.last_in_rank()
        self._running.leave(request, State.WAITING, step - 1)
        self._queue.push(request)
        self.preemptions += 1

    # --- prefill ------------------------------------------------------------------------------

    def _continue_prefills(self, draft: Draft) -> None:
        for request in tuple(self._running.prefilling):
            self._chunk(draft, request)

    def _admit(self, draft: Draft) -> None:
        """Start requests while there are tokens, slots and pages. The queue's head is never
        passed over, so a large request waits only for those before it.

        Each start takes a token of the budget, so the running requests never outnumber it, and
        a decode step always fits.
        """
        while draft.budget > 0 and self._slots.free:
            request = self._queue.peek()
            situation = (request, self._running.departures, self._cache.tree.num_pages)
            if request is None or situation == self._refused:
                return
            # Every running request soon wants a page: taking the last ones means preemption.
            reserved = self._cache.reserve(
                request.ids,
                request.submit.salt,
                request.reusable,
                headroom=len(self._running),
                step=draft.step,
            )
            if reserved is None:
                # Asking again is in vain until someone leaves or publishes, or a pin is lifted.
                self._refused = None if draft.copies else situation
                return
            self._queue.pop()
            slot = self._running.enter(request, reserved)
            draft.admit.append(
                SlotInit(
                    slot=slot,
                    params=request.params,
                    seed=request.seed,
                    prompt_len=request.prompt_len,
                    max_len=request.max_len,
                    history=request.ids if request.needs_history else EMPTY,
                )
            )
            draft.admitted.append((request, min(reserved.reused, request.prompt_len)))
            count = len(reserved.pages)
            table = np.empty((count, 3), dtype=np.int32)
            table[:, 0], table[:, 1], table[:, 2] = slot, np.arange(count), reserved.pages
            draft.pages.append(table)
            if reserved.copy is not None:
                draft.copies.append(reserved.copy)
            self._chunk(draft, request)

    def _chunk(self, draft: Draft, request: Request) -> None:
        """As much of a request's known tokens as the budget allows; the last chunk samples."""
        slots, slot = self._slots, request.slot
        start, known = int(slots.planned[slot]), int(slots.known[slot])
        count = min(known - start, draft.budget)
        if count <= 0 or request.lease is None:
            return
        flags = RowFlags.HOST_TOKENS
        if request.wants_prompt_logprobs:
            flags |= RowFlags.PROMPT_LOGPROBS
            row = len(draft.decode.slots) + len(draft.rows)
            draft.prompt_rows.append(PromptRow(row, request, int(slots.epoch[slot]), start))
        end = start + count
        if end == known:
            flags |= RowFlags.SAMPLE
            draft.sampled.append(slot)
            slots.goal[slot] = request.max_len - 1
            self._running.prefilling.remove(request)
        draft.rows.append((slot, start, count, int(flags)))
        draft.tokens.append(slots.ids[slot, start:end])
        draft.budget -= count
        slots.planned[slot] = end
        self._cache.publish(
            request.lease, slots.tokens(slot), slots.page_table(slot), end, draft.step
        )

    # --- assembly -----------------------------------------------------------------------------

    def _finish(self, draft: Draft) -> PlannedStep | None:
        slots, decode = self._slots, draft.decode.slots
        if not len(decode) and not draft.rows:
            return None
        recipients = draft.decode.recipients
        kind: StepKind = "decode"
        rows = draft.decode.rows.copy()
        positions = slots.planned[decode]
        rows[:, 1] = positions
        slots.planned[decode] = positions + 1
        plan = StepPlan(step=draft.step, rows=rows)
        if draft.rows:
            kind = "mixed" if len(decode) else "prefill"
            plan.rows = np.concatenate([rows, np.array(draft.rows, dtype=np.int32)])
            plan.tokens = np.concatenate(draft.tokens)
            sampled = np.concatenate([decode, np.array(draft.sampled, dtype=np.int64)])
            recipients = Recipients.of(slots, sampled)
        if self._running.released:
            plan.release = np.array(self._running.take_released(), dtype=np.int32)
        if draft.pages:
            plan.pages = np.concatenate(draft.pages) if len(draft.pages) > 1 else draft.pages[0]
        if draft.copies:
            plan.copies = np.array(draft.copies, dtype=np.int32)
        plan.admit = draft.admit
        return PlannedStep(
            plan,
            kind,
            recipients,
            self._running.departures,
            draft.prompt_rows,
            draft.admitted,
        )
