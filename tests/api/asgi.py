"""A client of the application without a network: the test holds both ends of the connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from fake_engine import FakeEngine, make_config, until
from starlette.applications import Starlette

from tidemill.api.engine_client import EngineClient
from tidemill.api.server import make_app


@dataclass
class Exchange:
    """One request, and what has been answered so far."""

    task: asyncio.Task[None] | None = None
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    pieces: list[bytes] = field(default_factory=list)
    complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """Of a complete or a growing stream, [DONE] as None."""
        made = []
        for line in self.body.decode().split("\n\n"):
            if line:
                assert line.startswith("data: "), line
                data = line.removeprefix("data: ")
                made.append(None if data == "[DONE]" else json.loads(data))
        return made

    async def end(self) -> Exchange:
        assert self.task is not None
        await self.task
        return self

    async def leave(self) -> Exchange:
        """The client closes its connection; returns when the application is through with it."""
        self.gone.set()
        return await self.end()


@dataclass
class Connection:
    app: Starlette
    engine: FakeEngine
    client: EngineClient

    def request(self, method: str, path: str, body: Any = None) -> Exchange:
        made = Exchange()
        data = b"" if body is None else json.dumps(body).encode()
        sent = False

        async def receive() -> dict[str, Any]:
            nonlocal sent
            if not sent:
                sent = True
                return {"type": "http.request", "body": data, "more_body": False}
            await made.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await asyncio.sleep(0)
            if message["type"] == "http.response.start":
                made.status = message["status"]
                made.headers = {k.decode(): v.decode() for k, v in message["headers"]}
            else:
                made.pieces.append(message.get("body", b""))
                made.complete = not message.get("more_body", False)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "scheme": "http",
            "query_string": b"",
            "headers": [(b"content-length", str(len(data)).encode())],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        made.task = asyncio.ensure_future(self.app(scope, receive, send))
        return made

    def post(self, path: str, **body: Any) -> Exchange:
        return self.request("POST", path, {"model": "fake"} | body)

    async def get(self, path: str) -> Exchange:
        return await self.request("GET", path).end()

    async def running(self, count: int) -> None:
        """Answers the tokenizer's calls until so many sequences are with the scheduler."""

        def there() -> bool:
            self.engine.answer_calls()
            return self.engine.take_requests() == count

        await until(there)

    async def step(self, count: int = 1) -> None:
        for _ in range(count):
            await self.engine.deliver(self.client, self.engine.step())

    async def finish(self, exchange: Exchange) -> Exchange:
        assert exchange.task is not None
        await self.engine.run(exchange.task.done)
        return await exchange.end()


@contextlib.asynccontextmanager
async def connected(tmp_path: Any, ready: bool = True, **changes: Any) -> AsyncIterator[Connection]:
    config = make_config(tmp_path, **changes)
    engine = FakeEngine(config)
    app = make_app(config, 0)
    try:
        async with app.router.lifespan_context(app):
            client: EngineClient = app.state.client
            if ready:
                await engine.publish(client)
            yield Connection(app, engine, client)
            assert client.open_requests == 0
    finally:
        engine.close()
