"""The torch CPU backend against the float32 reference: formats, operators, whole models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import gguf_harness as files
from gguf_harness import Stored
from model_harness import (
    SHAPE,
    Sequences,
    feed_in_chunks,
    ids_of,
    load,
    make_hf,
    one_row,
    reference,
    save,
)
from tidemill.config import EngineConfig
from tidemill.models.loader import load_model
from tidemill.ops.backend import AttentionSpec, RawWeight
from tidemill.ops.cpu import attention, int4
from tidemill.ops.cpu.torch_backend import TorchCpuBackend
from tidemill.ops.reference import ReferenceBackend
from tidemill.text import vocabulary

ROUNDING = 0.01  # of one product or attention: inputs and outputs have 8 bits
WHOLE_MODEL = 0.04
FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K", "Q8_0")


def raw_of(stored: Stored) -> RawWeight:
    data = np.ascontiguousarray(stored.data).view(np.uint8).reshape(-1)
    return RawWeight("w", stored.kind.name, stored.values.shape, data)


def stored(fmt: str, rows: int = 64, columns: int = 512, seed: int = 0) -> Stored:
    return Stored(fmt, (rows, columns), np.random.default_rng(seed))


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


class FixedBackend(TorchCpuBackend):
    """Uses one form of its weights for any number of rows."""

    def __init__(self, packed_rows: int) -> None:
        super().__init__()
        self._fixed = packed_rows

    def _most_packed_rows(self, shape: tuple[int, int]) -> int:
        return self._fixed


@pytest.fixture(params=[1 << 30, 0], ids=["packed", "dense"])
def ops(request: pytest.FixtureRequest) -> Iterator[TorchCpuBackend]:
    with torch.inference_mode():
        yield FixedBackend(request.param)


# --- weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", FOUR_BITS)
def test_blocks_map_onto_groups_exactly(fmt: str) -> None:
    weight = stored(fmt)
    groups = int4.split(raw_of(weight))
    assert groups is not None
    assert groups.q.max() < 16
    values = groups.dequantize(torch.float32).numpy()
    assert np.allclose(values, weight.values, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("fmt", FOUR_BITS)
def test_packed_product(fmt: str, rows: int) -> None:
    weights = [stored(fmt, 48, seed=1), stored(fmt, 16, seed=2)]
    packed = int4.pack([int4.split(raw_of(w)) for w in weights])
    assert packed is not None
    x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(3))
    wanted = x.bfloat16().float() @ torch.from_numpy(np.concatenate([w.values for w in weights])).T
    assert error(int4.linear(x.bfloat16(), packed), wanted) < ROUNDING


def test_packing_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = int4.split(raw_of(stored("Q8_0", 176)))
    assert groups is not None
    whole, values = int4.pack([groups]), groups.dequantize(torch.float32)
    monkeypatch.setattr(int4, "SLICE", 64)
    sliced = int4.pack([groups])
    assert whole is not None
    assert sliced is not None
    assert torch.equal(whole.packed, sliced.packed)
    assert torch.equal(values, groups.dequantize(torch.float32))


@pytest.mark.parametrize(
    ("formats", "shape"),
    [
        (["F16"], (64, 512)),
        (["Q5_1"], (64, 512)),
        (["Q6_K"], (64, 512)),
        (["Q4_1", "Q6_K"], (64, 512)),  # as in files that mix formats
        (["Q4_1", "Q8_0"], (64, 512)),
        (["Q4_0"], (20, 64)),  # torch packs rows by 16
    ],
)
def test_what_four_bits_cannot_hold_is_dense(formats: list[str], shape: tuple[int, int]) -> None:
    weights = [stored(fmt, *shape, seed=n) for n, fmt in enumerate(formats)]
    ops = TorchCpuBackend()
    packed = ops.pack([raw_of(w) for w in weights])
    assert packed.packed is None
    values = torch.from_numpy(np.concatenate([w.values for w in weights]))
    assert torch.equal(packed.dense, values.bfloat16())
    assert packed.nbytes == values.numel() * 2


@pytest.mark.parametrize("fmt", [*files.QUANTIZED_HERE, *files.SCALES_AT])
def test_dense_form(fmt: str) -> None:
    weight = stored(fmt)
    dense = TorchCpuBackend().pack([raw_of(weight)]).dense
    values = torch.from_numpy(weight.values)
    assert torch.allclose(dense.float(), values, rtol=1 / 256, atol=1e-6)


def test_the_form_is_chosen_by_measurement() -> None:
    """Whatever wins here, one row count decides, and it is measured once."""
    ops = TorchCpuBackend()
    weight = ops.pack([raw_of(stored("Q4_1", 256, 512))])
    most = ops._most_packed_rows(weight.shape)
    assert most in (0, 1, 2, 4, 8, 16, 32, 64)
    assert ops._packed_rows == {(256, 512): most}


# --- operators ----------------------------------------------------------------------------------


def pair(fmt: str, rows: int, ops: TorchCpuBackend) -> tuple[Any, Any]:
    raw = raw_of(stored(fmt, rows))
    return ops.pack([raw], keep_rows=True), reference().pack([raw])


def inputs(rows: int, *shape: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(rows, *shape, generator=generator) for _ in range(2)]


@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "F16"])
def test_linear_operators(ops: TorchCpuBackend, fmt: str, rows: int) -> None:
    ours, theirs = pair(fmt, 128, ops)
    x, _ = inputs(rows, 512)
    residual = torch.randn(rows, 128)
    norm, bias = torch.rand(512) + 0.5, torch.randn(128)
    wanted = reference().norm_linear(x, norm, 1e-5, theirs, bias)
    assert error(ops.norm_linear(x, norm, 1e-5, ours, bias), wanted) < ROUNDING
    wanted = reference().linear_residual(x, theirs, bias, residual)
    assert error(ops.linear_residual(x.bfloat16(), ours, bias, residual.clone()), wanted) < ROUNDING
    tokens = torch.tensor([rows - 1, 0], dtype=torch.int32)
    wanted = reference().logits(x, tokens, norm, 1e-5, theirs)
    found = ops.logits(x, tokens, norm, 1e-5, ours)
    assert found.dtype == torch.float32
    assert error(found, wanted) < ROUNDING
    for activation in ("silu", "gelu_tanh"):
        wanted = reference().gated_mlp_in(x, norm, 1e-5, theirs, activation)
        assert error(ops.gated_mlp_in(x, norm, 1e-5, ours, activation), wanted) < 2 * ROUNDING


@pytest.mark.parametrize("scale", [1.0, 5.5])
def test_embed(ops: TorchCpuBackend, scale: float) -> None:
    ours, theirs = pair("Q8_0", 128, ops)
    ids = torch.tensor([5, 127, 0, 5], dtype=torch.int32)
    wanted = reference().embed(ids, theirs, scale)
    assert error(ops.embed(ids, ours, scale), wanted) < ROUNDING


def test_copied_pages(ops: TorchCpuBackend, tmp_path: Path) -> None:
    spec = load(files.write(tmp_path / "m.gguf", files.weights("F32"))).config.attention(0)
    kv = ops.allocate_kv(spec, 2, 4, 4)
    kv.normal_()
    before = kv.clone()
    ops.copy_pages(kv, torch.tensor([[1, 3, 3]], dtype=torch.int32))
    assert torch.equal(kv[:, 3, :3], before[:, 1, :3])
    assert torch.equal(kv[:, 3, 3], before[:, 3, 3])
    assert kv[:, 0].nbytes == ops.kv_bytes_per_page(spec, 2, 4)


def test_decode_rows_of_similar_contexts_attend_together() -> None:
    lists = attention._similar([100, 900, 101, 120, 1000, 5, 30])  # rows 5 and 6 are 25 apart
    assert lists == [[5, 6], [0, 2, 3], [1, 4]]


# --- whole models -------------------------------------------------------------------------------

MODELS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE, attention_bias=True)),
    "llama, no groups": (LlamaForCausalLM, LlamaConfig(**SHAPE | {"num_key_value_heads": 4})),
    "mistral, window": (MistralForCausalLM, MistralConfig(**SHAPE, sliding_window=9)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return save(make_hf(*MODELS[request.param]), tmp_path_factory.mktemp("model"))


def test_prompts_and_chunks(folder: Path) -> None:
    ids = ids_of(1, 37)
    (wanted,) = Sequences(load(folder)).feed([(0, ids)])
    decoder = load_model(folder, "auto", TorchCpuBackend(), 64)
    for size in (37, 16, 5, 1):
        found = feed_in_chunks(Sequences(decoder), 0, ids, size)
        assert error(found, wanted) < WHOLE_MODEL


def test_mixed_batches(folder: Path) -> None:
    """Decode rows of very unequal contexts, with prefill rows behind them, twice over."""
    wanted = run_mixed(Sequences(load(folder)))
    found = run_mixed(Sequences(load_model(folder, "auto", TorchCpuBackend(), 64)))
    for ours, theirs in zip(found, wanted, strict=True):
        assert error(ours, theirs) < 2 * WHOLE_MODEL  # single tokens are noisier
    assert error(torch.cat(found), torch.cat(wanted)) < WHOLE_MODEL


def run_mixed(sequences: Sequences) -> list[Tensor]:
    lengths = [1, 2, 3, 55, 54, 20, 21, 9]
    out = []
    for name, length in enumerate(lengths):
        out += sequences.feed([(name, ids_of(name, length))])
    decode = [(name, ids_of(30 + name, 1)) for name in (3, 0, 5, 1, 4, 2)]
    out += sequences.feed([*decode, (6, ids_of(40, 7)), (9, ids_of(41, 12)), (7, ids_of(42, 2))])
    out += sequences.feed([(name, ids_of(50 + name, 1)) for name in range(8)])
    return out


@pytest.mark.parametrize("packed_rows", [0, 1 << 30])
@pytest.mark.parametrize("fmt", FOUR_BITS)
def test_gguf_models(tmp_path: Path, fmt: str, packed_rows: int) -> None:
    path = files.write(tmp_path / "model.gguf", files.weights(fmt))
    ids = ids_of(2, 23, files.VOCAB)
    (wanted,) = Sequences(load(path)).feed([(0, ids)])
    decoder = load_model(path, "auto", FixedBackend(packed_rows), 64)
    found = feed_in_chunks(Sequences(decoder), 0, ids, 6)
    assert error(found, wanted) < WHOLE_MODEL


def test_attention_with_softcap_takes_the_reference_path() -> None:
    spec = AttentionSpec(4, 2, 16, 0.25, softcap=3.0)
    theirs, ours = reference(), TorchCpuBackend()
    found = [attend_once(ops, spec) for ops in (ours, theirs)]
    assert error(*found) < ROUNDING


def attend_once(ops: ReferenceBackend, spec: AttentionSpec) -> Tensor:
    generator = torch.Generator().manual_seed(6)
    batch = one_row(9, 9)
    qkv = torch.randn(9, 8 * 16, generator=generator).to(ops.dtype)
    rope = torch.rand(9, 16, generator=generator)
    kv = ops.allocate_kv(spec, 1, 8, 4)[0]
    q = ops.rope_write(qkv, batch, rope, spec, kv, None, None, 1e-5)
    return ops.attention(q, batch, spec, kv)


# --- the real model -----------------------------------------------------------------------------

TEXT = """The tide is the rise and fall of the sea, caused by the pull of the Moon and the Sun.
Twice a day the water climbs the shore; twice a day it leaves pools behind, with crabs in them.
A mill on the coast could use it: a pond filled at high tide, a wheel turned as it emptied."""
NEAR_TIE = 0.5  # logits, of a range of about 30


@pytest.mark.parametrize("packed_rows", [0, 1 << 30])
def test_smollm2(smollm2: str, packed_rows: int) -> None:
    """Every position's best token is the reference's, or nearly ties with it."""
    ids = vocabulary.load(EngineConfig(model=smollm2)).encode(TEXT, add_special_tokens=False)
    (wanted,) = Sequences(load(Path(smollm2), 128), 16).feed([(0, ids)])
    decoder = load_model(smollm2, "auto", FixedBackend(packed_rows), 128)
    sequences = Sequences(decoder, 16)
    (prompt,) = sequences.feed([(0, ids[:40])])
    found = torch.cat([prompt, feed_in_chunks(sequences, 0, ids[40:], 1)])
    assert error(found, wanted) < 0.02
    best = found.argmax(dim=1, keepdim=True)
    gaps = wanted.max(dim=1).values - wanted.gather(1, best)[:, 0]
    assert float(gaps.max()) < NEAR_TIE
    assert int((gaps > 0).sum()) < len(ids) // 10
