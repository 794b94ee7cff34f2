"""One HTTP worker: the application's routes, and the process around it."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator

import msgspec
import uvicorn
from starlette import datastructures
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

import tidemill
from tidemill.api import errors, metrics
from tidemill.api.engine_client import EngineClient
from tidemill.api.errors import APIError
from tidemill.api.http import ClientGone, json_response
from tidemill.api.metrics import ServerMetrics
from tidemill.api.openai import chat, completions, tokens
from tidemill.config import EngineConfig
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import ErrorInfo
from tidemill.wire.sockets import PeerStuck
from tidemill.wire.status import StatusReporter

COUNTED = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}  # label in /metrics

log = logging.getLogger(__name__)


def make_app(config: EngineConfig, worker: int) -> Starlette:
    """The application; its lifespan opens and closes the connection to the engine."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        client = EngineClient(config, worker)
        app.state.client = client
        app.state.metrics = ServerMetrics()
        await client.start()
        yield
        await client.stop()

    routes = [
        Route("/v1/chat/completions", chat.chat_completions, methods=["POST"]),
        Route("/v1/completions", completions.completions, methods=["POST"]),
        Route("/v1/models", tokens.list_models),
        Route("/v1/models/{model:path}", tokens.get_model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/health", health),
        Route("/version", version),
        Route("/metrics", metrics_page),
    ]
    return Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            APIError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_gone,
            ClientGone: _client_gone,
            PeerStuck: _stuck,
            Exception: _bug,
        },
    )


async def health(request: Request) -> Response:
    """200 while new requests are answered at once, 503 otherwise; the body says why."""
    snapshot = request.app.state.client.snapshot
    body = {
        "state": snapshot.state,
        "components": {
            name: msgspec.to_builtins(info) for name, info in snapshot.components.items()
        },
    }
    return json_response(body, 200 if snapshot.state == "ready" else 503)


async def version(request: Request) -> Response:
    return json_response({"version": tidemill.__version__})


async def metrics_page(request: Request) -> Response:
    directory = Endpoints(request.app.state.client.config.run_dir).metrics_dir
    page = await run_in_threadpool(metrics.exposition, directory)  # it reads many files
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, APIError)
    return _failed(request, error.info)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    made = errors.response(ErrorInfo(status=error.status_code, message=message))
    made.headers.update(error.headers or {})
    return made


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it; the log shows nginx's code for this


async def _stuck(request: Request, error: Exception) -> Response:
    log.error("%s", error)
    return _failed(request, ErrorInfo(status=503, message="the engine does not answer"))


async def _bug(request: Request, error: Exception) -> Response:
    return _failed(request, errors.INTERNAL)  # starlette raises it again, for uvicorn's log


def _failed(request: Request, info: ErrorInfo) -> Response:
    endpoint = COUNTED.get(request.url.path)
    if endpoint is not None:
        request.app.state.metrics.failed(endpoint, info)
    return errors.response(info)


class _Server(uvicorn.Server):
    """Reports readiness once it accepts connections, and ends by itself when the engine drains
    and the last request is done. Until then it answers, if only with 503."""

    def __init__(
        self, config: uvicorn.Config, reporter: StatusReporter, state: datastructures.State
    ) -> None:
        super().__init__(config)
        self._reporter = reporter
        self._state = state  # the application's

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._reporter.ready()

    async def on_tick(self, counter: int) -> bool:
        client: EngineClient = self._state.client
        drained = client.snapshot.state == "draining" and not client.open_requests
        return drained or await super().on_tick(counter)


def main(config: EngineConfig, index: int) -> None:
    """Serve on the inherited socket until the engine has drained, or until SIGTERM; then finish
    open requests and return."""
    import zmq

    reporter = StatusReporter(zmq.Context.instance(), config.run_dir, f"server-{index}")
    app = make_app(config, index)
    settings = uvicorn.Config(
        app,
        host=config.host,
        port=config.port,
        loop="uvloop",
        http="httptools",
        lifespan="on",
        access_log=config.log_level == "debug",
        log_config=None,
        timeout_graceful_shutdown=max(1, int(config.drain_timeout)),
        timeout_keep_alive=75,
    )
    server = _Server(settings, reporter, app.state)
    inherited = os.environ.get("TIDEMILL_LISTEN_FD")
    sockets = [socket.socket(fileno=int(inherited))] if inherited is not None else None
    server.run(sockets)
