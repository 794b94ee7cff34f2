"""What a server costs beside its tokens: start, memory, idle CPU, and what HTTP adds.

    python benchmarks/footprint.py [--model smollm2] [--json FILE]

Memory is the proportional set size (PSS) summed over all processes, so that pages which they
share count once. Idle CPU is user + system time of all processes over 20 s without requests.
The HTTP overhead compares single-stream decode through the server with the inline engine, in
turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from pathlib import Path

import psutil
import servers

from tidemill import LLM, SamplingParams, hub
from tidemill.bench import serve
from tidemill.bench.workloads import Range, Sizes, Workload, make


def family(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def resident_mib(pid: int) -> float:
    return sum(p.memory_full_info().pss for p in family(pid)) / 2**20


def cpu_seconds(pid: int) -> float:
    return sum(sum(p.cpu_times()[:2]) for p in family(pid))


def workload(requests: int, input_len: int, output_len: int, seed: int) -> Workload:
    sizes = Sizes(requests, Range(input_len, input_len), Range(output_len, output_len), 0)
    made = make("mixed", sizes, seed)
    return Workload(made.name, made.requests, 0.0, made.description)


def inline_tpot(llm: LLM, plan: Workload) -> float:
    """Milliseconds per output token after the first, by the inline engine."""
    params = SamplingParams(
        temperature=0.0, max_tokens=plan.requests[0].output_len, ignore_eos=True
    )
    times = []
    for delta in llm.stream(plan.requests[0].prompt, params):
        times.append((time.perf_counter(), len(delta.token_ids)))
    tokens = sum(count for _, count in times[1:])
    return (times[-1][0] - times[0][0]) * 1e3 / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    model = str(hub.resolve(args.model))
    figures: dict[str, object] = {}
    begun = time.perf_counter()
    with servers.tidemill(model) as running:
        name = asyncio.run(serve.model_name(running.base_url, None))
        target = serve.Target(running.base_url, name)

        def send(plan: Workload) -> float:
            repetition = asyncio.run(serve.run(target, plan, serve.Arrivals(), 0))
            errors = [r.error for r in repetition.records if r.error]
            if errors:
                raise SystemExit(errors[0])
            return repetition.figures().get("tpot_ms", 0.0)

        send(workload(1, 16, 1, seed=0))
        figures["start to first token, s"] = time.perf_counter() - begun
        figures["start to ready, s"] = running.start_s
        time.sleep(2)
        before, begun = cpu_seconds(running.pid), time.perf_counter()
        time.sleep(20)
        used = (cpu_seconds(running.pid) - before) / (time.perf_counter() - begun)
        figures["idle CPU, % of a core"] = used * 100
        figures["resident after start, MiB"] = resident_mib(running.pid)
        send(workload(32, 128, 128, seed=1))
        figures["resident after 32 at once, MiB"] = resident_mib(running.pid)
        send(workload(1, 2048, 1, seed=2))
        figures["resident after a 2,048-token prompt, MiB"] = resident_mib(running.pid)
        served, inline = [], []
        with LLM(model) as llm:
            inline_tpot(llm, workload(1, 64, 32, seed=3))
            for index in range(args.repeat):
                plan = workload(1, 64, 256, seed=4 + index)
                inline.append(inline_tpot(llm, plan))
                served.append(send(plan))
    figures["TPOT inline, ms"] = statistics.median(inline)
    figures["TPOT over HTTP, ms"] = statistics.median(served)
    ratios = [a / b for a, b in zip(served, inline, strict=True)]
    figures["HTTP / inline, median of pairs"] = statistics.median(ratios)
    for key, value in figures.items():
        print(f"{key:45} {value:10.3f}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
