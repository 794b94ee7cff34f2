"""From a path to a decoder with packed weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from tidemill.models import families, rope
from tidemill.models.decoder import Decoder, DecoderConfig, DecoderWeights, LayerWeights
from tidemill.models.sources import Source, open_source
from tidemill.ops.backend import Backend, RawWeight, Weight
from tidemill.ops.quant import dequantize
from tidemill.wire.errors import ModelError

Progress = Callable[[float], None]


def read_config(path: str | Path, load_format: str = "auto") -> DecoderConfig:
    """The model's configuration, without reading weights. Raises ModelError."""
    return open_source(Path(path), load_format).config


def load_model(
    path: str | Path,
    load_format: str,
    backend: Backend,
    max_len: int,
    progress: Progress | None = None,
    seed: int = 0,
) -> Decoder:
    """Read and pack all weights. `max_len` is the longest sequence, in tokens, that will run.

    Weights stream: each tensor is packed and let go before the next is read. `progress` gets the
    fraction done. Raises ModelError for files that are broken or do not fit the configuration.
    """
    source = open_source(Path(path), load_format, seed)
    config = source.config
    reader = _Reader(source, backend)
    embedding = reader.pack([(families.EMBEDDING, config.vocab)], config.hidden, keep_rows=True)
    layers = []
    for index in range(config.layers):
        layers.append(_layer(reader, config, index))
        if progress is not None:
            progress((index + 1) / (config.layers + 1))
    head = embedding
    if not config.tie_embeddings:
        head = reader.pack([(families.HEAD, config.vocab)], config.hidden)
    final_norm = reader.vector([(families.FINAL_NORM, config.hidden)])
    if unused := source.unused():
        raise ModelError(
            f"{path}: {len(unused)} tensors have no place in a {config.family} model, among them "
            f"{', '.join(unused[:3])}"
        )
    if progress is not None:
        progress(1.0)
    table = rope.table(config.rope, config.head_dim, max_len, config.max_position)
    weights = DecoderWeights(embedding, layers, final_norm, head)
    return Decoder(config, weights, backend, table.to(backend.device))


Part = tuple[tuple[str, str], int]  # a tensor's names, and its rows


class _Reader:
    def __init__(self, source: Source, backend: Backend) -> None:
        self._source = source
        self._backend = backend

    def pack(self, parts: list[Part], columns: int, *, keep_rows: bool = False) -> Weight:
        raws = [self._source.get(name, (rows, columns)) for name, rows in parts]
        return self._backend.pack(raws, keep_rows=keep_rows)

    def vector(self, parts: list[Part]) -> Tensor:
        raws = [self._source.get(name, (rows,)) for name, rows in parts]
        if len(raws) == 1:
            return self._backend.vector(raws[0])
        joined = np.concatenate([dequantize(raw) for raw in raws])
        name = "+".join(raw.name for raw in raws)
        return self._backend.vector(RawWeight(name, "F32", joined.shape, joined.view(np.uint8)))


def _layer(reader: _Reader, config: DecoderConfig, index: int) -> LayerWeights:
    def part(role: str, rows: int) -> Part:
        hf, gguf = families.LAYER[role]
        return (hf.format(index), gguf.format(index)), rows

    hidden, inner = config.hidden, config.intermediate
    q, kv, dim = config.heads * config.head_dim, config.kv_heads * config.head_dim, config.head_dim
    qkv_bias = [part("q_bias", q), part("k_bias", kv), part("v_bias", kv)]
    return LayerWeights(
        attn_norm=reader.vector([part("attn_norm", hidden)]),
        qkv=reader.pack([part("q", q), part("k", kv), part("v", kv)], hidden),
        qkv_bias=reader.vector(qkv_bias) if config.qkv_bias else None,
        q_norm=reader.vector([part("q_norm", dim)]) if config.qk_norm else None,
        k_norm=reader.vector([part("k_norm", dim)]) if config.qk_norm else None,
        o=reader.pack([part("o", hidden)], q),
        o_bias=reader.vector([part("o_bias", hidden)]) if config.o_bias else None,
        mlp_norm=reader.vector([part("mlp_norm", hidden)]),
        gate_up=reader.pack([part("gate", inner), part("up", inner)], hidden),
        down=reader.pack([part("down", hidden)], inner),
    )
