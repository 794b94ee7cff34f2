"""What `tidemill info` prints: a model's shape, its memory by part, the context that fits here.

Reads headers only. The figures that need the model itself (activations, graphs) are measured at
start and stand in the server's log and metrics.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tidemill.config import EngineConfig
from tidemill.models.decoder import DecoderConfig
from tidemill.models.loader import read_config
from tidemill.runner import memory
from tidemill.runner.memory import CapacityError, mib


def parameters(config: DecoderConfig) -> dict[str, int]:
    """Number of parameters by part; norms and biases, which hardly count, are with their part."""
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = config.hidden * (q + 2 * kv) + q * config.hidden + config.hidden
    if config.qkv_bias:
        attention += q + 2 * kv
    if config.o_bias:
        attention += config.hidden
    if config.qk_norm:
        attention += 2 * config.head_dim
    mlp = 3 * config.hidden * config.intermediate + config.hidden
    made = {
        "embedding": config.vocab * config.hidden,
        "attention": config.layers * attention,
        "mlp": config.layers * mlp + config.hidden,
    }
    if not config.tie_embeddings:
        made["head"] = config.vocab * config.hidden
    return made


def describe(config: EngineConfig) -> list[tuple[str, str]]:
    """Lines of (what, value). Raises ModelError for a model that cannot be read."""
    path = Path(config.model)
    model = read_config(path, config.load_format)
    parts = parameters(model)
    value_bytes = 4 if config.dtype == "float32" else 2
    token_bytes = model.layers * 2 * model.kv_heads * model.head_dim * value_bytes
    lines = [
        ("model", config.model_name),
        ("family", model.family),
        ("parameters", f"{sum(parts.values()):,}"),
        *((f"  {name}", f"{count:,}") for name, count in parts.items()),
        ("layers", f"{model.layers}"),
        ("hidden, intermediate", f"{model.hidden:,}, {model.intermediate:,}"),
        ("heads (query, kv), size", f"{model.heads}, {model.kv_heads}, {model.head_dim}"),
        ("vocabulary", f"{model.vocab:,}{' (tied)' if model.tie_embeddings else ''}"),
        ("rope", f"{model.rope.kind}, theta {model.rope.theta:,.0f}"),
        ("trained context", f"{model.max_position:,} tokens"),
    ]
    if model.window is not None:
        lines.append(("sliding window", f"{model.window:,} tokens"))
    weights = sum(file.stat().st_size for file in _weight_files(path))
    if config.load_format == "dummy" or not weights:
        weights = sum(parts.values()) * value_bytes
    available = memory.available_memory(torch.device("cpu")) - weights
    lines += [
        ("weights", mib(weights)),
        ("KV cache per token", f"{token_bytes / 1024:,.1f} KiB"),
        ("KV cache for a full context", mib(token_bytes * model.max_position)),
        ("memory left beside weights", mib(max(available, 0))),
    ]
    try:
        fit = memory.fit(
            config, model.max_position, token_bytes * config.page_size, available, on_gpu=False
        )
    except CapacityError as error:
        return [*lines, ("fits here", f"no: {error}")]
    pool = fit.num_pages * config.page_size
    return [
        *lines,
        ("KV cache by default here", f"{mib(pool * token_bytes)}, {pool:,} tokens"),
        ("context that fits here", f"{fit.max_model_len:,} tokens"),
    ]


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return [file for pattern in ("*.safetensors", "*.gguf") for file in path.glob(pattern)]
