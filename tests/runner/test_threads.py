from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.runner import threads


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads each; all allowed, no quota."""
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    monkeypatch.setattr(threads, "CPUS", tmp_path)
    monkeypatch.setattr(threads, "QUOTAS", tmp_path)
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: set(range(8)))
    return tmp_path


def test_a_core_counts_once(machine: Path) -> None:
    assert threads.physical_cores() == 4


def test_the_affinity_mask_counts(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda pid: {0, 4, 1})
    assert threads.physical_cores() == 2


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 3)])
def test_a_containers_quota_counts(machine: Path, quota: str, cores: int) -> None:
    (machine / "cpu.max").write_text(quota + "\n")
    assert threads.physical_cores() == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 4), ("50000", 1)])
def test_an_old_containers_quota_counts(machine: Path, quota: str, cores: int) -> None:
    (machine / "cpu").mkdir()
    (machine / "cpu/cpu.cfs_quota_us").write_text(quota + "\n")
    (machine / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert threads.physical_cores() == cores


def test_unknown_topology_counts_every_cpu(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CPUS", machine / "nothing")
    assert threads.physical_cores() == 8
