"""The scheduler's process: between the servers' requests, the runner's ring and the detokenizers.

It sleeps in the kernel until one of them has something. Until the first runner is ready,
requests wait unread in the socket.
"""

from __future__ import annotations

import logging
import time

import zmq

from tidemill.config import EngineConfig
from tidemill.scheduler.metrics import SchedulerMetrics
from tidemill.scheduler.scheduler import Scheduler
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.link import RunnerGone
from tidemill.wire.messages import Abort, AnyMessage, Snapshot, Stopped, Submit, WorkerGone
from tidemill.wire.ring import SchedulerEnd
from tidemill.wire.sockets import Receiver, Sender
from tidemill.wire.status import StatusReporter

RUNNER = "runner-0"
METRICS_INTERVAL_S = 0.05  # while steps run; the last one of a burst is counted at once

log = logging.getLogger(__name__)


def main(config: EngineConfig, index: int) -> None:
    """Run until killed. There is one scheduler, so `index` is 0."""
    SchedulerProcess(config).run()


class SchedulerProcess:
    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._context = context = zmq.Context()
        endpoints = Endpoints(config.run_dir)
        self._inbox = Receiver.bind(context, endpoints.scheduler)
        self._events = Receiver.subscribe(context, endpoints.events)
        self._detokenizers = [
            Sender(context, endpoints.detokenizer(i)) for i in range(config.detokenizers)
        ]
        self._reporter = StatusReporter(context, config.run_dir, "scheduler")
        self._metrics = SchedulerMetrics()
        self._metrics_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._events.socket, zmq.POLLIN)
        self._scheduler: Scheduler | None = None
        self._link: SchedulerEnd | None = None  # None: no runner
        self._runner: tuple[int, str] | None = None  # (generation, ring) that was seen last

    def close(self) -> None:
        """Let go of all sockets and the ring; for tests, as a process just ends."""
        if self._link is not None:
            self._link.close()
        self._context.destroy(linger=0)

    def run(self) -> None:
        self._reporter.ready()
        while True:
            self._poller.poll()
            self.turn()

    def turn(self) -> None:
        """Take in everything that has come, and act on it. Never blocks."""
        for event in self._events.drain():
            if isinstance(event, Snapshot):
                self._follow_runner(event)
        if self._scheduler is None:
            return
        for message in self._inbox.drain():
            self._take(self._scheduler, message)
        try:
            batches = self._scheduler.advance()
        except RunnerGone as gone:
            log.warning("runner lost: %s", gone)
            self._lose_runner(self._scheduler)
            batches = self._scheduler.advance()
        for detokenizer, batch in batches.items():
            self._detokenizers[detokenizer].send(batch)
        now = time.monotonic()
        if now > self._metrics_at or not self._scheduler.in_flight:
            self._metrics_at = now + METRICS_INTERVAL_S
            self._metrics.update(self._scheduler)

    def _take(self, scheduler: Scheduler, message: AnyMessage) -> None:
        match message:
            case Submit():
                scheduler.submit(message)
            case Abort():
                scheduler.abort(message.rid)
            case Stopped():
                scheduler.stopped(message.rid, message.attempt)
            case WorkerGone():
                scheduler.worker_gone(message.worker)
            case _:
                raise TypeError(f"not for the scheduler: {type(message).__name__}")

    def _follow_runner(self, snapshot: Snapshot) -> None:
        """Let go of a runner that is gone, attach to a new one."""
        ready = snapshot.runner
        seen = (snapshot.components[RUNNER].generation, ready.ring) if ready is not None else None
        if seen == self._runner:
            return
        self._runner = seen
        if self._scheduler is not None:
            self._lose_runner(self._scheduler)
        if ready is None:
            return
        try:
            link = SchedulerEnd.attach(ready.ring)
        except RunnerGone as gone:
            log.warning("%s", gone)  # it died again; the next snapshot says more
            return
        if self._scheduler is None:
            self._scheduler = Scheduler(self._config, ready, link)
            self._poller.register(self._inbox.socket, zmq.POLLIN)
        else:
            self._scheduler.attach(ready, link)
        self._link = link
        self._poller.register(link.fileno(), zmq.POLLIN)

    def _lose_runner(self, scheduler: Scheduler) -> None:
        if self._link is None:
            return
        self._poller.unregister(self._link.fileno())
        self._link.close()
        self._link = None
        scheduler.runner_lost()
