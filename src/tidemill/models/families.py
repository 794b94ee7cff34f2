"""Model families: how a configuration and its tensor names map onto the decoder.

A family is data. To add one, add an entry to `FAMILIES` and, if its configuration has fields
that others do not, read them in `_from_hf`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tidemill.models.decoder import DecoderConfig
from tidemill.models.rope import RopeConfig
from tidemill.wire.errors import ModelError


@dataclass(frozen=True, slots=True)
class Family:
    """`gguf` is the value of general.architecture. `gguf_permuted`: llama.cpp's converter
    reorders q and k rows for interleaved rope, which loading undoes."""

    architectures: tuple[str, ...]
    gguf: str
    gguf_permuted: bool = False
    qk_norm: bool = False
    qkv_bias: bool | None = None  # None: `attention_bias` of the configuration


FAMILIES: dict[str, Family] = {
    "llama": Family(("LlamaForCausalLM",), "llama", gguf_permuted=True),
    "mistral": Family(("MistralForCausalLM",), "llama", gguf_permuted=True),
    "qwen2": Family(("Qwen2ForCausalLM",), "qwen2", qkv_bias=True),
    "qwen3": Family(("Qwen3ForCausalLM",), "qwen3", qk_norm=True),
}

# The decoder's parts: (Hugging Face name, GGUF name). Layer parts take the layer's number.
EMBEDDING = ("model.embed_tokens.weight", "token_embd.weight")
FINAL_NORM = ("model.norm.weight", "output_norm.weight")
HEAD = ("lm_head.weight", "output.weight")
LAYER = {
    "attn_norm": ("model.layers.{}.input_layernorm.weight", "blk.{}.attn_norm.weight"),
    "q": ("model.layers.{}.self_attn.q_proj.weight", "blk.{}.attn_q.weight"),
    "k": ("model.layers.{}.self_attn.k_proj.weight", "blk.{}.attn_k.weight"),
    "v": ("model.layers.{}.self_attn.v_proj.weight", "blk.{}.attn_v.weight"),
    "o": ("model.layers.{}.self_attn.o_proj.weight", "blk.{}.attn_output.weight"),
    "q_bias": ("model.layers.{}.self_attn.q_proj.bias", "blk.{}.attn_q.bias"),
    "k_bias": ("model.layers.{}.self_attn.k_proj.bias", "blk.{}.attn_k.bias"),
    "v_bias": ("model.layers.{}.self_attn.v_proj.bias", "blk.{}.attn_v.bias"),
    "o_bias": ("model.layers.{}.self_attn.o_proj.bias", "blk.{}.attn_output.bias"),
    "q_norm": ("model.layers.{}.self_attn.q_norm.weight", "blk.{}.attn_q_norm.weight"),
    "k_norm": ("model.layers.{}.self_attn.k_norm.weight", "blk.{}.attn_k_norm.weight"),
    "mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", "blk.{}.ffn_norm.weight"),
    "gate": ("model.layers.{}.mlp.gate_proj.weight", "blk.{}.ffn_gate.weight"),
    "up": ("model.layers.{}.mlp.up_proj.weight", "blk.{}.ffn_up.weight"),
    "down": ("model.layers.{}.mlp.down_proj.weight", "blk.{}.ffn_down.weight"),
}
# Tensors that some files carry and the decoder computes itself.
IGNORED = ("rotary_emb.inv_freq", "rope_freqs.weight")

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def from_hf(config: dict[str, Any], where: str) -> DecoderConfig:
    """A Hugging Face config.json. Raises ModelError naming the field that is missing or odd."""
    names = [str(name) for name in config.get("architectures") or []]
    found = [key for key, family in FAMILIES.items() if set(names) & set(family.architectures)]
    if not found and not names and config.get("model_type") in FAMILIES:
        found = [config["model_type"]]
    if not found:
        known = ", ".join(name for family in FAMILIES.values() for name in family.architectures)
        wanted = ", ".join(names) or config.get("model_type", "none named")
        raise ModelError(f"{where}: unknown architecture {wanted}; known are {known}")
    try:
        return _checked(_from_hf(found[0], config))
    except KeyError as error:
        raise ModelError(f"{where}: config.json lacks {error}") from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: config.json has a wrong value: {error}") from None


def _checked(config: DecoderConfig) -> DecoderConfig:
    """Raises ValueError for shapes that no decoder has."""
    for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "vocab"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} is {getattr(config, name)}")
    if config.max_position < 1:
        raise ValueError(f"the context length is {config.max_position}")
    if config.heads % config.kv_heads:
        raise ValueError(f"{config.heads} heads do not divide among {config.kv_heads} kv heads")
    if config.head_dim % 2:
        raise ValueError(f"head_dim {config.head_dim} is odd")
    return config


def _count(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """A positive whole number. Raises ValueError that names the field."""
    value = config[key] if default is None else (config.get(key) or default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, got {value!r}")
    return value


def _from_hf(name: str, config: dict[str, Any]) -> DecoderConfig:
    family = FAMILIES[name]
    heads, hidden = _count(config, "num_attention_heads"), _count(config, "hidden_size")
    if not config.get("head_dim") and hidden % heads:
        raise ValueError(f"hidden_size {hidden} does not divide among {heads} heads")
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ValueError(f"hidden_act {activation!r} is not one of {', '.join(_ACTIVATIONS)}")
    if config.get("mlp_bias"):
        raise ValueError("mlp_bias is not supported")
    layers = _count(config, "num_hidden_layers")
    biased = family.qkv_bias
    return DecoderConfig(
        family=name,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_count(config, "num_key_value_heads", heads),
        head_dim=_count(config, "head_dim", hidden // heads),
        intermediate=_count(config, "intermediate_size"),
        vocab=_count(config, "vocab_size"),
        norm_eps=float(config["rms_norm_eps"]),
        max_position=_count(config, "max_position_embeddings"),
        rope=_rope_from_hf(config),
        activation=_ACTIVATIONS[activation],
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        window=_window_from_hf(name, config, layers),
        qkv_bias=bool(config.get("attention_bias", False)) if biased is None else biased,
        o_bias=bool(config.get("attention_bias", False)) if biased is None else False,
        qk_norm=family.qk_norm,
    )


def _window_from_hf(name: str, config: dict[str, Any], layers: int) -> int | None:
    """The sliding window. All of Mistral's layers have it where it is set, Qwen's from
    `max_window_layers` on where it is switched on, Llama's never."""
    window = config.get("sliding_window")
    if name == "llama" or not window:
        return None
    if name != "mistral":
        if not config.get("use_sliding_window", False):
            return None
        first = int(config.get("max_window_layers", 28))
        kinds = config.get("layer_types") or [
            "full_attention" if layer < first else "sliding_attention" for layer in range(layers)
        ]
        if len(set(kinds)) > 1:
            raise ValueError("a sliding window in some layers only is not supported")
        if kinds[0] == "full_attention":
            return None
    return int(window)


def _rope_from_hf(config: dict[str, Any]) -> RopeConfig:
    """`rope_scaling` beside `rope_theta`, or `rope_parameters` holding both."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise ValueError(f"rope_scaling must be an object, got {given!r}")
    params = dict(given)
    theta = params.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    kind = params.pop("rope_type", None) or params.pop("type", None) or "default"
    params.pop("type", None)
    part = params.pop("partial_rotary_factor", None) or config.get("partial_rotary_factor") or 1
    if part != 1:
        raise ValueError(f"partial_rotary_factor {part} is not supported")
    return RopeConfig(float(theta), str(kind), params)


def from_gguf(metadata: dict[str, Any], tensors: set[str], vocab: int, where: str) -> DecoderConfig:
    """A GGUF file's metadata. `vocab` is the number of rows of its embedding."""
    arch = str(metadata.get("general.architecture"))
    found = [key for key, family in FAMILIES.items() if family.gguf == arch]
    if not found:
        known = ", ".join(dict.fromkeys(family.gguf for family in FAMILIES.values()))
        raise ModelError(f"{where}: unknown architecture {arch!r}; known are {known}")

    try:
        return _checked(_from_gguf(found[0], arch, metadata, tensors, vocab))
    except KeyError as error:
        raise ModelError(f"{where}: the GGUF metadata lacks {error}") from None
    except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: the GGUF metadata has a wrong value: {error}") from None


def _from_gguf(
    name: str, arch: str, metadata: dict[str, Any], tensors: set[str], vocab: int
) -> DecoderConfig:
    def number(key: str, default: int | None = None) -> int:
        value = metadata.get(f"{arch}.{key}", default)
        return int(metadata[f"{arch}.{key}"] if value is None else value)

    heads, hidden = number("attention.head_count"), number("embedding_length")
    if heads < 1:
        raise ValueError(f"{arch}.attention.head_count is {heads}")
    head_dim = number("attention.key_length", hidden // heads)
    if number("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{arch}.rope.dimension_count differs from the head's {head_dim}")
    return DecoderConfig(
        family=name,
        hidden=hidden,
        layers=number("block_count"),
        heads=heads,
        kv_heads=number("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=number("feed_forward_length"),
        vocab=vocab,
        norm_eps=float(metadata[f"{arch}.attention.layer_norm_rms_epsilon"]),
        max_position=number("context_length"),
        rope=_rope_from_gguf(metadata, arch),
        tie_embeddings=HEAD[1] not in tensors,
        window=number("attention.sliding_window", 0) or None,
        qkv_bias=LAYER["q_bias"][1].format(0) in tensors,
        o_bias=LAYER["o_bias"][1].format(0) in tensors,
        qk_norm=FAMILIES[name].qk_norm,
    )


def _rope_from_gguf(metadata: dict[str, Any], arch: str) -> RopeConfig:
    theta = float(metadata.get(f"{arch}.rope.freq_base", 10000.0))
    kind = str(metadata.get(f"{arch}.rope.scaling.type", "none"))
    if kind == "none":
        return RopeConfig(theta)
    params: dict[str, Any] = {"factor": float(metadata[f"{arch}.rope.scaling.factor"])}
    original = metadata.get(f"{arch}.rope.scaling.original_context_length")
    if original:
        params["original_max_position_embeddings"] = int(original)
    for key, name in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if f"{arch}.rope.scaling.{key}" in metadata:
            params[name] = float(metadata[f"{arch}.rope.scaling.{key}"])
    return RopeConfig(theta, kind, params)
