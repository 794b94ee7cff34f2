"""Every operator in plain torch: short, right for any device and dtype, and nobody's fast path.

This is the oracle that all other backends are tested against, and what `--dtype float32` runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.ops.backend import AttentionSpec, Batch, RawWeight
from tidemill.ops.quant import to_tensor


@dataclass(slots=True)
class DenseWeight:
    """[out, in] in the compute dtype."""

    data: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.data.shape[0], self.data.shape[1]

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


class ReferenceBackend:
    """See `backend.Backend` for the operators' contracts."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device = device
        self.dtype = dtype

    def pack(self, parts: list[RawWeight], *, keep_rows: bool = False) -> DenseWeight:
        return DenseWeight(to_tensor(parts, self.dtype).to(self.device))

    def vector(self, raw: RawWeight) -> Tensor:
        return to_tensor([raw], torch.float32).to(self.device)

    def allocate_kv(self, spec: AttentionSpec, layers: int, pages: int, page_size: int) -> Tensor:
        """[layers, 2 (k, v), pages, page_size, kv_heads, head_dim]"""
        return torch.zeros(
            (layers, 2, pages, page_size, spec.kv_heads, spec.head_dim),
            dtype=self.dtype,
            device=self.device,
        )

    def kv_bytes_per_page(self, spec: AttentionSpec, layers: int, page_size: int) -> int:
        return layers * 2 * page_size * spec.kv_heads * spec.head_dim * self.dtype.itemsize

    def copy_pages(self, kv: Tensor, copies: Tensor) -> None:
        for source, target, count in copies.tolist():
            kv[:, :, target, :count] = kv[:, :, source, :count]

    def graph(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        return forward

    def embed(self, ids: Tensor, weight: DenseWeight, scale: float) -> Tensor:
        return weight.data[ids.long()] * scale

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: DenseWeight, bias: Tensor | None
    ) -> Tensor:
        return self._linear(self._norm(x, norm, eps), weight, bias)

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
        tokens, dim = qkv.shape[0], spec.head_dim
        heads = qkv.view(tokens, spec.heads + 2 * spec.kv_heads, dim)
        q = heads[:, : spec.heads]
        k = heads[:, spec.heads : spec.heads + spec.kv_heads]
        v = heads[:, spec.heads + spec.kv_heads :]
        if q_norm is not None:
            q = self._norm(q, q_norm, eps)
        if k_norm is not None:
            k = self._norm(k, k_norm, eps)
        angles = rope[batch.positions.long()].unsqueeze(1)
        q, k = self._rotate(q, angles), self._rotate(k, angles)
        page_size = kv.shape[2]
        slots = batch.kv_slots.long()
        kv[0, slots // page_size, slots % page_size] = k
        kv[1, slots // page_size, slots % page_size] = v
        return q.reshape(tokens, spec.heads * dim)

    def attention(self, q: Tensor, batch: Batch, spec: AttentionSpec, kv: Tensor) -> Tensor:
        page_size = kv.shape[2]
        out = torch.empty_like(q)
        group = spec.heads // spec.kv_heads
        starts, contexts = batch.row_starts.tolist(), batch.contexts.tolist()
        for row in range(batch.num_rows):
            begin, end, context = starts[row], starts[row + 1], contexts[row]
            pages = batch.page_table[row, : -(-context // page_size)].long()
            k, v = (kv[i, pages].flatten(0, 1)[:context].transpose(0, 1) for i in (0, 1))
            k, v = k.repeat_interleave(group, 0).float(), v.repeat_interleave(group, 0).float()
            rows = q[begin:end].view(-1, spec.heads, spec.head_dim).transpose(0, 1).float()
            scores = rows @ k.transpose(1, 2) * spec.scale
            if spec.softcap is not None:
                scores = torch.tanh(scores / spec.softcap) * spec.softcap
            at = batch.positions[begin:end, None]
            keys = torch.arange(context, device=q.device)[None, :]
            hidden = keys > at
            if spec.window is not None:
                hidden |= keys <= at - spec.window
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            out[begin:end] = (weights @ v).transpose(0, 1).flatten(1).to(q.dtype)
        return out

    def linear_residual(
        self, x: Tensor, weight: DenseWeight, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        return residual + self._linear(x, weight, bias)

    def gated_mlp_in(
        self, x: Tensor, norm: Tensor, eps: float, weight: DenseWeight, activation: str
    ) -> Tensor:
        gate, up = self._linear(self._norm(x, norm, eps), weight, None).chunk(2, dim=-1)
        return self._activate(gate, activation) * up

    def logits(
        self, x: Tensor, tokens: Tensor, norm: Tensor, eps: float, weight: DenseWeight
    ) -> Tensor:
        return self._linear(self._norm(x[tokens.long()], norm, eps), weight, None).float()

    def _linear(self, x: Tensor, weight: DenseWeight, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.data, None if bias is None else bias.to(x.dtype))

    @staticmethod
    def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm (Zhang and Sennrich 2019), computed in float32."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return (wide * weight).to(x.dtype)

    @staticmethod
    def _rotate(x: Tensor, angles: Tensor) -> Tensor:
        """Rotary embedding (Su et al. 2021), pairs (i, i + dim/2). x: [T, heads, dim]."""
        cos, sin = angles.chunk(2, dim=-1)
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    @staticmethod
    def _activate(x: Tensor, name: str) -> Tensor:
        if name == "silu":
            return F.silu(x)
        return F.gelu(x, approximate="tanh")
