"""Errors that a user can mend: their text is one line that says what to do."""

from __future__ import annotations

from tidemill.wire.messages import ErrorInfo


class EngineError(RuntimeError):
    """The engine cannot start or go on as configured. The command line prints the message and
    exits with 1; a child process reports it as fatal."""


class ModelError(EngineError):
    """A model cannot be found, fetched, read or understood."""


class RequestError(ValueError):
    """The engine refused a request. `info` is what an HTTP client would have got."""

    def __init__(self, info: ErrorInfo) -> None:
        super().__init__(info.message)
        self.info = info
