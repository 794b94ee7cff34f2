"""One supervised process: how it is started, what it said last, when it may start again."""

from __future__ import annotations

import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.wire.messages import ComponentInfo, ComponentState, Status

MAX_FAILED_STARTS = 4  # deaths in a row before it was ready
WINDOW_S = 60.0  # in which deaths lengthen the pause
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0


@dataclass(slots=True)
class Component:
    """`generation` counts starts. A component that is dead starts again at `restart_at`
    (monotonic seconds) unless that is None. An `external` one is started by hand, under a
    debugger or a profiler, and known by its reports alone."""

    role: str
    index: int
    name: str
    external: bool = False
    process: subprocess.Popen[bytes] | None = None
    pid: int = 0  # 0: none
    generation: int = 0
    state: ComponentState = "dead"
    detail: str = ""
    progress: float | None = None
    restart_at: float | None = 0.0
    failed_starts: int = 0
    _deaths: deque[float] = field(default_factory=deque)

    @property
    def info(self) -> ComponentInfo:
        return ComponentInfo(
            state=self.state,
            pid=self.pid,
            generation=self.generation,
            detail=self.detail,
            progress=self.progress,
        )

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], descriptors: Sequence[int]
    ) -> None:
        self.restart_at = None
        if self.external:
            return
        # A group of its own: Ctrl-C in a terminal reaches the supervisor alone, which drains.
        self.process = subprocess.Popen(
            command,
            env=environment,
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            process_group=0,
        )
        self.pid = self.process.pid
        self.generation += 1
        self.state, self.detail, self.progress = "starting", "", None

    def take(self, status: Status) -> bool:
        """Note a report; False if it is an earlier incarnation's."""
        if self.external and status.pid != self.pid:
            self.pid = status.pid
            self.generation += 1
        if status.pid != self.pid:
            return False
        self.state, self.detail, self.progress = status.state, status.detail, status.progress
        if status.state == "ready":
            self.failed_starts = 0
        return True

    def reap(self) -> int | None:
        """If the process has ended: note its death, plan the restart, return the exit code
        (negative: the signal)."""
        if self.process is None or (code := self.process.poll()) is None:
            return None
        now = time.monotonic()
        if self.state != "ready":
            self.failed_starts += 1
        self.process, self.pid, self.state, self.progress = None, 0, "dead", None
        self.detail = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.restart_at = now + self._pause(now)
        return code

    def _pause(self, now: float) -> float:
        """None after the first death for a while, then twice as long each time."""
        while self._deaths and now - self._deaths[0] > WINDOW_S:
            self._deaths.popleft()
        before = len(self._deaths)
        self._deaths.append(now)
        return min(FIRST_PAUSE_S * 2 ** (before - 1), LONGEST_PAUSE_S) if before else 0.0
