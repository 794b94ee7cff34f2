"""What one HTTP worker's events cost: a real worker, and an engine that is only messages.

    python benchmarks/server.py [--streams 64] [--tokens 500] [--endpoint chat]

This process plays the tokenizer, the scheduler, the detokenizer, the supervisor and the clients;
the worker is a process of its own, whose CPU time is what counts. Every token is a message's
delta and an event on a connection. Prints events a second of CPU time (what one worker can write
on a core that it has for itself) and of wall time (with this process on the same machine).
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import zmq

from tidemill import config as configuration
from tidemill.config import EngineConfig
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    ComponentInfo,
    RunnerReady,
    Snapshot,
    Submit,
    TextBatch,
    TextDelta,
    TokenizeChat,
    Tokenized,
    TokenizeText,
    ids_to_bytes,
)
from tidemill.wire.sockets import Publisher, Receiver, Sender

TEXT = b" tide"
READY = RunnerReady(
    ring="",
    num_pages=1 << 20,
    page_size=16,
    max_model_len=1 << 20,
    max_running_requests=1024,
    max_batch_tokens=8192,
    vocab_size=1 << 15,
    device="none",
)


class Engine:
    """All that stands behind a worker, as far as the worker can tell."""

    def __init__(self, run_dir: str) -> None:
        context = zmq.Context.instance()
        endpoints = Endpoints(run_dir)
        self._events = Publisher(context, endpoints.events)
        self._control = Receiver.bind(context, endpoints.control)
        self._calls = Receiver.bind(context, endpoints.tokenizer(0))
        self._scheduler = Receiver.bind(context, endpoints.scheduler)
        self._worker = Sender(context, endpoints.server(0))
        self.submits: list[Submit] = []

    def until_ready(self) -> None:
        while not self._control.receive():
            pass
        while not self._events.has_new_subscribers():
            time.sleep(0.01)
        info = ComponentInfo(state="ready", pid=0, generation=1)
        self._events.send(Snapshot(state="ready", components={"scheduler": info}, runner=READY))

    def answer(self) -> None:
        for call in self._calls.drain():
            assert isinstance(call, TokenizeText | TokenizeChat)
            prompt = ids_to_bytes(list(range(16)))
            self._worker.send(Tokenized(call=call.call, prompts=[prompt], eos_ids=(0,)))
        self.submits += [m for m in self._scheduler.drain() if isinstance(m, Submit)]

    def step(self, token: int, last: bool) -> None:
        """One token of every stream."""
        deltas = [
            TextDelta(
                rid=submit.rid,
                attempt=0,
                offset=5 * token,
                text=TEXT.decode(),
                ids=b"abcd",
                generated=token + 1,
                cached_tokens=3,
                finish="length" if last else None,
            )
            for submit in self.submits
        ]
        self._worker.send(TextBatch(deltas=deltas))


@contextmanager
def worker(run_dir: str, port: int) -> Iterator[psutil.Process]:
    os.mkdir(Endpoints(run_dir).metrics_dir)
    config = EngineConfig(model="none", port=port, run_dir=run_dir, log_level="warning")
    environment = os.environ | {
        "TIDEMILL_CONFIG": configuration.encode(config),
        "PROMETHEUS_MULTIPROC_DIR": Endpoints(run_dir).metrics_dir,
    }
    command = [sys.executable, "-m", "tidemill.supervisor.child", "server", "0"]
    process = subprocess.Popen(command, env=environment)
    try:
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def request(endpoint: str, tokens: int) -> bytes:
    body = {"model": "none", "max_tokens": tokens, "stream": True}
    if endpoint == "chat":
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "hello"}]
    else:
        path = "/v1/completions"
        body["prompt"] = "hello"
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--endpoint", choices=["chat", "completions"], default="chat")
    arguments = parser.parse_args()
    streams, tokens = arguments.streams, arguments.tokens
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ExitStack() as stack:
        run_dir = stack.enter_context(tempfile.TemporaryDirectory(prefix="tidemill-"))
        engine = Engine(run_dir)
        process = stack.enter_context(worker(run_dir, port))
        engine.until_ready()
        time.sleep(0.3)
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(streams):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(request(arguments.endpoint, tokens))
            selector.register(connection, selectors.EVENT_READ)
        while len(engine.submits) < streams:
            engine.answer()
            time.sleep(0.001)
        times = process.cpu_times()
        cpu, wall = times.user + times.system, time.perf_counter()
        written = 0
        for token in range(tokens):
            engine.step(token, token == tokens - 1)
            while written < streams * (token + 1):  # so that no two events share a write
                for key, _ in selector.select(1):
                    written += key.fileobj.recv(1 << 16).count(TEXT)  # type: ignore[union-attr]
        times = process.cpu_times()
        cpu, wall = times.user + times.system - cpu, time.perf_counter() - wall
    print(
        f"{arguments.endpoint}, {streams} streams: {cpu / written * 1e6:.1f} µs of CPU an event, "
        f"{written / cpu:,.0f} events/s of CPU time, {written / wall:,.0f} events/s of wall time"
    )


if __name__ == "__main__":
    main()
