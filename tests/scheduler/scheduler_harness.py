"""A scheduler with a simulated runner, whose output and page ownership are checked each turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from tidemill.config import EngineConfig
from tidemill.scheduler.kv_cache import KVCache, Lease
from tidemill.scheduler.scheduler import Scheduler
from tidemill.scheduler.simulated import SimulatedRunner, expected_output
from tidemill.wire import messages
from tidemill.wire.messages import (
    RequestEnd,
    RequestStart,
    RunnerReady,
    Submit,
    TokenBatch,
    TokenLogprobs,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.plan import StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams


def make_ready(
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    max_running_requests: int = 8,
    max_batch_tokens: int = 32,
    vocab_size: int = 50,
) -> RunnerReady:
    return RunnerReady(
        ring="",
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        max_running_requests=max_running_requests,
        max_batch_tokens=max_batch_tokens,
        vocab_size=vocab_size,
        device="simulated",
    )


class AsyncLink:
    """Executes at once and delivers when `deliver` says so: steps stay in flight meanwhile.

    Plans and results go through their wire encoding.
    """

    def __init__(self, runner: SimulatedRunner, deliver: Callable[[], bool]) -> None:
        self.plans: list[StepPlan] = []
        self._runner = runner
        self._deliver = deliver
        self._results: list[StepResult] = []

    def send(self, plan: StepPlan) -> None:
        received = StepPlan.decode(np.concatenate(plan.encode()))
        self.plans.append(received)
        result = self._runner.execute(received)
        self._results.append(StepResult.decode(np.concatenate(result.encode())))

    def poll(self) -> StepResult | None:
        if not self._results or not self._deliver():
            return None
        return self._results.pop(0)

    def fileno(self) -> int:
        return -1


class Engine:
    """Drives a Scheduler, and hears what detokenizers would hear."""

    def __init__(
        self,
        ready: RunnerReady | None = None,
        config: EngineConfig | None = None,
        deliver: Callable[[], bool] = lambda: True,
    ) -> None:
        self.ready = ready or make_ready()
        self.config = config or EngineConfig(model="simulated")
        self.deliver = deliver
        self._new_runner()
        self.scheduler = Scheduler(self.config, self.ready, self.link)
        self.tokens: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[TokenLogprobs | None]] = {}
        self.prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        self.starts: dict[int, RequestStart] = {}
        self.ends: dict[int, RequestEnd] = {}
        self.aborts: list[int] = []
        self.turns = 0

    def _new_runner(self) -> None:
        self.runner = SimulatedRunner(self.ready)
        self.link = AsyncLink(self.runner, self.deliver)

    def submit(
        self,
        rid: int,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        output: Sequence[int] = (),
        attempt: int = 0,
        priority: int = 0,
        salt: str = "",
        worker: int = 0,
        detokenizer: int = 0,
    ) -> None:
        for heard in (self.tokens, self.logprobs, self.prompt_logprobs, self.starts, self.ends):
            heard.pop(rid, None)  # type: ignore[attr-defined]
        self.scheduler.submit(
            Submit(
                rid=rid,
                worker=worker,
                detokenizer=detokenizer,
                prompt_ids=ids_to_bytes(list(prompt)),
                params=params or SamplingParams(max_tokens=8, seed=rid),
                output_ids=ids_to_bytes(list(output)),
                attempt=attempt,
                priority=priority,
                salt=salt,
            )
        )

    def turn(self) -> None:
        """One advance, its output heard and ownership checked."""
        self.turns += 1
        for index, batch in self.scheduler.advance().items():
            heard = messages.decode(messages.encode(batch))
            assert isinstance(heard, TokenBatch)
            self._hear(index, heard)
        check_ownership(self.scheduler)

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.turn()
        raise AssertionError(f"no end after {limit} turns: {self.scheduler.stats}")

    def lose_runner(self) -> None:
        self.scheduler.runner_lost()
        check_ownership(self.scheduler)

    def attach_runner(self, ready: RunnerReady | None = None) -> None:
        self.ready = ready or self.ready
        self._new_runner()
        self.scheduler.attach(self.ready, self.link)

    def _hear(self, index: int, batch: TokenBatch) -> None:
        for start in batch.starts:
            assert start.rid not in self.starts, f"request {start.rid} starts twice"
            self.starts[start.rid] = start
            self.tokens[start.rid] = []
            self.logprobs[start.rid] = []
            self.prompt_logprobs[start.rid] = []
        for rid, entries in batch.prompt_logprobs:
            assert not self.tokens[rid], "prompt log-probabilities come before tokens"
            self.prompt_logprobs[rid] += entries
        rids = np.frombuffer(batch.rids, dtype="<i8").tolist()
        tokens = bytes_to_ids(batch.tokens).tolist()
        logprobs = batch.logprobs if batch.logprobs is not None else [None] * len(rids)
        for rid, token, entry in zip(rids, tokens, logprobs, strict=True):
            assert rid in self.starts, f"a token for {rid}, which has not started"
            assert rid not in self.ends, f"a token for {rid}, which has ended"
            self.tokens[rid].append(token)
            self.logprobs[rid].append(entry)
        for end in batch.ends:
            if end.reason == "abort":  # so that the detokenizer forgets what it may know
                assert end.rid not in self.ends
                self.aborts.append(end.rid)
                continue
            assert end.rid in self.starts
            assert end.rid not in self.ends, f"request {end.rid} ends twice"
            self.ends[end.rid] = end

    def assert_idle(self) -> None:
        """No request, page or slot is left behind."""
        scheduler = self.scheduler
        check_ownership(scheduler)
        stats = scheduler.stats
        assert (stats.running, stats.waiting, stats.pages_used) == (0, 0, 0)
        assert stats.pages_cached + stats.pages_free == self.ready.num_pages
        assert sorted(scheduler._running.slots.free) == list(
            range(len(scheduler._running.slots.rid))
        )
        assert not scheduler._requests
        assert all(not node.refs for node in scheduler._cache.tree.walk())

    def assert_output(
        self,
        rid: int,
        prompt: Sequence[int],
        params: SamplingParams,
        max_len: int,
        resumed: int = 0,
    ) -> None:
        """The request ended with what it would have said alone. `resumed`: output tokens that
        came with its Submit."""
        seed = params.seed
        assert seed is not None
        output, reason = expected_output(prompt, params, seed, max_len, self.ready.vocab_size)
        assert self.tokens[rid] == output[resumed:]
        end = self.ends[rid]
        assert (end.reason, end.error) == (reason, None)
        assert end.stop_token == (output[-1] if reason == "stop" else None)
        if params.logprobs is not None:
            first = len(prompt) + resumed - 1
            for at, entry in enumerate(self.logprobs[rid]):
                assert entry is not None
                assert entry.token == output[resumed + at]
                assert entry.logprob == -(first + at)
                assert len(entry.ids) == len(entry.values) == params.logprobs
        else:
            assert not any(self.logprobs[rid])
        wanted = [] if params.prompt_logprobs is None or resumed else range(1, len(prompt))
        entries = self.prompt_logprobs[rid]
        assert [entry.token for entry in entries] == [prompt[at] for at in wanted]
        assert [entry.logprob for entry in entries] == [-(at - 1) for at in wanted]


def check_ownership(scheduler: Scheduler) -> None:
    """Each page belongs to exactly one of free list, tree, running request."""
    running = scheduler._running
    leases: list[tuple[Lease, list[int]]] = []
    for slot, request in running.by_slot.items():
        assert request.lease is not None
        assert request.slot == slot
        leases.append((request.lease, running.slots.page_table(slot).tolist()))
    check_cache(scheduler._cache, leases)
    assert sorted([*running.slots.free, *running.by_slot]) == list(range(len(running.slots.rid)))


def check_cache(cache: KVCache, leases: list[tuple[Lease, list[int]]]) -> None:
    """`leases`: each with its request's page table."""
    owners = Counter(cache.pool.free_pages().tolist())
    refs: Counter[int] = Counter()
    for lease, table in leases:
        owners.update(table[lease.shared :])
        path: list[list[int]] = []
        node = lease.node
        while True:
            refs[id(node)] += 1
            path.append(node.pages.tolist())
            if node.parent is None:
                break
            node = node.parent
        assert [page for pages in reversed(path) for page in pages] == table[: lease.shared]
    evictable = pages = 0
    for node in cache.tree.walk():
        assert node.refs == refs[id(node)]
        owners.update(node.pages.tolist())
        pages += len(node.pages)
        evictable += 0 if node.refs else len(node.pages)
        size = cache.page_size * 4
        if node.parent is not None:
            assert len(node.pages) == -(-len(node.key) // size) > 0
        assert node.child_keys == sorted(set(node.child_keys))
        assert node.child_keys == [child.key[:size] for child in node.children]
        assert all(child.parent is node for child in node.children)
        if node.children and node.parent is not None:
            assert len(node.key) % size == 0
    assert owners == Counter(range(cache.pool.num_pages))
    assert (cache.tree.num_pages, cache.tree.evictable) == (pages, evictable)
