"""A real engine under SIGKILL: streams pause, go on, and say what they would have said.

float32 is the exact mode, so recomputing what was lost gives the same tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest

from tidemill import hub

LIMIT_S = 120.0  # only a failure takes so long
STREAMS = 8
TOKENS = 64
KILL_AT = 8  # tokens of each stream
PROMPTS = [
    "The tide comes in when",
    "Once upon a time, a miller",
    "Water is heavy, so",
    "def fibonacci(n):",
    "The three largest oceans are",
    "To bake bread you need",
    "A short history of windmills:",
    "Dear Sir or Madam,",
]


def model_path() -> Path:
    named = os.environ.get("TIDEMILL_TEST_MODEL")
    path = Path(named) if named else hub.cached_default_model()
    if path is None:
        pytest.skip("the default model is not cached: tidemill pull smollm2")
    return path


@dataclass
class Engine:
    process: subprocess.Popen[bytes]
    base: str
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.base}{path}", timeout=LIMIT_S)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()
            try:
                if self.get("/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"not ready:\n{self.log.read_text()}")

    def pid(self, name: str) -> int:
        """Of the child with this component name, by its command line."""
        role, _, index = name.partition("-")
        wanted = ["tidemill.supervisor.child", role, index or "0"]
        for child in psutil.Process(self.process.pid).children():
            if child.cmdline()[-3:] == wanted:
                return child.pid
        raise LookupError(name)

    def restarts(self, name: str) -> float:
        pattern = rf'^tidemill_restarts_total{{component="{name}"}} (\S+)$'
        found = re.search(pattern, self.get("/metrics").text, re.MULTILINE)
        assert found is not None, f"no restarts of {name} in /metrics"
        return float(found[1])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    model = model_path()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("kill") / "log"
    command = [sys.executable, "-m", "tidemill", "serve", str(model), "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--kv-memory", "64MiB"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stderr=output)
    made = Engine(process, f"http://127.0.0.1:{port}", log)
    try:
        made.wait_ready()
        yield made
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) == 0, log.read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@dataclass
class Stream:
    """One streamed completion and what it has said so far."""

    text: str = ""
    chunks: int = 0
    finish: str | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: httpx.AsyncClient, model: str, prompt: str) -> None:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
        }
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for event in events(response):
                assert "error" not in event, event
                (choice,) = event["choices"]
                self.text += choice["text"]
                self.chunks += bool(choice["text"])
                self.finish = choice["finish_reason"] or self.finish
                if self.chunks >= KILL_AT:
                    self.started.set()
        self.started.set()


async def events(response: httpx.Response) -> AsyncIterator[dict]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def complete(engine: Engine, kill: str | None = None) -> tuple[list[Stream], set[str]]:
    """All prompts at once; `kill` dies when every stream is under way. Returns the streams and
    the states that /health named from then on."""
    model = engine.get("/v1/models").json()["data"][0]["id"]
    streams = [Stream() for _ in PROMPTS]
    states: set[str] = set()
    async with httpx.AsyncClient(base_url=engine.base, timeout=LIMIT_S) as client:
        tasks = [
            asyncio.create_task(stream.run(client, model, prompt))
            for stream, prompt in zip(streams, PROMPTS, strict=True)
        ]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        if kill is not None:
            assert any(stream.finish is None for stream in streams), "too late to kill anything"
            os.kill(engine.pid(kill), signal.SIGKILL)
        while not all(task.done() for task in tasks):
            states.add((await client.get("/health")).json()["state"])
            await asyncio.sleep(0.01)
        await asyncio.gather(*tasks)
    return streams, states


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> list[str]:
    streams, states = asyncio.run(complete(engine))
    assert states <= {"ready"}
    assert all(stream.finish == "length" for stream in streams)
    assert len({stream.text for stream in streams}) == STREAMS
    return [stream.text for stream in streams]


@pytest.mark.parametrize("name", ["runner-0", "scheduler", "tokenizer-0", "detokenizer-0"])
def test_streams_survive_a_death(engine: Engine, undisturbed: list[str], name: str) -> None:
    engine.wait_ready()
    before = engine.restarts(name)
    streams, states = asyncio.run(complete(engine, kill=name))
    assert [stream.text for stream in streams] == undisturbed
    assert [stream.finish for stream in streams] == ["length"] * STREAMS
    if name == "runner-0":  # the others may be back before anyone asks
        assert "degraded" in states
    engine.wait_ready()
    assert engine.restarts(name) == before + 1
