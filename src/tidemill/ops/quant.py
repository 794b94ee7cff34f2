"""From a file's weight formats to numbers."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tidemill.ops.backend import RawWeight
from tidemill.wire.errors import ModelError

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def dequantize(raw: RawWeight) -> npt.NDArray[np.float32]:
    """float32 array of `raw.shape`, by the gguf package's reference decoders.

    Raises ModelError for a format that it does not know.
    """
    rows = int(np.prod(raw.shape[:-1], dtype=np.int64))
    data = np.ascontiguousarray(raw.data).reshape(rows, -1)
    try:
        values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[raw.fmt])
    except (KeyError, NotImplementedError):
        raise ModelError(
            f"{raw.name}: the weight format {raw.fmt} cannot be read; take a file in F16, Q8_0, "
            "Q4_1, Q4_K or the like"
        ) from None
    return values.reshape(raw.shape).astype(np.float32, copy=False)


def to_tensor(parts: list[RawWeight], dtype: torch.dtype) -> torch.Tensor:
    """The parts stacked over their first dimension, on the CPU. A single part that has the
    dtype already may share memory with `data`."""
    made = [_part(part, dtype) for part in parts]
    return made[0] if len(made) == 1 else torch.cat(made)


def _part(raw: RawWeight, dtype: torch.dtype) -> torch.Tensor:
    stored = _FLOATS.get(raw.fmt)
    values = dequantize(raw) if stored is None else raw.data
    if not values.flags.writeable:  # torch takes no read-only memory
        values = values.copy()
    tensor = torch.from_numpy(values)
    if stored is not None:
        tensor = tensor.view(stored).reshape(raw.shape)
    return tensor.to(dtype)
