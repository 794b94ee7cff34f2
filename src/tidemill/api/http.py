"""Small pieces between Starlette and the endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from tidemill.api.errors import APIError

T = TypeVar("T")

JSON_TYPES = ("application/json", "text/json", "text/plain", "application/octet-stream", "")


def json_response(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The request's body. Raises APIError(413) as soon as it is known to be too large, without
    reading on, APIError(415), and starlette's ClientDisconnect."""
    limit: int = request.app.state.client.config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind not in JSON_TYPES:
        raise APIError(415, f"the content type must be application/json, got {kind!r}")
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> APIError:
    return APIError(
        413, f"the request body exceeds {limit} bytes; the server's --max-body-bytes sets the limit"
    )


class ClientGone(Exception):
    """Nobody waits for the answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; cancels it and raises ClientGone if the client goes. The request's
    body must have been read, so that `receive` has nothing but the disconnect to tell."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_disconnect(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for future in (task, gone):
            future.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
