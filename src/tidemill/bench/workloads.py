"""What a benchmark sends: token ids and lengths, the same for every engine.

The five workloads and their default sizes are the ones commonly used to compare engines:
`mixed` is nano-vllm's and mini-sglang's offline benchmark, `decode` isolates the time per output
token at fixed batch sizes, `prefix` measures prefix reuse, `prefill` prompt reading alone and
`ttft` the latency of one prompt on an idle engine.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

WorkloadName = Literal["mixed", "decode", "prefix", "prefill", "ttft"]
WORKLOADS: tuple[WorkloadName, ...] = ("mixed", "decode", "prefix", "prefill", "ttft")

# Short decodes are subtracted from long ones, so that prefill and start-up cancel out.
DECODE_SHORT, DECODE_LONG = 32, 288


@dataclass(frozen=True, slots=True)
class Range:
    """Lengths in tokens, uniform in [low, high]."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Range:
        """ "128" or "100:1024". Raises ValueError with the accepted forms."""
        low, _, high = text.partition(":")
        try:
            made = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"a length is N or LOW:HIGH, got {text!r}") from None
        if not 1 <= made.low <= made.high:
            raise ValueError(f"a length range needs 1 <= LOW <= HIGH, got {text!r}")
        return made


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large a workload is. None takes the workload's default."""

    requests: int | None = None
    input_len: Range | None = None
    output_len: Range | None = None
    prefix_len: int | None = None
    vocab: int = 10000  # ids are drawn from [0, vocab]
    temperature: float | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    prompt: list[int]
    output_len: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One repetition's requests, all sent without waiting for EOS (`ignore_eos`)."""

    name: WorkloadName
    requests: list[BenchRequest]
    temperature: float
    description: str = field(default="")

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)


_DEFAULTS: dict[WorkloadName, Sizes] = {
    "mixed": Sizes(256, Range(100, 1024), Range(100, 1024), 0, temperature=0.6),
    "decode": Sizes(1, Range(128, 128), Range(DECODE_LONG, DECODE_LONG), 0, temperature=0.0),
    "prefix": Sizes(256, Range(64, 64), Range(64, 64), 4096, temperature=0.0),
    "prefill": Sizes(8, Range(8192, 8192), Range(1, 1), 0, temperature=0.0),
    "ttft": Sizes(1, Range(1024, 1024), Range(1, 1), 0, temperature=0.0),
}


def make(name: WorkloadName, sizes: Sizes, seed: int) -> Workload:
    """The workload's requests, a function of (name, sizes, seed) alone.

    Draws follow the published benchmark: all prompts first, then all output lengths.
    """
    default = _DEFAULTS[name]
    count = sizes.requests or default.requests or 1
    inputs = sizes.input_len or default.input_len or Range(1, 1)
    outputs = sizes.output_len or default.output_len or Range(1, 1)
    prefix_len = default.prefix_len if sizes.prefix_len is None else sizes.prefix_len
    temperature = default.temperature if sizes.temperature is None else sizes.temperature
    rng = random.Random(seed)

    def ids(length: int) -> list[int]:
        return [rng.randint(0, sizes.vocab) for _ in range(length)]

    prefix = ids(prefix_len or 0)
    prompts = [prefix + ids(rng.randint(inputs.low, inputs.high)) for _ in range(count)]
    lengths = [rng.randint(outputs.low, outputs.high) for _ in range(count)]
    described = f"{count} requests, {_span(inputs)} in, {_span(outputs)} out"
    if prefix_len:
        described += f", {prefix_len} shared"
    requests = [BenchRequest(p, n) for p, n in zip(prompts, lengths, strict=True)]
    return Workload(name, requests, temperature or 0.0, described)


def _span(length: Range) -> str:
    return str(length.low) if length.low == length.high else f"{length.low}-{length.high}"
