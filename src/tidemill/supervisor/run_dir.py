"""The private directory that holds an engine's sockets, rings and metrics while it lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tidemill-"
MIN_AGE_S = 60.0  # a younger directory may not be locked yet by the one who made it


def parent() -> str:
    """Where run directories are made. Memory-backed where there is such a place: the rings and
    the metrics are mapped files that change with every step. Short: the path of an ipc socket
    has a limit of about 100 bytes."""
    shared_memory = "/dev/shm"
    return shared_memory if os.access(shared_memory, os.W_OK) else tempfile.gettempdir()


@contextlib.contextmanager
def run_dir(folder: str | None = None) -> Iterator[str]:
    """Make a run directory (mode 0700) and remove it in the end, together with those whose
    owners were killed before they could. An owner holds a lock on its directory, which the
    system releases with the process."""
    folder = folder or parent()
    remove_stale(folder)
    path = tempfile.mkdtemp(prefix=PREFIX, dir=folder)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_stale(folder: str) -> None:
    """Remove this user's run directories in `folder` that nobody owns any more."""
    for path in Path(folder).glob(f"{PREFIX}*"):
        # Another engine that starts just now may remove it first.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            status = path.lstat()
            if status.st_uid != os.getuid() or time.time() - status.st_mtime < MIN_AGE_S:
                continue
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass  # its owner lives
            finally:
                os.close(descriptor)
