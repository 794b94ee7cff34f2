"""The engine under SIGKILL: streams pause, go on, and say what they would have said.

Once with a simulated runner, whose tokens are a hash of all that came before, as bytes that are
mostly no valid UTF-8: one wrong or missing token, and all text behind it differs. Once with the
model runner and a tiny model of random weights, in float32, the exact mode, so that recomputing
what was lost gives the same tokens.
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
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

LIMIT_S = 120.0  # only a failure takes so long
TOKENS = 300  # of each stream
KILL_AT = 8  # events of each stream
SIMULATED = Path(__file__).with_name("simulated.py")
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


MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 256,
}


def make_model(folder: Path) -> None:
    """A configuration, and a tokenizer whose tokens are the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({each: at for at, each in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(MODEL))


def command(runner: str, folder: Path, port: int) -> list[str]:
    if runner == "simulated":
        return [sys.executable, str(SIMULATED), "supervise", str(folder), str(port)]
    flags = ["--load-format", "dummy", "--dtype", "float32", "--kv-memory", "16MiB"]
    flags += ["--max-batch-tokens", "64", "--max-running-requests", "16", "--threads", "1"]
    return [sys.executable, "-m", "tidemill", "serve", str(folder), "--port", str(port), *flags]


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
        pid = self.get("/health").json()["components"][name]["pid"]
        assert pid > 0
        return int(pid)

    def restarts(self, name: str) -> float:
        pattern = rf'^tidemill_restarts_total{{component="{name}"}} (\S+)$'
        found = re.search(pattern, self.get("/metrics").text, re.MULTILINE)
        assert found is not None, f"no restarts of {name} in /metrics"
        return float(found[1])


@pytest.fixture(scope="module", params=["simulated", "model"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("kill")
    make_model(folder)
    log = folder / "log"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command(request.param, folder, port), stderr=output, env=environment
        )
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

    async def run(self, client: httpx.AsyncClient, prompt: str) -> None:
        try:
            await self._run(client, prompt)
        finally:
            self.started.set()

    async def _run(self, client: httpx.AsyncClient, prompt: str) -> None:
        body = {
            "model": (await client.get("/v1/models")).json()["data"][0]["id"],
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "seed": 1,  # the simulated runner samples by it even so
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


async def events(response: httpx.Response) -> AsyncIterator[dict]:
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def complete(engine: Engine, kill: tuple[str, ...] = ()) -> tuple[list[Stream], set[str]]:
    """All prompts at once; those in `kill` die when every stream is under way. Returns the
    streams and the states that /health named from then on."""
    streams = [Stream() for _ in PROMPTS]
    states: set[str] = set()
    async with httpx.AsyncClient(base_url=engine.base, timeout=LIMIT_S) as client:
        tasks = [
            asyncio.create_task(stream.run(client, prompt))
            for stream, prompt in zip(streams, PROMPTS, strict=True)
        ]
        await asyncio.gather(*(stream.started.wait() for stream in streams))
        for name in kill:
            assert any(stream.finish is None for stream in streams), "too late to kill anything"
            os.kill(engine.pid(name), signal.SIGKILL)
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
    assert len({stream.text for stream in streams}) == len(PROMPTS)
    return [stream.text for stream in streams]


ONE = [("runner-0",), ("scheduler",), ("tokenizer-0",), ("detokenizer-0",)]
ALL = ("runner-0", "scheduler", "tokenizer-0", "detokenizer-0")


@pytest.mark.parametrize("names", [*ONE, ALL], ids=",".join)
def test_streams_survive_a_death(
    engine: Engine, undisturbed: list[str], names: tuple[str, ...]
) -> None:
    engine.wait_ready()
    before = {name: engine.restarts(name) for name in names}
    streams, states = asyncio.run(complete(engine, names))
    assert [stream.text for stream in streams] == undisturbed
    assert [stream.finish for stream in streams] == ["length"] * len(PROMPTS)
    if "runner-0" in names:  # the others may be back before anyone asks
        assert "degraded" in states
    engine.wait_ready()
    assert {name: engine.restarts(name) - before[name] for name in names} == dict.fromkeys(names, 1)
