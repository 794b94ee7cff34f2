"""Start a server, stream one chat through the `openai` client, shut the server down.

Run by `make demo`; works from any environment that has tidemill and openai.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai

QUESTION = "Write a short poem about the sea."


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_ready(url: str, server: subprocess.Popen[bytes], limit_s: float) -> None:
    """Poll /health until it answers 200. Exits when the server does or the limit has passed."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit("the server ended before it was ready; see its message above")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"the server was not ready within {limit_s:.0f} s")


def stream_chat(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    print(f"\n{model} is asked: {QUESTION}\n")
    start = time.perf_counter()
    first = last = start
    usage = None
    for chunk in client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        max_tokens=160,
        stream=True,
        stream_options={"include_usage": True},
    ):
        usage = chunk.usage or usage
        text = chunk.choices[0].delta.content if chunk.choices else None
        if text:
            last = time.perf_counter()
            first = last if first == start else first
            print(text, end="", flush=True)
    tokens = usage.completion_tokens if usage else 0
    rate = (tokens - 1) / (last - first) if last > first else 0.0
    print(f"\n\n{tokens} tokens, first after {(first - start) * 1e3:.0f} ms, {rate:.0f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    args = parser.parse_args()
    tidemill = [sys.executable, "-m", "tidemill"]
    # Fetched first, so that the progress bar is in the foreground.
    subprocess.run([*tidemill, "pull", args.model], check=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [*tidemill, "serve", args.model, "--port", str(port), "--log-level", "warning"]
    # A cached model needs no network, and the server must not wait for one.
    server = subprocess.Popen(command, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    try:
        wait_until_ready(url, server, limit_s=180)
        stream_chat(url)
    finally:
        server.send_signal(signal.SIGINT)
        code = server.wait(timeout=60)
    if code != 0:
        sys.exit(f"the server ended with code {code}")
    print(
        f"\nThe server is down again. To serve for good:\n\n    {sys.executable} -m tidemill serve"
    )


if __name__ == "__main__":
    main()
