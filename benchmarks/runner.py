"""What a step costs beside the forward pass: plan to batch, sampling, slots, result.

    python benchmarks/runner.py

Runs the model runner on a decoder whose forward pass costs nothing (it returns logits that are
there already), with SmolLM2's vocabulary. Microseconds per decode step, the median of many.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.models.decoder import Decoder, DecoderConfig, DecoderWeights
from tidemill.ops.backend import Batch
from tidemill.ops.reference import DenseWeight, ReferenceBackend
from tidemill.runner.model_runner import ModelRunner
from tidemill.wire.plan import EMPTY, RowFlags, SlotInit, StepPlan
from tidemill.wire.sampling import SamplingParams

PROMPT = 200
KINDS = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "top_k": SamplingParams(temperature=0.8, top_k=40),
    "penalties": SamplingParams(temperature=0, presence_penalty=0.5, repetition_penalty=1.1),
    "logprobs": SamplingParams(temperature=0, logprobs=5),
}


class FreeDecoder(Decoder):
    """Logits of fixed noise; an embedding's width of nothing else."""

    def __init__(self, vocab: int, rows: int) -> None:
        config = DecoderConfig("llama", 8, 1, 1, 1, 8, 8, vocab, 1e-5, 8192)
        backend = ReferenceBackend(torch.device("cpu"), torch.float32)
        nothing = DenseWeight(torch.zeros(1, 8))
        weights = DecoderWeights(nothing, [], torch.ones(8), nothing)
        super().__init__(config, weights, backend, torch.zeros(8192, 8))
        self._noise = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(0)) * 3
        self._logits = torch.empty_like(self._noise)

    def forward(self, batch: Batch, kv: object) -> torch.Tensor:
        rows = len(batch.logit_tokens)
        return self._logits[:rows].copy_(self._noise[:rows])


def measure(runner: ModelRunner, params: SamplingParams, rows: int, steps: int) -> float:
    """Median microseconds of a decode step, without the forward pass."""
    runner.reset()
    history = np.arange(PROMPT, dtype=np.int32) if params.has_penalties else EMPTY
    inits = [SlotInit(slot, params, slot, PROMPT, 8192, history) for slot in range(rows)]
    pages = np.array([(s, p, 0) for s in range(rows) for p in range(64)], dtype=np.int32)
    table = np.zeros((rows, 4), dtype=np.int32)
    table[:, 0], table[:, 1] = np.arange(rows), PROMPT
    table[:, 2], table[:, 3] = 1, RowFlags.SAMPLE
    runner.execute(StepPlan(0, rows=table, admit=inits, pages=pages))
    taken = []
    for step in range(steps):
        table[:, 1] += 1
        begin = time.perf_counter_ns()
        runner.execute(StepPlan(step, rows=table))
        total = time.perf_counter_ns() - begin
        begin = time.perf_counter_ns()
        runner._decoder.forward(runner._batches.build(StepPlan(step, rows=table)).batch, None)
        built = time.perf_counter_ns()
        runner._batches.build(StepPlan(step, rows=table))
        taken.append((total - (built - begin) + (time.perf_counter_ns() - built)) / 1000)
    return float(np.median(taken))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    args = parser.parse_args()
    most = max(args.rows)
    config = EngineConfig(model="free", max_running_requests=most, kv_memory=1 << 20)
    runner = ModelRunner(config, decoder=FreeDecoder(args.vocab, most))
    print(f"{'':12}" + "".join(f"{rows:>9} rows" for rows in args.rows))
    for name, params in KINDS.items():
        times = [measure(runner, params, rows, args.steps) for rows in args.rows]
        print(f"{name:12}" + "".join(f"{value:>11.0f} µs" for value in times))


if __name__ == "__main__":
    main()
