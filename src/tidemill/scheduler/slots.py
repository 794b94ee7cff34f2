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

    NumPy charges a fixed price per operation, so the columns are int64, its index type.
    """

    page_size: int
    rid: I64
    detokenizer: I64
    logprobs: I64  # alternatives wanted per token, -1: none
    known: I64  # tokens whose ids are known: prompt and output
    planned: I64
    goal: I64
    room: I64  # tokens that the pages in the page table hold
    epoch: I64
    ids: I32  # [slots, longest request] token ids, `known` of them valid
    pages: I32  # [slots, pages of the longest request]
    free: list[int]  # heap: the lowest free slot is taken first, which keeps batches dense

    @classmethod
    def create(cls, slots: int, max_len: int, page_size: int) -> SlotTable:
        def column() -> I64:
            return np.zeros(slots, dtype=np.int64)

        return cls(
            page_size=page_size,
            rid=column(),
            detokenizer=column(),
            logprobs=column(),
            known=column(),
            planned=column(),
            goal=column(),
            room=column(),
            epoch=column(),
            # Untouched rows of these two cost address space, not memory.
            ids=np.empty((slots, max_len), dtype=np.int32),
            pages=np.empty((slots, -(-max_len // page_size)), dtype=np.int32),
            free=list(range(slots)),
        )

    def occupy(self, ids: I32, pages: I32, planned: int) -> int:
        """Put a request into the lowest free slot; returns the slot."""
        slot = heapq.heappop(self.free)
        self.known[slot] = len(ids)
        self.ids[slot, : len(ids)] = ids
        self.room[slot] = len(pages) * self.page_size
        self.pages[slot, : len(pages)] = pages
        self.planned[slot] = planned
        return slot

    def add_pages(self, slots: I64, pages: I32) -> I32:
        """One page more for each of `slots`; returns the plan's rows (slot, index, page)."""
        room = self.room[slots]
        self.room[slots] = room + self.page_size
        rows = np.empty((len(slots), 3), dtype=np.int32)
        rows[:, 0], rows[:, 1], rows[:, 2] = slots, room // self.page_size, pages
        self.pages[slots, rows[:, 1]] = pages
        return rows

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
        return self.pages[slot, : self.room[slot] // self.page_size]


@dataclass(slots=True)
class Recipients:
    """Whose tokens a step samples, in the order of its SAMPLE rows.

    While the same requests decode, the same object serves one step after another.
    """

    slots: I64
    epochs: I64
    groups: list[tuple[int, I64 | None, bytes]]  # detokenizer, its rows (None: all), their rids

    @classmethod
    def of(cls, table: SlotTable, slots: I64) -> Recipients:
        targets, rids = table.detokenizer[slots], table.rid[slots]
        groups: list[tuple[int, I64 | None, bytes]] = []
        if len(slots) and (targets == targets[0]).all():
            groups = [(int(targets[0]), None, rids.tobytes())]
        else:
            for index in np.unique(targets):
                rows = np.flatnonzero(targets == index)
                groups.append((int(index), rows, rids[rows].tobytes()))
        return cls(slots, table.epoch[slots], groups)
