"""The model runner: executes step plans on one device.

    plan ─► slots (release, admit, pages) ─► copies ─► batch ─► forward ─► sample ─► result

The loop around it, with its ring and its process, is `process.py`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tidemill.config import EngineConfig
from tidemill.models.decoder import Decoder, DecoderConfig
from tidemill.models.loader import load_model, read_config
from tidemill.ops.select import make_backend
from tidemill.runner import logprobs, memory
from tidemill.runner.batch import BatchBuilder, Step
from tidemill.runner.memory import CapacityError
from tidemill.runner.sampler import Sampler
from tidemill.runner.slots import Slots
from tidemill.runner.threads import physical_cores
from tidemill.wire.errors import EngineError
from tidemill.wire.messages import RunnerReady
from tidemill.wire.plan import Logprobs, RowFlags, SlotInit, StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams

Progress = Callable[[str, float | None], None]

CPU_RUNNING_REQUESTS, GPU_RUNNING_REQUESTS = 64, 256
CPU_BATCH_TOKENS, GPU_BATCH_TOKENS = 512, 8192


MAX_THREADS = 256


class ModelRunner:
    """A `wire.link.StepExecutor`: one step in, one result out, in the caller's thread.

    Raises CapacityError if model and limits do not fit the machine. Once constructed it has run
    a worst-case step and allocated all that it ever will, sampling scratch of a CPU aside.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        *,
        decoder: Decoder | None = None,
    ) -> None:
        """`progress` is told what happens, with 0..1 where that is known. `decoder`: a model
        that is loaded already, instead of `config.model`."""
        report = progress or (lambda detail, done: None)
        try:
            self._decoder = decoder or _load(config, report)
            report("measuring memory", None)
            self._start(config)
            report("warming up", None)
            self._warm_up()
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, EngineError) or not memory.is_out_of_memory(error):
                raise
            raise CapacityError(
                f"out of memory while {config.model} was set up: {str(error).splitlines()[0]}; "
                "lower --kv-memory, --max-batch-tokens or --max-running-requests"
            ) from error

    def _start(self, config: EngineConfig) -> None:
        model, ops = self._decoder.config, self._decoder.ops
        on_gpu = ops.device.type == "cuda"
        running, tokens = config.max_running_requests, config.max_batch_tokens
        if running is None:
            running = GPU_RUNNING_REQUESTS if on_gpu else CPU_RUNNING_REQUESTS
            running = min(running, tokens or running)
        if tokens is None:
            tokens = max(GPU_BATCH_TOKENS if on_gpu else CPU_BATCH_TOKENS, running)
        if tokens < running:
            raise CapacityError(
                f"--max-batch-tokens {tokens} is less than --max-running-requests {running}: "
                "a decode step has one token of every running request"
            )
        activations = self._measure_step(tokens, running)
        spec, page_size = model.attention(0), config.page_size
        page_bytes = ops.kv_bytes_per_page(spec, model.layers, page_size)
        available = memory.available_memory(ops.device) - activations
        fit = memory.fit(config, len(self._decoder.rope), page_bytes, available, on_gpu)

        self._kv: Any = ops.allocate_kv(spec, model.layers, fit.num_pages, page_size)
        self._forward = ops.graph(lambda batch: self._decoder.forward(batch, self._kv))
        weights, kv = self._decoder.weights.nbytes, fit.num_pages * page_bytes
        self.ready = RunnerReady(
            ring="",
            num_pages=fit.num_pages,
            page_size=page_size,
            max_model_len=fit.max_model_len,
            max_running_requests=running,
            max_batch_tokens=tokens,
            vocab_size=model.vocab,
            device=str(ops.device),
            memory={
                "weights": weights,
                "kv": kv,
                "activations": activations,
                "total": weights + kv + activations,
            },
        )
        self.reset()

    def reset(self) -> None:
        """Forget all requests. Weights and the KV pool stay."""
        ready, device = self.ready, self._decoder.ops.device
        self._slots = Slots(
            ready.max_running_requests, ready.max_model_len, ready.page_size, device
        )
        self._batches = BatchBuilder(self._slots, ready.max_batch_tokens, ready.page_size, device)
        self._sampler = Sampler(self._slots, ready.vocab_size, ready.max_model_len, device)

    # --- one step -----------------------------------------------------------------------------

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step. Plans must come in the scheduler's order."""
        begin = time.perf_counter_ns()
        self._slots.apply(plan)
        self._sampler.update(plan)
        if len(plan.copies):
            copies = torch.from_numpy(plan.copies.copy()).to(self._decoder.ops.device)
            self._decoder.ops.copy_pages(self._kv, copies)
        step = self._batches.build(plan)
        if len(step.prompt_rows):
            logits, prompt_logprobs = self._forward_with_prompt_logprobs(plan, step)
        else:
            logits, prompt_logprobs = self._forward(step.batch), []
        result = self._sample(plan.step, logits, step)
        result.prompt_logprobs = prompt_logprobs
        result.device_us = (time.perf_counter_ns() - begin) // 1000
        return result

    def _sample(self, number: int, logits: Tensor, step: Step) -> StepResult:
        if not len(step.sampled):
            nothing = np.empty(0, dtype=np.int32)
            return StepResult(number, nothing, nothing)
        chosen, report = self._sampler.sample(logits, step.sampled, step.positions)
        self._slots.remember(step.sampled, chosen)
        tokens = chosen.cpu().numpy().astype(np.int32)
        finished = self._slots.finished(step.sampled, step.positions, tokens)
        return StepResult(number, tokens, finished, report)

    def _forward_with_prompt_logprobs(
        self, plan: StepPlan, step: Step
    ) -> tuple[Tensor, list[tuple[int, Logprobs]]]:
        """The forward pass, with logits for every position of some rows: in slices no larger
        than the logits of a decode step, so that they never need more memory than those."""
        hidden = self._decoder.hidden(step.batch, self._kv)
        reports = []
        for row in step.prompt_rows.tolist():
            slot, start, count, _ = plan.rows[row].tolist()
            following = self._slots.prompts[slot][start + 1 : start + count + 1]
            report = logprobs.empty(len(following), int(self._slots.prompt_logprobs[slot]))
            for at in range(0, len(following), self._slots.count):
                tokens = torch.from_numpy(following[at : at + self._slots.count].astype(np.int64))
                first = int(step.row_starts[row]) + at
                wanted = torch.arange(first, first + len(tokens), dtype=torch.int32)
                logits = self._decoder.logits(hidden, wanted.to(hidden.device))
                part = slice(at, at + len(tokens))
                logprobs.fill(report, part, logits, tokens.to(hidden.device))
            reports.append((row, report))
        return self._decoder.logits(hidden, step.batch.logit_tokens), reports

    # --- start --------------------------------------------------------------------------------

    @torch.inference_mode()
    def _measure_step(self, tokens: int, rows: int) -> int:
        """Bytes that the largest step takes: prefill rows as long as can be among decode rows,
        all sampled. It runs on a pool of one page, which every row overwrites."""
        model, ops = self._decoder.config, self._decoder.ops
        longest = len(self._decoder.rope)
        counts = np.ones(rows, dtype=np.int32)
        for row in reversed(range(rows)):
            counts[row] += min(tokens - counts.sum(), longest - 1)
        length = int(counts.max())
        slots = Slots(rows, length, length, ops.device)
        kv = ops.allocate_kv(model.attention(0), model.layers, 1, length)
        table = np.zeros((rows, 4), dtype=np.int32)
        table[:, 0] = np.arange(rows)
        table[:, 2] = counts
        long = counts > 1
        table[:, 3] = np.where(long, RowFlags.SAMPLE | RowFlags.HOST_TOKENS, RowFlags.SAMPLE)
        plan = StepPlan(0, rows=table, tokens=np.zeros(counts[long].sum(), dtype=np.int32))
        step = BatchBuilder(slots, tokens, length, ops.device).build(plan)
        return memory.peak_of(lambda: self._decoder.forward(step.batch, kv), ops.device)

    def _warm_up(self) -> None:
        """A prompt and an answer's token through `execute`: what is recorded or compiled on
        first use is so before the first request. Both end in the first page."""
        ready = self.ready
        length = max(1, min(ready.page_size, ready.max_model_len - 1, ready.max_batch_tokens))
        table = np.zeros((1, 3), dtype=np.int32)
        init = SlotInit(0, SamplingParams(temperature=1.0), 0, length, ready.max_model_len)
        flags = int(RowFlags.SAMPLE | RowFlags.HOST_TOKENS)
        prompt = np.array([[0, 0, length, flags]], dtype=np.int32)
        ids = np.zeros(length, dtype=np.int32)
        self.execute(StepPlan(0, rows=prompt, tokens=ids, admit=[init], pages=table))
        answer = np.array([[0, length - 1, 1, int(RowFlags.SAMPLE)]], dtype=np.int32)
        self.execute(StepPlan(1, rows=answer))
        self.reset()


def _longest_context(model: DecoderConfig) -> int:
    """Tokens: dynamic scaling of rope stretches the trained context when asked to."""
    if model.rope.kind == "dynamic":
        return int(model.max_position * float(model.rope.params["factor"]))
    return model.max_position


def _load(config: EngineConfig, report: Progress) -> Decoder:
    threads = config.threads or physical_cores()
    if threads > MAX_THREADS:
        raise CapacityError(
            f"--threads {threads} is too many: at most {MAX_THREADS}; this machine has "
            f"{os.cpu_count()} processors"
        )
    torch.set_num_threads(threads)
    model = read_config(config.model, config.load_format)
    try:
        backend = make_backend(
            config.device,
            config.dtype,
            threads,
            config.native,
            attention=model.attention(0),
            intermediate=model.intermediate,
        )
    except ValueError as error:
        raise EngineError(str(error)) from error
    memory.check_weights(Path(config.model), memory.available_memory(backend.device))
    return load_model(
        config.model,
        config.load_format,
        backend,
        max_len=min(config.max_model_len or model.max_position, _longest_context(model)),
        progress=lambda done: report("loading weights", done),
        seed=config.seed,
    )
