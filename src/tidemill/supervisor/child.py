"""Entry point of the supervised processes: `python -m tidemill.supervisor.child ROLE INDEX`.

What a child needs comes in the environment, so a process can be started by hand, in a debugger
or under a profiler: `TIDEMILL_CONFIG` is the configuration as JSON. The supervisor adds
`TIDEMILL_LIFELINE_FD`, the end of a pipe that closes when the supervisor dies, and for servers
`TIDEMILL_LISTEN_FD`, the listening socket.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
from collections.abc import Callable

import zmq

from tidemill import config as configuration
from tidemill.config import EngineConfig
from tidemill.supervisor.logs import set_up_logging
from tidemill.wire.errors import EngineError
from tidemill.wire.status import StatusReporter

CONFIG_ENV = "TIDEMILL_CONFIG"
LIFELINE_ENV = "TIDEMILL_LIFELINE_FD"
LISTEN_ENV = "TIDEMILL_LISTEN_FD"
EXIT_FATAL = 3  # a restart cannot help; the reason went out as `Status.fatal`

# Each main(config, index) returns or raises EngineError when a restart cannot help. Imported by
# name, and only the one that runs, so that no process loads what it does not need.
MAINS = {
    "server": "tidemill.api.server",
    "tokenizer": "tidemill.text.tokenizer",
    "detokenizer": "tidemill.text.detokenizer",
    "scheduler": "tidemill.scheduler.process",
    "runner": "tidemill.runner.process",
}
SINGLE = frozenset({"scheduler"})  # roles of which there is one, named without an index

log = logging.getLogger(__name__)


def component_name(role: str, index: int) -> str:
    """The name in `Status` and `Snapshot`: "server-0", "scheduler"."""
    return role if role in SINGLE else f"{role}-{index}"


def main(arguments: list[str]) -> int:
    usage = f"usage: python -m tidemill.supervisor.child {{{','.join(MAINS)}}} INDEX"
    if len(arguments) != 2 or arguments[0] not in MAINS or not arguments[1].isdecimal():
        print(usage, file=sys.stderr)
        return 2
    if CONFIG_ENV not in os.environ:
        print(f"{usage}\n{CONFIG_ENV} must hold the configuration as JSON", file=sys.stderr)
        return 2
    role, index = arguments[0], int(arguments[1])
    return run(role, index, configuration.decode(os.environ[CONFIG_ENV]))


def run(role: str, index: int, config: EngineConfig) -> int:
    """Run one process to its end; returns its exit code."""
    hold_lifeline()
    component = component_name(role, index)
    set_up_logging(component, config.log_level)
    try:
        role_main: Callable[[EngineConfig, int], None]
        role_main = importlib.import_module(MAINS[role]).main
        role_main(config, index)
    except (EngineError, MemoryError) as error:
        reason = f"{component}: {' '.join(str(error).split()) or 'out of memory'}"
        log.debug("fatal", exc_info=True)
        report_fatal(config, component, reason)
        return EXIT_FATAL
    except Exception:
        log.exception("died of an error")
        return 1
    return 0


def report_fatal(config: EngineConfig, component: str, reason: str) -> None:
    with zmq.Context() as context:
        reporter = StatusReporter(context, config.run_dir, component)
        reporter.fatal(reason)
        reporter.close()


def hold_lifeline() -> None:
    """End this process as soon as the supervisor is gone, however it went: its end of the pipe
    closes with it. Works wherever there are pipes, and while the main thread computes."""
    descriptor = os.environ.get(LIFELINE_ENV)
    if descriptor is None:
        return

    def watch(pipe: int) -> None:
        os.read(pipe, 1)  # nobody writes: it returns at end of file
        os._exit(1)

    threading.Thread(target=watch, args=(int(descriptor),), daemon=True, name="lifeline").start()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
