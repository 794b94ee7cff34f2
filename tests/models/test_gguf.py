"""GGUF models in every weight format, against transformers on the dequantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

import gguf_harness as files
from model_harness import Sequences, hf_logits, ids_of, load, relative
from tidemill.models.loader import read_config

TOLERANCE = 1e-4
IDS = ids_of(1, 23, files.VOCAB)


def run(path: Path, max_len: int = 64) -> torch.Tensor:
    (found,) = Sequences(load(path, max_len)).feed([(0, IDS)])
    return found


@pytest.mark.parametrize("fmt", [*files.QUANTIZED_HERE, *files.SCALES_AT])
def test_every_weight_format(tmp_path: Path, fmt: str) -> None:
    tensors = files.weights(fmt)
    found = run(files.write(tmp_path / "model.gguf", tensors))
    assert relative(found, hf_logits(files.hf_llama(tensors), IDS)) < TOLERANCE


def test_tied_embedding(tmp_path: Path) -> None:
    tensors = files.weights("Q4_1", tied=True)
    path = files.write(tmp_path / "model.gguf", tensors)
    assert read_config(path).tie_embeddings
    assert relative(run(path), hf_logits(files.hf_llama(tensors), IDS)) < TOLERANCE


def test_a_folder_with_one_gguf(tmp_path: Path) -> None:
    files.write(tmp_path / "model.gguf", files.weights("F32"))
    assert read_config(tmp_path) == read_config(tmp_path / "model.gguf")


def test_llama_biases_are_permuted_too(tmp_path: Path) -> None:
    tensors = files.weights("F32")
    rng = np.random.default_rng(5)
    sizes = {"q": files.HEADS * files.DIM, "k": files.KV_HEADS * files.DIM}
    sizes |= {"v": sizes["k"], "output": files.HIDDEN}
    for layer in range(files.LAYERS):
        for part, size in sizes.items():
            bias = rng.standard_normal(size).astype(np.float32)
            tensors[f"blk.{layer}.attn_{part}.bias"] = bias
    found = run(files.write(tmp_path / "model.gguf", tensors))
    model = files.hf_llama(tensors, attention_bias=True)
    assert relative(found, hf_logits(model, IDS)) < TOLERANCE


ROPE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "theta": ({"llama.rope.freq_base": 500000.0}, {"rope_type": "default", "rope_theta": 5e5}),
    "linear": (
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    ),
    "yarn": (
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
            "llama.rope.scaling.yarn_beta_fast": 16.0,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 16.0,
        },
    ),
}


@pytest.mark.parametrize("kind", ROPE)
def test_rope_metadata(tmp_path: Path, kind: str) -> None:
    metadata, parameters = ROPE[kind]
    tensors = files.weights("F32")
    found = run(files.write(tmp_path / "model.gguf", tensors, metadata=metadata))
    model = files.hf_llama(tensors, rope_parameters=parameters)
    assert relative(found, hf_logits(model, IDS)) < TOLERANCE


def test_llama3_scaling_as_a_tensor_of_factors(tmp_path: Path) -> None:
    """llama.cpp's converter stores what Llama 3.1 divides each frequency by."""
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    tensors = files.weights("F32")
    model = files.hf_llama(tensors, rope_parameters=parameters)
    plain = 5e5 ** (-np.arange(0, files.DIM, 2) / files.DIM)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    factors = (plain / scaled).astype(np.float32)
    path = files.write(
        tmp_path / "model.gguf",
        tensors | {"rope_freqs.weight": factors},
        metadata={"llama.rope.freq_base": 5e5},
    )
    assert len(set(np.round(factors, 3))) > 2  # some kept, some divided, some between
    assert relative(run(path), hf_logits(model, IDS)) < TOLERANCE


def test_qwen2(tmp_path: Path) -> None:
    tensors = files.weights("Q8_0")
    rng = np.random.default_rng(5)
    for layer in range(files.LAYERS):
        for part, heads in (("q", files.HEADS), ("k", files.KV_HEADS), ("v", files.KV_HEADS)):
            bias = rng.standard_normal(heads * files.DIM).astype(np.float32)
            tensors[f"blk.{layer}.attn_{part}.bias"] = bias
    found = run(files.write(tmp_path / "model.gguf", tensors, "qwen2"))
    model = Qwen2ForCausalLM(Qwen2Config(**files.hf_config())).float().eval()
    model.load_state_dict(files.hf_state(tensors, permuted=False), strict=True)
    assert relative(found, hf_logits(model, IDS)) < TOLERANCE


def test_qwen3(tmp_path: Path) -> None:
    tensors = files.weights("Q8_0")
    rng = np.random.default_rng(5)
    for layer in range(files.LAYERS):
        for part in ("q", "k"):
            norm = (1 + 0.3 * rng.standard_normal(files.DIM)).astype(np.float32)
            tensors[f"blk.{layer}.attn_{part}_norm.weight"] = norm
    found = run(files.write(tmp_path / "model.gguf", tensors, "qwen3"))
    model = Qwen3ForCausalLM(Qwen3Config(**files.hf_config())).float().eval()
    model.load_state_dict(files.hf_state(tensors, permuted=False), strict=True)
    assert relative(found, hf_logits(model, IDS)) < TOLERANCE
