"""GGUF blocks as torch's packed 4-bit weights.

torch multiplies a bf16 row by 4-bit weights without unpacking them to memory
(`_weight_int4pack_mm_for_cpu`). Its weights are w = (q - 8) * scale + zero, with q in 0..15 and
one (scale, zero) for each group of 32 along in_features: what Q4_0, Q4_1 and Q4_K hold, but for
scales in bf16. An 8-bit q is 16 * high + low, so a Q8_0 weight is two such matrices side by side
that meet the row twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.ops.backend import RawWeight

GROUP = 32  # weights with one scale, along in_features
ROW_MULTIPLE = 16  # torch packs out_features in tiles of 64, the last a multiple of this
SLICE = 4096  # out_features unpacked at once: it takes 4 bytes a weight

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class Groups:
    """Plain 4-bit weights: `q` uint8[out, in * copies] in 0..15; `scale` and `zero`
    float32[out, in * copies / 32]. The matrices of several copies add up to the weight."""

    q: Bytes
    scale: Floats
    zero: Floats
    copies: int = 1

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, in]"""
        rows, columns = self.q.shape
        out = torch.empty(rows, columns // self.copies, dtype=dtype)
        for part in _slices(rows):
            q = torch.from_numpy(self.q[part]).float().view(-1, columns // GROUP, GROUP)
            scale, zero = (torch.from_numpy(a[part])[:, :, None] for a in (self.scale, self.zero))
            values = q.sub_(8).mul_(scale).add_(zero).view(len(q), self.copies, -1)
            out[part] = values[:, 0] if self.copies == 1 else values.sum(1)
        return out


@dataclass(slots=True)
class Int4Weight:
    """As torch's operator takes it."""

    packed: Tensor  # uint8
    scales_and_zeros: Tensor  # bf16[in * copies / 32, out, 2]
    copies: int  # how often a row stands side by side before it meets the weights

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes


def linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """x bf16[T, in] -> bf16[T, out]"""
    if weight.copies > 1:
        x = torch.cat([x] * weight.copies, dim=1)
    out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
        x, weight.packed, GROUP, weight.scales_and_zeros
    )
    return out


def split(raw: RawWeight) -> Groups | None:
    """The weight in groups, or None for a format that they cannot hold."""
    made = _SPLIT.get(raw.fmt)
    return None if made is None or raw.shape[1] % GROUP else made(raw)


def pack(parts: Sequence[Groups | None]) -> Int4Weight | None:
    """The parts stacked over out_features; None if one is, or if they do not fit together."""
    groups = [part for part in parts if part is not None]
    if len(groups) < len(parts) or len({part.copies for part in groups}) > 1:
        return None
    q = np.concatenate([part.q for part in groups])
    if len(q) % ROW_MULTIPLE:
        return None
    scale = np.concatenate([part.scale for part in groups])
    zero = np.concatenate([part.zero for part in groups])
    pairs = torch.from_numpy(np.stack([scale.T, zero.T], axis=2)).to(torch.bfloat16).contiguous()
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.from_numpy(q[part]).int(), 1)
        for part in _slices(len(q))
    ]
    return Int4Weight(torch.cat(packed), pairs, groups[0].copies)


def _slices(rows: int) -> Iterator[slice]:
    return (slice(at, at + SLICE) for at in range(0, rows, SLICE))


def _blocks(raw: RawWeight) -> Bytes:
    """[out, blocks in a row, bytes of a block]"""
    kind = gguf.GGMLQuantizationType[raw.fmt]
    return raw.data.reshape(raw.shape[0], -1, gguf.GGML_QUANT_SIZES[kind][1])


def _halves(blocks: Bytes, at: int) -> Floats:
    """The float16 at byte `at` of every block."""
    return (
        np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0].astype(np.float32)
    )


def _nibbles(data: Bytes) -> Bytes:
    """16 bytes hold 32 weights: the low nibbles are the first half. [..., n] -> [..., 2n]"""
    return np.concatenate([data & 15, data >> 4], axis=-1)


def _q4_0(raw: RawWeight) -> Groups:
    blocks = _blocks(raw)
    scale = _halves(blocks, 0)
    return Groups(_nibbles(blocks[..., 2:]).reshape(raw.shape), scale, np.zeros_like(scale))


def _q4_1(raw: RawWeight) -> Groups:
    blocks = _blocks(raw)
    scale, least = _halves(blocks, 0), _halves(blocks, 2)
    return Groups(_nibbles(blocks[..., 4:]).reshape(raw.shape), scale, least + 8 * scale)


def _q4_k(raw: RawWeight) -> Groups:
    """256 weights in 8 groups: two float16, 12 bytes of 6-bit scales and minima, the nibbles of
    four pairs of groups."""
    blocks = _blocks(raw)
    rows = raw.shape[0]
    scales, minima = gguf.quants.Q4_K.get_scale_min(blocks[..., 4:16].reshape(-1, 12))
    scale = (_halves(blocks, 0).reshape(-1, 1) * scales.reshape(-1, 8)).reshape(rows, -1)
    least = (_halves(blocks, 2).reshape(-1, 1) * minima.reshape(-1, 8)).reshape(rows, -1)
    q = _nibbles(blocks[..., 16:].reshape(rows, -1, GROUP)).reshape(raw.shape)
    return Groups(q, scale, 8 * scale - least)


def _q8_0(raw: RawWeight) -> Groups:
    blocks = _blocks(raw)
    scale = _halves(blocks, 0)
    biased = blocks[..., 2:] ^ np.uint8(0x80)  # q + 128 = 16 * (high + 8) + low
    q = np.concatenate([(biased >> 4).reshape(raw.shape), (biased & 15).reshape(raw.shape)], axis=1)
    zero = np.concatenate([np.zeros_like(scale), 8 * scale], axis=1)
    return Groups(q, np.concatenate([16 * scale, scale], axis=1), zero, copies=2)


_SPLIT: dict[str, Callable[[RawWeight], Groups]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q4_K": _q4_k,
    "Q8_0": _q8_0,
}
