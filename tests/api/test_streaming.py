"""What a stream looks like on the wire, when it begins, and how it ends."""

from __future__ import annotations

import msgspec
import pytest
from asgi import connected
from fake_engine import SCRIPT, run, until

from tidemill.wire.messages import ErrorInfo

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
WHOLE = SCRIPT[:10].decode()  # "Ebb é 日"
USAGE = {"include_usage": True}


def body(path, **more):
    made = {"max_tokens": 10, "stream": True}
    return made | ({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}) | more


def test_chat_events(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(CHAT, **body(CHAT, stream_options=USAGE))
            await to.running(1)
            assert made.status is None, "nothing is sent before the first token"
            await to.step(2)
            await until(lambda: len(made.pieces) == 2)
            assert (made.status, made.headers["content-type"]) == (
                200,
                "text/event-stream; charset=utf-8",
            )
            await to.finish(made)
            *chunks, usage, done = made.events
            assert done is None
            assert {chunk["object"] for chunk in made.events[:-1]} == {"chat.completion.chunk"}
            assert len({(chunk["id"], chunk["created"]) for chunk in made.events[:-1]}) == 1
            assert chunks[0]["id"].startswith("chatcmpl-")
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": ""}
            assert deltas[-1] == {}
            texts = [delta["content"] for delta in deltas[1:-1]]
            assert texts == ["E", "b", "b", " ", "é", " ", "日"]
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
            assert reasons == [None] * (len(chunks) - 1) + ["length"]
            assert all(chunk["usage"] is None for chunk in chunks)
            assert usage["choices"] == []
            assert usage["usage"] == {
                "prompt_tokens": len("user: hi\n"),
                "completion_tokens": 10,
                "total_tokens": 19,
                "prompt_tokens_details": {"cached_tokens": 3},
            }

    run(go())


def test_completion_events(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            made = await to.finish(to.post(TEXT, **body(TEXT, echo=True)))
            *chunks, done = made.events
            assert done is None
            assert chunks[0]["choices"][0]["text"] == "hiE"
            assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "hi" + WHOLE
            assert [c["choices"][0]["finish_reason"] for c in chunks][-2:] == [None, "length"]
            assert all("usage" not in chunk for chunk in chunks)

    run(go())


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_usage_grows_token_by_token(tmp_path, path):
    async def go():
        async with connected(tmp_path) as to:
            options = {"continuous_usage_stats": True}
            made = to.post(path, **body(path, stream_options=options))
            await to.running(1)
            to.engine.send([*to.engine.step(), *to.engine.step(), *to.engine.step()])
            await to.finish(made)
            counts = [event["usage"]["completion_tokens"] for event in made.events[:-1]]
            text = [1, 2, 3, 4, 6, 7]  # é is two tokens; the last character comes with the end
            assert counts == ([1, *text, 10, 10] if path == CHAT else [*text, 10])

    run(go())


def test_what_is_ready_together_is_written_together(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(TEXT, **body(TEXT))
            await to.running(1)
            batches = [*to.engine.step(), *to.engine.step(), *to.engine.step()]
            deltas = [delta for batch in batches for delta in batch.deltas]
            to.engine.send([msgspec.structs.replace(batches[0], deltas=deltas)])
            await until(lambda: made.pieces)
            assert [event["choices"][0]["text"] for event in made.events] == ["E", "b", "b"]
            assert len(made.pieces) == 1
            await to.finish(made)

    run(go())


def test_choices_of_one_stream(tmp_path):
    async def go():
        async with connected(tmp_path, detokenizers=2) as to:
            made = await to.finish(to.post(CHAT, **body(CHAT, n=3)))
            choices = [choice for event in made.events[:-1] for choice in event["choices"]]
            for index in range(3):
                mine = [choice for choice in choices if choice["index"] == index]
                assert mine[0]["delta"]["role"] == "assistant"
                assert "".join(c["delta"].get("content", "") for c in mine) == WHOLE
                assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]

    run(go())


REFUSALS = [
    ErrorInfo(status=429, message="too many wait", code="queue_full"),
    ErrorInfo(status=400, message="never fits", param="max_tokens"),
    ErrorInfo(status=500, message="broken"),
]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: str(each.status))
def test_a_refusal_has_its_status(tmp_path, path, stream, refusal):
    async def go():
        async with connected(tmp_path) as to:
            to.engine.refuse_with = refusal
            made = await to.finish(to.post(path, **body(path, stream=stream, n=2)))
            assert made.status == refusal.status
            assert made.json["error"]["message"] == refusal.message
            assert made.json["error"]["param"] == refusal.param
            assert made.json["error"]["code"] == refusal.code
            assert ("retry-after" in made.headers) == (refusal.status == 429)
            to.engine.refuse_with = None
            again = await to.finish(to.post(path, **body(path, stream=stream)))
            assert again.status == 200

    run(go())


def test_an_error_on_the_way_is_the_last_event(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            made = to.post(TEXT, **body(TEXT, n=2))
            await to.running(2)
            await to.step(2)
            to.engine.refuse_with = ErrorInfo(status=500, message="broken")
            await to.finish(made)
            assert made.status == 200
            *_, error, done = made.events
            assert error == {
                "error": {"message": "broken", "type": "server_error", "param": None, "code": None}
            }
            assert done is None
            await until(lambda: to.engine.take_requests() == 0)

    run(go())


def test_a_bug_on_the_way_is_the_last_event(tmp_path, monkeypatch, caplog):
    from tidemill.api.openai.completions import CompletionEvents

    def encode(self, choice, delta):
        if delta.generated > 2:
            raise ZeroDivisionError("a bug")
        return b"data: 1\n\n"

    monkeypatch.setattr(CompletionEvents, "encode", encode)

    async def go():
        async with connected(tmp_path) as to:
            made = await to.finish(to.post(TEXT, **body(TEXT)))
            assert made.events[-2]["error"]["type"] == "server_error"
            assert "a bug" not in made.body.decode()
            assert made.events[-1] is None

    run(go())
    assert "a bug" in caplog.text


def test_logprobs_of_an_echoed_prompt(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            asked = body(TEXT, prompt="tide", echo=True, logprobs=1, stream=False, max_tokens=5)
            made = await to.finish(to.post(TEXT, **asked))
            (choice,) = made.json["choices"]
            assert choice["text"] == "tideEbb \ufffd"
            logprobs = choice["logprobs"]
            assert logprobs["tokens"][:8] == list("tideEbb ")
            assert logprobs["token_logprobs"] == [None, -1, -2, -3, 0, -1, -2, -3, -4]
            assert logprobs["text_offset"] == list(range(9))
            assert logprobs["top_logprobs"][0] is None
            assert logprobs["top_logprobs"][1] == {"i": -1.0}
            streamed = await to.finish(to.post(TEXT, **asked | {"stream": True}))
            pieces = [event["choices"][0]["logprobs"] for event in streamed.events[:-1]]
            for key, values in logprobs.items():
                assert [each for piece in pieces if piece for each in piece[key]] == values

    run(go())


def test_prompt_logprobs(tmp_path):
    async def go():
        async with connected(tmp_path) as to:
            for path, count in ((CHAT, 9), (TEXT, 2)):
                asked = body(path, prompt_logprobs=1, stream=False)
                made = (await to.finish(to.post(path, **asked))).json
                entries = (made if path == CHAT else made["choices"][0])["prompt_logprobs"]
                assert len(entries) == count
                assert entries[0] is None
                (entry,) = entries[1].values()
                assert entry["logprob"] == -1

    run(go())
