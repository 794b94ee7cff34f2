"""From a plan to a batch: NumPy on persistent buffers, no Python per row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tidemill.ops.backend import Batch
from tidemill.runner.slots import Slots
from tidemill.runner.staging import Staged
from tidemill.wire.plan import I32, RowFlags, StepPlan


@dataclass(slots=True)
class Step:
    """A batch, and who gets what its forward pass brings."""

    batch: Batch
    row_starts: I32  # [R + 1], on the host
    sampled: I32  # slots of the SAMPLE rows, in row order
    positions: I32  # where their new tokens will stand
    sampled_on_device: Tensor  # the same slots, int64[S]
    prompt_rows: I32  # rows with PROMPT_LOGPROBS


class BatchBuilder:
    """Builds one batch at a time: the next `build` reuses the storage of the last."""

    def __init__(self, slots: Slots, max_tokens: int, page_size: int, device: torch.device) -> None:
        def ints(count: int) -> Staged:
            return Staged((count,), torch.int32, device)

        self._slots = slots
        self._page_size = page_size
        rows = slots.count
        self._ids, self._positions, self._kv_slots = (ints(max_tokens) for _ in range(3))
        self._row_starts, self._contexts = ints(rows + 1), ints(rows)
        self._row_slots, self._logit_tokens = ints(rows), ints(rows)
        self._sampled = Staged((rows,), torch.int64, device)
        width = slots.page_table.host.shape[1]
        self._page_table = torch.zeros(rows * width, dtype=torch.int32, device=device)
        self._counting: I32 = np.arange(max(max_tokens, rows + 1), dtype=np.int32)

    def build(self, plan: StepPlan) -> Step:
        """The plan's rows as a batch. Reads the slots, changes nothing but own buffers."""
        slots, starts, counts, flags = (np.ascontiguousarray(c) for c in plan.rows.T)
        rows = len(slots)
        contexts = self._contexts.host[:rows]
        np.add(starts, counts, out=contexts)
        row_starts = self._row_starts.host[: rows + 1]
        np.cumsum(counts, out=row_starts[1:])
        tokens = int(row_starts[-1])
        self._row_slots.host[:rows] = slots
        row_slots = self._row_slots.upload(rows)

        self._place_tokens(slots, starts, counts, row_starts, tokens)
        max_context = int(contexts.max())
        batch = Batch(
            ids=self._gather_ids(plan.tokens, row_slots, tokens),
            positions=self._positions.upload(tokens),
            kv_slots=self._kv_slots.upload(tokens),
            row_starts=self._row_starts.upload(rows + 1),
            contexts=self._contexts.upload(rows),
            page_table=self._gather_pages(row_slots, max_context),
            logit_tokens=row_slots,  # set below
            num_tokens=tokens,
            num_rows=rows,
            max_query=int(counts.max()),
            max_context=max_context,
        )
        sampling = np.flatnonzero(flags & RowFlags.SAMPLE)
        sampled = slots[sampling]
        self._sampled.host[: len(sampled)] = sampled
        np.subtract(row_starts[sampling + 1], 1, out=self._logit_tokens.host[: len(sampled)])
        batch.logit_tokens = self._logit_tokens.upload(len(sampled))
        return Step(
            batch,
            row_starts,
            sampled,
            contexts[sampling],
            self._sampled.upload(len(sampled)),
            np.flatnonzero(flags & RowFlags.PROMPT_LOGPROBS).astype(np.int32),
        )

    def _place_tokens(
        self, slots: I32, starts: I32, counts: I32, row_starts: I32, tokens: int
    ) -> None:
        """Each token's position, and the place of its K and V in the pool."""
        positions = self._positions.host[:tokens]
        if tokens == len(slots):  # one token a row: decode
            positions[:] = starts
            owners = slots
        else:
            np.add(
                np.repeat(starts - row_starts[:-1], counts), self._counting[:tokens], out=positions
            )
            owners = np.repeat(slots, counts)
        index, offset = np.divmod(positions, np.int32(self._page_size))
        pages = self._slots.page_table.host[owners, index]
        np.multiply(pages, np.int32(self._page_size), out=pages)
        np.add(pages, offset, out=self._kv_slots.host[:tokens])

    def _gather_ids(self, known: I32, row_slots: Tensor, tokens: int) -> Tensor:
        """Decode rows come first and take what their slots sampled last, on the device."""
        decode = tokens - len(known)
        self._ids.host[decode:tokens] = known
        ids = self._ids.upload(tokens)
        if decode:
            torch.index_select(self._slots.last_token, 0, row_slots[:decode], out=ids[:decode])
        return ids

    def _gather_pages(self, row_slots: Tensor, max_context: int) -> Tensor:
        rows, width = len(row_slots), -(-max_context // self._page_size)
        table = self._page_table[: rows * width].view(rows, width)
        torch.index_select(self._slots.page_table.device[:, :width], 0, row_slots, out=table)
        return table
