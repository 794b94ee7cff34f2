"""Small pieces between Starlette and the endpoints."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from tidemill.api.errors import APIError


def json_response(data: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(data), status, media_type="application/json")


async def read_body(request: Request) -> bytes:
    """The request's body. Raises APIError(413) as soon as it is known to be too large, without
    reading on, and ClientDisconnect."""
    limit: int = request.app.state.client.config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(limit)
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip()
    if kind not in ("application/json", "text/json", "text/plain", "application/octet-stream", ""):
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


__all__ = ["ClientDisconnect", "json_response", "read_body"]
