"""The memory fit: how many KV pages the machine holds, from what is measured.

The order at start: load the weights, run a worst-case step and see what it takes, look at what
is left, size the pool, allocate it. Whatever does not fit is refused here, in one line with the
numbers, before it is allocated.

Default pool on a CPU: room for one request of the model's full context, at least 256 MiB, and
at most a quarter of the memory that is free; a machine's owner has other uses for the rest.
Pages that nobody has touched cost nothing there. On a GPU: nine tenths of what is left.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.config import EngineConfig
from tidemill.wire.errors import EngineError

MIB = 1 << 20
CPU_SHARE, CPU_LEAST, MOST = 0.25, 256 * MIB, 0.9


class CapacityError(EngineError):
    """What was asked for does not fit. The message is one line, with the numbers and flags."""


@dataclass(frozen=True, slots=True)
class Fit:
    num_pages: int
    max_model_len: int


def fit(config: EngineConfig, context: int, page_bytes: int, available: int, on_gpu: bool) -> Fit:
    """Size the KV pool.

    `context` is the model's, in tokens; `page_bytes` a page's size over all layers;
    `available` the bytes that are free once weights and activations have theirs.
    """
    page = config.page_size
    wanted = config.max_model_len
    if wanted is not None and wanted > context:
        raise CapacityError(
            f"--max-model-len {wanted} exceeds the model's context of {context} tokens"
        )
    full = -(-(wanted or context) // page) * page_bytes
    most = int(available * MOST)
    if config.kv_memory is not None:
        pool = config.kv_memory
        if pool > most:
            raise CapacityError(
                f"--kv-memory {pool} ({mib(pool)}) does not fit: {mib(most)} are available to the "
                "KV cache beside weights and activations; lower --kv-memory"
            )
    elif on_gpu:
        pool = most
    else:
        pool = min(int(available * CPU_SHARE), max(full, CPU_LEAST))
        if wanted is not None:  # asked for, so it may have more than a quarter
            pool = max(pool, min(full, most))
    pages = max(pool, 0) // page_bytes
    held = pages * page
    if not pages:
        raise CapacityError(
            f"no room for a KV cache: one page of {page} tokens needs {mib(page_bytes)}, "
            f"{mib(pool)} are available; raise --kv-memory, or free memory"
        )
    if wanted is not None and held < wanted:
        remedy = "raise --kv-memory or lower --max-model-len"
        if config.kv_memory is None:
            remedy = "lower --max-model-len"
        raise CapacityError(
            f"--max-model-len {wanted} needs {mib(full)} of KV cache, {mib(pool)} are available "
            f"({held} tokens); {remedy}"
        )
    return Fit(pages, wanted or min(context, held))


def check_weights(model: Path, available: int) -> None:
    """Refuse a model whose files alone are larger than the free memory."""
    files = [model]
    if model.is_dir():
        files = [f for pattern in ("*.safetensors", "*.gguf") for f in model.glob(pattern)]
    size = sum(f.stat().st_size for f in files if f.is_file())
    if size > available:
        raise CapacityError(
            f"{model.name} does not fit: its weights are {mib(size)}, {mib(available)} are "
            "available; take a smaller or more heavily quantized model, or free memory"
        )


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """torch's CPU allocator reports exhaustion as a plain RuntimeError."""
    text = str(error)
    return (
        isinstance(error, MemoryError | torch.OutOfMemoryError)
        or "can't allocate memory" in text
        or "not enough memory" in text
    )


def mib(count: int) -> str:
    return f"{count / MIB:,.1f} MiB" if count < 100 * MIB else f"{count / MIB:,.0f} MiB"


# --- measuring -------------------------------------------------------------------------------


def available_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    limits = [_system_available(), *_cgroup_available()]
    return max(min(limits), 0)


def peak_of(run: Callable[[], object], device: torch.device) -> int:
    """Bytes that `run` takes at its peak, beyond what is allocated now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    _reset_peak()
    before = resident("VmRSS")
    run()
    return max(resident("VmHWM") - before, 0)


def resident(field: str = "VmRSS") -> int:
    """This process's resident bytes, now (VmRSS) or at their peak (VmHWM); 0 where unknown."""
    for line in _read("/proc/self/status").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _reset_peak() -> None:
    """Without it (some sandboxes forbid it) the peak includes loading: an upper bound."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _system_available() -> int:
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    # No /proc (macOS): there is no cheap equal of MemAvailable; count on half of the machine.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _cgroup_available() -> list[int]:
    """What each enclosing control group (a container's limit) leaves, version 2 and 1."""
    found = []
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, usage, cache = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root, limit, usage = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            cache = "total_inactive_file"
        else:
            continue
        top = Path("/sys/fs/cgroup") / root
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):
            left = _left_in(folder, limit, usage, cache)
            if left is not None:
                found.append(left)
            if folder == top:
                break
    return found


def _left_in(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    bound, used = _read(folder / limit).strip(), _read(folder / usage).strip()
    if not bound.isdecimal() or not used.isdecimal():  # "max", or no such controller here
        return None
    # The kernel drops inactive file pages before it refuses memory.
    stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    return int(bound) - int(used) + int(stat.get(cache, 0))


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
