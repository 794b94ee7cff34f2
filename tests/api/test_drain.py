"""The server's end: new requests are refused, open ones finish, everything exits."""

from __future__ import annotations

import json
import signal
import urllib.request

from served import serve_tiny, until


def test_sigterm_waits_for_open_streams(tmp_path):
    with serve_tiny(tmp_path) as served:
        asked = {"model": "tiny", "prompt": "stay", "stream": True, "ignore_eos": True}
        data = json.dumps(asked | {"max_tokens": 1500}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{served.url}/v1/completions", data, kind)
        with urllib.request.urlopen(request, timeout=60) as stream:
            first = stream.readline()
            served.process.send_signal(signal.SIGTERM)
            until(lambda: served.health()["state"] == "draining", "it to drain")
            status, made = served.post("/v1/completions", asked | {"stream": False})
            assert (status, made["error"]["code"]) == (503, "draining")
            events = (first + stream.read()).decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        last = json.loads(events[-3].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert served.process.wait(timeout=30) == 0
