"""From a file's weight formats to numbers."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import torch

from tidemill.ops.backend import RawWeight


def dequantize(raw: RawWeight) -> npt.NDArray[np.float32]:
    """float32 array of `raw.shape`, by the gguf package's reference decoders.

    Raises ValueError for a format that it does not know.
    """
    try:
        kind = gguf.GGMLQuantizationType[raw.fmt]
    except KeyError:
        raise ValueError(f"{raw.name}: unknown weight format {raw.fmt}") from None
    rows = int(np.prod(raw.shape[:-1], dtype=np.int64))
    data = np.ascontiguousarray(raw.data).reshape(rows, -1)
    if kind == gguf.GGMLQuantizationType.F32:
        values = data.view(np.float32)
    else:
        values = gguf.quants.dequantize(data, kind)
    return values.reshape(raw.shape).astype(np.float32, copy=False)


def to_tensor(parts: list[RawWeight], dtype: torch.dtype) -> torch.Tensor:
    """The parts stacked over their first dimension, on the CPU."""
    return torch.cat([torch.from_numpy(dequantize(part).copy()).to(dtype) for part in parts])
