"""A real server for tests: all processes, a tiny model with random weights, a free port."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    model: str
    process: subprocess.Popen[bytes]

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request("GET", path)

    def post(self, path: str, body: bytes | dict[str, Any]) -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        status, answer = self.request("POST", path, data)
        return status, json.loads(answer)

    def request(self, method: str, path: str, data: bytes | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def health(self) -> dict[str, Any]:
        made: dict[str, Any] = json.loads(self.get("/health")[1])
        return made

    def metric(self, name: str) -> float:
        """Sum of a metric's samples whose name (with labels) begins with `name`."""
        lines = self.get("/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def until_ready(self, limit_s: float = 120) -> None:
        until(lambda: self.get("/health")[0] == 200, "the server to be ready", limit_s)


def until(condition: Any, what: str, limit_s: float = 30) -> None:
    """Poll a condition; connection errors count as no."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            if condition():
                return
        time.sleep(0.02)
    raise TimeoutError(f"waited {limit_s} s for {what}")


def tiny_model(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(TINY | changes))
    (folder / "template.jinja").write_text(TEMPLATE)
    return folder


@contextlib.contextmanager
def serve(model: str, *flags: str) -> Iterator[Served]:
    """`tidemill serve` on a free port, ready; interrupted and reaped at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tidemill", "serve", model, "--port", str(port), *flags]
    command += ["--served-model-name", "tiny", "--threads", "1"]
    process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})
    served = Served(f"http://127.0.0.1:{port}", "tiny", process)
    try:
        served.until_ready()
        yield served
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def serve_tiny(folder: Path, *flags: str) -> Iterator[Served]:
    model = tiny_model(folder)
    dummy = ("--load-format", "dummy", "--chat-template", str(model / "template.jinja"))
    with serve(str(model), *dummy, *flags) as served:
        yield served
