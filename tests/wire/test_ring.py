"""The ring: what goes in comes out, in order, whatever its size; nothing stale is ever read."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.wire.link import RunnerGone
from tidemill.wire.plan import SlotInit, StepPlan, StepResult
from tidemill.wire.ring import DATA_AT, Kind, RunnerEnd, SchedulerEnd, _Queue
from tidemill.wire.sampling import SamplingParams

CAPACITY = 256  # words: small, so that everything wraps around often


def ends(folder: Path, capacity: int = CAPACITY) -> tuple[RunnerEnd, SchedulerEnd]:
    runner = RunnerEnd.create(f"{folder}/ring-0", capacity)
    scheduler = SchedulerEnd.attach(runner.path)
    assert runner.next() is Kind.RESET
    return runner, scheduler


def plan(step: int, tokens: int = 0) -> StepPlan:
    return StepPlan(step=step, tokens=np.arange(step, step + tokens, dtype=np.int32))


def result(step: int, tokens: int = 1) -> StepResult:
    ids = np.arange(step, step + tokens, dtype=np.int32)
    return StepResult(step=step, tokens=ids, finished=np.zeros(tokens, dtype=np.int32))


def readable(descriptor: int) -> bool:
    return bool(select.select([descriptor], [], [], 0)[0])


@given(st.lists(st.one_of(st.none(), st.integers(0, CAPACITY // 4 - 3)), max_size=200))
@settings(deadline=None)
def test_queue_equals_a_deque(operations: list[int | None]) -> None:
    """An integer pushes a record of so many words, None pops one."""
    header = memoryview(bytearray(DATA_AT * 4)).cast("Q")
    queue = _Queue(header, (0, 1), np.zeros(CAPACITY, dtype=np.int32))
    model: deque[list[int]] = deque()
    count = 0
    for operation in operations:
        if operation is None:
            record = queue.pop()
            assert (None if record is None else record[2].tolist()) == (
                model.popleft() if model else None
            )
        else:
            words = np.arange(count, count + operation, dtype=np.int32)
            count += operation
            if queue.push(Kind.PLAN, 7, words):
                model.append(words.tolist())
            else:
                # Refused only when it is really full: the record, its head and at worst a
                # skipped end of the ring do not fit beside what is there.
                used = sum(len(each) + 3 for each in model)
                assert used + 2 * (operation + 3) > CAPACITY // 2
    for expected in model:
        kind, epoch, popped = queue.pop() or (0, 0, np.empty(0))
        assert (kind, epoch, popped.tolist()) == (Kind.PLAN, 7, expected)
    assert queue.pop() is None


def test_plan_and_result_arrive_unchanged(tmp_path: Path) -> None:
    runner, scheduler = ends(tmp_path)
    params = SamplingParams(temperature=0.5, top_k=3, stop_token_ids=(2, 5), logit_bias={7: 1.5})
    sent = StepPlan(
        step=3,
        rows=np.array([[1, 10, 4, 3]], dtype=np.int32),
        tokens=np.array([5, 6, 7, 8], dtype=np.int32),
        release=np.array([2], dtype=np.int32),
        admit=[SlotInit(1, params, seed=2**63 + 1, prompt_len=14, max_len=20)],
        pages=np.array([[1, 0, 9]], dtype=np.int32),
        copies=np.array([[3, 9, 5]], dtype=np.int32),
    )
    scheduler.send(sent)
    got = runner.next()
    assert isinstance(got, StepPlan)
    assert np.concatenate(got.encode()).tolist() == np.concatenate(sent.encode()).tolist()
    runner.send_result(result(3, tokens=2))
    back = scheduler.poll()
    assert back is not None
    assert np.concatenate(back.encode()).tolist() == (
        np.concatenate(result(3, tokens=2).encode()).tolist()
    )
    assert scheduler.poll() is None


@given(st.lists(st.integers(0, 3 * CAPACITY), min_size=1, max_size=30))
@settings(deadline=None, max_examples=30)
def test_messages_larger_than_the_ring_pass_while_both_sides_push(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int]
) -> None:
    """Plans and results of several times the ring's size, in both directions at once."""
    runner, scheduler = ends(tmp_path_factory.mktemp("ring"))
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            answered = 0
            while answered < len(sizes):
                got = runner.next()
                if got is None:
                    runner.wait(10)
                    continue
                assert isinstance(got, StepPlan)
                assert got.tokens.tolist() == plan(answered, sizes[answered]).tokens.tolist()
                runner.send_result(result(answered, sizes[answered]))
                answered += 1
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for step, size in enumerate(sizes):  # all plans before the first result is taken
        scheduler.send(plan(step, size))
    for step, size in enumerate(sizes):
        while (back := scheduler.poll()) is None:
            scheduler.wait(10)
        assert (back.step, back.tokens.tolist()) == (step, result(step, size).tokens.tolist())
    thread.join(10)
    assert not failures
    assert not thread.is_alive()


def test_descriptor_is_readable_while_something_is_there(tmp_path: Path) -> None:
    runner, scheduler = ends(tmp_path)
    assert not readable(scheduler.fileno())
    for step in range(3):
        scheduler.send(plan(step))
        runner.next()
        runner.send_result(result(step))
    for _ in range(3):
        assert readable(scheduler.fileno())
        assert scheduler.poll() is not None
    assert scheduler.poll() is None
    assert not readable(scheduler.fileno())


def test_a_new_scheduler_reads_nothing_of_the_old_one(tmp_path: Path) -> None:
    runner, old = ends(tmp_path)
    old.send(plan(1))
    old.send(plan(2))
    assert runner.next() is not None  # plan 1 executes while the scheduler dies
    new = SchedulerEnd.attach(runner.path)
    runner.send_result(result(1))
    new.send(plan(50))
    assert runner.next() is Kind.RESET  # not plan 2
    got = runner.next()
    assert isinstance(got, StepPlan)
    assert got.step == 50
    runner.send_result(result(50))
    back = new.poll()
    assert back is not None
    assert back.step == 50  # not 1
    assert new.poll() is None


def test_a_result_already_waiting_does_not_reach_the_new_scheduler(tmp_path: Path) -> None:
    runner, old = ends(tmp_path)
    old.send(plan(1))
    runner.next()
    runner.send_result(result(1))
    new = SchedulerEnd.attach(runner.path)
    assert new.poll() is None
    assert runner.next() is Kind.RESET


def test_half_a_message_of_a_dead_scheduler_is_dropped(tmp_path: Path) -> None:
    runner, old = ends(tmp_path)
    # The first of several parts arrives, then the scheduler dies.
    old._out.push(Kind.PLAN | 1 << 8, old._epoch, np.arange(20, dtype=np.int32))
    assert runner.next() is None
    new = SchedulerEnd.attach(runner.path)
    new.send(plan(9, tokens=4))
    reset = runner._next()
    assert reset is not None
    assert (reset[0], len(reset[1])) == (Kind.RESET, 0)
    got = runner.next()
    assert isinstance(got, StepPlan)
    assert (got.step, got.tokens.tolist()) == (9, [9, 10, 11, 12])


def test_runner_blocked_on_a_full_ring_gives_up_for_a_new_scheduler(tmp_path: Path) -> None:
    runner, old = ends(tmp_path)
    old.send(plan(1))
    runner.next()
    blocked = threading.Thread(target=runner.send_result, args=(result(1, 5 * CAPACITY),))
    blocked.start()
    blocked.join(0.05)
    assert blocked.is_alive()  # nobody takes the result
    new = SchedulerEnd.attach(runner.path)
    blocked.join(10)
    assert not blocked.is_alive()
    assert new.poll() is None
    new.send(plan(2))
    assert runner.next() is Kind.RESET
    assert isinstance(runner.next(), StepPlan)


def test_fault_ends_the_link_with_its_text(tmp_path: Path) -> None:
    runner, scheduler = ends(tmp_path)
    scheduler.send(plan(1))
    runner.next()
    runner.send_fault("the sky fell: 3 €")
    with pytest.raises(RunnerGone, match="the sky fell: 3 €"):
        scheduler.poll()
    with pytest.raises(RunnerGone):
        scheduler.send(plan(2))


def test_results_before_a_fault_are_still_handed_out(tmp_path: Path) -> None:
    runner, scheduler = ends(tmp_path)
    scheduler.send(plan(1))
    runner.next()
    runner.send_result(result(1))
    runner.send_fault("out of order")
    assert scheduler.poll() is not None
    with pytest.raises(RunnerGone, match="out of order"):
        scheduler.poll()


def test_send_to_a_dead_runner_with_a_full_ring_raises(tmp_path: Path) -> None:
    """The runner's process makes a ring and is gone: a scheduler must not wait for it."""
    code = (
        "import sys; from tidemill.wire.ring import RunnerEnd;"
        f"print(RunnerEnd.create(sys.argv[1], {CAPACITY}).path)"
    )
    made = subprocess.run(
        [sys.executable, "-c", code, f"{tmp_path}/ring-0"], capture_output=True, check=True
    )
    scheduler = SchedulerEnd.attach(made.stdout.decode().strip())
    with pytest.raises(RunnerGone, match="died"):
        scheduler.send(plan(1, tokens=10 * CAPACITY))


def test_attaching_to_a_ring_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunnerGone, match="ring-0-1"):
        SchedulerEnd.attach(f"{tmp_path}/ring-0-1")


def test_a_new_runner_removes_the_old_ring(tmp_path: Path) -> None:
    (tmp_path / "ring-0-1").touch()
    (tmp_path / "ring-0-1.runner").touch()
    RunnerEnd.create(f"{tmp_path}/ring-0")
    name = f"ring-0-{os.getpid()}"
    assert {each.name for each in tmp_path.iterdir()} == {
        name,
        f"{name}.runner",
        f"{name}.scheduler",
    }
