"""Programs of the C++ library: operators recorded once, run in one call a step."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import byref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.ops.backend import Batch
from tidemill.ops.cpu.library import AttentionShape, LinearOptions, Operand, Step


class NativeWeight:
    """Panels of the C++ library (csrc/packed.h)."""

    def __init__(
        self, handle: int, packed: int, shape: tuple[int, int], nbytes: int, free: Any
    ) -> None:
        """`packed`: library.U4, U8 or BF16."""
        self.handle = handle
        self.packed = packed
        self.shape = shape
        self.nbytes = nbytes
        weakref.finalize(self, free, handle)


@dataclass(frozen=True, slots=True)
class Rows:
    """A result while recording: rows of one of the program's buffers, one for each token."""

    buffer: int
    width: int
    stride: int  # elements
    dtype: torch.dtype


class Program:
    """Operators appended one by one. Their inputs are tensors or results of earlier ones.

    It holds on to every tensor and weight whose address it has given away.
    """

    def __init__(self, lib: ctypes.CDLL, engine: int, batch: Batch | None) -> None:
        """`batch`: the batch of a recording, whose tensors stand for every step's."""
        self._library = lib
        self._batch = batch
        self._buffers: dict[str, Rows] = {}
        self._kept: list[object] = []
        self.weights: list[NativeWeight] = []  # of linear layers
        self.vocab = 0
        self.names: list[str] = []  # of the operations
        self._handle: int = lib.tidemill_program(engine)
        if not self._handle:
            raise MemoryError(self._error())
        weakref.finalize(self, lib.tidemill_program_free, self._handle)

    def _error(self) -> str:
        return bytes(self._library.tidemill_error()).decode()

    def _check(self, status: int) -> None:
        if status < 0:
            raise MemoryError(f"native CPU library: {self._error()}")

    # --- recording ------------------------------------------------------------------------------

    def buffer(self, role: str, width: int, dtype: torch.dtype) -> Rows:
        """Rows for a result. The same operator's result in the next layer takes the same."""
        role = f"{role}[{width}]"
        if role not in self._buffers:
            stride = -(-width // 32) * 32  # what the kernels read beyond `width` stays zero
            index = self._library.tidemill_buffer(self._handle, stride * dtype.itemsize)
            self._check(index)
            self._buffers[role] = Rows(index, width, stride, dtype)
        return self._buffers[role]

    def check_input(self, tensor: Tensor, name: str) -> None:
        """While recording, `tensor` must be the batch's: what else varies from step to step
        would be frozen."""
        if self._batch is not None and tensor is not getattr(self._batch, name):
            raise ValueError(f"a recorded operator must take its {name} from the batch")

    def embed(self, weight: NativeWeight, scale: float, out: Rows) -> None:
        self._append(
            "embed",
            self._library.tidemill_embed(
                self._handle, self._keep(weight).handle, scale, byref(self._operand(out))
            ),
        )

    def linear(
        self,
        name: str,
        x: Tensor | Rows,
        weight: NativeWeight,
        out: Tensor | Rows,
        output: int,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        bias: Tensor | None = None,
        activation: int = 0,
        logits: bool = False,
    ) -> None:
        options = LinearOptions(
            x=self._operand(x),
            norm=self._vector(norm),
            eps=eps,
            weight=self._keep(weight).handle,
            bias=self._vector(bias),
            output=output,
            activation=activation,
            out=self._operand(out),
            logits=logits,
        )
        self.weights.append(weight)
        if logits:
            self.vocab = weight.shape[0]
        self._append(name, self._library.tidemill_linear(self._handle, byref(options)))

    def rope_write(
        self,
        qkv: Tensor | Rows,
        shape: AttentionShape,
        rope: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> None:
        self._append(
            "rope_write",
            self._library.tidemill_rope_write(
                self._handle,
                byref(self._operand(qkv)),
                byref(shape),
                self._vector(rope),
                self._vector(q_norm),
                self._vector(k_norm),
                eps,
            ),
        )

    def attention(self, q: Tensor | Rows, shape: AttentionShape, out: Rows) -> None:
        self._append(
            "attention",
            self._library.tidemill_attention(
                self._handle, byref(self._operand(q)), byref(shape), byref(self._operand(out))
            ),
        )

    def keep(self, thing: object) -> None:
        self._kept.append(thing)

    def _append(self, name: str, status: int) -> None:
        self._check(status)
        self.names.append(name)

    def _keep(self, weight: NativeWeight) -> NativeWeight:
        self._kept.append(weight)
        return weight

    def _vector(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        if tensor.dtype != torch.float32 or not tensor.is_contiguous():
            raise TypeError(f"a contiguous float32 tensor is expected, not {tensor.dtype}")
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _operand(self, rows: Tensor | Rows) -> Operand:
        if isinstance(rows, Rows):
            return Operand(rows.buffer, None, rows.stride)
        if rows.stride(1) != 1:
            raise TypeError("the elements of a row must be contiguous")
        self._kept.append(rows)
        return Operand(-1, rows.data_ptr(), rows.stride(0))

    # --- running --------------------------------------------------------------------------------

    def run(self, step: Step) -> None:
        self._check(self._library.tidemill_run(self._handle, byref(step)))

    def profile(self, step: Step, seconds: Any) -> None:
        """As `run`; `seconds`, a ctypes double for every operation, are added to."""
        self._check(self._library.tidemill_profile(self._handle, byref(step), seconds))

    def result(self, rows: Rows, tokens: int) -> Tensor:
        """A copy of the first `tokens` rows, [tokens, width]."""
        address = self._library.tidemill_buffer_data(self._handle, rows.buffer, tokens)
        raw = (ctypes.c_char * (tokens * rows.stride * rows.dtype.itemsize)).from_address(address)
        values = torch.frombuffer(raw, dtype=rows.dtype).view(tokens, rows.stride)
        return values[:, : rows.width].clone()


def step_of(batch: Batch) -> Step:
    """The library's view of a batch, without a place for logits."""
    table = batch.page_table
    return Step(
        ids=batch.ids.data_ptr(),
        positions=batch.positions.data_ptr(),
        kv_slots=batch.kv_slots.data_ptr(),
        row_starts=batch.row_starts.data_ptr(),
        contexts=batch.contexts.data_ptr(),
        page_table=table.data_ptr(),
        table_stride=table.stride(0),
        logit_tokens=batch.logit_tokens.data_ptr(),
        logits=None,
        tokens=batch.num_tokens,
        rows=batch.num_rows,
        logit_count=0,
    )


class Graph:
    """A forward pass that is recorded at its first call and replayed from then on.

    The logits that it returns are a view of one buffer: valid until the next call.
    """

    def __init__(
        self,
        record: Callable[[Callable[[Batch], Tensor], Batch], Program],
        forward: Callable[[Batch], Tensor],
    ) -> None:
        self._record = record
        self._forward = forward
        self._program: Program | None = None
        self._logits = torch.empty((0, 0))

    def __call__(self, batch: Batch) -> Tensor:
        program, step, logits = self._prepare(batch)
        program.run(step)
        return logits

    def profile(self, batch: Batch) -> dict[str, float]:
        """Run a step; seconds by operator."""
        program, step, _ = self._prepare(batch)
        seconds = (ctypes.c_double * len(program.names))()
        program.profile(step, seconds)
        totals = dict.fromkeys(program.names, 0.0)
        for name, spent in zip(program.names, seconds, strict=True):
            totals[name] += spent
        return totals

    def _prepare(self, batch: Batch) -> tuple[Program, Step, Tensor]:
        if self._program is None:
            self._program = self._record(self._forward, batch)
        count = len(batch.logit_tokens)
        if count > len(self._logits):
            self._logits = torch.empty((count, self._program.vocab))
        step = step_of(batch)
        step.logits, step.logit_count = self._logits.data_ptr(), count
        return self._program, step, self._logits[:count]
