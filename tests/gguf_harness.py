"""Tiny GGUF files, written the way llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

Array = npt.NDArray[Any]

# K-quants have blocks of 256, so all in_features are multiples of it.
HIDDEN, INNER, HEADS, KV_HEADS, DIM, LAYERS, VOCAB = 256, 512, 4, 2, 64, 2, 96
QUANTIZED_HERE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
# gguf cannot quantize to these; where in a block its float16 scales stand.
SCALES_AT = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


class Stored:
    """A weight as the file holds it, and what that means in float32."""

    def __init__(self, fmt: str, shape: tuple[int, int], rng: np.random.Generator) -> None:
        self.kind = GGMLQuantizationType[fmt]
        values = rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[1])
        if fmt in SCALES_AT:
            self.data = self._random_blocks(fmt, shape, rng)
        else:
            self.data = gguf.quants.quantize(values, self.kind)
        self.values = gguf.quants.dequantize(self.data, self.kind).reshape(shape)

    def _random_blocks(
        self, fmt: str, shape: tuple[int, int], rng: np.random.Generator
    ) -> npt.NDArray[np.uint8]:
        block, size = gguf.GGML_QUANT_SIZES[self.kind]
        data = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
        for at in SCALES_AT[fmt]:
            scales = rng.uniform(1e-5, 1e-4, data.shape[:2]).astype(np.float16)
            data[..., at : at + 2] = scales[..., None].view(np.uint8)
        return data.reshape(shape[0], -1)


def to_halves(rows: Array, heads: int) -> Array:
    pairs = rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def weights(fmt: str, *, tied: bool = False, seed: int = 0) -> dict[str, Stored | Array]:
    """All tensors of a model under their GGUF names; matrices in `fmt`."""
    rng = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Stored:
        return Stored(fmt, (rows, columns), rng)

    def norm() -> Array:
        return (1 + 0.3 * rng.standard_normal(HIDDEN)).astype(np.float32)

    made: dict[str, Stored | Array] = {"token_embd.weight": matrix(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        made |= {
            f"blk.{layer}.attn_norm.weight": norm(),
            f"blk.{layer}.attn_q.weight": matrix(HEADS * DIM, HIDDEN),
            f"blk.{layer}.attn_k.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"blk.{layer}.attn_v.weight": matrix(KV_HEADS * DIM, HIDDEN),
            f"blk.{layer}.attn_output.weight": matrix(HIDDEN, HEADS * DIM),
            f"blk.{layer}.ffn_norm.weight": norm(),
            f"blk.{layer}.ffn_gate.weight": matrix(INNER, HIDDEN),
            f"blk.{layer}.ffn_up.weight": matrix(INNER, HIDDEN),
            f"blk.{layer}.ffn_down.weight": matrix(HIDDEN, INNER),
        }
    made["output_norm.weight"] = norm()
    if not tied:
        made["output.weight"] = matrix(VOCAB, HIDDEN)
    return made


def write(
    path: Path,
    tensors: dict[str, Stored | Array],
    arch: str = "llama",
    metadata: dict[str, Any] | None = None,
) -> Path:
    writer = GGUFWriter(path, arch)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(DIM)
    for key, value in (metadata or {}).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    for name, tensor in tensors.items():
        if isinstance(tensor, Stored):
            writer.add_tensor(name, tensor.data, raw_dtype=tensor.kind)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


_HF_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def hf_state(tensors: dict[str, Stored | Array], *, permuted: bool) -> dict[str, torch.Tensor]:
    """The same weights, dequantized, under transformers' names and in its row order."""
    state = {}
    for name, tensor in tensors.items():
        values = tensor.values if isinstance(tensor, Stored) else tensor
        if permuted and ".attn_q." in name:
            values = to_halves(values, HEADS)
        if permuted and ".attn_k." in name:
            values = to_halves(values, KV_HEADS)
        state[_hf_name(name)] = torch.from_numpy(values.astype(np.float32))
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    return state


def _hf_name(name: str) -> str:
    fixed = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
    if name in fixed:
        return fixed[name]
    _, layer, part = name.split(".", 2)
    for ours, theirs in _HF_NAMES.items():
        if part == ours or part.rsplit(".", 1)[0] == ours:
            suffix = "" if part == ours else "." + part.rsplit(".", 1)[1]
            return f"model.layers.{layer}.{theirs}{suffix}"
    raise KeyError(name)


def hf_config(**options: Any) -> dict[str, Any]:
    return {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        **options,
    }


def hf_llama(tensors: dict[str, Stored | Array], **options: Any) -> LlamaForCausalLM:
    model = LlamaForCausalLM(LlamaConfig(**hf_config(**options))).float().eval()
    model.load_state_dict(hf_state(tensors, permuted=True), strict=True)
    return model
