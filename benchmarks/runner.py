"""What a step costs beside the forward pass: plan to batch, sampling, slots, result.

    python benchmarks/runner.py

Runs the model runner on a decoder whose forward pass costs nothing (it returns logits that are
there already), with SmolLM2's vocabulary. Microseconds per decode step: the median of many,
and the best in brackets.
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

        self.spent = 0  # nanoseconds in `forward`, all calls together

    def forward(self, batch: Batch, kv: object) -> torch.Tensor:
        begin = time.perf_counter_ns()
        rows = len(batch.logit_tokens)
        logits = self._logits[:rows].copy_(self._noise[:rows])
        self.spent += time.perf_counter_ns() - begin
        return logits


def measure(
    runner: ModelRunner, decoder: FreeDecoder, params: SamplingParams, rows: int, steps: int
) -> list[float]:
    """Microseconds of each decode step, without the forward pass."""
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
        decoder.spent, begin = 0, time.perf_counter_ns()
        runner.execute(StepPlan(step, rows=table))
        taken.append((time.perf_counter_ns() - begin - decoder.spent) / 1000)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    args = parser.parse_args()
    most = max(args.rows)
    config = EngineConfig(model="free", max_running_requests=most, kv_memory=1 << 20)
    decoder = FreeDecoder(args.vocab, most)
    runner = ModelRunner(config, decoder=decoder)
    print(f"{'':12}" + "".join(f"{rows:>15} rows" for rows in args.rows))
    for name, params in KINDS.items():
        cells = []
        for rows in args.rows:
            times = measure(runner, decoder, params, rows, args.steps)
            cells.append(f"{np.median(times):>11.0f} ({min(times):.0f})".rjust(20))
        print(f"{name:12}" + "".join(cells))


if __name__ == "__main__":
    main()
