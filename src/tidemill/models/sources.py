"""Where weights come from: GGUF files, safetensors folders, random numbers.

A source hands out one tensor at a time as the file holds it, so that the whole model is never in
memory twice.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from tidemill.gguf_file import GGUFFile
from tidemill.models import families
from tidemill.models.decoder import DecoderConfig
from tidemill.ops.backend import RawWeight
from tidemill.wire.errors import ModelError

_FORMATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}

Name = tuple[str, str]  # (Hugging Face, GGUF)


class Source(Protocol):
    """A model's configuration and tensors."""

    config: DecoderConfig

    def get(self, name: Name, shape: tuple[int, ...]) -> RawWeight:
        """Raises ModelError if the tensor is missing or has another shape."""

    def unused(self) -> list[str]:
        """Tensors in the file that nobody asked for."""


def open_source(path: Path, load_format: str, seed: int = 0) -> Source:
    """The source for a model file or folder. Raises ModelError."""
    if load_format == "dummy":
        return DummySource(read_json(path), str(path), seed)
    if path.is_file() and load_format in ("auto", "gguf"):
        return GGUFSource(path)
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if load_format == "gguf" or (found and not (path / "config.json").exists()):
        if len(found) != 1:
            raise ModelError(f"{path} holds {len(found)} GGUF files; name one of them")
        return GGUFSource(found[0])
    if path.is_dir():
        return SafetensorsSource(path)
    raise ModelError(f"{path} is not a model folder; --load-format {load_format} needs one")


def read_json(path: Path) -> dict[str, Any]:
    """config.json of a model folder (or the file itself)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        made = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} has neither a config.json nor a GGUF file") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{file}: cannot read it as JSON: {error}") from None
    if not isinstance(made, dict):
        raise ModelError(f"{file}: a JSON object is expected")
    return made


class GGUFSource:
    """Weights stay in the blocks of the file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._left = set(self._file.tensors)
        embedding = self._file.tensors.get(families.EMBEDDING[1])
        if embedding is None:
            raise ModelError(f"{path}: the tensor {families.EMBEDDING[1]} is missing")
        config = families.from_gguf(self._file.metadata, self._left, embedding.shape[0], str(path))
        if "rope_freqs.weight" in self._file.tensors:
            factors = self._file.data("rope_freqs.weight").view(np.float32)
            rope = replace(config.rope, factors=tuple(float(f) for f in factors))
            config = replace(config, rope=rope)
        self.config = config

    def get(self, name: Name, shape: tuple[int, ...]) -> RawWeight:
        info = self._file.tensors.get(name[1])
        if info is None:
            raise ModelError(f"{self._file.path}: the tensor {name[1]} is missing")
        _check_shape(str(self._file.path), name[1], info.shape, shape)
        self._left.discard(name[1])
        raw = RawWeight(info.name, info.fmt, info.shape, self._file.data(name[1]))
        permuted = families.FAMILIES[self.config.family].gguf_permuted
        role = name[1].split(".")[2] if name[1].startswith("blk.") else ""
        if permuted and role in ("attn_q", "attn_k"):
            heads = self.config.heads if role == "attn_q" else self.config.kv_heads
            return _rows_for_half_rotation(raw, heads)
        return raw

    def unused(self) -> list[str]:
        return sorted(n for n in self._left if not n.endswith(families.IGNORED))


def _rows_for_half_rotation(raw: RawWeight, heads: int) -> RawWeight:
    """llama.cpp rotates neighbours (2i, 2i+1), the decoder halves (i, i + dim/2). Blocks lie
    along a row, so moving whole rows is exact in every format."""
    rows = raw.data.reshape(heads, raw.shape[0] // heads // 2, 2, -1)
    data = np.ascontiguousarray(rows.swapaxes(1, 2)).reshape(-1)
    return RawWeight(raw.name, raw.fmt, raw.shape, data)


class SafetensorsSource:
    """A Hugging Face folder: one *.safetensors file, or shards with an index."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = families.from_hf(read_json(path), str(path))
        self._files: dict[str, Any] = {}  # file name -> open file
        self._where: dict[str, str] = {}
        for file in self._shards():
            try:
                opened = safe_open(path / file, framework="pt")
            except FileNotFoundError:
                raise ModelError(f"{path}: the shard {file} is missing") from None
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{path / file}: {error}; fetch the file again") from None
            self._files[file] = opened
            self._where |= dict.fromkeys(opened.keys(), file)  # type: ignore[no-untyped-call]
        self._left = set(self._where)

    def _shards(self) -> list[str]:
        index = self._path / "model.safetensors.index.json"
        if index.exists():
            with suppress(OSError, ValueError, KeyError, AttributeError, TypeError):
                return sorted(set(json.loads(index.read_text())["weight_map"].values()))
            raise ModelError(f"{index}: not a safetensors index")
        if (self._path / "model.safetensors").exists():  # others may be copies in other layouts
            return ["model.safetensors"]
        found = sorted(file.name for file in self._path.glob("*.safetensors"))
        if not found:
            raise ModelError(
                f"{self._path} has no *.safetensors file; --load-format dummy runs random weights"
            )
        return found

    def get(self, name: Name, shape: tuple[int, ...]) -> RawWeight:
        if name[0] not in self._where:
            raise ModelError(f"{self._path}: the tensor {name[0]} is missing")
        tensor = self._files[self._where[name[0]]].get_tensor(name[0])
        _check_shape(str(self._path), name[0], tuple(tensor.shape), shape)
        if tensor.dtype not in _FORMATS:
            raise ModelError(
                f"{self._path}: {name[0]} is {tensor.dtype}; float32, float16 and bfloat16 are read"
            )
        self._left.discard(name[0])
        data = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        return RawWeight(name[0], _FORMATS[tensor.dtype], shape, data)

    def unused(self) -> list[str]:
        tied = {families.HEAD[0]} if self.config.tie_embeddings else set()
        return sorted(n for n in self._left - tied if not n.endswith(families.IGNORED))


class DummySource:
    """Random weights of a configuration's shapes, for measuring. A function of the seed and the
    tensor's name; spread so that activations keep their size through the layers."""

    def __init__(self, config: dict[str, Any], where: str, seed: int) -> None:
        self.config = families.from_hf(config, where)
        self._seed = seed

    def get(self, name: Name, shape: tuple[int, ...]) -> RawWeight:
        if len(shape) == 1:
            value = 0.0 if name[0].endswith("bias") else 1.0
            data = np.full(shape, value, dtype=np.float32)
            return RawWeight(name[0], "F32", shape, data.view(np.uint8))
        key = [self._seed, *name[0].encode()]
        # Random bf16 bit patterns: sign and mantissa free, exponents around 1 / sqrt(fan-in).
        bits = np.random.default_rng(key).integers(0, 1 << 16, shape, dtype=np.uint16)
        exponent = 127 - round(np.log2(shape[1]) / 2)
        bits &= np.uint16(0x807F)
        bits |= np.uint16(exponent << 7)
        return RawWeight(name[0], "BF16", shape, bits.reshape(-1).view(np.uint8))

    def unused(self) -> list[str]:
        return []


def _check_shape(where: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise ModelError(f"{where}: {name} has the shape {found}, the configuration says {wanted}")
