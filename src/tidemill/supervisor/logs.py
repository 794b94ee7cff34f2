"""One log format for all processes: time, level, component, message, on stderr."""

from __future__ import annotations

import logging
import sys


def set_up_logging(component: str, level: str) -> None:
    """Send this process's log to stderr, `level` and above."""
    handler = logging.StreamHandler(sys.stderr)
    line = f"%(asctime)s %(levelname)-7s {component:<13} %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
