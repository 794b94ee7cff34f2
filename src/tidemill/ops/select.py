"""Which backend runs: the fastest that this machine has."""

from __future__ import annotations

import logging

import torch

from tidemill.ops.backend import AttentionSpec, Backend
from tidemill.ops.reference import ReferenceBackend

log = logging.getLogger(__name__)


def make_backend(
    device: str,
    dtype: str,
    threads: int,
    native: bool = True,
    *,
    attention: AttentionSpec | None = None,
    intermediate: int = 0,
) -> Backend:
    """A backend for `config.device` and `config.dtype`.

    On a CPU: plain torch for float32, the exact mode; else the native kernels, or torch's own
    where those were not built, this CPU cannot run them, they do not take the model's sizes
    (`attention`, `intermediate`) or `native` is False. `threads` is the number that compute.
    Raises ValueError for a device or dtype that it has no backend for.
    """
    if device not in ("auto", "cpu"):
        raise ValueError(f"device {device!r} is not supported; there is cpu")
    if dtype == "float32":
        return ReferenceBackend(torch.device("cpu"), torch.float32)
    if dtype not in ("auto", "bfloat16"):
        raise ValueError(f"dtype {dtype!r} is not supported on a CPU; there are float32, bfloat16")
    if native:
        from tidemill.ops.cpu.library import Unavailable
        from tidemill.ops.cpu.native import NativeBackend, unsupported

        try:
            reason = unsupported(attention, intermediate) if attention is not None else None
            if reason is None:
                return NativeBackend(threads)
        except Unavailable as error:
            reason = str(error)
        log.warning("native CPU kernels are not used: %s", reason)
    from tidemill.ops.cpu.torch_backend import TorchCpuBackend

    return TorchCpuBackend()
