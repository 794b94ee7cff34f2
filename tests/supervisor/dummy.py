"""A child process without an engine: says that it is ready, and does what a file tells it to.

    python dummy.py ROLE INDEX                               a child
    python dummy.py supervise PORT MODEL DRAIN_TIMEOUT      a supervisor of such children

The folder of instructions is in TIDEMILL_DUMMY_DIR: `fatal-NAME`, `crash-NAME` and `slow-NAME`
concern the component of that name; `busy` keeps servers from finishing while they drain;
`unresolved` keeps the model from being found.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tidemill import config as configuration
from tidemill.config import EngineConfig
from tidemill.supervisor.child import (
    CONFIG_ENV,
    EXIT_FATAL,
    LISTEN_ENV,
    component_name,
    hold_lifeline,
)
from tidemill.supervisor.supervisor import Supervisor
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.errors import EngineError
from tidemill.wire.messages import RunnerReady, Snapshot, WorkerGone
from tidemill.wire.sockets import Receiver
from tidemill.wire.status import StatusReporter

FOLDER = Path(os.environ["TIDEMILL_DUMMY_DIR"])
READY = RunnerReady(
    ring="",
    num_pages=1,
    page_size=16,
    max_model_len=16,
    max_running_requests=1,
    max_batch_tokens=16,
    vocab_size=8,
    device="none",
)


def child(role: str, index: int) -> int:
    hold_lifeline()
    config = configuration.decode(os.environ[CONFIG_ENV])
    name = component_name(role, index)
    (FOLDER / f"pid-{name}").write_text(str(os.getpid()))
    context = zmq.Context()
    reporter = StatusReporter(context, config.run_dir, name)
    if (FOLDER / f"crash-{name}").exists():
        return 1
    if (FOLDER / f"fatal-{name}").exists():
        reporter.fatal(f"{name}: no room")
        reporter.close()
        return EXIT_FATAL
    reporter.starting("warming up", 0.5)
    while (FOLDER / f"slow-{name}").exists():
        time.sleep(0.01)
    reporter.ready(READY if role == "runner" else None)
    if role == "server":
        return serve(context, config, answers=index == 0)
    if role == "scheduler":
        inbox = Receiver.bind(context, Endpoints(config.run_dir).scheduler)
        while True:
            for message in inbox.receive():
                if isinstance(message, WorkerGone):
                    (FOLDER / "worker-gone").write_text(str(message.worker))
    while True:
        time.sleep(60)


def serve(context: zmq.Context[zmq.Socket[bytes]], config: EngineConfig, answers: bool) -> int:
    """Write the latest Snapshot, with the configuration, to everyone who connects. One worker
    alone does, so that no answer is older than the one before."""
    listener = socket.socket(fileno=int(os.environ[LISTEN_ENV]))
    events = Receiver.subscribe(context, Endpoints(config.run_dir).events)
    latest: list[Snapshot] = []

    def answer() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                while not latest:
                    time.sleep(0.01)
                connection.sendall(msgspec.json.encode((latest[-1], config)))

    if answers:
        threading.Thread(target=answer, daemon=True).start()
    while True:
        latest.extend(m for m in events.receive(0.05) if isinstance(m, Snapshot))
        if latest and latest[-1].state == "draining" and not (FOLDER / "busy").exists():
            return 0


def resolve(model: str, *, progress: Callable[[str, float | None], None]) -> Path:
    progress("Fetching", 0.25)
    while (FOLDER / "unresolved").exists():
        time.sleep(0.01)
    if model == "missing":
        raise EngineError("no such model: missing")
    return Path("/models") / model


def supervise(port: int, model: str, drain_timeout: float) -> int:
    config = EngineConfig(model=model, port=port, drain_timeout=drain_timeout, servers=2)

    def command(role: str, index: int) -> list[str]:
        return [sys.executable, __file__, role, str(index)]

    try:
        return Supervisor(config, command, resolve).run()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        sys.exit(supervise(int(sys.argv[2]), sys.argv[3], float(sys.argv[4])))
    sys.exit(child(sys.argv[1], int(sys.argv[2])))
