"""How many threads compute: one for each physical core that this process may use.

Two threads on one core share its vector units, and matrix code gains nothing from the second.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
QUOTAS = Path("/sys/fs/cgroup")


def physical_cores() -> int:
    """Cores that the affinity mask and a container's quota allow; at least 1."""
    if not hasattr(os, "sched_getaffinity"):  # macOS
        return os.cpu_count() or 1
    allowed = os.sched_getaffinity(0)
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _quota()))


def _siblings(cpu: int) -> str:
    """The hardware threads of the core that `cpu` belongs to, as the kernel lists them."""
    try:
        return (CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int:
    """A container's CPU limit in whole cores, rounded up; a large number where there is none."""
    try:
        quota, period = (QUOTAS / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (QUOTAS / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (QUOTAS / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return 1 << 16
    if not quota.isdecimal() or not period.isdecimal():  # "max", or -1
        return 1 << 16
    return math.ceil(int(quota) / int(period))
