"""Broken files and unknown models: one clear line, always a ModelError."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers import LlamaConfig, LlamaForCausalLM

import gguf_harness as files
from model_harness import SHAPE, edit_config, load, make_hf, save
from tidemill.models.loader import read_config
from tidemill.wire.errors import ModelError


def message_of(path: Path, load_format: str = "auto") -> str:
    with pytest.raises(ModelError) as caught:
        load(path, load_format=load_format)
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- GGUF ---------------------------------------------------------------------------------------


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    return files.write(tmp_path / "model.gguf", files.weights("Q4_0"))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    assert "not a GGUF file" in message_of(tmp_path / "model.gguf")


@pytest.mark.parametrize("content", [b"", b"GG", b"GGUF"])
def test_a_stub_of_a_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    assert "model.gguf" in message_of(tmp_path / "model.gguf")


def test_truncated_weights(gguf_file: Path) -> None:
    whole = gguf_file.read_bytes()
    gguf_file.write_bytes(whole[: len(whole) * 2 // 3])
    text = message_of(gguf_file)
    assert "truncated" in text
    assert str(len(whole) * 2 // 3) in text


def test_truncated_header(gguf_file: Path) -> None:
    gguf_file.write_bytes(gguf_file.read_bytes()[:200])
    assert "corrupt or truncated GGUF header" in message_of(gguf_file)


def test_unknown_version(gguf_file: Path) -> None:
    data = bytearray(gguf_file.read_bytes())
    data[4:8] = (9).to_bytes(4, "little")
    gguf_file.write_bytes(data)
    assert "version 9" in message_of(gguf_file)


def test_random_damage_to_the_header_never_escapes(gguf_file: Path) -> None:
    """Whatever bytes are wrong, reading ends in a model or a ModelError, and soon."""
    whole = gguf_file.read_bytes()
    header = whole.index(b"output_norm.weight") + 100
    draw = random.Random(0)
    refused = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            data[draw.randrange(4, header)] = draw.randrange(256)
        gguf_file.write_bytes(data)
        try:
            read_config(gguf_file)
        except ModelError:
            refused += 1
    assert refused > 50


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = files.write(tmp_path / "model.gguf", files.weights("F32"), "mamba")
    text = message_of(path)
    assert "'mamba'" in text
    assert "llama" in text
    assert "qwen3" in text


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = files.weights("F32")
    del tensors["blk.1.ffn_up.weight"]
    text = message_of(files.write(tmp_path / "model.gguf", tensors))
    assert "blk.1.ffn_up.weight is missing" in text


def test_superfluous_tensor(tmp_path: Path) -> None:
    tensors = files.weights("F32")
    tensors["blk.0.ffn_gate_exps.weight"] = np.zeros(4, dtype=np.float32)
    text = message_of(files.write(tmp_path / "model.gguf", tensors))
    assert "blk.0.ffn_gate_exps.weight" in text


def test_wrong_shape(tmp_path: Path) -> None:
    tensors = files.weights("F32")
    tensors["blk.0.attn_k.weight"] = np.zeros((32, files.HIDDEN), dtype=np.float32)
    text = message_of(files.write(tmp_path / "model.gguf", tensors))
    assert "blk.0.attn_k.weight" in text
    assert "(32, 256)" in text
    assert "(128, 256)" in text


def test_missing_metadata(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("token_embd.weight", np.zeros((8, 16), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "llama.embedding_length" in message_of(tmp_path / "model.gguf")


def test_format_without_a_decoder(gguf_file: Path) -> None:
    """I8 is a type of GGUF, but not one that weights are stored in."""
    tensors = files.weights("F32")
    tensors["blk.0.attn_k.weight"] = np.zeros((128, files.HIDDEN), dtype=np.int8)
    text = message_of(files.write(gguf_file, tensors))
    assert "blk.0.attn_k.weight" in text
    assert "I8" in text


def test_two_gguf_files_in_a_folder(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        files.write(tmp_path / name, files.weights("F32"))
    assert "2 GGUF files" in message_of(tmp_path)


# --- folders ------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = make_hf(LlamaForCausalLM, LlamaConfig(**SHAPE))
    return save(model, tmp_path, max_shard_size="50KB")


def test_empty_folder(tmp_path: Path) -> None:
    assert "neither a config.json nor a GGUF file" in message_of(tmp_path)


def test_config_without_weights(folder: Path) -> None:
    for path in folder.glob("*safetensors*"):
        path.unlink()
    assert "--load-format dummy" in message_of(folder)


def test_missing_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    assert f"the shard {shard.name} is missing" in message_of(folder)


def test_truncated_shard(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-40])
    assert shard.name in message_of(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_broken_index(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in message_of(folder)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff"])
def test_config_is_no_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    assert "config.json" in message_of(folder)


def test_unknown_architecture_in_a_folder(folder: Path) -> None:
    edit_config(folder, architectures=["MambaForCausalLM"])
    text = message_of(folder)
    assert "MambaForCausalLM" in text
    assert "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in text


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("hidden_size", None, "lacks 'hidden_size'"),
        ("num_hidden_layers", "many", "many"),
        ("num_hidden_layers", 0, "num_hidden_layers must be a positive integer, got 0"),
        ("intermediate_size", 80.5, "intermediate_size must be a positive integer, got 80.5"),
        ("num_attention_heads", 5, "5 heads do not divide among 2 kv heads"),
        ("num_key_value_heads", 3, "4 heads do not divide among 3 kv heads"),
        ("num_attention_heads", 0, "num_attention_heads must be"),
        ("head_dim", 7, "head_dim 7 is odd"),
        ("hidden_act", "relu", "'relu'"),
        ("mlp_bias", True, "mlp_bias"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.5"),
        ("rope_parameters", {"rope_type": "longrope", "factor": 2}, "'longrope'"),
        ("rope_parameters", {"rope_type": "linear"}, "factor"),
        ("rope_parameters", {"rope_type": "llama3", "factor": 8}, "low_freq_factor"),
        ("rope_parameters", "yes", "wrong value"),
    ],
)
def test_wrong_configuration(folder: Path, field: str, value: Any, said: str) -> None:
    if field == "partial_rotary_factor":
        edit_config(folder, rope_parameters=None)
    edit_config(folder, **{field: value})
    text = message_of(folder)
    assert "config.json" in text
    assert said in text


def test_window_in_some_layers_only(folder: Path) -> None:
    changes = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    edit_config(folder, architectures=["Qwen2ForCausalLM"], **changes)
    assert "in some layers only" in message_of(folder)


def test_shapes_that_do_not_fit_the_configuration(folder: Path) -> None:
    edit_config(folder, intermediate_size=100)
    text = message_of(folder)
    assert "mlp.gate_proj.weight" in text
    assert "(80, 48)" in text
    assert "(100, 48)" in text


def test_fewer_layers_than_the_file_has(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=2)
    assert "model.layers.2." in message_of(folder)


def test_more_layers_than_the_file_has(folder: Path) -> None:
    edit_config(folder, num_hidden_layers=4)
    assert "model.layers.3." in message_of(folder)


def test_a_load_format_that_does_not_fit(gguf_file: Path, tmp_path: Path) -> None:
    assert "safetensors" in message_of(gguf_file, "safetensors")
    (tmp_path / "empty").mkdir()
    assert "0 GGUF files" in message_of(tmp_path / "empty", "gguf")


def test_integer_weights_are_refused(folder: Path) -> None:
    from safetensors.numpy import load_file, save_file

    shard = sorted(folder.glob("*.safetensors"))[-1]
    tensors = {k: np.zeros(v.shape, dtype=np.int8) for k, v in load_file(shard).items()}
    save_file(tensors, shard)
    assert "int8" in message_of(folder)


def test_the_index_names_a_tensor_elsewhere(folder: Path) -> None:
    """What counts is what the shards hold."""
    index = folder / "model.safetensors.index.json"
    fields = json.loads(index.read_text())
    fields["weight_map"].pop("model.norm.weight")
    index.write_text(json.dumps(fields))
    assert load(folder).config.family == "llama"
