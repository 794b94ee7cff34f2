"""Running requests as rows of arrays, so that a decode step costs no Python per request."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tidemill.wire.plan import I32

I64 = npt.NDArray[np.int64]


@dataclass(slots=True)
class SlotTable:
    """One row per slot of the runner. Lengths and positions count from the prompt's start.

    A decode row is planned for a slot while `planned < goal`: `planned` positions have their KV
    written once all planned steps have run, and sampling behind position max_len - 2 gives the
    last token, so `goal` is max_len - 1 for a decoding request and 0 for every other slot.
    `epoch` changes whenever a slot is vacated: results of steps planned before are not its own.
    """

    rid: I64
    detokenizer: I32
    logprobs: I32  # alternatives wanted per token, -1: none
    known: I32  # tokens whose ids are known: prompt and output
    planned: I32
    goal: I32
    held: I32  # pages in the page table
    epoch: I64
    ids: I32  # [slots, max_model_len] token ids, `known` of them valid
    pages: I32  # [slots, pages of the longest request]
    free: list[int]  # heap: the lowest free slot is taken first, which keeps batches dense

    @classmethod
    def create(cls, slots: int, max_len: int, max_pages: int) -> SlotTable:
        def column() -> I32:
            return np.zeros(slots, dtype=np.int32)

        return cls(
            rid=np.zeros(slots, dtype=np.int64),
            detokenizer=column(),
            logprobs=column(),
            known=column(),
            planned=column(),
            goal=column(),
            held=column(),
            epoch=np.zeros(slots, dtype=np.int64),
            # Untouched rows of these two cost address space, not memory.
            ids=np.empty((slots, max_len), dtype=np.int32),
            pages=np.empty((slots, max_pages), dtype=np.int32),
            free=list(range(slots)),
        )

    def occupy(self, ids: I32, pages: I32, planned: int) -> int:
        """Put a request into the lowest free slot; returns the slot."""
        slot = heapq.heappop(self.free)
        self.known[slot] = len(ids)
        self.ids[slot, : len(ids)] = ids
        self.held[slot] = len(pages)
        self.pages[slot, : len(pages)] = pages
        self.planned[slot] = planned
        return slot

    def vacate(self, slot: int) -> None:
        self.epoch[slot] += 1
        self.goal[slot] = 0
        self.planned[slot] = 0
        heapq.heappush(self.free, slot)

    def tokens(self, slot: int) -> I32:
        """All known token ids of a slot: a view."""
        return self.ids[slot, : self.known[slot]]

    def page_table(self, slot: int) -> I32:
        """A view."""
        return self.pages[slot, : self.held[slot]]
