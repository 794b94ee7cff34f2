"""The native CPU backend around its many-row kernels (test_gemm.py has those): packing, products
with few rows, decode attention, rope, recorded programs, the thread pool."""

from __future__ import annotations

import time
from collections.abc import Callable

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
from tidemill.ops.reference import ReferenceBackend
from tidemill.ops.select import make_backend

Array = npt.NDArray[np.float64]
Maker = Callable[..., NativeBackend]

KERNELS = ("amx", "avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2")
INT8_ERROR = 1.5e-2  # of activations rounded to int8, a scale per 32: 1/254 of the largest
BF16_ERROR = 5e-3


@pytest.fixture(scope="module", autouse=True)
def _library_is_built() -> None:
    try:
        library.load()
    except library.Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Maker:
    """A backend with the named kernels that takes any number of rows as few."""

    def made(kernels: str = "", threads: int = 2) -> NativeBackend:
        if kernels:
            monkeypatch.setenv(KERNELS_VARIABLE, kernels)
        try:
            backend = NativeBackend(threads)
        except library.Unavailable as error:
            pytest.skip(str(error))
        for packed in (library.U4, library.U8, library.BF16):
            backend._library.tidemill_set_few_rows(backend._engine, packed, 1 << 20)
            backend.few_rows[packed] = 1 << 20  # as if measured
        return backend

    return made


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest, make: Maker) -> NativeBackend:
    return make(request.param)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def exact(tensor: Tensor) -> Array:
    values: Array = tensor.double().numpy()
    return values


def error(got: Tensor, expected: Array) -> float:
    return float(np.linalg.norm(exact(got) - expected) / np.linalg.norm(expected))


def floats(rng: np.random.Generator, *shape: int) -> Tensor:
    return torch.from_numpy(rng.normal(size=shape)).float()


def int32(values: npt.ArrayLike) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=np.int32))


def quantized(rng: np.random.Generator, rows: int, columns: int, fmt: str) -> RawWeight:
    values = rng.normal(0.02, 0.1, (rows, columns)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[fmt])
    return RawWeight(fmt, fmt, (rows, columns), data.reshape(-1).view(np.uint8))


def random_blocks(rng: np.random.Generator, rows: int, columns: int, fmt: str) -> RawWeight:
    """Random codes and sub-scales, which the gguf package cannot quantize to; scales in f16."""
    size = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}[fmt]
    blocks = rng.integers(0, 256, (rows, columns // 256, size), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (rows, columns // 256, 2)).astype(np.float16)
    if fmt == "Q6_K":
        blocks[..., 208:] = scales[..., :1].view(np.uint8)
    else:
        blocks[..., :4] = scales.view(np.uint8)
    return RawWeight(fmt, fmt, (rows, columns), blocks.reshape(-1))


def raw(rng: np.random.Generator, rows: int, columns: int, fmt: str) -> RawWeight:
    make = random_blocks if fmt in ("Q4_K", "Q5_K", "Q6_K") else quantized
    return make(rng, rows, columns, fmt)


def unpacked(backend: NativeBackend, parts: list[RawWeight]) -> Array:
    """All rows of the packed weight, as `embed` reads them."""
    weight = backend.pack(parts, keep_rows=True)
    return exact(backend.embed(int32(np.arange(weight.shape[0])), weight, 1.0))


# --- packing ------------------------------------------------------------------------------------

# Scales that are products in the file are rounded to f16; Q6_K is coded anew in 8 bits.
TOLERANCES = {"F32": 2**-8, "F16": 2**-8, "BF16": 0.0, "Q8_0": 0.0, "Q4_0": 0.0, "Q4_1": 0.0}
TOLERANCES |= {"Q5_0": 0.0, "Q5_1": 0.0, "Q4_K": 1e-3, "Q5_K": 1e-3, "Q6_K": 8e-3}


@pytest.mark.parametrize("fmt", library.FILE_FORMATS)
def test_weights_survive_packing(make: Maker, rng: np.random.Generator, fmt: str) -> None:
    part = raw(rng, 37, 512, fmt)
    expected = dequantize(part).astype(np.float64)
    got = unpacked(make(), [part])
    # Integers below a 2^-10 of their scale apart would not show, and float32 sums round.
    largest = np.abs(expected).max()
    assert np.abs(got - expected).max() <= (TOLERANCES[fmt] + 1e-6) * largest


def test_formats_that_the_library_does_not_know_become_bf16(
    make: Maker, rng: np.random.Generator
) -> None:
    blocks = rng.integers(0, 256, (5, 2, 84), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.02, (5, 2, 2)).astype(np.float16)
    blocks[..., 80:] = scales.view(np.uint8)
    part = RawWeight("w", "Q2_K", (5, 512), blocks.reshape(-1))
    expected = dequantize(part).astype(np.float64)
    assert np.allclose(unpacked(make(), [part]), expected, rtol=2**-8)


@pytest.mark.parametrize(
    "formats", [("Q4_1", "Q4_0"), ("Q4_0", "Q8_0", "Q4_1"), ("Q4_0", "BF16"), ("Q8_0", "F32")]
)
def test_parts_of_different_formats_are_stacked(
    make: Maker, rng: np.random.Generator, formats: tuple[str, ...]
) -> None:
    """Part boundaries fall within panels."""
    parts = [raw(rng, 16 + 3 * i, 64, fmt) for i, fmt in enumerate(formats)]
    expected = np.concatenate([dequantize(part) for part in parts]).astype(np.float64)
    got = unpacked(make(), parts)
    assert np.allclose(got, expected, rtol=2**-8 if {"BF16", "F32"} & set(formats) else 1e-6)


def test_embedding_is_scaled(make: Maker, rng: np.random.Generator) -> None:
    backend = make()
    part = raw(rng, 40, 64, "Q8_0")
    weight = backend.pack([part], keep_rows=True)
    ids = [39, 0, 17, 17]
    got = backend.embed(int32(ids), weight, 3.5)
    assert got.dtype == torch.float32
    assert np.allclose(exact(got), 3.5 * dequantize(part)[ids], rtol=1e-6)


# --- products with few rows ---------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["Q4_1", "Q8_0", "BF16"])
def test_few_rows(backend: NativeBackend, rng: np.random.Generator, fmt: str) -> None:
    """Numbers of rows around the kernels' register blocks; outputs that fill no panel pair."""
    outputs, columns = 83, 576
    part = raw(rng, outputs, columns, fmt)
    weight = backend.pack([part])
    bias, norm = floats(rng, outputs), floats(rng, columns).abs()
    for rows in (1, 2, 3, 4, 7, 8, 9, 17):
        x = floats(rng, rows, columns)
        normed = exact(x) / np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5) * exact(norm)
        product = normed @ dequantize(part).astype(np.float64).T
        expected = product + exact(bias)
        tolerance = BF16_ERROR if fmt == "BF16" else INT8_ERROR
        got = backend.norm_linear(x, norm, 1e-5, weight, bias)
        assert error(got, expected) < tolerance
        wanted = int32([rows - 1, 0])
        got = backend.logits(x, wanted, norm, 1e-5, weight)
        assert error(got, product[wanted.numpy()]) < tolerance


@pytest.mark.parametrize("features", [16, 48, 33])
def test_columns_that_are_no_multiple_of_32(
    backend: NativeBackend, rng: np.random.Generator, features: int
) -> None:
    part = raw(rng, 20, features, "F32")
    x = floats(rng, 3, features).bfloat16()
    residual = floats(rng, 3, 20)
    expected = exact(residual) + exact(x) @ dequantize(part).astype(np.float64).T
    got = backend.linear_residual(x, backend.pack([part]), None, residual)
    assert error(got, expected) < BF16_ERROR


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_and_company_change_nothing(
    make: Maker, rng: np.random.Generator, threads: int
) -> None:
    part = raw(rng, 2 * 96, 576, "Q4_1")
    x, norm = floats(rng, 19, 576), floats(rng, 576).abs()
    expected = None
    for backend in (make(threads=2), make(threads=threads)):
        weight = backend.pack([part])
        got = backend.gated_mlp_in(x, norm, 1e-5, weight, "silu")
        alone = backend.gated_mlp_in(x[4:5], norm, 1e-5, weight, "silu")
        assert torch.equal(got[4:5], alone)
        assert expected is None or torch.equal(got, expected)
        expected = got


# --- attention and rope -------------------------------------------------------------------------

SPECS = [
    AttentionSpec(9, 3, 64, 64**-0.5),
    AttentionSpec(4, 4, 80, 0.2),
    AttentionSpec(16, 1, 128, 0.1, window=100),
    AttentionSpec(2, 1, 256, 256**-0.5, softcap=5.0),
    AttentionSpec(12, 2, 16, 0.25, window=7),
    AttentionSpec(4, 2, 48, 0.3, window=300, softcap=20.0),
]


def decode_batch(tables: list[list[int]], contexts: list[int], page_size: int) -> Batch:
    rows = len(contexts)
    table = np.zeros((rows, max(map(len, tables))), dtype=np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    positions = np.array(contexts) - 1
    pages = table[np.arange(rows), positions // page_size]
    return Batch(
        ids=int32(np.zeros(rows)),
        positions=int32(positions),
        kv_slots=int32(pages * page_size + positions % page_size),
        row_starts=int32(np.arange(rows + 1)),
        contexts=int32(contexts),
        page_table=int32(table),
        logit_tokens=int32(np.arange(rows)),
        num_tokens=rows,
        num_rows=rows,
        max_query=1,
        max_context=max(contexts),
    )


def expected_attention(q: Array, batch: Batch, spec: AttentionSpec, kv: Array) -> Array:
    """kv: [pages, 2, kv_heads, page_size, head_dim]"""
    out = np.empty_like(q)
    group, page_size = spec.heads // spec.kv_heads, kv.shape[3]
    for row, context in enumerate(batch.contexts.tolist()):
        first = 0 if spec.window is None else max(0, context - spec.window)
        at = np.arange(first, context)
        pages = batch.page_table[row].numpy()[at // page_size]
        for head in range(spec.heads):
            part = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
            k, v = (kv[pages, i, head // group, at % page_size] for i in (0, 1))
            scores = k @ q[row, part] * spec.scale
            if spec.softcap is not None:
                scores = np.tanh(scores / spec.softcap) * spec.softcap
            weights = np.exp(scores - scores.max())
            out[row, part] = weights / weights.sum() @ v
    return out


@pytest.mark.parametrize("page_size", [5, 16, 700])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("contexts", [[611], [1, 64, 65, 300, 17, 128]])
def test_decode_attention(
    backend: NativeBackend,
    rng: np.random.Generator,
    spec: AttentionSpec,
    page_size: int,
    contexts: list[int],
) -> None:
    """A long row alone is cut into spans; rows beside each other share their first pages."""
    counts = [-(-context // page_size) for context in contexts]
    shared = 1 if min(counts) > 1 else 0
    numbers = iter(rng.permutation(np.arange(shared, sum(counts) + shared)).tolist())
    tables = [
        list(range(shared)) + [next(numbers) for _ in range(count - shared)] for count in counts
    ]
    batch = decode_batch(tables, contexts, page_size)
    kv = backend.allocate_kv(spec, 2, sum(counts) + shared, page_size)
    # What no row has written may hold anything, and so may the other layer.
    kv.data.fill_(float("nan"))
    for pages, context in zip(tables, contexts, strict=True):
        for at, page in enumerate(pages):
            tokens = min(page_size, context - at * page_size)
            values = floats(rng, 2, spec.kv_heads, tokens, spec.head_dim)
            kv.data[page, 1, :, :, :tokens] = values.bfloat16()
    q = (2 * floats(rng, len(contexts), spec.heads * spec.head_dim)).bfloat16()
    got = backend.attention(q, batch, spec, kv[1])
    expected = expected_attention(exact(q), batch, spec, exact(kv.data[:, 1]))
    assert got.shape == expected.shape
    for row in range(len(contexts)):
        assert error(got[row], expected[row]) < BF16_ERROR


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 16])
def test_rope_and_cache_write(
    backend: NativeBackend, rng: np.random.Generator, head_dim: int, norms: bool
) -> None:
    spec = AttentionSpec(6, 2, head_dim, 1.0)
    reference = ReferenceBackend(torch.device("cpu"), torch.float32)
    batch = decode_batch([[2, 0], [1], [3, 4]], [7, 5, 9], 5)
    rope = floats(rng, 9, head_dim)
    qkv = floats(rng, 3, 10 * head_dim).bfloat16()
    q_norm, k_norm = (floats(rng, head_dim) if norms else None for _ in range(2))
    kv, expected_kv = (b.allocate_kv(spec, 1, 5, 5) for b in (backend, reference))
    expected = reference.rope_write(
        qkv.float(), batch, rope, spec, expected_kv[0], q_norm, k_norm, 1e-5
    )
    got = backend.rope_write(qkv, batch, rope, spec, kv[0], q_norm, k_norm, 1e-5)
    assert error(got, exact(expected)) < BF16_ERROR
    # reference: [2, pages, page_size, kv_heads, head_dim]
    assert error(kv.data[:, 0].permute(1, 0, 3, 2, 4), exact(expected_kv[0])) < BF16_ERROR
    assert torch.equal(kv.data[:, 0] == 0, (expected_kv[0] == 0).permute(1, 0, 3, 2, 4))


def test_copied_pages_are_equal_and_apart(make: Maker, rng: np.random.Generator) -> None:
    spec = AttentionSpec(2, 1, 32, 1.0)
    kv = make().allocate_kv(spec, 3, 4, 8)
    kv.data.copy_(floats(rng, *kv.data.shape))
    before = kv.data.clone()
    make().copy_pages(kv, int32([[0, 2, 5], [1, 3, 8]]))
    assert torch.equal(kv.data[2, ..., :5, :], before[0, ..., :5, :])
    assert torch.equal(kv.data[2, ..., 5:, :], before[2, ..., 5:, :])
    assert torch.equal(kv.data[3], before[1])
    assert torch.equal(kv.data[:2], before[:2])


# --- programs -----------------------------------------------------------------------------------


class SmallModel:
    """Two layers on the backend's operators, as the decoder calls them."""

    spec = AttentionSpec(4, 2, 16, 0.25)
    hidden, inner, vocab = 64, 96, 200

    def __init__(self, backend: NativeBackend, rng: np.random.Generator) -> None:
        self.ops = backend

        def pack(rows: int, columns: int, fmt: str = "Q4_1") -> object:
            return backend.pack([raw(rng, rows, columns, fmt)])

        self.embedding = pack(self.vocab, self.hidden, "Q8_0")
        self.layers = [
            (pack(128, 64), pack(64, 64), pack(2 * 96, 64), pack(64, 96)) for _ in range(2)
        ]
        self.norm = floats(rng, self.hidden).abs()
        self.rope = floats(rng, 400, 16)
        self.kv = backend.allocate_kv(self.spec, 2, 400, 4)

    def forward(self, batch: Batch) -> Tensor:
        ops, norm, eps = self.ops, self.norm, 1e-5
        x = ops.embed(batch.ids, self.embedding, 1.0)
        for layer, (qkv, o, gate_up, down) in enumerate(self.layers):
            kv = self.kv[layer]
            projected = ops.norm_linear(x, norm, eps, qkv, None)
            q = ops.rope_write(projected, batch, self.rope, self.spec, kv, None, None, eps)
            x = ops.linear_residual(ops.attention(q, batch, self.spec, kv), o, None, x)
            x = ops.linear_residual(ops.gated_mlp_in(x, norm, eps, gate_up, "silu"), down, None, x)
        return ops.logits(x, batch.logit_tokens, norm, eps, self.embedding)


def small_batch(rng: np.random.Generator, rows: int, context: int) -> Batch:
    tables = [[row * 4 + i for i in range(-(-context // 4))] for row in range(rows)]
    batch = decode_batch(tables, [context] * rows, 4)
    batch.ids = int32(rng.integers(0, SmallModel.vocab, rows))
    return batch


def test_recorded_program_equals_its_operators(
    backend: NativeBackend, rng: np.random.Generator
) -> None:
    """One recording serves all numbers of rows, smaller and larger ones than it was made with,
    and contexts that are cut into spans, which every layer puts together anew."""
    model = SmallModel(backend, rng)
    graph = backend.graph(model.forward)
    for rows, context in [(3, 1), (1, 2), (8, 3), (100, 1), (2, 9), (1, 300), (1, 390)]:
        batch = small_batch(rng, rows, context)
        recorded = graph(batch).clone()
        assert recorded.shape == (rows, model.vocab)
        assert torch.equal(recorded, model.forward(batch))


def test_kernels_change_at_a_measured_number_of_rows(make: Maker, rng: np.random.Generator) -> None:
    backend = make()
    backend.few_rows.clear()
    model = SmallModel(backend, rng)
    graph = backend.graph(model.forward)
    batch = small_batch(rng, 70, 1)
    measured = graph(batch).clone()
    assert backend.few_rows.keys() == {library.U4, library.U8}
    assert set(backend.few_rows.values()) <= {0, 8, 16, 32, 64}
    # 70 rows are many: the other kernels, which round differently.
    few = SmallModel(make(), np.random.default_rng(0)).forward(batch)
    assert torch.allclose(measured, few, rtol=0.1, atol=0.1 * float(measured.std()))
    assert not torch.equal(measured, few)


def test_only_wanted_logits_are_made(make: Maker, rng: np.random.Generator) -> None:
    model = SmallModel(make(), rng)
    graph = model.ops.graph(model.forward)
    batch = small_batch(rng, 4, 3)
    everything = graph(batch).clone()
    batch.logit_tokens = int32([2, 0])
    assert torch.equal(graph(batch), everything[[2, 0]])
    batch.logit_tokens = int32([])
    assert graph(batch).shape == (0, model.vocab)


def test_what_varies_must_come_from_the_batch(make: Maker, rng: np.random.Generator) -> None:
    model = SmallModel(make(), rng)
    fixed = int32([1, 2])
    graph = model.ops.graph(lambda batch: model.ops.embed(fixed, model.embedding, 1.0))
    with pytest.raises(ValueError, match="ids"):
        graph(small_batch(rng, 2, 1))


def test_profile_names_every_operator(make: Maker, rng: np.random.Generator) -> None:
    model = SmallModel(make(), rng)
    graph = model.ops.graph(model.forward)
    seconds = graph.profile(small_batch(rng, 2, 5))
    assert set(seconds) == {
        "embed",
        "norm_linear",
        "rope_write",
        "attention",
        "linear_residual",
        "gated_mlp_in",
        "logits",
    }
    assert all(spent > 0 for spent in seconds.values())


def test_many_short_runs_end(make: Maker, rng: np.random.Generator) -> None:
    """Wake-ups between threads that spin, sleep and are held up: none is lost."""
    for threads in (2, 5):
        model = SmallModel(make(threads=threads), rng)
        graph = model.ops.graph(model.forward)
        batch = small_batch(rng, 2, 5)
        expected = graph(batch).clone()
        for i in range(300):
            if i % 100 == 0:
                time.sleep(0.01)  # threads go to sleep
            assert torch.equal(graph(batch), expected)


def test_idle_threads_take_no_time(make: Maker, rng: np.random.Generator) -> None:
    model = SmallModel(make(threads=4), rng)
    graph = model.ops.graph(model.forward)
    graph(small_batch(rng, 2, 5))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1


# --- refusals -----------------------------------------------------------------------------------


def test_models_of_other_sizes_run_on_torch(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    make()  # skips where the library does not run

    def chosen(head_dim: int, intermediate: int, native: bool = True) -> str:
        spec = AttentionSpec(2, 1, head_dim, 1.0)
        backend = make_backend("cpu", "auto", 1, native, attention=spec, intermediate=intermediate)
        return type(backend).__name__

    assert chosen(64, 160) == "NativeBackend"
    assert not caplog.records
    assert chosen(40, 160) == chosen(272, 160) == chosen(64, 24) == "TorchCpuBackend"
    assert "head_dim 40" in caplog.text
    assert "intermediate size 24" in caplog.text
    assert chosen(64, 160, native=False) == "TorchCpuBackend"


def test_unsupported_sizes_are_named(make: Maker, rng: np.random.Generator) -> None:
    backend = make()
    with pytest.raises(ValueError, match="head_dim 40"):
        backend.allocate_kv(AttentionSpec(2, 1, 40, 1.0), 1, 1, 16)
    weight = backend.pack([raw(rng, 2 * 24, 32, "F32")])
    with pytest.raises(ValueError, match="24"):
        backend.gated_mlp_in(floats(rng, 1, 32), floats(rng, 32), 1e-5, weight, "silu")
    with pytest.raises(TypeError, match="float32"):
        backend.norm_linear(floats(rng, 1, 32), floats(rng, 32).half(), 1e-5, weight, None)
