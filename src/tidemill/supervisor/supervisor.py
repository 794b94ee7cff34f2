"""The supervisor: starts the engine's processes, watches them, restarts what died, tells all.

It owns two things that outlive every other process: the listening socket, which server workers
inherit, so a restarted worker finds the connections that came meanwhile; and the run directory
with the sockets on which everyone finds everyone.

    starting ──all ready──► ready ◄──all ready── degraded        SIGTERM, SIGINT: draining
                              └────something died────▲

To debug or profile one process, name it in TIDEMILL_EXTERNAL ("runner-0", several with commas;
not a server): the supervisor prints the command instead of running it, and waits for whoever
does.

*Draining*: servers refuse new requests, finish the open ones and exit; then everything ends. A
second signal, or the end of `config.drain_timeout`, ends it sooner.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from tidemill import config as configuration
from tidemill.config import EngineConfig
from tidemill.supervisor.child import (
    CONFIG_ENV,
    EXIT_FATAL,
    LIFELINE_ENV,
    LISTEN_ENV,
    component_name,
)
from tidemill.supervisor.component import MAX_FAILED_STARTS, Component
from tidemill.supervisor.logs import set_up_logging
from tidemill.supervisor.run_dir import run_dir
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.errors import EngineError
from tidemill.wire.messages import (
    ComponentInfo,
    EngineState,
    RunnerReady,
    Snapshot,
    Status,
    WorkerGone,
)
from tidemill.wire.sockets import Publisher, Receiver, Sender
from tidemill.wire.status import StatusReporter

MODEL = "model"  # stands among the components while the model is being fetched
STOP_S = 3.0  # that children get to end by themselves after SIGTERM
LAST_WORDS_S = 1.0  # to wait for the reason of a child that gave up
BACKLOG = 2048  # connections that wait for a server worker
EXTERNAL_ENV = "TIDEMILL_EXTERNAL"
METRICS_ENV = "PROMETHEUS_MULTIPROC_DIR"
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

log = logging.getLogger(__name__)


class Resolve(Protocol):
    """`tidemill.hub.resolve`: a model's local path, fetched where needed."""

    def __call__(self, model: str, *, progress: Callable[[str, float | None], None]) -> Path: ...


def child_command(role: str, index: int) -> list[str]:
    return [sys.executable, "-m", "tidemill.supervisor.child", role, str(index)]


class Supervisor:
    """`command` says how a role's process is started, `resolve` how a model is fetched; tests
    put their own in place."""

    def __init__(
        self,
        config: EngineConfig,
        command: Callable[[str, int], list[str]] = child_command,
        resolve: Resolve | None = None,
    ) -> None:
        self._config = config
        self._command = command
        self._resolve = resolve
        self._components: dict[str, Component] = {}
        self._external = os.environ.get(EXTERNAL_ENV, "").split(",")
        self._runner: RunnerReady | None = None
        self._model: ComponentInfo | None = None  # while it is being fetched
        self._resolved: list[str] = []  # the model's path, once it is there
        self._was_ready = False
        self._drain_until: float | None = None  # monotonic; set: draining
        self._changed = True  # since the last Snapshot

    def run(self) -> int:
        """Serve until told to stop; returns the exit code. Must run in the main thread.

        Raises EngineError, with one line for the user, when the engine cannot start or go on;
        all processes have ended by then.
        """
        set_up_logging("supervisor", self._config.log_level)
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(listen(self._config.host, self._config.port))
            folder = stack.enter_context(run_dir())
            self._signals = stack.enter_context(signals_as_bytes())
            self._config = msgspec.structs.replace(
                self._config,
                run_dir=folder,
                port=self._listener.getsockname()[1],
                served_model_name=self._config.model_name,  # before it becomes a path
            )
            self._lifeline, ours = os.pipe()  # children inherit the first, and wait for its end
            stack.callback(os.close, self._lifeline)
            stack.callback(os.close, ours)
            self._set_up_metrics()
            self._context = stack.enter_context(zmq.Context())
            self._open_sockets(stack)
            stack.callback(self._stop_children)
            return self._supervise()

    # --- set-up -------------------------------------------------------------------------------

    def _set_up_metrics(self) -> None:
        self._endpoints = Endpoints(self._config.run_dir)
        os.mkdir(self._endpoints.metrics_dir)
        # prometheus_client reads it when it is imported, here and in the children.
        os.environ[METRICS_ENV] = self._endpoints.metrics_dir
        from prometheus_client import Counter

        self._restarts = Counter(
            "tidemill_restarts",
            "Processes started again after they died.",
            ["component"],
            registry=None,  # the servers read the directory
        )

    def _open_sockets(self, stack: contextlib.ExitStack) -> None:
        self._statuses = Receiver.bind(self._context, self._endpoints.control)
        self._events = Publisher(self._context, self._endpoints.events)
        self._scheduler = Sender(self._context, self._endpoints.scheduler)
        for each in (self._statuses, self._events, self._scheduler):
            stack.callback(each.close)
        self._poller = zmq.Poller()
        for source in (self._signals, self._statuses.socket, self._events.socket):
            self._poller.register(source, zmq.POLLIN)

    def _add(self, role: str, count: int) -> None:
        for index in range(count):
            name = component_name(role, index)
            self._components[name] = Component(role, index, name, name in self._external)
            self._restarts.labels(name)

    # --- the loop -----------------------------------------------------------------------------

    def _supervise(self) -> int:
        host, port = self._config.host, self._config.port
        log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)
        self._add("server", self._config.servers)
        self._start_due()  # before anything else: /health answers while the rest starts
        self._fetch_model()
        while not self._is_drained():
            self._publish()
            self._poller.poll(self._timeout_ms())
            code = self._take_signals()
            if code is not None:
                return code
            self._take_statuses()
            self._reap()
            self._changed |= self._events.has_new_subscribers()
            self._take_model()
            self._start_due()
        return 0

    def _timeout_ms(self) -> int | None:
        """Until the next restart or the end of draining; None: until something happens."""
        times = [c.restart_at for c in self._components.values() if c.restart_at is not None]
        if self._drain_until is not None:
            times.append(self._drain_until)
        if not times:
            return None
        return max(0, int((min(times) - time.monotonic()) * 1000) + 1)

    def _publish(self) -> None:
        """Tell everyone, if there is anything new."""
        if not self._changed:
            return
        self._changed = False
        components = {name: each.info for name, each in self._components.items()}
        if self._model is not None:
            components[MODEL] = self._model
        state = self._state(components)
        if state == "ready" and not self._was_ready:
            self._was_ready = True
            log.info("ready: %s", self._config.model_name)
        self._events.send(Snapshot(state=state, components=components, runner=self._runner))

    def _state(self, components: dict[str, ComponentInfo]) -> EngineState:
        if self._drain_until is not None:
            return "draining"
        started = "runner-0" in components
        if started and all(each.state == "ready" for each in components.values()):
            return "ready"
        return "degraded" if self._was_ready else "starting"

    def _take_signals(self) -> int | None:
        """The exit code, if a second signal asks for an end at once."""
        with contextlib.suppress(BlockingIOError):
            for number in self._signals.recv(64):
                if number not in STOP_SIGNALS:
                    continue  # SIGCHLD: it only wakes
                if self._drain_until is not None:
                    log.warning("ending at once")
                    for each in self._components.values():
                        if each.process is not None:
                            each.process.kill()
                    return 128 + number
                log.info("draining: open requests have %g s", self._config.drain_timeout)
                self._drain_until = time.monotonic() + self._config.drain_timeout
                self._changed = True
        return None

    def _is_drained(self) -> bool:
        if self._drain_until is None:
            return False
        servers = [c for c in self._components.values() if c.role == "server"]
        if all(each.process is None for each in servers):
            return True
        if time.monotonic() < self._drain_until:
            return False
        log.warning("ending the requests that are still open")
        return True

    def _take_statuses(self) -> None:
        for message in self._statuses.drain():
            if isinstance(message, Status):
                self._take_status(message)

    def _take_status(self, status: Status) -> None:
        if status.component == MODEL:
            if status.fatal is not None:
                raise EngineError(status.fatal)
            if status.state == "starting":
                self._model = ComponentInfo(
                    state="starting",
                    pid=status.pid,
                    generation=1,
                    detail=status.detail,
                    progress=status.progress,
                )
        else:
            component = self._components.get(status.component)
            if component is None or not component.take(status):
                return
            if status.fatal is not None:
                raise EngineError(status.fatal)
            if status.runner is not None:
                self._runner = status.runner
            if status.state == "ready":
                log.debug("%s is ready", component.name)
        self._changed = True

    # --- processes ----------------------------------------------------------------------------

    def _start_due(self) -> None:
        """Start what has no process and whose pause is over."""
        now = time.monotonic()
        for component in self._components.values():
            if component.restart_at is None or now < component.restart_at:
                continue
            if component.generation > 0:
                self._restarts.labels(component.name).inc()
            self._start(component)
            self._changed = True

    def _start(self, component: Component) -> None:
        extra = {CONFIG_ENV: configuration.encode(self._config), LIFELINE_ENV: str(self._lifeline)}
        descriptors = [self._lifeline]
        if component.role == "server":
            extra[LISTEN_ENV] = str(self._listener.fileno())
            descriptors.append(self._listener.fileno())
        command = self._command(component.role, component.index)
        component.start(command, os.environ | extra, descriptors)
        level = logging.WARNING if component.external else logging.DEBUG
        if log.isEnabledFor(level):
            shown = {CONFIG_ENV: extra[CONFIG_ENV], METRICS_ENV: self._endpoints.metrics_dir}
            setting = " ".join(f"{key}={shlex.quote(value)}" for key, value in shown.items())
            what = "start it yourself" if component.external else f"pid {component.pid}"
            log.log(level, "%s, %s: %s %s", component.name, what, setting, shlex.join(command))

    def _reap(self) -> None:
        """Note which processes ended."""
        for component in self._components.values():
            pid = component.pid
            code = component.reap()
            if code is None:
                continue
            self._changed = True
            self._forget_gauges(pid)
            if code == EXIT_FATAL:
                self._give_up(component)
            if component.role == "runner":
                self._runner = None
            if component.role == "server":
                self._scheduler.send(WorkerGone(worker=component.index))
                if self._drain_until is not None:
                    component.restart_at = None
                    continue
            log.warning("%s (pid %d) died: %s", component.name, pid, component.detail)
            if component.failed_starts >= MAX_FAILED_STARTS:
                raise EngineError(
                    f"{component.name} died {component.failed_starts} times in a row before it was "
                    f"ready (the last time: {component.detail}); its log above says why"
                )

    def _give_up(self, component: Component) -> None:
        """A child ended because no restart can help. Its reason is on the way."""
        deadline = time.monotonic() + LAST_WORDS_S
        while (left := deadline - time.monotonic()) > 0:
            for message in self._statuses.receive(left):
                if isinstance(message, Status) and message.fatal is not None:
                    raise EngineError(message.fatal)
        raise EngineError(f"{component.name} gave up; its log above says why")

    def _forget_gauges(self, pid: int) -> None:
        """A dead process's gauges end with it; its counters go on counting."""
        from prometheus_client import multiprocess

        multiprocess.mark_process_dead(  # type: ignore[no-untyped-call]
            pid, path=self._endpoints.metrics_dir
        )

    def _stop_children(self) -> None:
        processes = [c.process for c in self._components.values() if c.process is not None]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_S
        for process in processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    # --- the model ----------------------------------------------------------------------------

    def _fetch_model(self) -> None:
        """Resolve the model in a thread that reports like a process. Those that need the model
        start when it is there."""

        def fetch() -> None:
            with zmq.Context() as context:  # its own: nobody waits for this thread in the end
                reporter = StatusReporter(context, self._config.run_dir, MODEL)
                try:
                    path = self._resolver()(self._config.model, progress=reporter.starting)
                    self._resolved.append(str(path))
                    reporter.ready()
                except Exception as error:
                    log.debug("fetching the model failed", exc_info=True)
                    reporter.fatal(" ".join(str(error).split()) or repr(error))
                finally:
                    reporter.close()

        threading.Thread(target=fetch, daemon=True, name="fetch-model").start()

    def _resolver(self) -> Resolve:
        if self._resolve is not None:
            return self._resolve
        from tidemill import hub  # in the thread, while the servers start

        resolve: Resolve = hub.resolve
        return resolve

    def _take_model(self) -> None:
        """Start the rest once the model is there."""
        if not self._resolved:
            return
        self._config = msgspec.structs.replace(self._config, model=self._resolved.pop())
        self._model = None
        self._add("runner", 1)  # first: it takes longest
        self._add("scheduler", 1)
        self._add("tokenizer", self._config.tokenizers)
        self._add("detokenizer", self._config.detokenizers)


def listen(host: str, port: int) -> socket.socket:
    """The listening socket. Raises EngineError that says what is wrong with the address."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            reason = f"port {port} on {host} is in use; choose another with --port"
        else:
            reason = f"cannot listen on {host}, port {port}: {error.strerror or error}"
        raise EngineError(reason) from None


@contextlib.contextmanager
def signals_as_bytes() -> Iterator[socket.socket]:
    """A socket from which the numbers of arriving signals can be read, one byte each: those
    that ask for an end, and SIGCHLD. What was ignored before (nohup) stays ignored."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    theirs.setblocking(False)
    watched = [s for s in STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, lambda *_: None) for s in (*watched, signal.SIGCHLD)}
    descriptor = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    try:
        yield ours
    finally:
        signal.set_wakeup_fd(descriptor)
        for number, handler in before.items():
            signal.signal(number, handler)
        ours.close()
        theirs.close()
