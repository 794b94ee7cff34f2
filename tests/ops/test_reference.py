"""The reference operators against formulas written another way, and the decoding of formats."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_harness import QUANTIZED_HERE, SCALES_AT, Stored
from model_harness import one_row, reference
from tidemill.ops.backend import AttentionSpec, RawWeight
from tidemill.ops.quant import dequantize, to_tensor
from tidemill.wire.errors import ModelError

SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=8, scale=0.4)


def raw_of(stored: Stored) -> RawWeight:
    data = np.ascontiguousarray(stored.data).view(np.uint8).reshape(-1)
    return RawWeight("w", stored.kind.name, stored.values.shape, data)


def floats(values: Tensor) -> RawWeight:
    return RawWeight("w", "F32", tuple(values.shape), values.numpy().view(np.uint8).reshape(-1))


# --- formats ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [*QUANTIZED_HERE, *SCALES_AT])
def test_every_format_is_decoded(fmt: str) -> None:
    stored = Stored(fmt, (6, 512), np.random.default_rng(0))
    raw = raw_of(stored)
    assert np.array_equal(dequantize(raw), stored.values)
    assert torch.equal(to_tensor([raw], torch.float32), torch.from_numpy(stored.values))


def test_parts_are_stacked() -> None:
    rng = np.random.default_rng(0)
    parts = [Stored("Q8_0", (4, 64), rng), Stored("F16", (2, 64), rng)]
    stacked = to_tensor([raw_of(part) for part in parts], torch.float32)
    assert np.array_equal(stacked.numpy(), np.concatenate([part.values for part in parts]))


def test_a_mapped_file_is_not_written_through() -> None:
    values = torch.randn(3, 4)
    raw = floats(values.clone())
    raw.data.flags.writeable = False
    to_tensor([raw], torch.float32).zero_()
    assert np.array_equal(raw.data.view(np.float32).reshape(3, 4), values.numpy())


@pytest.mark.parametrize("fmt", ["I32", "NO_SUCH"])
def test_an_unreadable_format_is_named(fmt: str) -> None:
    raw = RawWeight("blk.0.attn_q.weight", fmt, (1, 4), np.zeros(16, dtype=np.uint8))
    with pytest.raises(ModelError, match=rf"blk\.0\.attn_q\.weight: the weight format {fmt}"):
        to_tensor([raw], torch.float32)


# --- operators ----------------------------------------------------------------------------------


def plain_attention(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """One token and one head at a time. q: [Q, heads, dim], k and v: [context, kv_heads, dim];
    the queries are the last positions."""
    out = torch.zeros_like(q)
    first = len(k) - len(q)
    for row in range(len(q)):
        at = first + row
        begin = 0 if spec.window is None else max(0, at - spec.window + 1)
        for head in range(spec.heads):
            kv_head = head // (spec.heads // spec.kv_heads)
            scores = k[begin : at + 1, kv_head] @ q[row, head] * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            out[row, head] = scores.softmax(0) @ v[begin : at + 1, kv_head]
    return out


@pytest.mark.parametrize("query", [1, 5, 11])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (3, None), (None, 2.0), (11, 5.0)])
def test_attention_over_pages(query: int, window: int | None, softcap: float | None) -> None:
    spec = AttentionSpec(4, 2, 8, 0.4, window, softcap)
    generator = torch.Generator().manual_seed(1)
    k, v = torch.randn(2, 11, 2, 8, generator=generator)
    q = torch.randn(query, 4, 8, generator=generator)
    ops = reference()
    kv = ops.allocate_kv(spec, 1, 8, 4)[0]
    everything = one_row(11, 11)
    kv[:, everything.kv_slots.long() // 4, everything.kv_slots.long() % 4] = torch.stack([k, v])
    out = ops.attention(q.flatten(1), one_row(11, query), spec, kv)
    assert torch.allclose(out.view(q.shape), plain_attention(q, k, v, spec), atol=1e-6)


def test_rope_rotates_pairs_and_writes_the_cache() -> None:
    """Each pair (i, i + dim/2) as a complex number times e^(i angle); v unchanged."""
    ops, batch = reference(), one_row(7, 5)
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(5, 8, 8, generator=generator)
    angles = torch.randn(7, 4, generator=generator)
    rope = torch.cat([angles.cos(), angles.sin()], dim=1)
    kv = ops.allocate_kv(SPEC, 1, 4, 4)[0]
    q = ops.rope_write(qkv.flatten(1), batch, rope, SPEC, kv, None, None, 1e-5)
    turn = torch.polar(torch.ones(5, 1, 4), angles[2:7, None])
    pairs = torch.complex(qkv[..., :4], qkv[..., 4:]) * turn
    rotated = torch.cat([pairs.real, pairs.imag], dim=-1)
    slots = batch.kv_slots.long()
    written = kv[:, slots // 4, slots % 4]
    assert torch.allclose(q.view(5, 4, 8), rotated[:, :4], atol=1e-6)
    assert torch.allclose(written[0], rotated[:, 4:6], atol=1e-6)
    assert torch.equal(written[1], qkv[:, 6:])


def test_copied_pages_hold_the_leading_tokens() -> None:
    ops = reference()
    kv = ops.allocate_kv(SPEC, 2, 4, 4)
    kv.normal_(generator=torch.Generator().manual_seed(3))
    before = kv.clone()
    ops.copy_pages(kv, torch.tensor([[1, 3, 3], [0, 2, 4]], dtype=torch.int32))
    assert torch.equal(kv[:, :, 3, :3], before[:, :, 1, :3])
    assert torch.equal(kv[:, :, 3, 3], before[:, :, 3, 3])
    assert torch.equal(kv[:, :, 2], before[:, :, 0])
    assert torch.equal(kv[:, :, :2], before[:, :, :2])
    assert kv[:, :, 0].nbytes == ops.kv_bytes_per_page(SPEC, 2, 4)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_mlp(activation: str) -> None:
    generator = torch.Generator().manual_seed(4)
    x, norm = torch.randn(3, 16, generator=generator), torch.rand(16, generator=generator)
    gate, up = torch.randn(2, 24, 16, generator=generator)
    ops = reference()
    weight = ops.pack([floats(gate), floats(up)])
    found = ops.gated_mlp_in(x, norm, 1e-5, weight, activation)
    normed = x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * norm
    a = normed @ gate.T
    acted = a * torch.sigmoid(a)
    if activation == "gelu_tanh":
        acted = 0.5 * a * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (a + 0.044715 * a**3)))
    assert torch.allclose(found, acted * (normed @ up.T), rtol=1e-4, atol=1e-5)
