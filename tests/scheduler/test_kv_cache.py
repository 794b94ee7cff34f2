"""Page ownership under random reservations, growth, retirement and eviction.

The model keeps what every cell of every page physically holds: the tokens up to its position.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_harness import check_cache

from tidemill.scheduler.kv_cache import KVCache, Lease
from tidemill.scheduler.pages import PagePool

PAGE = 3
Tokens = tuple[int, ...]


@dataclass
class Holder:
    salt: str
    ids: list[int]
    table: list[int]
    lease: Lease
    planned: int


class CacheMachine(RuleBasedStateMachine):
    @initialize(pages=st.integers(4, 16), prefix_cache=st.sampled_from([True, True, False]))
    def start(self, pages: int, prefix_cache: bool) -> None:
        self.cache = KVCache(pages, PAGE, prefix_cache)
        self.cells: dict[tuple[int, int], tuple[str, Tokens]] = {}
        self.before: dict[tuple[int, int], tuple[str, Tokens]] = {}  # as the step found them
        self.holders: list[Holder] = []
        self.step = 1
        self.published = False

    def cached_tokens(self, salt: str, ids: list[int]) -> int:
        """The longest prefix of `ids` that some page of the tree holds the end of."""
        pages = {page for node in self.cache.tree.walk() for page in node.pages.tolist()}
        limits = {
            node.pages[-1]: (len(node.key) // 4 - 1) % PAGE + 1
            for node in self.cache.tree.walk()
            if len(node.pages)
        }
        return max(
            (
                len(tokens)
                for (page, offset), (held_salt, tokens) in self.cells.items()
                if page in pages
                and offset < limits.get(page, PAGE)
                and held_salt == salt
                and tuple(ids[: len(tokens)]) == tokens
            ),
            default=0,
        )

    @rule(
        ids=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        salt=st.sampled_from(["", "", "x"]),
        headroom=st.integers(0, 3),
        reusable=st.sampled_from([100, 100, 100, 0, 2]),
    )
    def reserve(self, ids: list[int], salt: str, headroom: int, reusable: int) -> None:
        reusable = min(reusable, len(ids) - 1)
        longest = self.cached_tokens(salt, ids[:reusable]) if self.cache.prefix_cache else 0
        free, available = self.cache.pool.free, self.cache.available
        array = np.array(ids, dtype=np.int32)
        got = self.cache.reserve(array, salt, reusable, headroom, self.step)
        needed = -(-len(ids) // PAGE)
        if got is None:
            assert needed - longest // PAGE + headroom > available - longest // PAGE
            assert self.cache.pool.free == free, "a refusal evicts nothing"
            return
        assert self.cache.available >= headroom
        assert len(got.pages) == needed
        assert got.reused <= reusable
        roomy = available > needed + headroom + 8
        if roomy and not self.published:
            assert got.reused == longest
        assert got.reused >= longest // PAGE * PAGE
        holder = Holder(salt, ids, got.pages.tolist(), got.lease, got.reused)
        whole = got.lease.shared * PAGE
        if got.copy is not None:
            source, target, count = got.copy
            assert target == holder.table[got.lease.shared]
            assert count == got.reused - whole
            for offset in range(count):  # copies read what was there before the step
                self.cells[target, offset] = self.before[source, offset]
        else:
            assert got.reused == whole
        self.holders.append(holder)
        for position in range(got.reused):
            self.check_cell(holder, position)

    def check_cell(self, holder: Holder, position: int) -> None:
        cell = holder.table[position // PAGE], position % PAGE
        assert self.cells[cell] == (holder.salt, tuple(holder.ids[: position + 1]))

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 50), count=st.integers(1, 9))
    def compute(self, which: int, count: int) -> None:
        """A prefill chunk."""
        holder = self.holders[which % len(self.holders)]
        end = min(holder.planned + count, len(holder.ids))
        if end == holder.planned:
            return
        for position in range(holder.planned, end):
            cell = holder.table[position // PAGE], position % PAGE
            assert holder.table[position // PAGE] in holder.table[holder.lease.shared :]
            self.cells[cell] = (holder.salt, tuple(holder.ids[: position + 1]))
        holder.planned = end
        shared = holder.lease.shared
        self.cache.publish(
            holder.lease,
            np.array(holder.ids, dtype=np.int32),
            np.array(holder.table, dtype=np.int32),
            end,
            self.step,
        )
        self.published |= holder.lease.shared > shared

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 50), token=st.integers(0, 1))
    def decode(self, which: int, token: int) -> None:
        holder = self.holders[which % len(self.holders)]
        if holder.planned < len(holder.ids) or len(holder.ids) > 20:
            return
        if holder.planned == len(holder.table) * PAGE:
            if not self.cache.available:
                return
            holder.table += self.cache.allocate(1).tolist()
        holder.ids = [*holder.ids, token]
        cell = holder.table[holder.planned // PAGE], holder.planned % PAGE
        self.cells[cell] = (holder.salt, tuple(holder.ids))
        holder.planned += 1

    @precondition(lambda self: self.holders)
    @rule(which=st.integers(0, 50))
    def retire(self, which: int) -> None:
        self.next_step()  # requests leave between plans
        holder = self.holders.pop(which % len(self.holders))
        self.cache.retire(
            holder.lease,
            np.array(holder.ids[: holder.planned], dtype=np.int32),
            np.array(holder.table, dtype=np.int32),
            self.step - 1,
        )

    @rule()
    def next_step(self) -> None:
        self.cache.end_step()
        self.step += 1
        self.before = copy.copy(self.cells)
        self.published = False

    @invariant()
    def pages_are_owned_once_and_hold_what_is_read(self) -> None:
        if not hasattr(self, "cache"):
            return
        pinned = [(Lease(node, self.depth(node)), self.path(node)) for node in self.cache._pinned]
        check_cache(self.cache, [(h.lease, h.table) for h in self.holders] + pinned)
        for holder in self.holders:
            for position in range(holder.planned):
                self.check_cell(holder, position)

    def path(self, node: object) -> list[int]:
        pages: list[int] = []
        while node is not None:
            pages = node.pages.tolist() + pages  # type: ignore[attr-defined]
            node = node.parent  # type: ignore[attr-defined]
        return pages

    def depth(self, node: object) -> int:
        return len(self.path(node))


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_a_pool_gives_each_page_once() -> None:
    pool = PagePool(5)
    first, second = pool.take(3), pool.take(2)
    assert sorted([*first.tolist(), *second.tolist()]) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="1 pages wanted, 0 free"):
        pool.take(1)
    pool.give(first)
    assert sorted(pool.take(3).tolist()) == sorted(first.tolist())


def test_a_copy_is_given_up_where_its_source_takes_the_last_pages() -> None:
    """A cache that fits the request exactly must not fail for the page that it copies from."""
    cache = KVCache(4, 4, prefix_cache=True)
    old = np.arange(16, dtype=np.int32)
    got = cache.reserve(old, "", 15, 0, 1)
    assert got is not None
    cache.retire(got.lease, old, got.pages, 1)
    new = np.concatenate([old[:6], np.full(10, 40, dtype=np.int32)])
    got = cache.reserve(new, "", 15, 0, 2)
    assert got is not None
    assert (got.reused, got.copy) == (4, None)
    assert len(set(got.pages.tolist())) == 4


def test_a_copys_source_survives_its_step() -> None:
    cache = KVCache(6, 4, prefix_cache=True)
    old = np.arange(8, dtype=np.int32)
    got = cache.reserve(old, "", 7, 0, 1)
    assert got is not None
    cache.retire(got.lease, old, got.pages, 1)
    new = np.array([0, 1, 2, 3, 4, 5, 9, 9], dtype=np.int32)
    got = cache.reserve(new, "", 7, 0, 2)
    assert got is not None
    assert got.copy is not None
    assert cache.available == 3
    assert got.copy[0] not in cache.allocate(3).tolist()
    cache.end_step()
    assert cache.available == 1
