"""Attention over the paged cache with torch's fused kernel.

Decode rows of similar contexts attend in one call, padded to the longest; a prefill row attends
in a call of its own. Pages are gathered first: one copy of K and V costs less than a call per page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.ops.backend import AttentionSpec, Batch

PADDING = 1.25  # rows share a call while the longest context is at most this times the shortest,
PADDING_TOKENS = 32  # … or longer by at most so many tokens


@dataclass(slots=True)
class RowGroup:
    """Rows that attend in one call."""

    tokens: Tensor | slice  # which of the batch's tokens
    rows: int
    query: int  # tokens of each row
    context: int  # of the longest row
    shortest: int
    contexts: Tensor  # int32[rows]
    pages: Tensor  # int32[rows * pages of the longest row]
    masks: dict[int | None, Tensor | None] = field(default_factory=dict)  # by window

    def mask(self, window: int | None) -> Tensor | None:
        """bf16[rows, 1, query, context] to add to the scores; None where nothing is hidden."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(window)
        return self.masks[window]

    def _make_mask(self, window: int | None) -> Tensor | None:
        windowed = window is not None and window < self.context
        if self.query == 1 and self.shortest == self.context and not windowed:
            return None
        last = self.contexts[:, None] - self.query + torch.arange(self.query)
        at = last[:, None, :, None]
        keys = torch.arange(self.context)
        hidden = keys > at
        if window is not None:
            hidden |= keys <= at - window
        return torch.zeros(hidden.shape, dtype=torch.bfloat16).masked_fill_(hidden, float("-inf"))


def row_groups(batch: Batch, page_size: int) -> list[RowGroup]:
    starts, contexts = batch.row_starts.tolist(), batch.contexts.tolist()
    lengths = [end - begin for begin, end in pairwise(starts)]
    decode = next((row for row, length in enumerate(lengths) if length > 1), batch.num_rows)

    def group(rows: list[int], tokens: Tensor | slice) -> RowGroup:
        longest = max(contexts[row] for row in rows)
        index = torch.tensor(rows)
        pages = batch.page_table[index, : -(-longest // page_size)].reshape(-1)
        shortest = min(contexts[row] for row in rows)
        return RowGroup(
            tokens, len(rows), lengths[rows[0]], longest, shortest, batch.contexts[index], pages
        )

    groups = []
    for rows in _similar(contexts[:decode]):
        together = rows[-1] - rows[0] == len(rows) - 1
        groups.append(group(rows, slice(rows[0], rows[-1] + 1) if together else torch.tensor(rows)))
    for row in range(decode, batch.num_rows):
        groups.append(group([row], slice(starts[row], starts[row + 1])))
    return groups


def _similar(contexts: list[int]) -> list[list[int]]:
    """Row numbers, in lists of similar contexts."""
    lists: list[list[int]] = []
    limit = 0.0
    for row in sorted(range(len(contexts)), key=contexts.__getitem__):
        if contexts[row] > limit:
            lists.append([])
            limit = max(contexts[row] * PADDING, contexts[row] + PADDING_TOKENS)
        lists[-1].append(row)
    return [sorted(rows) for rows in lists]


def attend(q: Tensor, group: RowGroup, spec: AttentionSpec, kv: Tensor) -> Tensor:
    """q bf16[rows * query, heads * head_dim], kv bf16[pages, page_size, 2, kv_heads, head_dim]
    -> like q."""
    rows, query, heads, dim = group.rows, group.query, spec.heads, spec.head_dim
    gathered = kv.view(kv.shape[0], -1).index_select(0, group.pages)
    k, v = gathered.view(rows, -1, 2, spec.kv_heads, dim)[:, : group.context].unbind(2)
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    windowed = spec.window is not None and spec.window < group.context
    if query == 1:  # the heads that share a kv head stand where a prompt's tokens would
        q = q.view(rows, spec.kv_heads, heads // spec.kv_heads, dim)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=group.mask(spec.window), scale=spec.scale
        )
        return out.reshape(rows, heads * dim)
    q = q.view(rows, query, heads, dim).transpose(1, 2)
    whole = query == group.context and not windowed  # nothing is cached: plain causal
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=None if whole else group.mask(spec.window),
        is_causal=whole,
        scale=spec.scale,
        enable_gqa=heads > spec.kv_heads,
    )
    return out.transpose(1, 2).reshape(rows * query, heads * dim)
