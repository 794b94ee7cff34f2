"""The scheduler's process with a simulated runner behind the real ring, turn by turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq

from tidemill.config import EngineConfig
from tidemill.runner.process import serve
from tidemill.scheduler.process import SchedulerProcess
from tidemill.scheduler.simulated import SimulatedRunner, expected_output
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    Abort,
    ComponentInfo,
    RequestEnd,
    RunnerReady,
    Snapshot,
    Stopped,
    Submit,
    TokenBatch,
    WorkerGone,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.plan import StepPlan, StepResult
from tidemill.wire.ring import RunnerEnd
from tidemill.wire.sampling import SamplingParams
from tidemill.wire.sockets import Publisher, Receiver, Sender

LIMIT_S = 20.0
VOCAB = 1000
READY = RunnerReady(
    ring="",
    num_pages=64,
    page_size=4,
    max_model_len=128,
    max_running_requests=4,
    max_batch_tokens=32,
    vocab_size=VOCAB,
    device="simulated",
)
Context = zmq.Context[zmq.Socket[bytes]]


class Runner(SimulatedRunner):
    def __init__(self) -> None:
        super().__init__(READY)
        self.fail = False

    def reset(self) -> None:
        SimulatedRunner.__init__(self, READY)

    def execute(self, plan: StepPlan) -> StepResult:
        if self.fail:
            raise ValueError("it broke")
        return super().execute(plan)


class Stage:
    """All that surrounds the scheduler's process, played by the test."""

    def __init__(self, folder: Path, context: Context) -> None:
        self.folder = folder
        self.context = context
        self.endpoints = Endpoints(str(folder))
        self.config = EngineConfig(model="simulated", run_dir=str(folder), detokenizers=2)
        self.publisher = Publisher(context, self.endpoints.events)
        self.server = Sender(context, self.endpoints.scheduler)
        self.detokenizers = [
            Receiver.bind(context, self.endpoints.detokenizer(index)) for index in range(2)
        ]
        self.generation = 0
        self.start_scheduler()
        self.start_runner()

    def start_scheduler(self) -> None:
        self.process = SchedulerProcess(self.config)
        while not self.publisher.has_new_subscribers():
            assert self.publisher.socket.poll(LIMIT_S * 1000)

    def start_runner(self) -> None:
        self.generation += 1
        self.runner = Runner()
        self.ring = RunnerEnd.create(f"{self.endpoints.ring(0)}-{self.generation}")
        self.publish(msgspec.structs.replace(READY, ring=self.ring.path))

    def publish(self, ready: RunnerReady | None) -> None:
        info = ComponentInfo(state="ready", pid=os.getpid(), generation=self.generation)
        self.publisher.send(Snapshot(state="ready", components={"runner-0": info}, runner=ready))

    def turn(self, wait_s: float = LIMIT_S) -> bool:
        """Wait for something to do, do it; the runner too. False if nothing came."""
        came = bool(self.process._poller.poll(wait_s * 1000))
        self.process.turn()
        serve(self.ring, self.runner)
        return came

    def submit(self, rid: int, output_len: int = 8, worker: int = 0) -> None:
        self.server.send(
            Submit(
                rid=rid,
                worker=worker,
                detokenizer=rid % 2,
                prompt_ids=ids_to_bytes(prompt(rid)),
                params=SamplingParams(seed=rid, max_tokens=output_len),
            )
        )

    def hear(self, heard: dict[int, list[int]], ends: dict[int, RequestEnd]) -> None:
        for receiver in self.detokenizers:
            for batch in receiver.receive(0.001):
                assert isinstance(batch, TokenBatch)
                for start in batch.starts:
                    heard.setdefault(start.rid, [])
                rids = np.frombuffer(batch.rids, dtype=np.int64)
                for rid, token in zip(rids.tolist(), bytes_to_ids(batch.tokens), strict=True):
                    heard[rid].append(int(token))
                ends.update({end.rid: end for end in batch.ends})

    def play(self, rids: range) -> dict[int, list[int]]:
        """Until all of `rids` have ended."""
        heard: dict[int, list[int]] = {}
        ends: dict[int, RequestEnd] = {}
        while not set(rids) <= set(ends):
            assert self.turn(), f"stuck with {len(ends)} of {len(rids)} requests ended"
            self.hear(heard, ends)
        return heard


def prompt(rid: int) -> list[int]:
    return [(7 * rid + at) % VOCAB for at in range(5 + rid)]


def expected(rid: int, output_len: int = 8) -> list[int]:
    ids = prompt(rid)
    params = SamplingParams(seed=rid, max_tokens=output_len)
    return expected_output(ids, params, rid, len(ids) + output_len, VOCAB)[0]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    context: Context = zmq.Context()
    made = Stage(tmp_path, context)
    yield made
    made.process.close()
    context.destroy(linger=0)


def test_requests_run_and_each_detokenizer_hears_its_own(stage: Stage) -> None:
    for rid in range(6):
        stage.submit(rid)
    heard = stage.play(range(6))
    assert heard == {rid: expected(rid) for rid in range(6)}


def test_requests_that_come_before_the_runner_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Context = zmq.Context()
    monkeypatch.setattr(Stage, "start_runner", lambda _: None)
    stage = Stage(tmp_path, context)
    monkeypatch.undo()
    stage.submit(1)
    assert not stage.process._poller.poll(100)  # it sleeps
    stage.start_runner()
    assert stage.play(range(1, 2)) == {1: expected(1)}
    stage.process.close()
    context.destroy(linger=0)


@pytest.mark.parametrize("after_turns", range(1, 12))
def test_a_new_runner_goes_on_where_the_dead_one_was(stage: Stage, after_turns: int) -> None:
    """Tokens that were handed out are not handed out again."""
    heard: dict[int, list[int]] = {}
    ends: dict[int, RequestEnd] = {}
    for rid in range(6):
        stage.submit(rid, output_len=24)
    for _ in range(after_turns):
        stage.turn()
    stage.publish(None)  # killed
    stage.process.turn()
    stage.start_runner()
    while len(ends) < 6:
        assert stage.turn()
        stage.hear(heard, ends)
    assert heard == {rid: expected(rid, 24) for rid in range(6)}


def test_a_fault_is_followed_by_a_new_runner(stage: Stage) -> None:
    for rid in range(4):
        stage.submit(rid)
    stage.runner.fail = True
    with pytest.raises(ValueError, match="it broke"):
        stage.play(range(4))
    stage.process.turn()  # hears of the fault
    stage.publish(msgspec.structs.replace(READY, ring=stage.ring.path))  # old news: no attach
    stage.process.turn()
    stage.start_runner()
    assert stage.play(range(4)) == {rid: expected(rid) for rid in range(4)}


def test_a_new_scheduler_takes_over_a_runner_in_the_middle_of_its_work(stage: Stage) -> None:
    for rid in range(4):
        stage.submit(rid, output_len=24)
    for _ in range(5):
        stage.turn()
    stage.process.close()  # killed
    stage.start_scheduler()
    stage.publish(msgspec.structs.replace(READY, ring=stage.ring.path))
    for rid in range(4, 8):
        stage.submit(rid)
    heard = stage.play(range(4, 8))
    assert {rid: heard[rid] for rid in range(4, 8)} == {r: expected(r) for r in range(4, 8)}
    assert all(len(heard.get(rid, [])) < 24 for rid in range(4))  # nobody asked for them again


def test_aborts_stops_and_dead_workers_free_everything(stage: Stage) -> None:
    for rid in range(4):
        stage.submit(rid, output_len=100, worker=rid // 2)
    while len(stage.runner.slots) < 4:
        assert stage.turn()
    stage.server.send(Abort(rid=0))
    stage.server.send(Stopped(rid=1, attempt=0))
    stage.server.send(WorkerGone(worker=1))
    scheduler = stage.process._scheduler
    assert scheduler is not None
    while scheduler.stats.running or scheduler.in_flight:
        assert stage.turn(), "requests still run"
    assert scheduler.stats.waiting == 0
    for rid in range(4, 8):  # they need all slots
        stage.submit(rid)
    heard = stage.play(range(4, 8))
    assert {rid: heard[rid] for rid in range(4, 8)} == {r: expected(r) for r in range(4, 8)}
