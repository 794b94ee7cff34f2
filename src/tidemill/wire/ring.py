"""The shared-memory ring between the scheduler and a runner.

One file, mapped by both; two single-producer single-consumer queues of int32 words in it, one
for each direction. The runner makes it (`RunnerEnd.create`), the scheduler attaches
(`SchedulerEnd.attach`).

    words    0..15                    magic, version, capacity, runner's pid, epoch
    words   16..47, 48..79            head and tail of each direction, each in its own cache line
    words 1024..                      to the runner: `capacity` words, then to the scheduler

A record is `kind, epoch, length` and then `length` words, always in one piece: where the end of
the ring is too near, a SKIP record fills it. A message longer than a quarter of the ring goes as
several records, all but the last marked MORE, so a message of any size passes.

*Waiting.* Each end sleeps in poll() on a named pipe of its own, into which the other writes a
byte after each record. The pipe only wakes; `head` says what is there. An end that finds nothing
empties its pipe and looks once more before it sleeps, so no record is missed. There is no
spinning: with few cores it takes time from the very process that is waited for.

*Memory order.* A producer writes the words, then `head`; a consumer reads `head`, then the
words, and moves `tail` only when it has copied them. On x86 (total store order) stores become
visible in program order and loads are not reordered, so this suffices. Elsewhere the write to
and the read from the pipe are full barriers on the path that waits, and on the path that finds
`head` moved early, the interpreter executes thousands of instructions, hundreds of them stores,
between the two accesses: more than any processor's reorder window and store buffer hold. Both
counters are 8-byte aligned and written with one store.

*Epochs.* Each scheduler that attaches raises the epoch in the header and sends RESET. Records
carry the epoch of the scheduler they come from or go to; those of an earlier one are skipped. So
what a scheduler left behind when it died reaches neither the runner nor its successor.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum
from pathlib import Path

import numpy as np

from tidemill.wire.link import RunnerGone
from tidemill.wire.plan import EMPTY, I32, StepPlan, StepResult

MAGIC = 0x7D311
VERSION = 1
CAPACITY = 1 << 18  # words a direction: 1 MiB
RECORD_HEAD = 3  # words: kind, epoch, length
MORE = 1 << 8  # or'ed to a kind: the message goes on in the next record
DATA_AT = 1024  # words

# Indices into the header as 64-bit words.
_MAGIC, _VERSION, _CAPACITY, _PID, _EPOCH = range(5)
_COUNTERS = {"runner": (8, 16), "scheduler": (24, 32)}  # (head, tail) of what goes *to* it

FIRST_NAP_S, LONGEST_NAP_S = 0.0005, 0.01  # of a producer while the ring is full


class Kind(IntEnum):
    PLAN = 1
    RESULT = 2
    RESET = 3  # a scheduler attached: the runner forgets all slots
    FAULT = 4  # the runner cannot go on; the words are UTF-8 text
    SKIP = 5  # nothing; the next record is at the start of the ring


class _Queue:
    """One direction. Only its producer calls `push`, only its consumer `pop`."""

    def __init__(self, header: memoryview, counters: tuple[int, int], data: I32) -> None:
        self._header = header  # of 64-bit words
        self._head, self._tail = counters
        self._data = data
        self._capacity = len(data)
        self.longest = self._capacity // 4 - RECORD_HEAD

    def push(self, kind: int, epoch: int, words: I32) -> bool:
        """Append a record of at most `longest` words; False when it does not fit now."""
        header, data, capacity = self._header, self._data, self._capacity
        head, tail = header[self._head], header[self._tail]
        at, needed = head % capacity, RECORD_HEAD + len(words)
        rest = capacity - at  # to the end of the ring
        skipped = 0 if needed <= rest else rest
        if head + skipped + needed - tail > capacity:
            return False
        if skipped:
            data[at] = Kind.SKIP
            at = 0
        data[at], data[at + 1], data[at + 2] = kind, epoch, len(words)
        data[at + RECORD_HEAD : at + needed] = words
        header[self._head] = head + skipped + needed
        return True

    def pop(self) -> tuple[int, int, I32] | None:
        """(kind, epoch, a copy of the words) of the oldest record, if there is one."""
        header, data, capacity = self._header, self._data, self._capacity
        tail = header[self._tail]
        if tail == header[self._head]:
            return None
        at = tail % capacity
        if data[at] == Kind.SKIP:
            tail += capacity - at
            at = 0
        kind, epoch, length = data[at : at + RECORD_HEAD].tolist()
        at += RECORD_HEAD
        words = data[at : at + length].copy()
        header[self._tail] = tail + RECORD_HEAD + length
        return kind, epoch, words


class _End:
    """What both ends have in common: the mapping, a queue each way, the pipes."""

    def __init__(self, path: str, inbox: str, outbox: str) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._map = mmap.mmap(descriptor, 0)
        finally:
            os.close(descriptor)
        self._header = memoryview(self._map)[: DATA_AT * 4].cast("Q")
        if (self._header[_MAGIC], self._header[_VERSION]) != (MAGIC, VERSION):
            raise RunnerGone(f"{path} is not a ring of version {VERSION}")
        capacity = self._header[_CAPACITY]
        words = np.frombuffer(self._map, dtype=np.int32)
        halves = {"runner": DATA_AT, "scheduler": DATA_AT + capacity}
        self._in, self._out = (
            _Queue(self._header, _COUNTERS[to], words[halves[to] : halves[to] + capacity])
            for to in (inbox, outbox)
        )
        self._epoch = self._header[_EPOCH]
        self._parts: list[I32] = []  # of a message that is not complete
        # Read-write, so that a pipe never reports that its other end is closed.
        flags = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
        self._wake_me = os.open(f"{path}.{inbox}", flags)
        self._wake_peer = os.open(f"{path}.{outbox}", flags)
        self._poller = select.poll()
        self._poller.register(self._wake_me, select.POLLIN)

    def fileno(self) -> int:
        """Readable while `_next` may have something."""
        return self._wake_me

    def wait(self, timeout_s: float | None = None) -> None:
        """Sleep until the other end has written, or the time is up."""
        self._poller.poll(None if timeout_s is None else timeout_s * 1000)

    def close(self) -> None:
        """Let go of the pipes. The mapping goes with the last array that refers to it."""
        os.close(self._wake_me)
        os.close(self._wake_peer)

    def _next(self) -> tuple[Kind, I32] | None:
        """The next message of the present epoch, if there is one; never blocks."""
        while True:
            record = self._in.pop()
            if record is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_me, 1 << 16)
                record = self._in.pop()
                if record is None:
                    return None
            kind, epoch, words = record
            if epoch != self._current_epoch():
                continue
            if kind & MORE:
                self._parts.append(words)
                continue
            if self._parts:
                words = np.concatenate([*self._parts, words])
                self._parts.clear()
            return Kind(kind), words

    def _current_epoch(self) -> int:
        """The epoch in the header. A new one makes half a message of the old one worthless."""
        epoch = self._header[_EPOCH]
        if epoch != self._epoch:
            self._epoch = epoch
            self._parts.clear()
        return epoch

    def _send(
        self, kind: Kind, arrays: Sequence[I32], epoch: int, give_way: Callable[[], bool]
    ) -> None:
        """Push a message and wake the other end. While the ring is full, nap; `give_way` runs
        between naps and says whether to go on trying."""
        words = np.concatenate(arrays) if len(arrays) != 1 else arrays[0]
        longest = self._out.longest
        last = max(len(words) - 1, 0) // longest * longest
        for at in range(0, last + 1, longest):
            mark = kind | MORE if at < last else kind
            nap = FIRST_NAP_S
            while not self._out.push(mark, epoch, words[at : at + longest]):
                if not give_way():
                    return
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_S)
            # EAGAIN: the pipe holds bytes enough to wake anyone.
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_peer, b"\1")


class RunnerEnd(_End):
    """The runner's side: receives plans, sends results."""

    @classmethod
    def create(cls, prefix: str, capacity: int = CAPACITY) -> RunnerEnd:
        """Make the ring `prefix`-PID, and remove those of runners before this one."""
        path = Path(f"{prefix}-{os.getpid()}")
        for stale in path.parent.glob(f"{Path(prefix).name}-*"):
            stale.unlink()
        header = struct.pack("<5Q", MAGIC, VERSION, capacity, os.getpid(), 0)
        with open(path, "xb") as file:
            file.write(header)
            file.truncate((DATA_AT + 2 * capacity) * 4)
        for end in ("runner", "scheduler"):
            os.mkfifo(f"{path}.{end}", 0o600)
        return cls(str(path))

    def __init__(self, path: str) -> None:
        super().__init__(path, inbox="runner", outbox="scheduler")
        self.path = path
        self._plan_epoch = 0  # of the plan taken last, and so of its result

    def next(self) -> StepPlan | Kind | None:
        """The next plan, `Kind.RESET`, or None when there is nothing; never blocks."""
        message = self._next()
        if message is None:
            return None
        kind, words = message
        self._plan_epoch = self._epoch
        return StepPlan.decode(words) if kind is Kind.PLAN else kind

    def send_result(self, result: StepResult) -> None:
        """Answer the plan taken last. Waits while the ring is full, unless a new scheduler
        has attached meanwhile, who does not want the result."""
        self._send(Kind.RESULT, result.encode(), self._plan_epoch, self._is_wanted)

    def send_fault(self, text: str) -> None:
        """Tell the scheduler that this runner cannot go on."""
        data = text.encode()
        words = np.frombuffer(data + bytes(-len(data) % 4), dtype=np.int32)
        self._send(Kind.FAULT, [words], self._plan_epoch, lambda: False)

    def _is_wanted(self) -> bool:
        return self._header[_EPOCH] == self._plan_epoch


class SchedulerEnd(_End):
    """The scheduler's side; implements `wire.link.RunnerLink`."""

    @classmethod
    def attach(cls, path: str) -> SchedulerEnd:
        """Take over the ring from any scheduler before. Raises RunnerGone if there is none."""
        try:
            return cls(path)
        except FileNotFoundError:
            raise RunnerGone(f"the runner's ring {path} is gone") from None

    def __init__(self, path: str) -> None:
        super().__init__(path, inbox="scheduler", outbox="runner")
        self._results: deque[StepResult] = deque()
        self._gone: str | None = None
        self._header[_EPOCH] += 1
        self._epoch = self._header[_EPOCH]
        self._send(Kind.RESET, [EMPTY], self._epoch, self._take_results)

    def send(self, plan: StepPlan) -> None:
        """Hand over a plan. Waits while the ring is full. Raises RunnerGone."""
        if self._gone is not None:
            raise RunnerGone(self._gone)
        self._send(Kind.PLAN, plan.encode(), self._epoch, self._take_results)
        if self._gone is not None:
            raise RunnerGone(self._gone)

    def poll(self) -> StepResult | None:
        """The next result if there is one; never blocks. Raises RunnerGone."""
        if self._results:
            return self._results.popleft()
        if self._gone is None:
            self._take_result()
        if self._results:
            return self._results.popleft()
        if self._gone is not None:
            raise RunnerGone(self._gone)
        return None

    def _take_result(self) -> bool:
        message = self._next()
        if message is None:
            return False
        kind, words = message
        if kind is Kind.FAULT:
            self._gone = words.tobytes().rstrip(b"\0").decode(errors="replace")
        else:
            self._results.append(StepResult.decode(words))
        return True

    def _take_results(self) -> bool:
        """While the way out is full: take results in, for the runner may be waiting for just
        that, and see whether it lives."""
        while self._gone is None and self._take_result():
            pass
        try:
            os.kill(self._header[_PID], 0)
        except ProcessLookupError:
            self._gone = self._gone or "the runner died"
        return self._gone is None
