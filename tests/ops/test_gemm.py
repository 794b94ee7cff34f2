"""The many-row kernels of the native CPU library, every set that this CPU runs, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tidemill.ops.backend import AttentionSpec, Batch, RawWeight
from tidemill.ops.cpu import library
from tidemill.ops.cpu.native import KERNELS_VARIABLE, NativeBackend
from tidemill.ops.quant import dequantize

Array = npt.NDArray[np.float64]

KERNELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
FORMATS = ("Q4_1", "Q8_0", "BF16")
THREADS = 2

# Relative to the norm of the result. bfloat16 keeps 8 bits; int8 with a scale per 32 values has
# an error of 1/254 of their largest.
BF16_ERROR = 5e-3
INT8_ERROR = 1.5e-2


@pytest.fixture(scope="module", autouse=True)
def _library_is_built() -> None:
    try:
        library.load()
    except library.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> NativeBackend:
    """A backend of the named kernels that uses the many-row ones for any number of rows."""
    monkeypatch.setenv(KERNELS_VARIABLE, request.param)
    try:
        made = NativeBackend(THREADS)
    except library.Unavailable as error:
        pytest.skip(str(error))
    assert made.kernels == request.param
    for fmt in (library.U4, library.U8, library.BF16):
        made._library.tidemill_set_few_rows(made._engine, fmt, 0)
    return made


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random_weight(rng: np.random.Generator, rows: int, columns: int, fmt: str) -> RawWeight:
    values = rng.normal(0.02, 0.1, (rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[fmt])
    return RawWeight("weight", fmt, (rows, columns), data.reshape(-1).view(np.uint8))


def bf16(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape)).to(torch.bfloat16)


def exact(tensor: Tensor) -> Array:
    values: Array = tensor.double().numpy()
    return values


def error(got: Tensor, expected: Array) -> float:
    return float(np.linalg.norm(exact(got) - expected) / np.linalg.norm(expected))


def tolerance(backend: NativeBackend, fmt: str) -> float:
    return INT8_ERROR if backend.kernels.endswith("vnni") and fmt != "BF16" else BF16_ERROR


def normed(x: Tensor, weight: Tensor, eps: float) -> Array:
    wide = exact(x)
    result: Array = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * exact(weight)
    return result


# Rows around the register blocks' sizes (6, 12, 16, 32), outputs that fill no pair of panels,
# and columns that take one or several blocks of k (2,048 at most).
SHAPES = [
    (1, 40, 64),
    (5, 16, 32),
    (16, 96, 576),
    (17, 33, 2112),
    (33, 1000, 96),
    (70, 50, 4160),
]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("rows", "outputs", "columns"), SHAPES)
def test_product_is_added_to_the_residual_stream(
    backend: NativeBackend,
    rng: np.random.Generator,
    fmt: str,
    rows: int,
    outputs: int,
    columns: int,
) -> None:
    raw = random_weight(rng, outputs, columns, fmt)
    x, bias = bf16(rng, rows, columns), torch.from_numpy(rng.normal(size=outputs)).float()
    residual = torch.from_numpy(rng.normal(size=(rows, outputs))).float()
    product = exact(x) @ dequantize(raw).astype(np.float64).T
    expected = exact(residual) + product + exact(bias)
    got = backend.linear_residual(x, backend.pack([raw]), bias, residual.clone())
    assert error(got - residual - bias, product) < tolerance(backend, fmt)
    assert error(got, expected) < tolerance(backend, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_product(
    backend: NativeBackend, rng: np.random.Generator, fmt: str, activation: str
) -> None:
    inner, columns, rows = 80, 160, 37
    parts = [random_weight(rng, inner, columns, fmt) for _ in range(2)]
    x = torch.from_numpy(rng.normal(size=(rows, columns))).float()
    norm = torch.from_numpy(rng.uniform(0.5, 1.5, columns)).float()
    source = normed(x, norm, 1e-5)
    gate, up = (source @ dequantize(part).astype(np.float64).T for part in parts)
    if activation == "silu":
        active = gate / (1 + np.exp(-gate))
    else:
        active = 0.5 * gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
    got = backend.gated_mlp_in(x, norm, 1e-5, backend.pack(parts), activation)
    assert got.shape == (rows, inner)
    assert error(got, active * up) < 2 * tolerance(backend, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
def test_normed_product_and_logits(
    backend: NativeBackend, rng: np.random.Generator, fmt: str
) -> None:
    rows, outputs, columns = 23, 200, 192
    raw = random_weight(rng, outputs, columns, fmt)
    weight = backend.pack([raw])
    x = torch.from_numpy(rng.normal(size=(rows, columns))).float()
    norm = torch.from_numpy(rng.uniform(0.5, 1.5, columns)).float()
    bias = torch.from_numpy(rng.normal(size=outputs)).float()
    product = normed(x, norm, 1e-5) @ dequantize(raw).astype(np.float64).T
    got = backend.norm_linear(x, norm, 1e-5, weight, bias)
    assert error(got, product + exact(bias)) < tolerance(backend, fmt)
    wanted = torch.tensor([22, 0, 7, 8, 9, 21, 3], dtype=torch.int32)
    got = backend.logits(x, wanted, norm, 1e-5, weight)
    assert error(got, product[wanted.numpy()]) < tolerance(backend, fmt)


def test_rows_do_not_depend_on_their_company(
    backend: NativeBackend, rng: np.random.Generator
) -> None:
    """A row's sums are taken in the same order whatever rows are beside it."""
    raw = random_weight(rng, 96, 2112, "Q4_1")
    weight = backend.pack([raw])
    x = bf16(rng, 40, 2112)
    together = backend.linear_residual(x, weight, None, torch.zeros(40, 96))
    for begin, end in [(0, 1), (1, 18), (18, 40)]:
        apart = backend.linear_residual(
            x[begin:end].contiguous(), weight, None, torch.zeros(end - begin, 96)
        )
        assert torch.equal(apart, together[begin:end])


def test_large_and_zero_values(backend: NativeBackend, rng: np.random.Generator) -> None:
    raw = random_weight(rng, 64, 64, "Q4_1")
    weight = backend.pack([raw])
    x = bf16(rng, 20, 64) * 1e4
    x[3] = 0
    got = backend.linear_residual(x, weight, None, torch.zeros(20, 64))
    expected = exact(x) @ dequantize(raw).astype(np.float64).T
    assert error(got, expected) < tolerance(backend, "Q4_1")
    assert torch.equal(got[3], torch.zeros(64))
    # Activations saturate to x and 0, and nothing becomes NaN on the way.
    for activation in ("silu", "gelu_tanh"):
        big = torch.full((20, 64), 1e6)
        made = backend.gated_mlp_in(big, torch.full((64,), 1e4), 1e-5, weight, activation)
        assert torch.isfinite(made).all()


@dataclass
class Row:
    new: int
    context: int


def paged_batch(rng: np.random.Generator, rows: list[Row], page_size: int) -> Batch:
    """Rows over pages in random order; only what attention reads is filled in."""
    pages = [-(-row.context // page_size) for row in rows]
    numbers = iter(rng.permutation(sum(pages)).tolist())
    table = torch.zeros((len(rows), max(pages)), dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([next(numbers) for _ in range(count)])
    starts = np.concatenate([[0], np.cumsum([row.new for row in rows])])
    positions = np.concatenate([np.arange(row.context - row.new, row.context) for row in rows])

    def int32(values: npt.ArrayLike) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int32))

    return Batch(
        ids=int32(np.zeros(len(positions))),
        positions=int32(positions),
        kv_slots=int32(np.zeros(len(positions))),
        row_starts=int32(starts),
        contexts=int32([row.context for row in rows]),
        page_table=table,
        logit_tokens=int32([]),
        num_tokens=len(positions),
        num_rows=len(rows),
        max_query=max(row.new for row in rows),
        max_context=max(row.context for row in rows),
    )


def expected_attention(q: Tensor, batch: Batch, spec: AttentionSpec, kv: Tensor) -> Array:
    """kv: [pages, 2, kv_heads, page_size, head_dim]"""
    out = []
    group, page_size = spec.heads // spec.kv_heads, kv.shape[3]
    for row in range(batch.num_rows):
        context = int(batch.contexts[row])
        table = batch.page_table[row, : -(-context // page_size)].long()
        k, v = (exact(kv[table, i].transpose(1, 2).flatten(0, 1)[:context]) for i in (0, 1))
        for token in range(int(batch.row_starts[row]), int(batch.row_starts[row + 1])):
            at = int(batch.positions[token])
            first = 0 if spec.window is None else max(0, at - spec.window + 1)
            for head in range(spec.heads):
                query = exact(q[token]).reshape(spec.heads, -1)[head]
                scores = k[first : at + 1, head // group] @ query * spec.scale
                if spec.softcap is not None:
                    scores = np.tanh(scores / spec.softcap) * spec.softcap
                weights = np.exp(scores - scores.max())
                out.append(weights / weights.sum() @ v[first : at + 1, head // group])
    return np.stack(out).reshape(batch.num_tokens, -1)


SPECS = [
    AttentionSpec(9, 3, 64, 64**-0.5),
    AttentionSpec(4, 4, 80, 0.2),
    AttentionSpec(8, 1, 128, 0.1, window=100),
    AttentionSpec(2, 1, 256, 256**-0.5, softcap=5.0),
    AttentionSpec(32, 1, 16, 0.25, window=7),
    AttentionSpec(4, 2, 48, 0.3, window=300, softcap=20.0),
]


@pytest.mark.parametrize("page_size", [5, 16])
@pytest.mark.parametrize("spec", SPECS)
def test_prefill_attention(
    backend: NativeBackend, rng: np.random.Generator, spec: AttentionSpec, page_size: int
) -> None:
    # One token (decode) rows first; whole prompts, chunks behind a prefix, block boundaries.
    rows = [Row(1, 33), Row(1, 1), Row(5, 5), Row(33, 33), Row(17, 200), Row(140, 270), Row(3, 65)]
    batch = paged_batch(rng, rows, page_size)
    pages = int(batch.page_table.max()) + 1
    kv = backend.allocate_kv(spec, 1, pages, page_size)
    # What no row has written must not be read: it may hold anything.
    kv.data.fill_(float("nan"))
    for row in range(batch.num_rows):
        for at in range(int(batch.contexts[row])):
            page = int(batch.page_table[row, at // page_size])
            kv.data[page, 0, :, :, at % page_size] = bf16(rng, 2, spec.kv_heads, spec.head_dim)
    q = 2 * bf16(rng, batch.num_tokens, spec.heads * spec.head_dim)
    got = backend.attention(q, batch, spec, kv[0])
    expected = expected_attention(q, batch, spec, kv.data[:, 0])
    assert error(got, expected) < BF16_ERROR
    # Every token for itself, so that a short row's errors are not lost among the others'.
    norms = np.linalg.norm(exact(got) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert norms.max() < 2 * BF16_ERROR


def test_equal_scores_share_evenly(backend: NativeBackend) -> None:
    """Queries of zero: the output is the mean of the visible values, however many blocks."""
    spec = AttentionSpec(2, 1, 32, 1.0)
    rng = np.random.default_rng(1)
    batch = paged_batch(rng, [Row(300, 300)], 16)
    kv = backend.allocate_kv(spec, 1, 19, 16)
    kv.data.fill_(0)
    table = batch.page_table[0]
    for at in range(300):
        kv.data[int(table[at // 16]), 0, 1, 0, at % 16] = float(at % 64)
    got = backend.attention(torch.zeros((300, 64), dtype=torch.bfloat16), batch, spec, kv[0])
    means = np.cumsum(np.arange(300) % 64) / np.arange(1, 301)
    assert np.allclose(exact(got), means[:, None], rtol=BF16_ERROR, atol=1e-6)


def test_first_kernels_are_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable, the first set in the list that runs here is taken."""

    def runs(name: str) -> bool:
        monkeypatch.setenv(KERNELS_VARIABLE, name)
        try:
            return NativeBackend(1).kernels == name
        except library.Unavailable:
            return False

    available: Iterator[str] = (name for name in KERNELS if runs(name))
    best = next(available, None)
    if best is None:
        pytest.skip("this CPU runs none of the native kernels")
    monkeypatch.delenv(KERNELS_VARIABLE)
    assert NativeBackend(1).kernels == best


def test_unknown_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KERNELS_VARIABLE, "sse9")
    with pytest.raises(library.Unavailable, match="sse9"):
        NativeBackend(1)
