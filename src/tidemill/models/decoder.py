"""The decoder: one forward pass for every family.

A family is a mapping from its configuration and tensor names onto `DecoderConfig` and
`DecoderWeights` (see `families.py`), not a copy of this file.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

from tidemill.models.rope import RopeConfig
from tidemill.ops.backend import AttentionSpec, Backend, Batch, Weight


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    activation: str = "silu"
    tie_embeddings: bool = False
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    embedding_scale: float = 1.0

    def attention(self, layer: int) -> AttentionSpec:
        return AttentionSpec(
            self.heads, self.kv_heads, self.head_dim, self.head_dim**-0.5, self.window
        )


@dataclass(slots=True)
class LayerWeights:
    attn_norm: Tensor
    qkv: Weight
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Weight
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Weight
    down: Weight


@dataclass(slots=True)
class DecoderWeights:
    embedding: Weight
    layers: list[LayerWeights]
    final_norm: Tensor
    head: Weight  # the embedding itself when tied

    @property
    def nbytes(self) -> int:
        """Bytes of all weights as packed; a shared one counts once."""
        parts: list[Weight | Tensor | None] = [self.embedding, self.head, self.final_norm]
        for layer in self.layers:
            parts += (getattr(layer, f.name) for f in fields(layer))
        return sum({id(part): part.nbytes for part in parts if part is not None}.values())


class Decoder:
    """Weights and configuration, ready to run on one backend."""

    def __init__(
        self, config: DecoderConfig, weights: DecoderWeights, backend: Backend, rope: Tensor
    ) -> None:
        self.config = config
        self.weights = weights
        self.ops = backend
        self.rope = rope  # float32[max_len, head_dim]

    def forward(self, batch: Batch, kv: Any) -> Tensor:
        """Logits float32[S, V] of `batch.logit_tokens`. Writes the KV of every token."""
        return self.logits(self.hidden(batch, kv), batch.logit_tokens)

    def hidden(self, batch: Batch, kv: Any) -> Tensor:
        """The residual stream after the last layer, [T, H]. Writes the KV of every token."""
        config, weights, ops = self.config, self.weights, self.ops
        eps = config.norm_eps
        x = ops.embed(batch.ids, weights.embedding, config.embedding_scale)
        for index, layer in enumerate(weights.layers):
            spec = config.attention(index)
            qkv = ops.norm_linear(x, layer.attn_norm, eps, layer.qkv, layer.qkv_bias)
            q = ops.rope_write(
                qkv, batch, self.rope, spec, kv[index], layer.q_norm, layer.k_norm, eps
            )
            attended = ops.attention(q, batch, spec, kv[index])
            x = ops.linear_residual(attended, layer.o, layer.o_bias, x)
            hidden = ops.gated_mlp_in(x, layer.mlp_norm, eps, layer.gate_up, config.activation)
            x = ops.linear_residual(hidden, layer.down, None, x)
        return x

    def logits(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Logits float32[S, V] of the residual stream's rows `tokens`, int32[S]."""
        weights = self.weights
        return self.ops.logits(x, tokens, weights.final_norm, self.config.norm_eps, weights.head)
