"""Every wrong request gets a 4xx that names the field; the server lives on."""

from __future__ import annotations

import http.client
import json
import socket
import time

import pytest

from served import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


def body(path, **more):
    made = {"model": "tiny", "max_tokens": 2, "temperature": 0}
    return made | ({"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}) | more


@pytest.fixture(autouse=True)
def _still_alive(tiny):
    """After every bad request a good one works."""
    yield
    status, made = tiny.post(TEXT, body(TEXT))
    assert status == 200, made


@pytest.mark.parametrize("path", [CHAT, TEXT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data",
    [b"", b"   ", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe{}", b"{'a': 1}", b"[" * 5000],
)
def test_bodies_that_are_not_an_object(tiny, path, data):
    status, made = tiny.post(path, data)
    assert status == 400
    assert made["error"]["type"] == "invalid_request_error"
    assert made["error"]["message"]


BOTH = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"top_k": 2.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"max_tokens": 511}, "max_tokens"),
    ({"min_tokens": 5}, "min_tokens"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 2000}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": [256]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [2**40]}, "stop_token_ids"),
    ({"logit_bias": {"256": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {"1": None}}, "logit_bias"),
    ({"max_tokens": None, "min_tokens": 600}, "min_tokens"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"seed": 2**70}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"odd": 1}}, "stream_options.odd"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"priority": 2**40}, "priority"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": 3}, "model"),
    ({"model": None}, "model"),
    ({"store": True}, "store"),
    ({"service_tier": "priority"}, "service_tier"),
    ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        "stream_options.include_obfuscation",
    ),
    ({"skip_special_tokens": None}, "skip_special_tokens"),
    ({"metadata": [1]}, "metadata"),
]
ONLY_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "x"}]}, "messages[...].role"),
    ({"messages": [{"role": "pirate", "content": "arr"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[...].content"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"prediction": {"type": "content"}}, "prediction"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"prompt": "hi"}, "prompt"),
    ({"messages": [{"role": "user", "content": "x", "images": []}]}, "messages[...].images"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]
ONLY_TEXT = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [256]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**50]}, "prompt"),
    ({"prompt": ["a"] * 17}, "prompt"),
    ({"prompt": ["a"] * 8, "n": 3}, "n"),
    ({"prompt": "x" * 600}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"messages": MESSAGES}, "messages"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, "prompt_logprobs"),
]
CASES = [(path, change, param) for change, param in BOTH for path in (CHAT, TEXT)]
CASES += [(CHAT, *case) for case in ONLY_CHAT] + [(TEXT, *case) for case in ONLY_TEXT]


@pytest.mark.parametrize(("path", "change", "param"), CASES, ids=str)
def test_wrong_fields_are_named(tiny, path, change, param):
    status, made = tiny.post(path, body(path, **change))
    assert status == 400, made
    assert made["error"]["param"] is not None, made
    assert made["error"]["param"].split("[")[0] == param.split("[")[0], made


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_none(tiny, text):
    data = json.dumps(body(TEXT)).replace('"temperature": 0', f'"temperature": {text}')
    assert tiny.post(TEXT, data.encode())[0] == 400


def test_missing_and_unknown_fields(tiny):
    for path, field in ((CHAT, "messages"), (TEXT, "prompt")):
        status, made = tiny.post(path, {"model": "tiny"})
        assert status == 400
        assert (made["error"]["param"], made["error"]["code"]) == (field, "missing_parameter")
        _, made = tiny.post(path, body(path, temprature=1))
        assert made["error"]["code"] == "unknown_parameter"
        assert "temprature" in made["error"]["message"]


WRONG_TOKENS = [
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
    ("/tokenize", {"prompt": 3}, "prompt"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {"messages": [{"role": "pirate", "content": "arr"}]}, "messages[0].role"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [-1]}, "tokens"),
    ("/detokenize", {"tokens": [256]}, "tokens"),
    ("/detokenize", {"tokens": [2**40]}, "tokens"),
]


@pytest.mark.parametrize(("path", "data", "param"), WRONG_TOKENS, ids=str)
def test_wrong_tokenize_calls(tiny, path, data, param):
    status, made = tiny.post(path, data)
    assert status == 400, made
    assert made["error"]["param"] == param


def test_fields_that_ask_for_nothing(tiny):
    nothing = {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"}
    nothing |= {"stop": None, "logit_bias": None, "seed": None, "n": None, "stream": None}
    nothing |= {"response_format": {"type": "text"}, "prompt_cache_key": "k"}
    chat = {"tools": [], "tool_choice": "none", "modalities": ["text"], "audio": None}
    for path, more in ((CHAT, chat), (TEXT, {"suffix": None, "best_of": 1, "echo": None})):
        status, made = tiny.post(path, body(path, **nothing | more))
        assert status == 200, made


def test_bytes_that_are_no_text(tiny):
    data = json.dumps(body(TEXT)).encode().replace(b'"hi"', b'"\xff\xfe"')
    assert tiny.post(TEXT, data)[0] == 400


def test_content_types(tiny):
    host, port = tiny.url.removeprefix("http://").split(":")
    data = json.dumps(body(TEXT))
    for kind, status in (
        ("application/json; charset=utf-8", 200),
        ("text/plain", 200),
        (None, 200),
        ("multipart/form-data; boundary=x", 415),
        ("application/x-www-form-urlencoded", 415),
    ):
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        connection.request("POST", TEXT, data, {} if kind is None else {"Content-Type": kind})
        answer = connection.getresponse()
        assert answer.status == status, kind
        assert status == 200 or json.loads(answer.read())["error"]["message"]
        connection.close()


def test_refusals_are_counted(tiny):
    name = 'tidemill_requests_total{endpoint="chat",outcome="refused"}'
    before = tiny.metric(name)
    tiny.post(CHAT, b"{")
    tiny.post(CHAT, body(CHAT, n=0))
    tiny.post(CHAT, body(CHAT, model="gpt-9"))
    assert tiny.metric(name) == before + 3


def test_context_length_names_both_numbers(tiny):
    _, made = tiny.post(TEXT, body(TEXT, prompt="x" * 600))
    assert made["error"]["code"] == "context_length_exceeded"
    assert "600" in made["error"]["message"]
    assert "512" in made["error"]["message"]


def test_unknown_model_and_routes(tiny):
    assert tiny.post(CHAT, body(CHAT, model="gpt-9"))[0] == 404
    for method, path, status in (
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ):
        found, answer = tiny.request(method, path, b"{}" if method == "POST" else None)
        assert found == status
        assert json.loads(answer)["error"]["message"]


def test_huge_bodies_are_refused_unread(tiny):
    status, made = tiny.post(TEXT, b'{"prompt": "' + b"x" * 200_000 + b'"}')
    assert status == 413
    assert "100000" in made["error"]["message"]
    host, port = tiny.url.removeprefix("http://").split(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=10)
    connection.putrequest("POST", TEXT)
    connection.putheader("Content-Length", str(10**12))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_lone_surrogates(tiny):
    data = json.dumps(body(TEXT)).replace('"hi"', '"\\ud800"').encode()
    assert tiny.post(TEXT, data)[0] == 400


def test_half_a_request_and_garbage(tiny):
    host, port = tiny.url.removeprefix("http://").split(":")
    for data in (
        b"\x00\x01\x02",
        b"GET",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 50\r\n\r\n{",
    ):
        with socket.create_connection((host, int(port)), timeout=5) as raw:
            raw.sendall(data)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_request(tiny, stream):
    data = json.dumps(
        body(TEXT, prompt="stay", max_tokens=500, ignore_eos=True, stream=stream, n=4)
    ).encode()
    host, port = tiny.url.removeprefix("http://").split(":")
    aborted = tiny.metric('tidemill_requests_total{endpoint="completions",outcome="abort"}')
    with socket.create_connection((host, int(port)), timeout=10) as raw:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        raw.sendall(head.encode() + data)
        if stream:
            assert raw.recv(100)
        else:
            until(lambda: tiny.metric("tidemill_running_requests") > 0, "it to run")
    until(lambda: tiny.metric("tidemill_running_requests") == 0, "its slots to be free")
    until(
        lambda: (
            tiny.metric('tidemill_requests_total{endpoint="completions",outcome="abort"}')
            == aborted + 4
        ),
        "the aborts to be counted",
    )
    time.sleep(0.05)
    assert tiny.metric('tidemill_kv_pages{state="used"}') == 0
