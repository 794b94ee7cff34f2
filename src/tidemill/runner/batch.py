"""From a plan to a batch: NumPy on persistent buffers, no Python per row.

A step of decode rows alone is the common one. Everything about it but the positions follows
from the number of its rows, so its batch is made once for each such number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tidemill.ops.backend import Batch
from tidemill.runner.slots import Slots
from tidemill.runner.staging import Staged
from tidemill.wire.plan import EMPTY, I32, RowFlags, StepPlan


@dataclass(slots=True)
class Step:
    """A batch, and who gets what its forward pass brings."""

    batch: Batch
    sampled: I32  # slots of the SAMPLE rows, in row order
    positions: I32  # where their new tokens will stand
    prompt_rows: I32  # rows with PROMPT_LOGPROBS
    row_starts: I32  # [R + 1], on the host


class BatchBuilder:
    """Builds one batch at a time: the next `build` reuses the storage of the last."""

    def __init__(self, slots: Slots, max_tokens: int, page_size: int, device: torch.device) -> None:
        rows = slots.count
        self._slots = slots
        self._page_size = np.int32(page_size)
        self._ids = Staged((max_tokens,), device)
        self._positions = Staged((max_tokens,), device)
        self._kv_slots = Staged((max_tokens,), device)
        self._row_starts = Staged((rows + 1,), device)
        self._contexts = Staged((rows,), device)
        self._logit_tokens = Staged((rows,), device)
        self._page_table = Staged((rows, slots.page_table.shape[1]), device)
        self._gathered = (b"", 0)  # slots and width of what `_page_table` holds

        self._counting: I32 = np.arange(max(max_tokens, rows + 1), dtype=np.int32)
        counting = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._decode_starts = counting  # row r has token r
        self._decode_batches: dict[int, Batch] = {}

    def build(self, plan: StepPlan) -> Step:
        """The plan's rows as a batch. Reads the slots, changes nothing but own buffers."""
        slots, starts, counts, flags = plan.rows.T.copy()
        if len(plan.pages):
            self._gathered = (b"", 0)
        if len(plan.tokens) or (flags != RowFlags.SAMPLE.value).any():
            return self._mixed(plan.tokens, slots, starts, counts, flags)
        return self._decode(slots, starts)

    def _decode(self, slots: I32, starts: I32) -> Step:
        rows = len(slots)
        batch = self._decode_batches.get(rows)
        if batch is None:
            batch = self._decode_batches[rows] = self._make_decode_batch(rows)
        contexts = self._contexts.host[:rows]
        np.add(starts, 1, out=contexts)
        self._contexts.send(rows)
        self._positions.host[:rows] = starts
        self._place(slots, rows)
        self._slots.recall(slots, batch.ids)
        batch.max_context = int(contexts.max())
        self._gather_pages(slots, batch.max_context)
        return Step(batch, slots, starts + 1, EMPTY, self._counting)

    def _make_decode_batch(self, rows: int) -> Batch:
        return Batch(
            ids=self._ids.device[:rows],
            positions=self._positions.device[:rows],
            kv_slots=self._kv_slots.device[:rows],
            row_starts=self._decode_starts[: rows + 1],
            contexts=self._contexts.device[:rows],
            page_table=self._page_table.device[:rows],
            logit_tokens=self._decode_starts[:rows],
            num_tokens=rows,
            num_rows=rows,
            max_query=1,
            max_context=0,
        )

    def _mixed(self, known: I32, slots: I32, starts: I32, counts: I32, flags: I32) -> Step:
        rows = len(slots)
        contexts = self._contexts.host[:rows]
        np.add(starts, counts, out=contexts)
        self._contexts.send(rows)
        row_starts = self._row_starts.host[: rows + 1]
        np.cumsum(counts, out=row_starts[1:])
        self._row_starts.send(rows + 1)

        tokens = int(row_starts[-1])
        offsets = np.repeat(starts - row_starts[:-1], counts)
        np.add(offsets, self._counting[:tokens], out=self._positions.host[:tokens])
        self._place(np.repeat(slots, counts), tokens)
        # Decode rows come first and take what their slots sampled last, on the device.
        decode = tokens - len(known)
        self._ids.host[decode:tokens] = known
        self._ids.send(tokens)
        self._slots.recall(slots[:decode], self._ids.device[:decode])

        sampling = np.flatnonzero(flags & RowFlags.SAMPLE.value)
        np.subtract(row_starts[sampling + 1], 1, out=self._logit_tokens.host[: len(sampling)])
        self._logit_tokens.send(len(sampling))
        max_context = int(contexts.max())
        self._gather_pages(slots, max_context)
        batch = Batch(
            ids=self._ids.device[:tokens],
            positions=self._positions.device[:tokens],
            kv_slots=self._kv_slots.device[:tokens],
            row_starts=self._row_starts.device[: rows + 1],
            contexts=self._contexts.device[:rows],
            page_table=self._page_table.device[:rows],
            logit_tokens=self._logit_tokens.device[: len(sampling)],
            num_tokens=tokens,
            num_rows=rows,
            max_query=int(counts.max()),
            max_context=max_context,
        )
        prompt_rows = np.flatnonzero(flags & RowFlags.PROMPT_LOGPROBS.value).astype(np.int32)
        return Step(batch, slots[sampling], contexts[sampling], prompt_rows, row_starts)

    def _place(self, owners: I32, tokens: int) -> None:
        """Where each token's K and V go, from its slot and its position."""
        positions = self._positions.host[:tokens]
        self._positions.send(tokens)
        index, offset = np.divmod(positions, self._page_size)
        pages = self._slots.page_table[owners, index]
        pages *= self._page_size
        np.add(pages, offset, out=self._kv_slots.host[:tokens])
        self._kv_slots.send(tokens)

    def _gather_pages(self, slots: I32, max_context: int) -> None:
        """The rows' page tables, as far as this step needs them; unless they are there."""
        width = -(-max_context // int(self._page_size))
        identity, held = slots.tobytes(), self._gathered
        if held[0] == identity and held[1] >= width:
            return
        self._page_table.host[: len(slots), :width] = self._slots.page_table[slots, :width]
        self._page_table.send(len(slots))
        self._gathered = (identity, width)
