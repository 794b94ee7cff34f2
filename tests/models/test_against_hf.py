"""The decoder against transformers, on tiny random models in float32."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from model_harness import (
    SHAPE,
    Sequences,
    edit_config,
    feed_in_chunks,
    hf_logits,
    ids_of,
    load,
    make_hf,
    relative,
    save,
)
from tidemill.models.decoder import Decoder
from tidemill.models.loader import read_config

TOLERANCE = 1e-4
LENGTH = 37


def llama(**options: Any) -> PreTrainedModel:
    return make_hf(LlamaForCausalLM, LlamaConfig(**SHAPE | options))


def mistral(**options: Any) -> PreTrainedModel:
    return make_hf(MistralForCausalLM, MistralConfig(**SHAPE | options))


def rope(kind: str, theta: float = 10000.0, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **params}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
QWEN3_WINDOW = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}

CASES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, heads without groups": lambda: llama(num_key_value_heads=4),
    "llama, one kv head": lambda: llama(num_key_value_heads=1),
    "llama, tied": lambda: llama(tie_word_embeddings=True),
    "llama, biases": lambda: llama(attention_bias=True),
    "llama, head_dim": lambda: llama(head_dim=20),
    "llama, gelu": lambda: llama(hidden_act="gelu_pytorch_tanh"),
    "llama, theta": lambda: llama(**rope("default", 500000.0)),
    "llama, linear rope": lambda: llama(**rope("linear", factor=4.0)),
    "llama, dynamic rope": lambda: llama(**rope("dynamic", factor=2.0)),
    "llama, llama3 rope": lambda: llama(**rope("llama3", **LLAMA3)),
    "llama, yarn": lambda: llama(
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=8, beta_slow=2)
    ),
    "llama, yarn, mscale": lambda: llama(
        **rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=16,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
        )
    ),
    "llama, yarn, attention factor": lambda: llama(
        **rope("yarn", factor=4.0, original_max_position_embeddings=16, attention_factor=1.3)
    ),
    "mistral, window": lambda: mistral(sliding_window=9),
    "mistral, no window": lambda: mistral(sliding_window=None),
    "qwen2": lambda: make_hf(Qwen2ForCausalLM, Qwen2Config(**SHAPE)),
    "qwen3": lambda: make_hf(Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16)),
    "qwen3, window": lambda: make_hf(
        Qwen3ForCausalLM, Qwen3Config(**SHAPE, head_dim=16, **QWEN3_WINDOW)
    ),
}


@pytest.fixture(scope="module", params=CASES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: Any) -> tuple[PreTrainedModel, Decoder]:
    model = CASES[request.param]()
    return model, load(save(model, tmp_path_factory.mktemp("model")))


def test_logits_of_a_whole_prompt(pair: tuple[PreTrainedModel, Decoder]) -> None:
    model, decoder = pair
    ids = ids_of(1, LENGTH)
    (found,) = Sequences(decoder).feed([(0, ids)])
    assert relative(found, hf_logits(model, ids)) < TOLERANCE


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_chunks_of_any_size(pair: tuple[PreTrainedModel, Decoder], size: int) -> None:
    model, decoder = pair
    ids = ids_of(2, LENGTH)
    found = feed_in_chunks(Sequences(decoder), 0, ids, size)
    assert relative(found, hf_logits(model, ids)) < TOLERANCE


def test_a_batch_of_prefill_and_decode_rows(pair: tuple[PreTrainedModel, Decoder]) -> None:
    """Eight sequences, each moving on by a random number of tokens in every pass."""
    model, decoder = pair
    draw = random.Random(3)
    ids = [ids_of(10 + n, draw.randint(1, LENGTH)) for n in range(8)]
    done = [0] * len(ids)
    found: list[list[torch.Tensor]] = [[] for _ in ids]
    sequences = Sequences(decoder)
    while any(at < len(own) for at, own in zip(done, ids, strict=True)):
        rows = []
        for name, own in enumerate(ids):
            count = draw.choice([0, 1, 1, 2, 7])
            if part := own[done[name] : done[name] + count]:
                rows.append((name, part))
                done[name] += len(part)
        rows.sort(key=lambda row: len(row[1]) > 1)
        for (name, _), logits in zip(rows, sequences.feed(rows) if rows else [], strict=True):
            found[name].append(logits)
    for own, logits in zip(ids, found, strict=True):
        assert relative(torch.cat(logits), hf_logits(model, own)) < TOLERANCE


def test_every_sequence_reads_its_own_pages(pair: tuple[PreTrainedModel, Decoder]) -> None:
    _, decoder = pair
    ids = ids_of(4, LENGTH)
    alone = Sequences(decoder).feed([(0, ids)])[0]
    others = [(name, ids_of(20 + name, 11 + name)) for name in range(1, 6)]
    together = Sequences(decoder).feed([*others[:3], (0, ids), *others[3:]])[3]
    assert relative(together, alone) < 1e-5


def test_dynamic_rope_beyond_the_trained_context(tmp_path: Path) -> None:
    """The base is set for the longest sequence that will run; transformers sets it for the
    sequence at hand, so the two agree for a sequence of just that length."""
    model = llama(**rope("dynamic", factor=2.0))
    length = 2 * SHAPE["max_position_embeddings"]
    decoder = load(save(model, tmp_path), max_len=length)
    ids = ids_of(5, length)
    (found,) = Sequences(decoder).feed([(0, ids)])
    assert relative(found, hf_logits(model, ids)) < TOLERANCE


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_older_spelling_of_rope_scaling(tmp_path: Path, key: str) -> None:
    """`rope_theta` and `rope_scaling` side by side, as most published folders have them."""
    folder = save(llama(**rope("llama3", 500000.0, **LLAMA3)), tmp_path)
    new = read_config(folder)
    edit_config(
        folder, rope_parameters=None, rope_theta=500000.0, rope_scaling={key: "llama3", **LLAMA3}
    )
    assert read_config(folder) == new
    assert new.rope.kind == "llama3"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stored_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = save(llama().to(dtype), tmp_path)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = ids_of(6, LENGTH)
    (found,) = Sequences(load(folder)).feed([(0, ids)])
    assert relative(found, hf_logits(model, ids)) < TOLERANCE


def test_sharded_folder(tmp_path: Path) -> None:
    model = llama()
    folder = save(model, tmp_path, max_shard_size="50KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    ids = ids_of(7, LENGTH)
    (found,) = Sequences(load(folder)).feed([(0, ids)])
    assert relative(found, hf_logits(model, ids)) < TOLERANCE
