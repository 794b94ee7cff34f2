"""The whole engine with a simulated runner, so that no device and no weights are needed.

python simulated.py supervise MODEL PORT     like `tidemill serve`
python simulated.py runner 0                 what it starts in the model runner's place
"""

from __future__ import annotations

import os
import sys

import msgspec
import zmq

from tidemill import config as configuration
from tidemill.config import EngineConfig
from tidemill.runner.process import serve
from tidemill.scheduler.simulated import CostModel, SimulatedRunner
from tidemill.supervisor.child import CONFIG_ENV, hold_lifeline
from tidemill.supervisor.supervisor import Supervisor, child_command
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.errors import EngineError
from tidemill.wire.messages import RunnerReady
from tidemill.wire.ring import RunnerEnd
from tidemill.wire.status import StatusReporter

READY = RunnerReady(
    ring="",
    num_pages=1024,
    page_size=16,
    max_model_len=1024,
    max_running_requests=16,
    max_batch_tokens=256,
    vocab_size=256,
    device="simulated",
)


class Runner(SimulatedRunner):
    def __init__(self) -> None:
        super().__init__(READY, CostModel(step=4000, token=50, sleep=True))

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]


def run(config: EngineConfig) -> None:
    hold_lifeline()
    reporter = StatusReporter(zmq.Context(), config.run_dir, "runner-0")
    runner = Runner()
    ring = RunnerEnd.create(Endpoints(config.run_dir).ring(0))
    reporter.ready(msgspec.structs.replace(READY, ring=ring.path))
    while True:
        serve(ring, runner)
        ring.wait()


def command(role: str, index: int) -> list[str]:
    if role == "runner":
        return [sys.executable, __file__, role, str(index)]
    return child_command(role, index)


def supervise(model: str, port: int) -> int:
    config = EngineConfig(model=model, port=port, tokenizers=2, detokenizers=2)
    try:
        return Supervisor(config, command).run()
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        sys.exit(supervise(sys.argv[2], int(sys.argv[3])))
    run(configuration.decode(os.environ[CONFIG_ENV]))
