from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tidemill.config import EngineConfig
from tidemill.runner import memory
from tidemill.runner.memory import MIB, CapacityError, fit

PAGE_BYTES = 100_000  # 16 tokens
CONTEXT = 8192  # 512 pages


def config(**settings: object) -> EngineConfig:
    return EngineConfig(model="m", **settings)  # type: ignore[arg-type]


def test_a_roomy_cpu_holds_one_full_context_or_256_mib() -> None:
    roomy = 64 << 30
    assert fit(config(), CONTEXT, PAGE_BYTES, roomy, False).num_pages == 256 * MIB // PAGE_BYTES
    large = fit(config(), 131072, PAGE_BYTES, roomy, False)
    assert (large.num_pages, large.max_model_len) == (8192, 131072)


def test_a_small_cpu_gives_a_quarter_and_cuts_the_context() -> None:
    found = fit(config(), CONTEXT, PAGE_BYTES, 40 * PAGE_BYTES, False)
    assert (found.num_pages, found.max_model_len) == (10, 160)


def test_a_gpu_gives_nine_tenths() -> None:
    assert fit(config(), CONTEXT, PAGE_BYTES, 1000 * PAGE_BYTES, True).num_pages == 900


def test_a_context_that_is_asked_for_may_have_more_than_a_quarter() -> None:
    found = fit(config(max_model_len=1600), CONTEXT, PAGE_BYTES, 200 * PAGE_BYTES, False)
    assert (found.num_pages, found.max_model_len) == (100, 1600)


def test_kv_memory_decides_when_given() -> None:
    found = fit(config(kv_memory=PAGE_BYTES * 7 + 5), CONTEXT, PAGE_BYTES, 64 << 30, False)
    assert (found.num_pages, found.max_model_len) == (7, 112)


@pytest.mark.parametrize(
    ("settings", "available", "parts"),
    [
        ({"max_model_len": 9000}, 64 << 30, ["--max-model-len 9000", "8192"]),
        ({"max_model_len": 1600}, 50 * PAGE_BYTES, ["--max-model-len 1600", "9.5 MiB", "720"]),
        (
            {"max_model_len": 1600, "kv_memory": 10 * PAGE_BYTES},
            64 << 30,
            ["9.5 MiB", "160 tokens", "raise --kv-memory"],
        ),
        ({"kv_memory": 10 << 30}, 2 << 30, ["--kv-memory", "10,240 MiB", "1,843 MiB"]),
        ({"kv_memory": 10}, 2 << 30, ["one page", "raise --kv-memory"]),
        ({}, -5, ["no room for a KV cache"]),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(
    settings: dict[str, int], available: int, parts: list[str]
) -> None:
    with pytest.raises(CapacityError) as caught:
        fit(config(**settings), CONTEXT, PAGE_BYTES, available, False)
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


def test_weights_larger_than_memory_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "big.gguf"
    with file.open("wb") as out:
        out.truncate(3 * MIB)
    memory.check_weights(file, 4 * MIB)
    with pytest.raises(CapacityError, match=r"big.gguf does not fit.*3.0 MiB.*2.0 MiB"):
        memory.check_weights(file, 2 * MIB)
    with pytest.raises(CapacityError, match="does not fit"):
        memory.check_weights(tmp_path, 2 * MIB)


def test_a_container_limit_counts(tmp_path: Path) -> None:
    def left() -> int | None:
        return memory._left_in(tmp_path, "memory.max", "memory.current", "inactive_file")

    assert left() is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert left() is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert left() == 400
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50\n")
    assert left() == 450


def test_available_memory_is_within_the_machine() -> None:
    available = memory.available_memory(torch.device("cpu"))
    assert 0 < available < 1 << 46


def test_the_peak_of_a_step_is_seen() -> None:
    if not memory.resident():
        pytest.skip("this system has no /proc/self/status")
    # In a process of its own: memory that other tests have freed would be used again.
    code = (
        "import torch; from tidemill.runner import memory;"
        "print(memory.peak_of(lambda: torch.ones(16 << 20), torch.device('cpu')))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 60 * MIB < int(made.stdout) < 90 * MIB  # 64 MiB, and a little on first use


def test_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert memory.is_out_of_memory(caught.value)
    assert memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(RuntimeError("shape mismatch"))
