"""Online benchmark: streams completions from any OpenAI-compatible server.

Arrivals are a Poisson process (`rate`), or a fixed number of requests in flight
(`concurrency`), or all at once. Prompts are token ids, which vLLM, SGLang, llama.cpp and
Tidemill all accept; `text` prompts are for servers that do not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from tidemill.bench.report import Repetition, RequestRecord
from tidemill.bench.workloads import BenchRequest, Workload

# Common short words; about one token each in most vocabularies.
_WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world",
    "school", "state", "family",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """Where and how to send. `extra` goes into every request body as it is."""

    base_url: str  # e.g. http://127.0.0.1:8000/v1
    model: str
    api_key: str | None = None
    text_prompts: bool = False
    timeout_s: float = 600.0
    extra: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` requests a second (Poisson), or `concurrency` in flight, or (neither) all at once."""

    rate: float | None = None
    concurrency: int | None = None


async def run(target: Target, workload: Workload, arrivals: Arrivals, seed: int) -> Repetition:
    """Send one repetition and wait for every answer. Failed requests are recorded, not raised."""
    timeout = aiohttp.ClientTimeout(total=target.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    gate = asyncio.Semaphore(arrivals.concurrency or len(workload.requests))
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=headers
    ) as session:
        # The first connection and its event-loop set-up are not the engine's time.
        async with session.get(f"{target.base_url}/models") as response:
            await response.read()
        start = time.perf_counter()

        async def one(request: BenchRequest) -> RequestRecord:
            async with gate:
                return await _stream(session, target, workload, request, start)

        tasks = [
            asyncio.create_task(one(request))
            async for request in _arrive(workload.requests, arrivals, seed)
        ]
        records = list(await asyncio.gather(*tasks))
        return Repetition(time.perf_counter() - start, records)


async def model_name(base_url: str, api_key: str | None) -> str:
    """The first model that the server lists. Raises RuntimeError in one line."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(f"{base_url}/models") as response,
        ):
            body = orjson.loads(await response.read())
            return str(body["data"][0]["id"])
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        raise RuntimeError(f"no OpenAI-compatible server answers at {base_url}: {error}") from error


async def _arrive(
    requests: list[BenchRequest], arrivals: Arrivals, seed: int
) -> AsyncIterator[BenchRequest]:
    rng = random.Random(seed)
    due = time.perf_counter()
    for request in requests:
        if arrivals.rate is not None:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += rng.expovariate(arrivals.rate)
        yield request


def _body(target: Target, workload: Workload, request: BenchRequest) -> bytes:
    prompt: Any = request.prompt
    if target.text_prompts:
        prompt = " ".join(_WORDS[token % len(_WORDS)] for token in request.prompt)
    body = {
        "model": target.model,
        "prompt": prompt,
        "max_tokens": request.output_len,
        "temperature": workload.temperature,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return orjson.dumps(body | (target.extra or {}))


async def _stream(
    session: aiohttp.ClientSession,
    target: Target,
    workload: Workload,
    request: BenchRequest,
    start: float,
) -> RequestRecord:
    record = RequestRecord(time.perf_counter() - start, len(request.prompt))
    try:
        async with session.post(
            f"{target.base_url}/completions",
            data=_body(target, workload, request),
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                record.error = f"{response.status}: {(await response.text())[:200]}"
                return record
            last_event = b""
            async for line in response.content:
                if not line.startswith(b"data:"):
                    continue
                if line.startswith(b"data: [DONE]"):
                    break
                last_event = line
                # The usage event that ends a stream carries no choice and is not text.
                if b'"choices":[]' not in line:
                    record.last = time.perf_counter() - start
                    record.first = record.first or record.last
            _read_usage(record, last_event)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        record.error = f"{type(error).__name__}: {error}"
    return record


def _read_usage(record: RequestRecord, event: bytes) -> None:
    """Token counts from the server's final usage event; its absence is an error, since counting
    events would miscount where several tokens share one."""
    usage = orjson.loads(event[5:] or b"{}").get("usage")
    if not usage:
        record.error = "the stream ended without usage"
        return
    record.output_tokens = usage["completion_tokens"]
    record.prompt_tokens = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    record.cached_tokens = details.get("cached_tokens") or 0
