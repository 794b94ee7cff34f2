"""Offline benchmark: the Python API, all requests handed over at once."""

from __future__ import annotations

import time

from tidemill.bench.report import Repetition, RequestRecord
from tidemill.bench.workloads import DECODE_LONG, DECODE_SHORT, Workload
from tidemill.llm import LLM
from tidemill.wire.sampling import SamplingParams


def run(llm: LLM, workload: Workload) -> Repetition:
    """One repetition. `decode` runs twice and reports the difference as TPOT."""
    if workload.name == "decode":
        return _decode(llm, workload)
    wall = _generate(llm, workload, [request.output_len for request in workload.requests])
    records = [
        RequestRecord(0.0, len(request.prompt), None, wall, request.output_len)
        for request in workload.requests
    ]
    if workload.name == "ttft":
        records[0].first = wall
    return Repetition(wall, records)


def _decode(llm: LLM, workload: Workload) -> Repetition:
    """TPOT = (time for the long output - time for the short) / the difference in tokens."""
    count = len(workload.requests)
    _generate(llm, workload, [1] * count)  # the prompts are cached from here on
    short = _generate(llm, workload, [DECODE_SHORT] * count)
    long = _generate(llm, workload, [DECODE_LONG] * count)
    steps = DECODE_LONG - DECODE_SHORT
    records = [
        RequestRecord(0.0, len(request.prompt), None, None, steps) for request in workload.requests
    ]
    return Repetition(long - short, records, tpot_ms=(long - short) * 1e3 / steps)


def _generate(llm: LLM, workload: Workload, lengths: list[int]) -> float:
    """Seconds for all requests to produce exactly `lengths` tokens."""
    params = [
        SamplingParams(temperature=workload.temperature, max_tokens=n, ignore_eos=True)
        for n in lengths
    ]
    start = time.perf_counter()
    outputs = llm.generate([request.prompt for request in workload.requests], params)
    wall = time.perf_counter() - start
    made = [len(output.choices[0].token_ids) for output in outputs]
    if made != lengths:
        raise RuntimeError(f"the engine produced {sum(made)} tokens instead of {sum(lengths)}")
    return wall
