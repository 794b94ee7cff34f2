"""The operator interface and the plain data that operators share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(slots=True)
class RawWeight:
    """A weight as the file holds it.

    `fmt` is a GGUF type name (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_K, …; safetensors' float
    types use the same names). `shape` is (out_features, in_features) or (n,). `data` is the raw
    bytes, usually a view of the mapped file: blocks lie along in_features, row by row.
    """

    name: str
    fmt: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


class Weight(Protocol):
    """A packed weight: opaque to all but the backend that made it, which is why operators take
    `Any`: each backend knows its own kind."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def nbytes(self) -> int: ...


@dataclass(slots=True)
class Batch:
    """One forward pass: T tokens in R rows. Rows with one token (decode) come first.

    All tensors live on the backend's device. The runner owns them and may reuse their storage
    for the next step.
    """

    ids: Tensor  # int32[T]
    positions: Tensor  # int32[T], position in the sequence
    kv_slots: Tensor  # int32[T], page * page_size + offset: where the token's K and V go
    row_starts: Tensor  # int32[R + 1], row r owns tokens row_starts[r] … row_starts[r+1]
    contexts: Tensor  # int32[R], tokens in the KV cache for the row, this step's included
    page_table: Tensor  # int32[R, P], page numbers
    logit_tokens: Tensor  # int32[S], tokens whose logits are wanted
    num_tokens: int
    num_rows: int
    max_query: int  # longest row
    max_context: int


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The shape of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None  # sliding window: a token sees itself and window - 1 before it
    softcap: float | None = None


class Backend(Protocol):
    """Every operator. Activations are [T, features] in the backend's compute dtype.

    Operators may work in place and may return views of persistent buffers: a result is valid
    until the same operator runs again for the same layer position.
    """

    device: torch.device
    dtype: torch.dtype

    def pack(self, parts: list[RawWeight], *, keep_rows: bool = False) -> Weight:
        """Store linear weights, concatenated over out_features, in the backend's best format.

        `keep_rows`: the weight also serves `embed`.
        """

    def vector(self, raw: RawWeight) -> Tensor:
        """A norm weight or bias, float32 or compute dtype as the backend likes."""

    def allocate_kv(self, spec: AttentionSpec, layers: int, pages: int, page_size: int) -> Any:
        """The KV pool; `kv[layer]` is what the other operators take."""

    def kv_bytes_per_page(self, spec: AttentionSpec, layers: int, page_size: int) -> int: ...

    def copy_pages(self, kv: Any, copies: Tensor) -> None:
        """copies: int32[N, 3] (source page, destination page, tokens), all layers."""

    def graph(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        """The same function, as fast as this backend can launch it (recorded once and replayed:
        a CUDA graph on GPUs, a native operator program on CPUs). Default: `forward` itself.

        Recording happens on first use; what varies from step to step must come from the Batch.
        """

    def embed(self, ids: Tensor, weight: Any, scale: float) -> Tensor:
        """-> residual stream [T, H]."""

    def norm_linear(
        self, x: Tensor, norm: Tensor, eps: float, weight: Any, bias: Tensor | None
    ) -> Tensor:
        """RMSNorm(x) @ weight.T + bias -> [T, out]."""

    def rope_write(
        self,
        qkv: Tensor,
        batch: Batch,
        rope: Tensor,
        spec: AttentionSpec,
        kv: Any,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """Per-head norms (if given) and rotary embedding on q and k; write k and v to the pool.

        `rope`: float32[max_len, head_dim], cosines then sines, already scaled (yarn's attention
        factor included); rotation pairs are (i, i + head_dim / 2). -> q [T, heads * head_dim].
        """

    def attention(self, q: Tensor, batch: Batch, spec: AttentionSpec, kv: Any) -> Tensor:
        """Causal attention over the paged cache -> [T, heads * head_dim]."""

    def linear_residual(
        self, x: Tensor, weight: Any, bias: Tensor | None, residual: Tensor
    ) -> Tensor:
        """residual + x @ weight.T + bias -> the residual stream (may be updated in place)."""

    def gated_mlp_in(
        self, x: Tensor, norm: Tensor, eps: float, weight: Any, activation: str
    ) -> Tensor:
        """act(RMSNorm(x) @ gate.T) * (RMSNorm(x) @ up.T) -> [T, I]; weight is [2I, H], gate
        first. `activation`: "silu" or "gelu_tanh"."""

    def logits(self, x: Tensor, tokens: Tensor, norm: Tensor, eps: float, weight: Any) -> Tensor:
        """RMSNorm(x[tokens]) @ weight.T -> float32 [S, V]."""
