"""Server-sent events. A stream's constant parts are encoded once, so that a token costs one
small JSON string and a join."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson

from tidemill.api import errors
from tidemill.api.errors import APIError

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


class ChunkWriter:
    """Events of one stream. `head` is the chunk object's constant part; `opening` and `closing`
    surround the text within a choice, e.g. `"delta":{"content":` and `}`."""

    def __init__(self, head: dict[str, Any], opening: bytes, closing: bytes, usage: bool) -> None:
        self._head = head
        self._start = b"data: " + orjson.dumps(head)[:-1] + b',"choices":[{"index":'
        self._opening = b"," + opening
        self._closing = closing + b',"logprobs":null,"finish_reason":null}]'
        # With include_usage every chunk has the field; it is null but in the last.
        self._end = b',"usage":null}\n\n' if usage else b"}\n\n"
        self._usage = usage

    def text(self, index: int, text: str) -> bytes:
        """The common case: a piece of text and nothing else."""
        return b"".join(
            (
                self._start,
                str(index).encode(),
                self._opening,
                orjson.dumps(text),
                self._closing,
                self._end,
            )
        )

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, Any] | None = None) -> bytes:
        """Any other chunk."""
        data = self._head | {"choices": choices}
        if self._usage or usage is not None:
            data["usage"] = usage
        return event(data)


async def guarded(events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """A stream whose errors become its last event: the status line is long gone."""
    try:
        async for data in events:
            yield data
    except APIError as error:
        yield event(errors.body(error.info))
    yield DONE
