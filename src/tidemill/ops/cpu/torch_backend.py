"""The CPU backend that needs no compiler: torch's own operators, few of them per layer.

Weights are held twice: as packed 4-bit groups for few rows, where reading weights is the cost,
and in bf16 for many rows, where arithmetic is (oneDNN uses AMX where there is AMX). Which form a
step takes is measured on first use. The residual stream, norms and rotation are float32;
products and the KV cache are bf16.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.ops.backend import AttentionSpec, Batch, RawWeight
from tidemill.ops.cpu import attention, int4
from tidemill.ops.quant import to_tensor
from tidemill.ops.reference import ReferenceBackend

BF16 = torch.bfloat16
TRIED_ROWS = (1, 2, 4, 8, 16, 32, 64)  # where the two forms of a weight are compared
COMPARED_WEIGHTS = 8  # of one shape, in turn, so that they are not all in the cache


@dataclass(slots=True)
class CpuWeight:
    dense: Tensor  # bf16[out, in]
    packed: int4.Int4Weight | None

    @property
    def shape(self) -> tuple[int, int]:
        return self.dense.shape[0], self.dense.shape[1]

    @property
    def nbytes(self) -> int:
        return self.dense.nbytes + (self.packed.nbytes if self.packed else 0)


@dataclass(slots=True)
class Pass:
    """What all layers of one forward pass share."""

    kv_slots: Tensor  # int64[T]
    cos: Tensor  # float32[T, 1, head_dim], both halves alike
    sin: Tensor  # float32[T, 1, head_dim], the first half negated
    groups: list[attention.RowGroup]


class TorchCpuBackend(ReferenceBackend):
    """See `backend.Backend` for the operators' contracts. `embed` begins a pass."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"), BF16)
        self._by_shape: dict[tuple[int, int], list[CpuWeight]] = {}
        self._packed_rows: dict[tuple[int, int], int] = {}  # the most rows that want 4 bits
        self._pass: Pass | None = None

    # --- weights ------------------------------------------------------------------------------

    def pack(self, parts: list[RawWeight], *, keep_rows: bool = False) -> CpuWeight:  # type: ignore[override]
        groups = [int4.split(part) for part in parts]
        dense = torch.cat(
            [
                to_tensor([part], BF16) if split is None else split.dequantize(BF16)
                for part, split in zip(parts, groups, strict=True)
            ]
        )
        weight = CpuWeight(dense, int4.pack(groups))
        self._by_shape.setdefault(weight.shape, []).append(weight)
        return weight

    def _linear(self, x: Tensor, weight: CpuWeight, bias: Tensor | None) -> Tensor:  # type: ignore[override]
        """x bf16[T, in] -> bf16[T, out]"""
        packed = weight.packed
        if packed is None or x.shape[0] > self._most_packed_rows(weight.shape):
            return F.linear(x, weight.dense, None if bias is None else bias.to(BF16))
        out = int4.linear(x, packed)
        return out if bias is None else out.add_(bias)

    def _most_packed_rows(self, shape: tuple[int, int]) -> int:
        if (known := self._packed_rows.get(shape)) is not None:
            return known
        weights = self._by_shape[shape][:COMPARED_WEIGHTS]
        packed = [w.packed for w in weights if w.packed is not None]
        found = 0
        for rows in TRIED_ROWS:
            x = torch.zeros(rows, shape[1], dtype=BF16)
            dense = partial(_each, F.linear, x, [w.dense for w in weights])
            if _seconds(dense) / len(weights) < _seconds(
                partial(_each, int4.linear, x, packed)
            ) / len(packed):
                break
            found = rows
        self._packed_rows[shape] = found
        return found

    # --- KV cache -----------------------------------------------------------------------------

    def allocate_kv(self, spec: AttentionSpec, layers: int, pages: int, page_size: int) -> Tensor:
        """bf16[layers, pages, page_size, 2 (k, v), kv_heads, head_dim]: a token's K and V are one
        row, written and gathered at once."""
        return torch.zeros((layers, pages, page_size, 2, spec.kv_heads, spec.head_dim), dtype=BF16)

    def copy_pages(self, kv: Tensor, copies: Tensor) -> None:
        for source, target, count in copies.tolist():
            kv[:, target, :count] = kv[:, source, :count]

    # --- operators ----------------------------------------------------------------------------

    def embed(self, ids: Tensor, weight: CpuWeight, scale: float) -> Tensor:  # type: ignore[override]
        self._pass = None
        rows = F.embedding(ids, weight.dense).float()
        return rows if scale == 1 else rows.mul_(scale)

    def rope_write(
        self,
        qkv: Tensor,
        batch: Batch,
        rope: Tensor,
        spec: AttentionSpec,
        kv: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        now = self._pass
        if now is None:
            now = self._pass = _begin_pass(batch, rope, kv.shape[1])
        tokens, heads = qkv.shape[0], spec.heads
        split = qkv.view(tokens, heads + 2 * spec.kv_heads, spec.head_dim)
        turned = split[:, : heads + spec.kv_heads].float()
        if q_norm is not None:
            turned[:, :heads] = self._norm(turned[:, :heads], q_norm, eps)
        if k_norm is not None:
            turned[:, heads:] = self._norm(turned[:, heads:], k_norm, eps)
        swapped = turned.roll(spec.head_dim // 2, -1)
        turned.mul_(now.cos).addcmul_(swapped, now.sin)
        split[:, : heads + spec.kv_heads] = turned
        width = 2 * spec.kv_heads * spec.head_dim
        kv.view(-1, width).index_copy_(0, now.kv_slots, qkv[:, heads * spec.head_dim :])
        return qkv[:, : heads * spec.head_dim]

    def attention(self, q: Tensor, batch: Batch, spec: AttentionSpec, kv: Tensor) -> Tensor:
        if spec.softcap is not None:  # torch's fused attention has none
            return super().attention(q, batch, spec, kv.permute(2, 0, 1, 3, 4))
        assert self._pass is not None, "rope_write comes first"
        groups = self._pass.groups
        if len(groups) == 1:
            return attention.attend(q, groups[0], spec, kv)
        out = torch.empty(q.shape, dtype=BF16)
        for group in groups:
            out[group.tokens] = attention.attend(q[group.tokens], group, spec, kv)
        return out

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: CpuWeight,  # type: ignore[override]
        bias: Tensor | None,
    ) -> Tensor:
        return self._linear(self._norm(x, norm, eps).to(BF16), weight, bias)

    def linear_residual(
        self,
        x: Tensor,
        weight: CpuWeight,  # type: ignore[override]
        bias: Tensor | None,
        residual: Tensor,
    ) -> Tensor:
        return residual.add_(self._linear(x, weight, bias))

    def gated_mlp_in(
        self,
        x: Tensor,
        norm: Tensor,
        eps: float,
        weight: CpuWeight,  # type: ignore[override]
        activation: str,
    ) -> Tensor:
        both = self._linear(self._norm(x, norm, eps).to(BF16), weight, None)
        gate, up = both.chunk(2, dim=-1)
        return self._activate(gate, activation).mul_(up)

    def logits(
        self,
        x: Tensor,
        tokens: Tensor,
        norm: Tensor,
        eps: float,
        weight: CpuWeight,  # type: ignore[override]
    ) -> Tensor:
        wanted = x.index_select(0, tokens)
        return self._linear(self._norm(wanted, norm, eps).to(BF16), weight, None).float()

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)


def _begin_pass(batch: Batch, rope: Tensor, page_size: int) -> Pass:
    cos, sin = rope.index_select(0, batch.positions).unsqueeze(1).chunk(2, dim=-1)
    return Pass(
        batch.kv_slots.long(),
        torch.cat((cos, cos), dim=-1),
        torch.cat((-sin, sin), dim=-1),
        attention.row_groups(batch, page_size),
    )


def _each(linear: Callable[[Tensor, Any], Tensor], x: Tensor, weights: list[Any]) -> None:
    for weight in weights:
        linear(x, weight)


def _seconds(run: Callable[[], None]) -> float:
    """The best of three, after a first."""
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return min(times[1:])
