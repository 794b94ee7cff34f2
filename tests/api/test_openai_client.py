"""The official client against the real server."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest

MESSAGES = [{"role": "user", "content": "hello"}]


def complete(client, **more):
    settings = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 12}
    settings["extra_body"] = {"ignore_eos": True} | more.pop("extra_body", {})
    return client.completions.create(**(settings | more))


def chat(client, **more):
    settings = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    settings["extra_body"] = {"ignore_eos": True} | more.pop("extra_body", {})
    return client.chat.completions.create(**(settings | more))


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").id == "tiny"


def test_chat_and_its_stream_agree(client):
    whole = chat(client)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.role == "assistant"
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == choice.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client(tiny, client):
    whole = chat(client, logprobs=True)

    async def go():
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none") as aclient:
            settings = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
            settings["extra_body"] = {"ignore_eos": True}
            made = await aclient.chat.completions.create(**settings)
            text = ""
            async for chunk in await aclient.chat.completions.create(**settings, stream=True):
                text += chunk.choices[0].delta.content or ""
            return made.choices[0].message.content, text

    assert asyncio.run(go()) == (whole.choices[0].message.content,) * 2


def test_errors_have_the_client_s_types(client):
    with pytest.raises(openai.NotFoundError) as missing:
        chat(client, model="gpt-9")
    assert missing.value.code == "model_not_found"
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as wrong:
            chat(client, max_tokens=600, stream=stream)
        assert (wrong.value.code, wrong.value.param) == ("context_length_exceeded", "max_tokens")


def test_text_is_not_cut_inside_characters(client):
    """Random weights write bytes that are rarely UTF-8: what is no character becomes U+FFFD, and
    a stream says the same as a whole answer."""
    whole = complete(client, max_tokens=200, temperature=1, seed=3).choices[0].text
    chunks = complete(client, max_tokens=200, temperature=1, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_continuing_a_message(tiny, client):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well"}]
    _, made = tiny.post("/tokenize", {"messages": messages, "continue_final_message": True})
    prompt = bytes(made["tokens"]).decode()
    assert prompt.endswith("assistant: Well")
    continued = chat(client, messages=messages, extra_body={"continue_final_message": True})
    assert continued.usage.prompt_tokens == len(prompt)


def test_continuous_usage(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        chunk.usage.completion_tokens for chunk in chat(client, stream=True, stream_options=options)
    ]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_completion_forms_agree(client):
    text = complete(client).choices[0].text
    ids = list(b"hello")
    assert complete(client, prompt=ids).choices[0].text == text
    many = complete(client, prompt=["hello", "other", "hello"])
    assert [choice.index for choice in many.choices] == [0, 1, 2]
    assert many.choices[0].text == many.choices[2].text == text
    assert complete(client, prompt=[ids, ids]).choices[1].text == text
    streamed = complete(client, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_the_default_length_gives_way_to_a_long_prompt(client):
    made = complete(client, prompt="x" * 510, max_tokens=None)
    assert made.usage.completion_tokens == 2


def test_echo_and_logprobs(client):
    plain = complete(client).choices[0].text
    made = complete(client, echo=True, logprobs=2).choices[0]
    assert made.text == "hello" + plain
    assert len(made.logprobs.tokens) == 5 + 12
    assert made.logprobs.token_logprobs[0] is None
    assert all(value <= 0 for value in made.logprobs.token_logprobs[1:])
    # Two alternatives, and the chosen token where it is not one; bytes that are no text collide.
    assert all(1 <= len(top) <= 3 for top in made.logprobs.top_logprobs[1:])


def test_chat_logprobs(client):
    entries = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(entries) == 12
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the most likely one.
        assert entry.logprob == pytest.approx(entry.top_logprobs[0].logprob)
        assert entry.top_logprobs[0].logprob >= entry.top_logprobs[1].logprob
    streamed = [
        entry
        for chunk in chat(client, logprobs=True, top_logprobs=3, stream=True)
        if chunk.choices and chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [e.token for e in streamed] == [e.token for e in entries]


def test_n_choices_differ_and_repeat_with_a_seed(client):
    def texts():
        made = chat(client, n=3, seed=5, temperature=1.5)
        return [choice.message.content for choice in made.choices]

    first = texts()
    assert len(set(first)) == 3
    assert texts() == first
    alone = chat(client, n=1, seed=5, temperature=1.5).choices[0].message.content
    assert alone == first[0]
    by_choice = {0: "", 1: "", 2: ""}
    for chunk in chat(client, n=3, seed=5, temperature=1.5, stream=True):
        for choice in chunk.choices:
            by_choice[choice.index] += choice.delta.content or ""
    assert list(by_choice.values()) == first


def test_stop_string_ends_and_does_not_leak(client):
    whole = complete(client).choices[0].text
    stop = whole[4:6]
    expected = whole[: whole.index(stop)]
    made = complete(client, stop=stop).choices[0]
    assert made.finish_reason == "stop"
    assert made.stop_reason == stop
    assert made.text == expected
    streamed = complete(client, stop=[stop, "never"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == expected


def test_logit_bias_and_stop_token_ids(client):
    biased = complete(client, logit_bias={"65": 100}).choices[0].text
    assert biased == "A" * 12
    made = complete(client, logit_bias={"65": 100}, extra_body={"stop_token_ids": [65]})
    assert made.choices[0].text == ""
    assert made.choices[0].stop_reason == 65
    body = {"stop_token_ids": [65], "min_tokens": 3}
    assert complete(client, logit_bias={"65": 50}, extra_body=body).usage.completion_tokens >= 4


def test_prefix_cache_shows_in_usage(client):
    prompt = "a prompt that nobody else uses, long enough for pages " * 3
    first = complete(client, prompt=prompt)
    second = complete(client, prompt=prompt)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == len(prompt) - 1
    assert second.choices[0].text == first.choices[0].text


def test_many_streams_at_once(tiny, client):
    alone = complete(client, prompt="stream 7").choices[0].text

    async def go():
        aclient = openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)

        async def one(index):
            text = ""
            stream = await aclient.completions.create(
                model="tiny",
                prompt=f"stream {index}",
                temperature=0,
                max_tokens=12,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                text += chunk.choices[0].text
            return text

        texts = await asyncio.gather(*(one(index) for index in range(40)))
        await aclient.close()
        return texts

    assert asyncio.run(go())[7] == alone


def test_tokenize_and_detokenize(tiny):
    status, made = tiny.post("/tokenize", {"prompt": "hey", "return_token_strs": True})
    assert (status, made["tokens"], made["count"]) == (200, list(b"hey"), 3)
    assert made["token_strs"] == ["h", "e", "y"]
    assert made["max_model_len"] == 512
    status, made = tiny.post("/tokenize", {"messages": MESSAGES})
    assert bytes(made["tokens"]) == b"user: hello\nassistant: "
    assert tiny.post("/detokenize", {"tokens": list(b"hey")}) == (200, {"prompt": "hey"})


def test_version_health_and_metrics(tiny, client):
    assert json.loads(tiny.get("/version")[1])["version"]
    health = tiny.health()
    assert health["state"] == "ready"
    assert health["components"]["runner-0"]["state"] == "ready"
    before = tiny.metric("tidemill_generated_tokens_total")
    complete(client)
    assert tiny.metric("tidemill_generated_tokens_total") >= before + 12
    assert tiny.metric('tidemill_requests_total{endpoint="completions",outcome="length"}') >= 1
    for name in ("ttft", "tpot", "queue", "step", "schedule"):
        assert tiny.metric(f"tidemill_{name}_seconds_count") >= 1, name
