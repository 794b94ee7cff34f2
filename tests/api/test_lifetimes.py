"""When requests are taken, and that none outlives its client."""

from __future__ import annotations

import pytest
from asgi import connected
from fake_engine import run, until

from tidemill.api.engine_client import EngineClient
from tidemill.wire.sockets import PeerStuck

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def body(path, **more):
    made = {"max_tokens": 10, "n": 3}
    return made | ({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}) | more


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_client_leaves(tmp_path, path, stream, steps):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(path, **body(path, stream=stream))
            await to.running(3)
            await to.step(steps)
            await made.leave()
            assert to.client.open_requests == 0
            await until(lambda: to.engine.take_requests() == 0)
            assert sorted(to.engine.aborts) == sorted(s.rid for s in to.engine.submits)

    run(go())


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_leaves_before_its_prompt_is_tokenized(tmp_path, path, stream):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(path, **body(path, stream=stream))
            await until(to.engine.take_calls)
            made.gone.set()
            to.engine.answer_calls()
            await made.end()
            assert to.client.open_requests == 0
            await to.engine.deliver(to.client, [])
            await until(lambda: to.engine.take_requests() == 0)
            assert len(to.engine.aborts) == len(to.engine.submits)

    run(go())


def test_a_scheduler_that_does_not_read(tmp_path, monkeypatch):
    submit = EngineClient.submit

    def stuck_at_the_second(self, *arguments, choice, **more):
        if choice == 1:
            raise PeerStuck("full")
        return submit(self, *arguments, choice=choice, **more)

    async def go():
        async with connected(tmp_path) as to:
            for stream in (True, False):
                with monkeypatch.context() as patch:
                    patch.setattr(EngineClient, "submit", stuck_at_the_second)
                    made = await to.finish(to.post(TEXT, **body(TEXT, stream=stream)))
                assert made.status == 503
                assert to.client.open_requests == 0
                await until(lambda: to.engine.take_requests() == 0)
            again = await to.finish(to.post(TEXT, **body(TEXT)))
            assert again.status == 200

    run(go())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_starting_refuses_and_degraded_waits(tmp_path, path):
    async def go():
        async with connected(tmp_path, ready=False) as to:
            for state in (None, "starting", "draining"):
                if state is not None:
                    await to.engine.publish(to.client, state)
                made = await to.post(path, **body(path)).end()
                assert made.status == 503
                assert made.json["error"]["code"] == (state or "starting")
                assert "retry-after" in made.headers
            await to.engine.publish(to.client, "ready")
            await to.engine.publish(to.client, "degraded")
            made = await to.finish(to.post(path, **body(path)))
            assert made.status == 200

    run(go())


def test_open_requests_end_while_draining(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(TEXT, **body(TEXT, stream=True))
            await to.running(3)
            await to.engine.publish(to.client, "draining")
            refused = await to.post(TEXT, **body(TEXT)).end()
            assert refused.status == 503
            await to.finish(made)
            reasons = [event["choices"][0]["finish_reason"] for event in made.events[:-1]]
            assert reasons.count("length") == 3

    run(go())


@pytest.mark.parametrize(
    ("state", "status"), [("starting", 503), ("ready", 200), ("degraded", 503), ("draining", 503)]
)
def test_health(tmp_path, state, status):
    async def go():
        async with connected(tmp_path, ready=False) as to:
            await to.engine.publish(to.client, state, detail="loading weights", progress=0.5)
            made = await to.get("/health")
            assert (made.status, made.json["state"]) == (status, state)
            runner = made.json["components"]["runner-0"]
            assert (runner["detail"], runner["progress"]) == ("loading weights", 0.5)

    run(go())


def test_health_before_the_supervisor_has_spoken(tmp_path):
    async def go():
        async with connected(tmp_path, ready=False) as to:
            made = await to.get("/health")
            assert (made.status, made.json["state"]) == (503, "starting")
            assert (await to.get("/v1/models")).status == 200

    run(go())


def test_streams_survive_the_scheduler_s_death(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            calm = await to.finish(to.post(TEXT, **body(TEXT, n=1)))
            made = to.post(
                TEXT, **body(TEXT, stream=True, n=1, stream_options={"include_usage": True})
            )
            await to.running(1)
            await to.step(5)
            await to.engine.kill(to.client, "scheduler")
            await to.finish(made)
            *chunks, usage, _ = made.events
            text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
            assert text == calm.json["choices"][0]["text"]
            assert usage["usage"] == calm.json["usage"]

    run(go())
