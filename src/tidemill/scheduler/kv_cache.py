"""Who owns which KV page: the free list and the prefix tree behind one door (see pages.py)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tidemill.scheduler.pages import PagePool
from tidemill.scheduler.prefix_tree import Match, Node, PrefixTree, encode_key
from tidemill.wire.plan import I32


@dataclass(slots=True)
class Lease:
    """A running request's hold on the cache.

    The first `shared` pages of its page table belong to the tree, which it locks at `node`; the
    rest belong to the request. `publishing` ends when another request has put the same tokens
    into the tree first: from there on the request keeps its own pages until it retires.
    """

    node: Node
    shared: int
    publishing: bool = True


@dataclass(slots=True)
class Reservation:
    """What a request gets when it starts running."""

    lease: Lease
    pages: I32  # its page table: shared pages, then its own
    reused: int  # tokens whose KV is there already, the copied ones included
    copy: tuple[int, int, int] | None  # source page, destination page, tokens


class KVCache:
    def __init__(self, num_pages: int, page_size: int, prefix_cache: bool) -> None:
        self.page_size = page_size
        self.prefix_cache = prefix_cache
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(page_size)
        self._pinned: list[Node] = []  # sources of this step's copies

    @property
    def available(self) -> int:
        """Pages that can be had at once: free, or cached and unused."""
        return self.pool.free + self.tree.evictable

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> I32:
        """`count` pages, evicting as needed. The caller has checked `available`."""
        missing = count - self.pool.free
        if missing > 0:
            self.pool.give(self.tree.evict(missing))
        return self.pool.take(count)

    def reserve(
        self, ids: I32, salt: str, reusable: int, headroom: int, step: int
    ) -> Reservation | None:
        """Pages for all of `ids`, as many of its first `reusable` tokens as possible from the
        tree. None, and nothing evicted, if that would leave fewer than `headroom` pages."""
        key = encode_key(ids[:reusable]) if self.prefix_cache else b""
        match = self.tree.match(key, salt, step)
        self.tree.lock(match.node)
        wanted = self.pages_for(len(ids)) - len(match.pages)
        copies = self._pin_source(match, wanted + headroom)
        if wanted + headroom > self.available:
            self.tree.unlock(match.node)
            return None
        own = self.allocate(wanted)
        reused = len(match.pages) * self.page_size
        lease = Lease(match.node, len(match.pages), self.prefix_cache)
        pages = np.concatenate([match.pages, own])
        if not copies:
            return Reservation(lease, pages, reused, None)
        copy = (match.source, int(own[0]), match.tail)
        return Reservation(lease, pages, reused + match.tail, copy)

    def publish(self, lease: Lease, ids: I32, pages: I32, planned: int, step: int) -> None:
        """Give the tree the pages that a request fills with `step`, which is being planned.

        `ids` and `pages` are the request's tokens and page table, `planned` the tokens whose KV
        is written once `step` has run.
        """
        full = planned // self.page_size
        if not lease.publishing or full == lease.shared:
            return
        key = encode_key(ids[lease.shared * self.page_size : full * self.page_size])
        if self.tree.has_child(lease.node, key):
            lease.publishing = False
            return
        node, superseded = self.tree.insert(
            lease.node, key, pages[lease.shared : full].copy(), step
        )
        self.pool.give(superseded)
        self.tree.extend_lock(lease.node, node)
        lease.node, lease.shared = node, full

    def retire(self, lease: Lease, ids: I32, pages: I32, step: int) -> None:
        """End a lease. Pages that hold KV of `ids` go to the tree, the rest to the free list.

        `ids` are the tokens whose KV is written by steps up to `step`; `pages` is the request's
        page table, which may be longer.
        """
        own = pages[lease.shared :]
        filled = 0
        if self.prefix_cache and len(ids) > lease.shared * self.page_size:
            filled = self.pages_for(len(ids)) - lease.shared
            key = encode_key(ids[lease.shared * self.page_size :])
            _, unused = self.tree.insert(lease.node, key, own[:filled].copy(), step)
            self.pool.give(unused)
        self.pool.give(own[filled:])
        self.tree.unlock(lease.node)

    def end_step(self) -> None:
        """The step that copies from pinned pages is planned: they may be evicted again."""
        for node in self._pinned:
            self.tree.unlock(node)
        self._pinned.clear()

    def _pin_source(self, match: Match, needed: int) -> bool:
        """Keep a copy's source from being evicted, and so overwritten, in the same step.

        Gives the copy up where the pin itself would leave too few pages.
        """
        if match.source_node is None:
            return False
        self.tree.lock(match.source_node)
        if needed > self.available:
            self.tree.unlock(match.source_node)
            return False
        self._pinned.append(match.source_node)
        return True
