"""The supervisor with dummy children: states, restarts, reasons, draining, clean-up."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

from tidemill.config import EngineConfig
from tidemill.wire.messages import Snapshot

DUMMY = Path(__file__).with_name("dummy.py")
LIMIT_S = 30.0  # for things that take a second; only a failure waits so long
NAMES = {
    "server-0",
    "server-1",
    "runner-0",
    "scheduler",
    "tokenizer-0",
    "detokenizer-0",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


class Engine:
    def __init__(self, folder: Path, model: str, drain_timeout: float, external: str) -> None:
        self.folder = folder
        self.port = free_port()
        self.process = subprocess.Popen(
            [sys.executable, str(DUMMY), "supervise", str(self.port), model, str(drain_timeout)],
            env=os.environ | {"TIDEMILL_DUMMY_DIR": str(folder), "TIDEMILL_EXTERNAL": external},
            stderr=subprocess.PIPE,
        )

    def look(self) -> tuple[Snapshot, EngineConfig]:
        """What a server says."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            with contextlib.suppress(ConnectionError):
                with socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT_S) as client:
                    data = b"".join(iter(lambda: client.recv(1 << 16), b""))
                return msgspec.json.decode(data, type=tuple[Snapshot, EngineConfig])
            assert time.monotonic() < deadline, "nobody answers"
            time.sleep(0.02)

    def snapshot(self) -> Snapshot:
        return self.look()[0]

    def wait_for(self, state: str) -> Snapshot:
        until(lambda: self.snapshot().state == state)
        return self.snapshot()

    def metrics(self, name: str) -> dict[str, float]:
        """Samples of all processes' metric `name`, by their labels."""
        registry = CollectorRegistry()
        multiprocess.MultiProcessCollector(registry, path=f"{self.look()[1].run_dir}/metrics")
        lines = generate_latest(registry).decode().splitlines()
        found = [line.rpartition(" ") for line in lines if line.startswith(name)]
        return {labels.removeprefix(name): float(value) for labels, _, value in found}

    def pid(self, name: str) -> int:
        return int((self.folder / f"pid-{name}").read_text())

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def end(self) -> tuple[int, str]:
        """(exit code, log) once it has ended."""
        _, log = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, log.decode()


Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def start_engine(
        model: str = "tide", drain_timeout: float = LIMIT_S, external: str = ""
    ) -> Engine:
        engines.append(Engine(tmp_path, model, drain_timeout, external))
        return engines[-1]

    yield start_engine
    for engine in engines:
        if engine.process.poll() is None:
            engine.process.send_signal(signal.SIGTERM)
            engine.process.send_signal(signal.SIGINT)  # the second one: at once
        engine.end()


def test_servers_answer_while_the_model_is_fetched_and_the_rest_starts(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "unresolved").touch()
    (tmp_path / "slow-runner-0").touch()
    engine = start()
    until(lambda: "model" in engine.snapshot().components)
    fetching = engine.snapshot()
    assert fetching.state == "starting"
    model = fetching.components["model"]
    assert (model.detail, model.progress) == ("Fetching", 0.25)
    (tmp_path / "unresolved").unlink()
    until(lambda: set(engine.snapshot().components) == NAMES)
    until(lambda: engine.snapshot().components["detokenizer-0"].state == "ready")
    until(lambda: engine.snapshot().components["runner-0"].detail == "warming up")
    assert engine.snapshot().state == "starting"  # the runner is not ready
    (tmp_path / "slow-runner-0").unlink()
    ready = engine.wait_for("ready")
    assert ready.runner is not None
    assert {each.generation for each in ready.components.values()} == {1}


def test_children_get_the_resolved_model_under_the_name_that_clients_use(start: Start) -> None:
    engine = start()
    engine.wait_for("ready")
    runner = psutil.Process(engine.pid("runner-0"))
    config = msgspec.json.decode(runner.environ()["TIDEMILL_CONFIG"], type=EngineConfig)
    assert (config.model, config.model_name, config.port) == ("/models/tide", "tide", engine.port)
    run_dir = Path(config.run_dir)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    engine.process.terminate()
    engine.end()
    assert not run_dir.exists()


def test_what_dies_is_started_again_and_counted(start: Start) -> None:
    engine = start()
    before = engine.wait_for("ready")
    for name in sorted(NAMES):
        os.kill(engine.pid(name), signal.SIGKILL)
        until(lambda name=name: engine.snapshot().components[name].generation == 2)
        after = engine.wait_for("ready")
        assert after.components[name].pid == engine.pid(name) != before.components[name].pid
        others = NAMES - {name}
        assert all(after.components[other] == before.components[other] for other in others)
        if name.startswith("server"):  # the scheduler is told whose requests are gone
            gone = engine.folder / "worker-gone"
            until(lambda gone=gone, name=name: gone.exists() and gone.read_text() == name[-1])
        before = after
    restarts = engine.metrics("tidemill_restarts_total")
    assert restarts == {f'{{component="{name}"}}': 1.0 for name in NAMES}


def test_while_the_runner_is_away_the_engine_is_degraded(start: Start) -> None:
    engine = start()
    engine.wait_for("ready")
    (engine.folder / "slow-runner-0").touch()
    os.kill(engine.pid("runner-0"), signal.SIGKILL)
    assert engine.wait_for("degraded").runner is None
    (engine.folder / "slow-runner-0").unlink()
    assert engine.wait_for("ready").runner is not None


def test_a_reason_why_a_restart_cannot_help_ends_the_engine(start: Start, tmp_path: Path) -> None:
    (tmp_path / "fatal-runner-0").touch()
    code, log = start().end()
    assert code == 1
    assert log.splitlines()[-1] == "error: runner-0: no room"


def test_a_model_that_cannot_be_found_ends_the_engine(start: Start) -> None:
    code, log = start(model="missing").end()
    assert (code, log.splitlines()[-1]) == (1, "error: no such model: missing")


def test_a_child_that_never_gets_ready_ends_the_engine(start: Start, tmp_path: Path) -> None:
    (tmp_path / "crash-tokenizer-0").touch()
    engine = start()
    code, log = engine.end()
    assert code == 1
    last = log.splitlines()[-1]
    assert last.startswith("error: tokenizer-0 died 4 times in a row before it was ready")
    assert "exit code 1" in last


def test_a_port_in_use_is_said_at_once(start: Start) -> None:
    engine = start()
    engine.snapshot()
    command = [*engine.process.args[:3], str(engine.port), "tide", "1"]  # type: ignore[index]
    environment = os.environ | {"TIDEMILL_DUMMY_DIR": str(engine.folder)}
    second = subprocess.run(command, env=environment, capture_output=True, timeout=LIMIT_S)
    assert second.returncode == 1
    reason = f"error: port {engine.port} on 127.0.0.1 is in use; choose another with --port"
    assert second.stderr.decode().splitlines()[-1] == reason


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_draining_waits_for_the_servers(start: Start, number: signal.Signals) -> None:
    engine = start()
    engine.wait_for("ready")
    children = engine.children()
    (engine.folder / "busy").touch()
    engine.process.send_signal(number)
    assert engine.wait_for("draining").components["server-0"].state == "ready"
    assert engine.process.poll() is None
    # What open requests need is still looked after.
    os.kill(engine.pid("scheduler"), signal.SIGKILL)
    until(lambda: engine.snapshot().components["scheduler"].generation == 2)
    (engine.folder / "busy").unlink()
    assert engine.end()[0] == 0
    assert not any(child.is_running() for child in children)


def test_draining_has_an_end(start: Start) -> None:
    engine = start(drain_timeout=0.2)
    engine.wait_for("ready")
    (engine.folder / "busy").touch()
    engine.process.terminate()
    code, log = engine.end()
    assert code == 0
    assert "still open" in log


def test_a_second_signal_ends_at_once(start: Start) -> None:
    engine = start()
    engine.wait_for("ready")
    children = engine.children()
    (engine.folder / "busy").touch()
    engine.process.send_signal(signal.SIGINT)
    engine.wait_for("draining")
    engine.process.send_signal(signal.SIGINT)
    assert engine.end()[0] == 128 + signal.SIGINT
    assert not any(child.is_running() for child in children)


def test_children_do_not_outlive_a_supervisor_that_is_killed(start: Start) -> None:
    engine = start()
    engine.wait_for("ready")
    children = engine.children()
    assert len(children) == len(NAMES)
    engine.process.kill()
    gone, alive = psutil.wait_procs(children, timeout=LIMIT_S)
    assert (len(gone), alive) == (len(NAMES), [])


def test_a_signal_while_the_model_is_fetched_ends_it(start: Start, tmp_path: Path) -> None:
    (tmp_path / "unresolved").touch()
    engine = start()
    until(lambda: "model" in engine.snapshot().components)
    engine.process.terminate()
    assert engine.end()[0] == 0


def test_an_external_component_is_started_by_hand_with_the_command_that_is_shown(
    start: Start,
) -> None:
    engine = start(external="tokenizer-0")
    until(lambda: (engine.folder / "pid-runner-0").exists())
    until(lambda: engine.snapshot().components["runner-0"].state == "ready")
    assert engine.snapshot().components["tokenizer-0"].state == "dead"
    assert not (engine.folder / "pid-tokenizer-0").exists()
    assert engine.process.stderr is not None
    lines = iter(engine.process.stderr.readline, b"")
    shown = next(line for line in lines if b"tokenizer-0, start it yourself: " in line)
    command = shown.decode().split(": ", 1)[1]
    environment = os.environ | {"TIDEMILL_DUMMY_DIR": str(engine.folder)}
    for generation in (1, 2):
        process = subprocess.Popen(["sh", "-c", f"exec env {command}"], env=environment)
        until(
            lambda count=generation: engine.snapshot().components["tokenizer-0"].generation == count
        )
        assert engine.wait_for("ready").components["tokenizer-0"].pid == process.pid
        process.kill()
        process.wait()
