"""The model runner's process: load the model, make the ring, execute plans as they come."""

from __future__ import annotations

import logging
from typing import Protocol

import msgspec
import zmq

from tidemill.config import EngineConfig
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.link import StepExecutor
from tidemill.wire.ring import Kind, RunnerEnd
from tidemill.wire.status import StatusReporter

log = logging.getLogger(__name__)


class SlotExecutor(StepExecutor, Protocol):
    def reset(self) -> None:
        """Forget all slots: a new scheduler starts with none."""


def main(config: EngineConfig, index: int) -> None:
    """Run until killed. Raises EngineError when the model cannot be loaded or does not fit."""
    reporter = StatusReporter(zmq.Context(), config.run_dir, f"runner-{index}")
    reporter.starting("Loading libraries")
    from tidemill.runner.model_runner import ModelRunner  # torch: seconds, so they are announced

    runner = ModelRunner(config, progress=reporter.starting)
    ring = RunnerEnd.create(Endpoints(config.run_dir).ring(index))
    reporter.ready(msgspec.structs.replace(runner.ready, ring=ring.path))
    log.debug("executing plans from %s", ring.path)
    while True:
        serve(ring, runner)
        ring.wait()


def serve(ring: RunnerEnd, runner: SlotExecutor) -> None:
    """Do all that the scheduler has sent. An error in a step leaves the slots in an unknown
    state: the scheduler is told, and the process ends with it."""
    while (item := ring.next()) is not None:
        if isinstance(item, Kind):
            runner.reset()
            continue
        try:
            result = runner.execute(item)
        except Exception as error:
            ring.send_fault(f"{type(error).__name__} in step {item.step}: {error}")
            raise
        ring.send_result(result)
