"""Arrays that the host writes and the device reads."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Staged:
    """A persistent host array with its copy on the device.

    On a CPU both are the same memory and `send` does nothing; on a GPU the host side is pinned
    and `send` is one asynchronous copy.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._pinned = torch.zeros(shape, dtype=torch.int32, pin_memory=self._on_gpu)
        self.host: npt.NDArray[np.int32] = self._pinned.numpy()
        self.device: Tensor = self._pinned
        if self._on_gpu:
            self.device = torch.zeros(shape, dtype=torch.int32, device=device)

    def send(self, count: int) -> None:
        """Bring the first `count` elements (rows) up to date on the device."""
        if self._on_gpu:
            self.device[:count].copy_(self._pinned[:count], non_blocking=True)
