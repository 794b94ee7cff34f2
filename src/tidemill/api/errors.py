"""Errors as clients see them: OpenAI's shape, at the right status."""

from __future__ import annotations

import orjson
from starlette.responses import Response

from tidemill.wire.messages import ErrorInfo

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
RETRY_AFTER_S = {429: "1", 503: "2"}
INTERNAL = ErrorInfo(status=500, message="internal error; the server's log has it")


class APIError(Exception):
    """Raised anywhere while a request is handled; becomes the response."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.info = ErrorInfo(status=status, message=message, param=param, code=code)

    @classmethod
    def of(cls, info: ErrorInfo) -> APIError:
        return cls(info.status, info.message, info.param, info.code)


def unsupported(param: str, detail: str = "") -> APIError:
    return APIError(400, f"{param} is not supported{detail}", param, "unsupported_parameter")


def body(info: ErrorInfo) -> dict[str, object]:
    return {
        "error": {
            "message": info.message,
            "type": _TYPES.get(info.status, "invalid_request_error"),
            "param": info.param,
            "code": info.code,
        }
    }


def response(info: ErrorInfo) -> Response:
    headers = {}
    if info.status in RETRY_AFTER_S:
        headers["Retry-After"] = RETRY_AFTER_S[info.status]
    return Response(
        orjson.dumps(body(info)), info.status, headers=headers, media_type="application/json"
    )
