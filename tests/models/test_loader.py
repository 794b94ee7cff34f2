"""Loading itself: dummy weights, progress, sizes, what is kept in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gguf_harness as files
from model_harness import Sequences, ids_of, load, reference
from tidemill.models.loader import load_model, read_config

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 500,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}


@pytest.fixture
def config_only(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def logits_of(path: Path, seed: int) -> torch.Tensor:
    decoder = load_model(path, "dummy", reference(), 64, seed=seed)
    return Sequences(decoder).feed([(0, ids_of(1, 20))])[0]


def test_dummy_weights_follow_the_seed(config_only: Path) -> None:
    first = logits_of(config_only, 0)
    assert torch.equal(first, logits_of(config_only, 0))
    assert not torch.allclose(first, logits_of(config_only, 1))


def test_dummy_logits_are_of_ordinary_size(config_only: Path) -> None:
    """Not so small that all tokens tie, nor so large that bf16 overflows."""
    logits = logits_of(config_only, 0)
    assert torch.isfinite(logits).all()
    assert 0.1 < float(logits.std()) < 10


@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_progress_rises_to_one(tmp_path: Path, load_format: str) -> None:
    path = files.write(tmp_path / "model.gguf", files.weights("Q8_0"))
    told: list[float] = []
    load_model(path, load_format, reference(), 64, progress=told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    assert len(told) > files.LAYERS


def test_a_tied_weight_counts_once(tmp_path: Path) -> None:
    tied = load(files.write(tmp_path / "tied.gguf", files.weights("F32", tied=True)))
    apart = load(files.write(tmp_path / "apart.gguf", files.weights("F32")))
    assert apart.weights.nbytes - tied.weights.nbytes == files.VOCAB * files.HIDDEN * 4


def test_rope_table_has_the_length_asked_for(tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", files.weights("F32"))
    assert load(path, max_len=40).rope.shape == (40, files.DIM)


def test_configuration_needs_no_weights(config_only: Path) -> None:
    config = read_config(config_only, "dummy")
    assert (config.layers, config.head_dim, config.vocab) == (3, 32, 500)
