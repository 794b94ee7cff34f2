"""What the scheduler costs, without a model: `python benchmarks/scheduler.py`.

1. Scheduler and wire time of a decode step with many running requests: `Scheduler.advance`,
   the TokenBatch's encoding, and encoding and decoding of the plan and the result. The runner
   is simulated and its own time is left out.
2. Radix match and page allocation of a long prompt, with nothing, half, and all of it cached.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable

import numpy as np

from tidemill.config import EngineConfig
from tidemill.scheduler.kv_cache import KVCache
from tidemill.scheduler.scheduler import Scheduler
from tidemill.scheduler.simulated import SimulatedRunner
from tidemill.wire import messages
from tidemill.wire.messages import RunnerReady, Submit, ids_to_bytes
from tidemill.wire.plan import I32, StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams

VOCAB = 50_000


class WireLink:
    """Encodes and decodes as the ring does; `excluded` sums up the runner's own seconds."""

    def __init__(self, runner: SimulatedRunner) -> None:
        self._runner = runner
        self._results: list[I32] = []
        self.excluded = 0.0

    def send(self, plan: StepPlan) -> None:
        received = StepPlan.decode(np.concatenate(plan.encode()))
        began = time.perf_counter()
        result = self._runner.execute(received)
        self.excluded += time.perf_counter() - began
        self._results.append(np.concatenate(result.encode()))

    def poll(self) -> StepResult | None:
        return StepResult.decode(self._results.pop(0)) if self._results else None

    def fileno(self) -> int:
        return -1


def decode_steps(requests: int, steps: int, prompt_len: int, detokenizers: int) -> list[float]:
    """Microseconds of each steady decode step with `requests` running."""
    per_request = prompt_len + steps + 64
    ready = RunnerReady(
        ring="",
        num_pages=requests * -(-per_request // 16),
        page_size=16,
        max_model_len=4096,
        max_running_requests=requests,
        max_batch_tokens=max(2048, requests),
        vocab_size=VOCAB,
        device="simulated",
    )
    link = WireLink(SimulatedRunner(ready))
    scheduler = Scheduler(EngineConfig(model="simulated", run_ahead=1), ready, link)
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.0, max_tokens=steps + 48, stop_token_ids=())
    for rid in range(requests):
        prompt = rng.integers(0, VOCAB, prompt_len, dtype=np.int32)
        scheduler.submit(
            Submit(
                rid=rid,
                worker=0,
                detokenizer=rid % detokenizers,
                prompt_ids=ids_to_bytes(prompt),
                params=params,
            )
        )
    while scheduler.stats.generated_tokens < requests * 8:  # prefill over, batch stable
        scheduler.advance()
    times: list[float] = []
    while len(times) < steps // 2:
        done, excluded = scheduler.stats.generated_tokens, link.excluded
        began = time.perf_counter()
        batches = scheduler.advance()
        for batch in batches.values():
            messages.encode(batch)
        seconds = time.perf_counter() - began - (link.excluded - excluded)
        finished = (scheduler.stats.generated_tokens - done) / requests
        if finished:  # a turn may take in two steps
            times.append(seconds * 1e6 / finished)
    return times


def reserve_times(tokens: int, cached: float, repeat: int) -> list[float]:
    """Microseconds to match and to allocate `tokens`, the first `cached` part of them in the
    tree, which is full, so that the rest must be evicted."""
    page_size = 16
    ids = np.random.default_rng(1).integers(0, VOCAB, tokens, dtype=np.int32)
    pages = tokens // page_size + 64
    times: list[float] = []
    for index in range(repeat):
        cache = KVCache(2 * pages, page_size, prefix_cache=True)
        rng = np.random.default_rng(index)
        for _ in range(2 * pages // 8):  # other conversations, of 8 pages each
            _fill(cache, rng.integers(0, VOCAB, 8 * page_size, dtype=np.int32))
        if cached:
            _fill(cache, ids[: int(tokens * cached)])
        began = time.perf_counter()
        reserved = cache.reserve(ids, "", len(ids) - 1, 0, step=1)
        times.append((time.perf_counter() - began) * 1e6)
        if reserved is None or reserved.reused < int(tokens * cached) - 1:
            raise RuntimeError("the prompt was not found in the cache")
    return times


def _fill(cache: KVCache, ids: I32) -> None:
    reserved = cache.reserve(ids, "", len(ids) - 1, 0, step=0)
    if reserved is None:
        raise RuntimeError("no room in the cache")
    cache.retire(reserved.lease, ids, reserved.pages, 0)
    cache.end_step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--prompt-len", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32768, help="length of the long prompt")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", help="write the figures to this file")
    options = parser.parse_args()
    cases: dict[str, Callable[[], list[float]]] = {
        f"decode step, {options.requests} running": lambda: decode_steps(
            options.requests, options.steps, options.prompt_len, 1
        ),
        f"decode step, {options.requests} running, 2 detokenizers": lambda: decode_steps(
            options.requests, options.steps, options.prompt_len, 2
        ),
    }
    for cached in (0.0, 0.5, 1.0):
        cases[f"match + allocate {options.tokens} tokens, {cached:.0%} cached"] = (
            lambda cached=cached: reserve_times(options.tokens, cached, options.repeat)
        )
    report: dict[str, dict[str, float]] = {}
    print(f"{'microseconds':54} {'p10':>8} {'median':>8} {'p90':>8} {'max':>8}")
    for name, measure in cases.items():
        gc.collect()
        times = measure()
        p10, p50, p90 = (float(v) for v in np.percentile(times, (10, 50, 90)))
        report[name] = {"p10": p10, "median": p50, "p90": p90, "max": max(times)}
        print(f"{name:54} {p10:8.1f} {p50:8.1f} {p90:8.1f} {max(times):8.1f}")
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump({"options": vars(options), "microseconds": report}, file, indent=2)


if __name__ == "__main__":
    main()
