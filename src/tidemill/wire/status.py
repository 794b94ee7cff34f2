"""How a component tells the supervisor how it is. The answer is a stream of `Snapshot`s:
`Receiver.subscribe(context, endpoints.events)`, whose last message is the present state."""

from __future__ import annotations

import os
import time

import zmq

from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import ComponentState, RunnerReady, Status
from tidemill.wire.sockets import Sender

PROGRESS_INTERVAL_S = 0.1


class StatusReporter:
    """Reports of one component, named as in `Snapshot.components` ("server-0", "scheduler")."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], run_dir: str, component: str
    ) -> None:
        self._component = component
        self._sender = Sender(context, Endpoints(run_dir).control)
        self._last_progress = 0.0

    def starting(self, detail: str, progress: float | None = None) -> None:
        """Say what start-up is at; `progress` is 0..1 of `detail`. Cheap to call often."""
        now = time.monotonic()
        if progress is not None:
            if progress < 1 and now - self._last_progress < PROGRESS_INTERVAL_S:
                return
            self._last_progress = now
        self._send("starting", detail=detail, progress=progress)

    def ready(self, runner: RunnerReady | None = None) -> None:
        self._send("ready", runner=runner)

    def fatal(self, reason: str) -> None:
        """A one-line reason why a restart cannot help: the supervisor ends the engine with it."""
        self._send("dead", fatal=reason)

    def close(self) -> None:
        """Close once the last report has left (at most a second)."""
        self._sender.close()

    def _send(
        self,
        state: ComponentState,
        *,
        detail: str = "",
        progress: float | None = None,
        runner: RunnerReady | None = None,
        fatal: str | None = None,
    ) -> None:
        self._sender.send(
            Status(
                component=self._component,
                state=state,
                pid=os.getpid(),
                detail=detail,
                progress=progress,
                runner=runner,
                fatal=fatal,
            )
        )
