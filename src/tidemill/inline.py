"""The whole engine in one thread: what the Python API runs on.

The scheduler, the model runner behind the inline link and the detokenizer are the classes that
the server's processes run; here they are called in step. Callers in any thread or event loop
hand over sequences and hear of them through callbacks, so all callers share batches, and an
interrupt hits the caller that waits, never the middle of a step.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from tidemill.config import EngineConfig
from tidemill.runner.model_runner import ModelRunner
from tidemill.scheduler.scheduler import Scheduler
from tidemill.text.detokenizer import Detokenizer
from tidemill.text.vocabulary import Vocabulary
from tidemill.wire.errors import EngineError
from tidemill.wire.link import InlineLink
from tidemill.wire.messages import ErrorInfo, RunnerReady, Submit, TextDelta
from tidemill.wire.sampling import SamplingParams

log = logging.getLogger(__name__)

# Called in the engine's thread with each delta of a sequence, so it must be quick and not raise.
# The last one has `finish` set.
Sink = Callable[[TextDelta], None]


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. `params` are those of one choice (see `for_choice`)."""

    prompt_ids: bytes
    params: SamplingParams
    sink: Sink


class InlineEngine:
    """Raises EngineError when the model cannot be loaded or does not fit."""

    scheduler: Scheduler
    ready: RunnerReady

    def __init__(self, config: EngineConfig, vocab: Vocabulary) -> None:
        self._config = config
        self._detokenizer = Detokenizer(vocab)
        self._rids = itertools.count(1)
        self._sinks: dict[int, Sink] = {}  # the engine's thread alone uses it
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over: str | None = None  # why nothing can be submitted any more
        self._closing = False
        loaded: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._main, args=(loaded,), name="tidemill engine", daemon=True
        )
        self._thread.start()
        loaded.result()

    def submit(self, jobs: Sequence[Job]) -> list[int]:
        """Start sequences, all in one step where they fit; returns an id for each. Raises
        EngineError once the engine is closed or has failed."""
        rids = [next(self._rids) for _ in jobs]

        def start() -> None:
            self._sinks.update((rid, job.sink) for rid, job in zip(rids, jobs, strict=True))
            for rid, job in zip(rids, jobs, strict=True) if self._over is None else ():
                self.scheduler.submit(
                    Submit(
                        rid=rid,
                        worker=0,
                        detokenizer=0,
                        prompt_ids=job.prompt_ids,
                        params=job.params,
                    )
                )

        with self._lock:
            if self._over is not None:
                raise EngineError(self._over)
            self._inbox.put(start)
        return rids

    def abort(self, rids: Sequence[int]) -> None:
        """Forget sequences; those that have ended are ignored."""

        def forget() -> None:
            for rid in rids:
                if self._sinks.pop(rid, None) is not None and self._over is None:
                    self.scheduler.abort(rid)

        self._inbox.put(forget)

    def close(self) -> None:
        """End the thread. What still runs ends with an error. Harmless when repeated."""

        def leave() -> None:
            self._closing = True

        self._inbox.put(leave)
        if threading.current_thread() is not self._thread:  # a garbage collection may run there
            self._thread.join()

    # --- in the engine's thread ---------------------------------------------------------------

    def _main(self, loaded: Future[None]) -> None:
        try:
            runner = ModelRunner(self._config)
            self.ready = runner.ready
            self.scheduler = Scheduler(self._config, runner.ready, InlineLink(runner))
        except BaseException as error:  # it belongs to who waits for the engine
            loaded.set_exception(error)
            return
        loaded.set_result(None)
        try:
            while not self._closing:
                self._turn()
        except Exception as error:
            log.exception("the engine failed")
            self._end(f"the engine failed: {type(error).__name__}: {error}")
        else:
            self._end("the engine is closed")

    def _turn(self) -> None:
        """Do what callers want, waiting where there is nothing else to do; then one step."""
        while not self._inbox.empty() or not self.scheduler.has_work:
            self._inbox.get()()
            if self._closing:
                return
        for batch in self.scheduler.advance().values():
            texts, stopped = self._detokenizer.handle(batch)
            for message in stopped:
                self.scheduler.stopped(message.rid, message.attempt)
            for text in texts.values():
                for delta in text.deltas:
                    self._deliver(delta)

    def _deliver(self, delta: TextDelta) -> None:
        sink = self._sinks.get(delta.rid)
        if sink is None:
            return  # aborted meanwhile
        if delta.finish is not None:
            del self._sinks[delta.rid]
        sink(delta)

    def _end(self, reason: str) -> None:
        """Nobody may go on waiting."""
        with self._lock:
            self._over = reason
        while not self._inbox.empty():
            self._inbox.get()()
        error = ErrorInfo(status=503, message=reason)
        for rid in list(self._sinks):
            self._deliver(
                TextDelta(rid=rid, attempt=0, offset=0, text="", finish="error", error=error)
            )
