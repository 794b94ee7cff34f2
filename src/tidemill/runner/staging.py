"""Arrays that the host writes and the device reads."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Staged:
    """A persistent host array with its copy on the device.

    On a CPU both are the same memory and `upload` costs nothing; on a GPU the host side is
    pinned and `upload` is one asynchronous copy.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._pinned = torch.zeros(shape, dtype=dtype, pin_memory=on_gpu)
        self.host: npt.NDArray[Any] = self._pinned.numpy()
        self.device = torch.zeros(shape, dtype=dtype, device=device) if on_gpu else self._pinned

    def upload(self, count: int) -> Tensor:
        """The first `count` elements (rows) on the device: a view of persistent storage."""
        if self.device is not self._pinned:
            self.device[:count].copy_(self._pinned[:count], non_blocking=True)
        return self.device[:count]

    def upload_at(self, rows: npt.NDArray[np.int32], columns: npt.NDArray[np.int32]) -> None:
        """Bring single elements of a 2-D array up to date on the device."""
        if self.device is not self._pinned:
            at = (torch.from_numpy(rows).long(), torch.from_numpy(columns).long())
            self.device[at] = self._pinned[at].to(self.device.device)
