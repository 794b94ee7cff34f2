"""A runner without a model: it checks every plan, and its tokens can be foretold.

The KV cache is modelled as what it means: each cell of a page remembers which token at which
position was written there. A row's context is read back cell by cell, and the sampled token is
a function of the whole context, so one wrong page, copy or position shows in the tokens, if it
is not caught as an error before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tidemill.wire.messages import RunnerReady
from tidemill.wire.plan import EMPTY, F32, I32, Logprobs, RowFlags, SlotInit, StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams

U64 = npt.NDArray[np.uint64]


class PlanError(AssertionError):
    """The scheduler planned something that would corrupt a real runner's state."""


def context_hash(ids: I32, start: int = 0) -> int:
    """A hash of tokens and their positions (`start` onwards), additive over positions."""
    positions = np.arange(start, start + len(ids), dtype=np.uint64)
    x = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x ^= (positions + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(29)
    x *= np.uint64(0x94D049BB133111EB)  # uint64 arithmetic on arrays wraps
    x ^= x >> np.uint64(32)
    return int(x.sum(dtype=np.uint64))


def pseudo_token(seed: int, position: int, context: int, vocab_size: int) -> int:
    """The token at `position`, given the hash of all before it."""
    mask = 2**64 - 1
    x = (seed ^ context ^ (position * 0xD6E8FEB86659FD93)) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return (x ^ (x >> 31)) % vocab_size


def sample(init: SlotInit, context: int, length: int, vocab_size: int) -> tuple[int, int]:
    """(token, finished) behind `length` tokens, as the runner's sampler would decide."""
    params = init.params
    token = pseudo_token(init.seed, length, context, vocab_size)
    if length - init.prompt_len < params.min_tokens:
        while token in params.stop_token_ids:
            token = (token + 1) % vocab_size
    elif token in params.stop_token_ids:
        return token, 1
    return token, 2 if length + 1 >= init.max_len else 0


def expected_output(
    prompt: Sequence[int], params: SamplingParams, seed: int, max_len: int, vocab_size: int
) -> tuple[list[int], str]:
    """The tokens and the finish reason of a request that runs alone and undisturbed."""
    init = SlotInit(0, params, seed, len(prompt), max_len)
    context, length = context_hash(np.array(prompt, dtype=np.int32)), len(prompt)
    output: list[int] = []
    while True:
        token, finished = sample(init, context, length, vocab_size)
        output.append(token)
        if finished:
            return output, "stop" if finished == 1 else "length"
        context = (context + context_hash(np.array([token], dtype=np.int32), length)) % 2**64
        length += 1


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long a step takes, microseconds. `sleep`: really take that long."""

    step: float = 500.0
    token: float = 5.0
    context: float = 0.002  # for each token of a row's context
    sleep: bool = False

    def of(self, tokens: int, context: int) -> int:
        return int(self.step + self.token * tokens + self.context * context)


@dataclass(slots=True)
class _Slot:
    init: SlotInit
    pages: list[int] = field(default_factory=list)
    length: int = 0  # positions whose KV this slot may rely on
    last_token: int | None = None  # sampled, not yet an input
    finished: int = 0  # as in StepResult

    @property
    def wanted_logprobs(self) -> int:
        wanted = self.init.params.logprobs
        return -1 if wanted is None else wanted


class SimulatedRunner:
    """A StepExecutor. See `wire.plan` for what it must do and in which order."""

    def __init__(self, ready: RunnerReady, cost: CostModel | None = None) -> None:
        self._ready = ready
        self._cost = cost or CostModel()
        shape = (ready.num_pages, ready.page_size)
        self._tokens = np.full(shape, -1, dtype=np.int32)
        self._positions = np.full(shape, -1, dtype=np.int32)  # -1: never written
        self.slots: dict[int, _Slot] = {}
        self.computed_tokens = 0
        self._step = -1

    def execute(self, plan: StepPlan) -> StepResult:
        """Raises PlanError if the plan breaks a rule."""
        _require(plan.step > self._step, f"step {plan.step} after step {self._step}")
        self._step = plan.step
        self._change_slots(plan)
        self._assign_pages(plan)
        self._copy(plan)
        self._check_rows(plan)
        self._write(plan)
        result = self._sample(plan)
        tokens = int(plan.rows[:, 2].sum())
        self.computed_tokens += tokens
        result.device_us = self._cost.of(tokens, int(plan.rows[:, 1:3].sum()))
        if self._cost.sleep:
            time.sleep(result.device_us * 1e-6)
        return result

    # --- state changes ------------------------------------------------------------------------

    def _change_slots(self, plan: StepPlan) -> None:
        for slot in plan.release.tolist():
            _require(slot in self.slots, f"slot {slot} is released but not admitted")
            del self.slots[slot]
        for init in plan.admit:
            _require(init.slot not in self.slots, f"slot {init.slot} is admitted twice")
            _require(
                0 <= init.slot < self._ready.max_running_requests, f"no such slot: {init.slot}"
            )
            _require(init.max_len <= self._ready.max_model_len, f"max_len {init.max_len}")
            self.slots[init.slot] = _Slot(init)

    def _assign_pages(self, plan: StepPlan) -> None:
        for slot, index, page in plan.pages.tolist():
            _require(slot in self.slots, f"a page for slot {slot}, which is empty")
            table = self.slots[slot].pages
            _require(index == len(table), f"slot {slot}: page {index} after {len(table)}")
            _require(0 <= page < self._ready.num_pages, f"no such page: {page}")
            _require(page not in table, f"slot {slot}: page {page} twice")
            table.append(page)

    def _copy(self, plan: StepPlan) -> None:
        sources, targets = set(plan.copies[:, 0].tolist()), plan.copies[:, 1].tolist()
        _require(len(set(targets)) == len(targets), "two copies into one page")
        _require(not sources & set(targets), "a page is both source and target of copies")
        for source, target, count in plan.copies.tolist():
            _require(0 < count < self._ready.page_size, f"a copy of {count} tokens")
            written = bool((self._positions[source, :count] >= 0).all())
            _require(written, f"page {source} is not written")
            self._check_free_to_write(target, 0, count, writer=None)
            self._tokens[target, :count] = self._tokens[source, :count]
            self._positions[target, :count] = self._positions[source, :count]

    # --- rows ---------------------------------------------------------------------------------

    def _check_rows(self, plan: StepPlan) -> None:
        _require(len(plan.rows) > 0, "an empty step")
        budget = int(plan.rows[:, 2].sum())
        _require(budget <= self._ready.max_batch_tokens, f"{budget} tokens in one step")
        _require(len(set(plan.rows[:, 0].tolist())) == len(plan.rows), "a slot has two rows")
        host = (plan.rows[:, 3] & RowFlags.HOST_TOKENS) != 0
        _require(bool((np.diff(host.astype(int)) >= 0).all()), "decode rows come first")
        _require(int(plan.rows[host, 2].sum()) == len(plan.tokens), "tokens do not match rows")
        for slot, start, count, flags in plan.rows.tolist():
            _require(slot in self.slots, f"a row for slot {slot}, which is empty")
            state = self.slots[slot]
            fresh = state.length == 0 and state.last_token is None
            _require(fresh or start == state.length, f"slot {slot}: {start} after {state.length}")
            end = start + count
            _require(count > 0 and end < state.init.max_len, f"slot {slot}: row to {end}")
            _require(end <= len(state.pages) * self._ready.page_size, f"slot {slot}: no page")
            if not flags & RowFlags.HOST_TOKENS:
                _require(count == 1 and bool(flags & RowFlags.SAMPLE), f"slot {slot}: decode row")
                _require(state.last_token is not None, f"slot {slot}: nothing was sampled")

    def _write(self, plan: StepPlan) -> None:
        """Every row's KV, before any row reads."""
        at = 0
        for slot, start, count, flags in plan.rows.tolist():
            state = self.slots[slot]
            if flags & RowFlags.HOST_TOKENS:
                ids = plan.tokens[at : at + count]
                at += count
            else:
                ids = np.array([state.last_token], dtype=np.int32)
            positions = np.arange(start, start + count)
            size = self._ready.page_size
            pages = np.array(state.pages, dtype=np.int32)[positions // size]
            for page in np.unique(pages).tolist():
                own = positions[pages == page] % size
                self._check_free_to_write(page, int(own[0]), int(own[-1]) + 1, writer=slot)
            self._tokens[pages, positions % size] = ids
            # What a step writes for a request that has finished is nobody's to read.
            self._positions[pages, positions % size] = -1 if state.finished else positions
        for slot, start, count, _ in plan.rows.tolist():
            self.slots[slot].length = start + count

    def _check_free_to_write(self, page: int, begin: int, end: int, writer: int | None) -> None:
        """No other slot may rely on these cells from an earlier step."""
        for slot, state in self.slots.items():
            if slot != writer and page in state.pages:
                first = state.pages.index(page) * self._ready.page_size + begin
                _require(first >= state.length, f"page {page} is written under slot {slot}")

    def _context(self, state: _Slot) -> I32:
        """The token ids that a slot's KV stands for."""
        size = self._ready.page_size
        pages = np.array(state.pages[: -(-state.length // size)], dtype=np.int32)
        positions = self._positions[pages].ravel()[: state.length]
        _require(
            bool((positions == np.arange(state.length)).all()),
            f"slot {state.init.slot} reads KV that was never written, or another's",
        )
        return self._tokens[pages].ravel()[: state.length]

    def _sample(self, plan: StepPlan) -> StepResult:
        tokens: list[int] = []
        finished: list[int] = []
        sampled: list[_Slot] = []
        prompt_logprobs: list[tuple[int, Logprobs]] = []
        for row, (slot, start, count, flags) in enumerate(plan.rows.tolist()):
            state = self.slots[slot]
            ids = EMPTY if state.finished else self._context(state)
            if flags & RowFlags.PROMPT_LOGPROBS:
                end = min(start + count, state.init.prompt_len - 1)
                wanted = state.init.params.prompt_logprobs
                _require(wanted is not None, f"slot {slot}: no prompt log-probabilities wanted")
                _require(len(state.init.history) > end, f"slot {slot}: no history")
                prompt_logprobs.append((row, self._logprobs(range(start, end), wanted or 0)))
            if flags & RowFlags.SAMPLE:
                state.last_token, ended = sample(
                    state.init, context_hash(ids), len(ids), self._ready.vocab_size
                )
                state.finished = state.finished or ended
                tokens.append(state.last_token)
                finished.append(ended)
                sampled.append(state)
        wanted = max((state.wanted_logprobs for state in sampled), default=-1)
        logprobs = None
        if wanted >= 0:
            logprobs = self._logprobs([s.length - 1 for s in sampled], wanted)
        return StepResult(
            step=plan.step,
            tokens=np.array(tokens, dtype=np.int32),
            finished=np.array(finished, dtype=np.int32),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )

    def _logprobs(self, positions: Sequence[int], alternatives: int) -> Logprobs:
        """Figures that tell from which position they come: -position for the chosen token."""
        chosen: F32 = -np.array(positions, dtype=np.float32)
        ids = np.arange(alternatives, dtype=np.int32)[None, :] + np.array(
            positions, dtype=np.int32
        ).reshape(-1, 1)
        ids %= self._ready.vocab_size
        values = np.repeat(chosen[:, None], alternatives, axis=1)
        return Logprobs(chosen, np.zeros(len(chosen), dtype=np.int32), ids, values)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
