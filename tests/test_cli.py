"""Wrong flags and wrong models: one line that says what to do, and a non-zero exit."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest


def run(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tidemill", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    """The error line; fails on a traceback or on success."""
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stderr, result.stderr
    return result.stderr.strip().splitlines()[-1]


def test_help_names_every_command():
    text = run("--help").stdout
    for command in ("serve", "generate", "chat", "bench", "pull", "info"):
        assert command in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["serve", "--port", "70000"], "65535"),
        (["serve", "--page-size", "0"], "greater than or equal to 1"),
        (["serve", "--kv-memory", "lots"], "512MiB"),
        (["serve", "--kv-memory", "-1G"], "positive"),
        (["serve", "--dtype", "int3"], "float32"),
        (["serve", "--no-such-flag"], "no-such-flag"),
        (["bench", "offline", "nonsense"], "mixed"),
        (["bench", "offline", "mixed", "--input-len", "9:3"], "LOW"),
        (["bench", "serve", "--url", "http://127.0.0.1:9/v1", "decode"], "127.0.0.1:9"),
        (["bench", "serve", "--rate", "1", "--concurrency", "1"], "exclude"),
    ],
)
def test_wrong_flags_name_the_limit(arguments, says):
    result = run(*arguments)
    assert says in last_line(result)
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("command", ["serve", "info"])
def test_missing_model(command, tmp_path):
    extra = ["--port", "0"] if command == "serve" else []
    assert "nothing-here" in last_line(run(command, str(tmp_path / "nothing-here.gguf"), *extra))


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_corrupt_gguf(content, tmp_path):
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    assert "broken.gguf" in last_line(run("serve", str(path), "--port", "0"))


def test_unknown_architecture_lists_the_known_ones(tmp_path):
    config = {"architectures": ["NovelForCausalLM"], "model_type": "novel"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = last_line(run("info", str(tmp_path), "--load-format", "dummy"))
    assert "LlamaForCausalLM" in line or "llama" in line


def test_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = last_line(run("serve", "--port", port))
    assert port in line
    assert "--port" in line
