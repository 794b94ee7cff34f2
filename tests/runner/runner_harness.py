"""A tiny random model, its oracle, and a plan writer that drives a ModelRunner by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from tidemill.config import EngineConfig
from tidemill.models import rope
from tidemill.models.decoder import Decoder, DecoderConfig, DecoderWeights, LayerWeights
from tidemill.ops.backend import Batch
from tidemill.ops.reference import DenseWeight, ReferenceBackend
from tidemill.runner.model_runner import ModelRunner
from tidemill.wire.plan import EMPTY, RowFlags, SlotInit, StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams

VOCAB, CONTEXT, PAGE = 300, 256, 4
GREEDY = SamplingParams(temperature=0)


def tiny_decoder(seed: int = 0) -> Decoder:
    config = DecoderConfig(
        family="llama",
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate=48,
        vocab=VOCAB,
        norm_eps=1e-5,
        max_position=CONTEXT,
    )
    generator = torch.Generator().manual_seed(seed)

    def dense(rows: int, columns: int, spread: float = 1.0) -> DenseWeight:
        weights = torch.randn((rows, columns), generator=generator)
        return DenseWeight(weights * spread / columns**0.5)

    layers = [
        LayerWeights(
            attn_norm=torch.ones(32),
            qkv=dense(64, 32, 2.0),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            o=dense(32, 32, 2.0),
            o_bias=None,
            mlp_norm=torch.ones(32),
            gate_up=dense(96, 32),
            down=dense(32, 48),
        )
        for _ in range(config.layers)
    ]
    weights = DecoderWeights(dense(VOCAB, 32, 4.0), layers, torch.ones(32), dense(VOCAB, 32, 2.0))
    table = rope.table(config.rope, config.head_dim, CONTEXT, CONTEXT)
    backend = ReferenceBackend(torch.device("cpu"), torch.float32)
    return Decoder(config, weights, backend, table)


def full_logits(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    """Logits float32[T, V] behind every token: one forward pass without the runner's parts."""
    count = len(ids)
    every = torch.arange(count, dtype=torch.int32)
    batch = Batch(
        ids=torch.tensor(ids, dtype=torch.int32),
        positions=every,
        kv_slots=every,
        row_starts=torch.tensor([0, count], dtype=torch.int32),
        contexts=torch.tensor([count], dtype=torch.int32),
        page_table=torch.zeros((1, 1), dtype=torch.int32),
        logit_tokens=every,
        num_tokens=count,
        num_rows=1,
        max_query=count,
        max_context=count,
    )
    spec = decoder.config.attention(0)
    kv = decoder.ops.allocate_kv(spec, decoder.config.layers, 1, count)
    return decoder.forward(batch, kv)


def greedy_oracle(decoder: Decoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(full_logits(decoder, ids)[-1].argmax()))
    return ids[len(prompt) :]


def make_runner(decoder: Decoder, **settings: object) -> ModelRunner:
    defaults: dict[str, object] = {
        "kv_memory": 8 << 20,
        "page_size": PAGE,
        "max_running_requests": 32,
        "max_batch_tokens": 64,
    }
    config = EngineConfig(model="tiny", **(defaults | settings))  # type: ignore[arg-type]
    return ModelRunner(config, decoder=decoder)


@dataclass
class Sequence:
    ids: list[int]  # prompt and known output
    prompt_len: int
    planned: int = 0
    output: list[int] = field(default_factory=list)
    ended: int = 0


class PlanWriter:
    """Writes plans as a scheduler would, synchronously. Pages are handed out in random order."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = np.random.default_rng(seed).permutation(runner.ready.num_pages).tolist()
        self.sequences: dict[int, Sequence] = {}
        self.pages: dict[int, list[int]] = {}
        self._admit: list[SlotInit] = []
        self._release: list[int] = []
        self._pages: list[tuple[int, int, int]] = []
        self.copies: list[tuple[int, int, int]] = []

    def start(
        self,
        slot: int,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        output: list[int] | None = None,
        max_len: int = CONTEXT,
        seed: int = 0,
        cached: int = 0,
    ) -> None:
        """Admit a request; `output` resumes it, `cached` tokens are in its pages already."""
        ids = [*prompt, *(output or [])]
        history = np.array(ids, dtype=np.int32)
        needs_history = params.has_penalties or params.prompt_logprobs is not None
        init = SlotInit(
            slot, params, seed, len(prompt), max_len, history if needs_history else EMPTY
        )
        self._admit.append(init)
        self.sequences[slot] = Sequence(ids, len(prompt), cached)
        self.pages[slot] = []

    def release(self, slot: int) -> None:
        self.free.extend(self.pages.pop(slot))
        del self.sequences[slot]
        self._release.append(slot)

    def step(self, work: dict[int, int]) -> StepResult:
        """Run one step: {slot: number of tokens}. Slots that decode must come first."""
        rows, tokens, sampled = [], [], []
        for slot, count in work.items():
            sequence = self.sequences[slot]
            start, known = sequence.planned, len(sequence.ids)
            end = start + count
            while len(self.pages[slot]) * PAGE < end:
                self._pages.append((slot, len(self.pages[slot]), self.free.pop()))
                self.pages[slot].append(self._pages[-1][2])
            flags = RowFlags(0)
            if not (sequence.output and start == known - 1):
                flags |= RowFlags.HOST_TOKENS
                tokens += sequence.ids[start:end]
                if self.wants_prompt_logprobs.get(slot):
                    flags |= RowFlags.PROMPT_LOGPROBS
            if end == known:
                flags |= RowFlags.SAMPLE
                sampled.append(sequence)
            rows.append((slot, start, count, int(flags)))
            sequence.planned = end
        plan = StepPlan(
            step=1,
            rows=np.array(rows, dtype=np.int32),
            tokens=np.array(tokens, dtype=np.int32),
            release=np.array(self._release, dtype=np.int32),
            admit=self._admit,
            pages=np.array(self._pages, dtype=np.int32).reshape(-1, 3),
            copies=np.array(self.copies, dtype=np.int32).reshape(-1, 3),
        )
        self._admit, self._release, self._pages, self.copies = [], [], [], []
        result = self.runner.execute(StepPlan.decode(np.concatenate(plan.encode())))
        result = StepResult.decode(np.concatenate(result.encode()))
        outputs = zip(sampled, result.tokens.tolist(), result.finished.tolist(), strict=True)
        for sequence, token, finished in outputs:
            sequence.ids.append(token)
            sequence.output.append(token)
            sequence.ended = sequence.ended or finished
        return result

    def run(self, count: int, chunk: int = 64) -> dict[int, list[int]]:
        """Until every sequence has `count` new tokens: decode all that can, prefill the rest in
        chunks. Returns outputs by slot."""
        while True:
            decode = {
                slot: 1 for slot, s in self.sequences.items() if s.output and len(s.output) < count
            }
            work = dict(decode)
            budget = self.runner.ready.max_batch_tokens - len(decode)
            for slot, s in self.sequences.items():
                if not s.output and budget > 0:
                    work[slot] = min(chunk, budget, len(s.ids) - s.planned)
                    budget -= work[slot]
            if not work:
                return {slot: s.output for slot, s in self.sequences.items()}
            self.step(work)

    @property
    def wants_prompt_logprobs(self) -> dict[int, bool]:
        slots = self.runner._slots
        wanted = {slot: slots.prompt_logprobs[slot] >= 0 for slot in self.sequences}
        for init in self._admit:
            wanted[init.slot] = init.params.prompt_logprobs is not None
        return wanted
