"""Reading GGUF files: metadata and where the tensors are.

The gguf package's reader builds NumPy views for every string of the vocabulary and takes
seconds; this one reads the header once, front to back. It serves the tokenizer (metadata) and
the model loader (tensors), so it imports neither torch nor anything else of tidemill but errors.
Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from tidemill.wire.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q"}
_SCALARS |= {12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is in NumPy's order (out_features, in_features); `fmt` a GGUF type name."""

    name: str
    fmt: str
    shape: tuple[int, ...]
    offset: int  # from the start of the file
    nbytes: int


class GGUFFile:
    """A mapped GGUF file. Raises ModelError if it is not one, or is cut short."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path}: cannot read the file: {error}") from None
        self._at = 0
        try:
            self._read_header()
        except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
            raise ModelError(
                f"{path}: corrupt or truncated GGUF header ({error}); fetch the file again"
            ) from None

    def data(self, name: str) -> npt.NDArray[np.uint8]:
        """The tensor's raw bytes, a view of the mapped file."""
        info = self.tensors[name]
        return np.frombuffer(self._map, np.uint8, info.nbytes, info.offset)

    def _read_header(self) -> None:
        if self._map[:4] != b"GGUF":
            raise ModelError(f"{self.path}: not a GGUF file (it begins with {self._map[:4]!r})")
        self._at = 4
        version = self._scalar("I")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version}; versions 2 and 3 are known")
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        if max(tensors, fields) > len(self._map):
            raise ModelError(
                f"{self.path}: corrupt GGUF header: {tensors} tensors, {fields} fields"
            )
        for _ in range(fields):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        infos = [self._tensor_info() for _ in range(tensors)]
        alignment = int(self.metadata.get("general.alignment", 32))
        if alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment}")
        start = -(-self._at // alignment) * alignment
        for name, kind, shape, offset in infos:
            if offset % alignment:
                raise ModelError(f"{self.path}: tensor {name} is not aligned: a corrupt header")
            self.tensors[name] = self._place(name, kind, shape, start + offset)

    def _place(self, name: str, kind: int, shape: tuple[int, ...], at: int) -> TensorInfo:
        try:
            fmt = gguf.GGMLQuantizationType(kind)
        except ValueError:
            raise ModelError(f"{self.path}: tensor {name} has the unknown type {kind}") from None
        block, size = gguf.GGML_QUANT_SIZES[fmt]
        count = math.prod(shape)
        if shape[-1] % block:
            raise ModelError(f"{self.path}: tensor {name}: {shape} is not whole {fmt.name} blocks")
        nbytes = count // block * size
        if at + nbytes > len(self._map):
            raise ModelError(
                f"{self.path}: truncated: tensor {name} ends at byte {at + nbytes}, the file at "
                f"{len(self._map)}; fetch the file again"
            )
        return TensorInfo(name, fmt.name, shape, at, nbytes)

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        dimensions = self._scalar("I")
        if not 1 <= dimensions <= 4:
            raise ModelError(f"{self.path}: tensor {name} has {dimensions} dimensions")
        shape = tuple(self._scalar("Q") for _ in range(dimensions))[::-1]
        return name, self._scalar("I"), shape, self._scalar("Q")

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._map, self._at)
        self._at += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        end = self._at + length
        if end > len(self._map):
            raise struct.error(f"a string of {length} bytes at byte {self._at}")
        text = self._map[self._at : end].decode("utf-8", errors="replace")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, count = self._scalar("I"), self._scalar("Q")
            if item in _SCALARS:
                code = np.dtype(_SCALARS[item]).newbyteorder("<")
                if self._at + count * code.itemsize > len(self._map):
                    raise struct.error(f"an array of {count} items at byte {self._at}")
                values = np.frombuffer(self._map, code, count, self._at)
                self._at += values.nbytes
                return values
            return [self._value(item) for _ in range(min(count, len(self._map)))]
        if kind not in _SCALARS:
            raise struct.error(f"value type {kind}")
        return self._scalar(_SCALARS[kind])
