"""The free list of KV pages.

Every page is owned by exactly one of three:

    free list ──allocate──► running request ──publish/retire──► prefix tree
        ▲                         │                                 │
        └────────retire───────────┴─────────────evict───────────────┘

    page table of a running request:   [ 0 … shared ) belong to the tree, locked by the request
                                       [ shared … held ) belong to the request alone

Freeing needs no delay. The runner executes steps in order, so when a page that step N may still
write is freed and given away while step N+1 is planned, its new owner writes it after step N is
over, and nobody else reads it from then on.
"""

from __future__ import annotations

import numpy as np

from tidemill.wire.plan import I32


class PagePool:
    """Pages that nobody owns, as a stack: the page freed last is the warmest in the caches."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._stack = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.free = num_pages

    def take(self, count: int) -> I32:
        """`count` pages, int32[count]. The caller has checked `free`."""
        if count > self.free:
            raise ValueError(f"{count} pages wanted, {self.free} free")
        self.free -= count
        return self._stack[self.free : self.free + count][::-1].copy()

    def give(self, pages: I32) -> None:
        """Take back pages that their owner no longer needs."""
        end = self.free + len(pages)
        self._stack[self.free : end] = pages
        self.free = end

    def free_pages(self) -> I32:
        """The free pages themselves, for checks of ownership."""
        return self._stack[: self.free].copy()
