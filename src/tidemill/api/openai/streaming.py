"""How answers leave: whole, as one JSON object, or as server-sent events while they grow.

A stream's constant parts are encoded once, so that a token costs one small JSON string and a
join.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Protocol

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.api import errors
from tidemill.api.errors import APIError
from tidemill.api.http import ClientGone, json_response, while_connected
from tidemill.api.metrics import ServerMetrics
from tidemill.api.openai.generation import Job
from tidemill.wire.messages import TextDelta

DONE = b"data: [DONE]\n\n"

log = logging.getLogger(__name__)


class Answer(Protocol):
    """Gathers a job's deltas into one object."""

    def add(self, choice: int, delta: TextDelta) -> None: ...

    def result(self) -> dict[str, Any]: ...


class Events(Protocol):
    """Turns a job's deltas into server-sent events as they come."""

    def encode(self, choice: int, delta: TextDelta) -> bytes:
        """The events for a delta, perhaps none."""

    def close(self) -> bytes:
        """What follows when all choices have ended, before [DONE]."""


async def whole(request: Request, job: Job, answer: Answer) -> Response:
    """Run the job to its end and answer in one piece."""

    async def work() -> None:
        with job:
            async for news in job.news():
                for choice, delta in news:
                    answer.add(choice, delta)

    await while_connected(request.receive, work())
    return json_response(answer.result())


class EventStream(Response):
    """Runs a job and writes its events. The status line waits for the job's first news, so that
    a request which the scheduler refuses gets the status of its refusal; an error after that is
    the stream's last event."""

    def __init__(self, job: Job, events: Events, metrics: ServerMetrics) -> None:
        self._job = job
        self._events = events
        self._metrics = metrics
        self.status_code = 200
        self.background = None
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # nginx: do not hold
        self.media_type = "text/event-stream"
        self.init_headers(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.suppress(ClientGone):  # there is nobody left to tell
            await while_connected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        started = False
        try:
            with self._job as job:
                async for news in job.news():
                    # Encode before the start: a first piece that is an error raises here.
                    data = b"".join([self._events.encode(*piece) for piece in news])
                    if not started:
                        await send(self._start())
                        started = True
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
            tail = self._events.close()
        except Exception as error:
            if not started:
                raise
            tail = self._failed(error)
        await send({"type": "http.response.body", "body": tail + DONE, "more_body": False})

    def _start(self) -> dict[str, Any]:
        return {
            "type": "http.response.start",
            "status": self.status_code,
            "headers": self.raw_headers,
        }

    def _failed(self, error: Exception) -> bytes:
        if isinstance(error, APIError):
            info = error.info
        else:
            log.error("a stream failed", exc_info=error)
            info = errors.INTERNAL
        self._metrics.failed(self._job.endpoint, info)
        return event(errors.body(info))


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class ChunkWriter:
    """Events of one stream. `head` is the chunk object's constant part; `opening` and `closing`
    surround the text within a choice, e.g. `"delta":{"content":` and `}`. With `usage` every
    chunk has that field, null where there is nothing to say."""

    def __init__(self, head: dict[str, Any], opening: bytes, closing: bytes, usage: bool) -> None:
        self._head = head
        self._usage = usage
        self._start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._opening = b"," + opening
        self._end = closing + b',"logprobs":null,"finish_reason":null}]'
        self._end += b',"usage":null}\n\n' if usage else b"}\n\n"

    def text(self, choice: int, text: str) -> bytes:
        """The common case: a piece of text and nothing else."""
        return b"%b%d%b%b%b" % (
            self._start,
            choice,
            self._opening,
            orjson.dumps(text),
            self._end,
        )

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Any other chunk."""
        data = self._head | {"choices": choices}
        if self._usage or usage is not None:
            data["usage"] = usage
        return event(data)
