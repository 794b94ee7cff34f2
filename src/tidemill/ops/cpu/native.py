"""The native CPU backend: packed weights and fused operators of the C++ library.

`graph` runs the decoder once to *record* it: every operator call appends to a program and hands
back a symbolic result; afterwards a step is one call that runs the program over the batch. The
same operators called with tensors (eagerly: tests, prompt logprobs) are programs of one operator.

Activations: the residual stream is float32, everything between operators bfloat16. Linear layers
on quantized weights take few rows as int8 with a scale per 32 columns (llama.cpp's Q8), many rows
as bfloat16.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.ops.backend import AttentionSpec, Batch, RawWeight
from tidemill.ops.cpu import library
from tidemill.ops.cpu.library import AttentionShape, KvPages, Step, Unavailable
from tidemill.ops.cpu.program import Graph, NativeWeight, Program, Rows, step_of
from tidemill.ops.quant import dequantize, to_tensor

KERNELS_VARIABLE = "TIDEMILL_CPU_ISA"  # forces a kernel set, see csrc/gemm_dispatch.h
SAMPLE_BYTES = 8 << 20  # weights to measure on: more than a core's own caches hold


@dataclass(slots=True)
class NativeKv:
    """bfloat16[pages, layers, 2 (k, v), kv_heads, page_size, head_dim].

    A head's page is contiguous, which is what attention reads, and a page of all layers is, so
    that memory is touched as pages come into use.
    """

    data: Tensor

    def __getitem__(self, layer: int) -> NativeKvLayer:
        return NativeKvLayer(self.data, layer)


@dataclass(frozen=True, slots=True)
class NativeKvLayer:
    data: Tensor
    layer: int


def unsupported(spec: AttentionSpec, intermediate: int) -> str | None:
    """Which of a model's sizes the kernels do not take, if any."""
    if spec.head_dim % 16 or spec.head_dim > 256:
        return f"head_dim {spec.head_dim} is not a multiple of 16 up to 256"
    if intermediate % 16:
        return f"intermediate size {intermediate} is not a multiple of 16"
    return None


class NativeBackend:
    """See `backend.Backend` for the operators' contracts.

    Raises Unavailable if the library was not built or this CPU lacks AVX2.
    """

    def __init__(self, threads: int) -> None:
        self.device = torch.device("cpu")
        self.dtype = torch.bfloat16
        self._library = library.load()
        kernels = os.environ.get(KERNELS_VARIABLE)
        engine = self._library.tidemill_engine(threads, kernels.encode() if kernels else None)
        if not engine:
            raise Unavailable(self._error())
        self._engine: int = engine
        self._recording: Program | None = None
        self.few_rows: dict[int, int] = {}  # by packed format, as measured
        weakref.finalize(self, self._library.tidemill_engine_free, engine)

    @property
    def kernels(self) -> str:
        """The kernel set in use, e.g. "amx"."""
        return bytes(self._library.tidemill_kernels(self._engine)).decode()

    def _error(self) -> str:
        return bytes(self._library.tidemill_error()).decode()

    # --- weights and cache ----------------------------------------------------------------------

    def pack(self, parts: list[RawWeight], *, keep_rows: bool = False) -> NativeWeight:
        parts = [self._packable(part) for part in parts]
        features = parts[0].shape[1]
        rows = sum(part.shape[0] for part in parts)
        # Each format holds what the ones before it do.
        packed = max(
            self._library.tidemill_packed_format(library.FILE_FORMATS[part.fmt]) for part in parts
        )
        handle = self._library.tidemill_weight(self._engine, packed, rows, features)
        if not handle:
            raise MemoryError(self._error())
        bits = {library.U4: 5, library.U8: 9, library.BF16: 16}[packed]
        padded = -(-rows // 16) * 16 * (-(-features // 32) * 32)
        free = self._library.tidemill_weight_free
        weight = NativeWeight(handle, packed, (rows, features), padded * bits // 8, free)
        first = 0
        for part in parts:
            data = np.ascontiguousarray(part.data)
            self._library.tidemill_pack(
                self._engine,
                handle,
                library.FILE_FORMATS[part.fmt],
                data.ctypes.data,
                part.shape[0],
                first,
            )
            first += part.shape[0]
        return weight

    @staticmethod
    def _packable(part: RawWeight) -> RawWeight:
        """The weight itself, or as float32 if the library does not know its format."""
        if part.fmt in library.FILE_FORMATS:
            return part
        values = dequantize(part)
        return RawWeight(part.name, "F32", part.shape, values.reshape(-1).view(np.uint8))

    def vector(self, raw: RawWeight) -> Tensor:
        return to_tensor([raw], torch.float32)

    def allocate_kv(self, spec: AttentionSpec, layers: int, pages: int, page_size: int) -> NativeKv:
        if reason := unsupported(spec, 0):
            raise ValueError(f"native CPU kernels: {reason}")
        shape = (pages, layers, 2, spec.kv_heads, page_size, spec.head_dim)
        count = int(np.prod(shape, dtype=np.int64))
        # Untouched pages take no memory.
        memory = mmap.mmap(-1, 2 * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        values = torch.frombuffer(memory, dtype=torch.bfloat16, count=count)
        return NativeKv(values.view(shape))

    def kv_bytes_per_page(self, spec: AttentionSpec, layers: int, page_size: int) -> int:
        return layers * 2 * spec.kv_heads * page_size * spec.head_dim * 2

    def copy_pages(self, kv: NativeKv, copies: Tensor) -> None:
        for source, target, count in copies.tolist():
            kv.data[target, :, :, :, :count] = kv.data[source, :, :, :, :count]

    # --- recording ------------------------------------------------------------------------------

    def graph(self, forward: Callable[[Batch], Tensor]) -> Graph:
        return Graph(self._record, forward)

    def _record(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Program:
        program = self._recording = Program(self._library, self._engine, batch)
        try:
            forward(batch)
        finally:
            self._recording = None
        self._measure_few_rows(program.weights)
        return program

    def _measure_few_rows(self, weights: list[NativeWeight]) -> None:
        """Find out which kernels to use for how many rows, once for each packed format."""
        for packed in {weight.packed for weight in weights} - self.few_rows.keys():
            sample, size = [], 0
            for weight in weights:
                if weight.packed == packed and size < SAMPLE_BYTES:
                    sample.append(weight.handle)
                    size += weight.nbytes
            handles = (ctypes.c_void_p * len(sample))(*sample)
            rows = self._library.tidemill_measure_few_rows(self._engine, handles, len(sample))
            if rows < 0:
                raise MemoryError(self._error())
            self.few_rows[packed] = rows

    def _program(self) -> Program:
        """The one that is being recorded, or a new one for a single operator."""
        return self._recording or Program(self._library, self._engine, None)

    def _result(self, program: Program, out: Rows, step: Step) -> Tensor:
        """Symbolic while recording, else computed."""
        if program is self._recording:
            return cast(Tensor, out)
        program.run(step)
        return program.result(out, step.tokens)

    # --- operators ------------------------------------------------------------------------------

    def embed(self, ids: Tensor, weight: NativeWeight, scale: float) -> Tensor:
        program = self._program()
        program.check_input(ids, "ids")
        out = program.buffer("residual", weight.shape[1], torch.float32)
        program.embed(weight, scale, out)
        return self._result(program, out, Step(ids=ids.data_ptr(), tokens=len(ids)))

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: NativeWeight, bias: Tensor | None
    ) -> Tensor:
        program = self._program()
        out = program.buffer("norm_linear", weight.shape[0], torch.bfloat16)
        program.linear(
            "norm_linear", x, weight, out, library.OUTPUT_BF16, norm=norm, eps=eps, bias=bias
        )
        return self._result(program, out, _step_over(x))

    def rope_write(
        self,
        qkv: Tensor,
        batch: Batch,
        rope: Tensor,
        spec: AttentionSpec,
        kv: NativeKvLayer,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        program = self._program()
        program.keep(kv)
        program.rope_write(qkv, _shape(spec, kv), rope, q_norm, k_norm, eps)
        width = spec.heads * spec.head_dim
        if isinstance(qkv, Rows):
            return cast(Tensor, replace(qkv, width=width))
        program.run(step_of(batch))
        return qkv[:, :width]

    def attention(self, q: Tensor, batch: Batch, spec: AttentionSpec, kv: NativeKvLayer) -> Tensor:
        program = self._program()
        program.keep(kv)
        out = program.buffer("attention", spec.heads * spec.head_dim, torch.bfloat16)
        program.attention(q, _shape(spec, kv), out)
        return self._result(program, out, step_of(batch))

    def linear_residual(
        self, x: Tensor, weight: NativeWeight, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        program = self._program()
        if isinstance(x, Tensor) and x.shape[1] % 32:
            x = F.pad(x, (0, 32 - x.shape[1] % 32))
        program.linear("linear_residual", x, weight, residual, library.OUTPUT_ADD_F32, bias=bias)
        if program is not self._recording:
            program.run(_step_over(x))
        return residual

    def gated_mlp_in(
        self, x: Tensor, norm: Tensor, eps: float, weight: NativeWeight, activation: str
    ) -> Tensor:
        inner = weight.shape[0] // 2
        if inner % 16:
            raise ValueError(f"native CPU kernels: {inner} outputs are not a multiple of 16")
        program = self._program()
        out = program.buffer("gated_mlp_in", inner, torch.bfloat16)
        number = library.ACTIVATIONS[activation]
        program.linear(
            "gated_mlp_in",
            x,
            weight,
            out,
            library.OUTPUT_GATED,
            norm=norm,
            eps=eps,
            activation=number,
        )
        return self._result(program, out, _step_over(x))

    def logits(
        self, x: Tensor, tokens: Tensor, norm: Tensor, eps: float, weight: NativeWeight
    ) -> Tensor:
        program = self._program()
        program.check_input(tokens, "logit_tokens")
        # What the step gives as the place of its logits.
        out = Rows(-1, weight.shape[0], weight.shape[0], torch.float32)
        program.linear(
            "logits", x, weight, out, library.OUTPUT_F32, norm=norm, eps=eps, logits=True
        )
        if program is self._recording:
            return cast(Tensor, out)
        made = torch.empty((len(tokens), weight.shape[0]))
        step = _step_over(x)
        step.logit_tokens, step.logit_count = tokens.data_ptr(), len(tokens)
        step.logits = made.data_ptr()
        program.run(step)
        return made


def _step_over(x: Tensor) -> Step:
    """A step for an operator that needs no more than its rows; symbolic ones are not run."""
    return Step(tokens=0 if isinstance(x, Rows) else len(x))


def _shape(spec: AttentionSpec, kv: NativeKvLayer) -> AttentionShape:
    pool = kv.data
    page, _, side, head, token, _ = pool.stride()
    first = pool.data_ptr() + kv.layer * pool.stride(1) * pool.itemsize
    pages = KvPages(
        k=first,
        v=first + side * pool.itemsize,
        page_stride=page,
        token_stride=token,
        head_stride=head,
        page_size=pool.shape[4],
    )
    return AttentionShape(
        kv=pages,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        scale=spec.scale,
        window=spec.window or 0,
        softcap=spec.softcap or 0.0,
    )
