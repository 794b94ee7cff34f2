"""Every sampling parameter against a slow oracle: one row, a full sort, plain Python."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from tidemill.runner.filters import lower_bounds
from tidemill.runner.sampler import Sampler
from tidemill.runner.slots import Slots
from tidemill.wire.plan import EMPTY, SlotInit, StepPlan
from tidemill.wire.sampling import SamplingParams

CPU = torch.device("cpu")


class Bench:
    """A sampler with slots, and no model."""

    def __init__(self, vocab: int, count: int = 64, max_len: int = 4096) -> None:
        self.slots = Slots(count, max_len, 16, CPU)
        self.sampler = Sampler(self.slots, vocab, max_len, CPU)

    def admit(self, slot: int, params: SamplingParams, seed: int = 0, **fields: object) -> None:
        given: dict[str, object] = {"prompt_len": 0, "max_len": 4096, "history": EMPTY} | fields
        init = SlotInit(slot, params, seed, **given)  # type: ignore[arg-type]
        plan = StepPlan(0, admit=[init])
        self.slots.apply(plan)
        self.sampler.update(plan)

    def sample(self, logits: np.ndarray, slots: list[int], position: int = 0) -> list[int]:
        positions = np.full(len(slots), position, dtype=np.int32)
        rows = torch.from_numpy(logits.astype(np.float32).copy())
        tokens, _ = self.sampler.sample(rows, np.array(slots, dtype=np.int32), positions)
        return tokens.tolist()

    def draws(self, logits: np.ndarray, params: SamplingParams, count: int) -> Counter[int]:
        """Tokens at `count` positions, 64 requests with different seeds side by side."""
        found: Counter[int] = Counter()
        for slot in range(64):
            self.admit(slot, params, seed=slot)
        for position in range(count // 64):
            found.update(self.sample(np.tile(logits, (64, 1)), list(range(64)), position))
        return found


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What each token's probability must be."""
    scaled = logits.astype(np.float64) / params.temperature
    p = np.exp(scaled - scaled.max())
    order = sorted(range(len(p)), key=lambda i: -p[i])
    if params.top_k:
        order = order[: params.top_k]
    reached, nucleus = 0.0, []
    total = sum(p[i] for i in order)
    for token in order:
        nucleus.append(token)
        reached += p[token]
        if reached >= params.top_p * total:
            break
    kept = [i for i in nucleus if p[i] >= params.min_p * p.max()]
    result = np.zeros(len(p))
    result[kept] = p[kept] / sum(p[kept])
    return result


def chi_square(found: Counter[int], expected: np.ndarray) -> float:
    """Deviations in standard errors: Pearson's statistic, made standard normal (Fisher)."""
    total = sum(found.values())
    observed = np.array([found[i] for i in range(len(expected))])
    assert observed[expected == 0].sum() == 0, "a token was drawn that the filters exclude"
    kept = expected > 0
    if kept.sum() == 1:
        return 0.0
    counts = expected[kept] * total
    statistic = float(((observed[kept] - counts) ** 2 / counts).sum())
    return (2 * statistic) ** 0.5 - (2 * (kept.sum() - 1) - 1) ** 0.5


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=1),
    SamplingParams(top_k=5),
    SamplingParams(top_p=0.8),
    SamplingParams(top_p=1e-6),
    SamplingParams(min_p=0.2),
    SamplingParams(temperature=1.7, top_k=20, top_p=0.7, min_p=0.05),
    SamplingParams(temperature=0.8, top_k=1000, top_p=0.95),
]


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
@pytest.mark.parametrize("vocab", [40, 256, 300])
def test_tokens_come_with_their_probabilities(params: SamplingParams, vocab: int) -> None:
    logits = np.random.default_rng(vocab).normal(0, 1.5, vocab)
    found = Bench(vocab).draws(logits, params, 40_000)
    assert abs(chi_square(found, probabilities(logits, params))) < 4


def test_the_statistic_notices_a_wrong_temperature() -> None:
    logits = np.random.default_rng(40).normal(0, 1.5, 40)
    found = Bench(40).draws(logits, SamplingParams(temperature=1.1), 40_000)
    assert chi_square(found, probabilities(logits, SamplingParams())) > 6


def test_filters_over_a_large_vocabulary() -> None:
    """The bounds are exact, however few or many tokens they leave."""
    rng, vocab = np.random.default_rng(5), 20_000
    rows = [
        SamplingParams(top_k=50),
        SamplingParams(top_k=1250),  # as many as there are groups
        SamplingParams(top_k=1251),
        SamplingParams(top_k=vocab + 7, top_p=0.5),
        SamplingParams(top_p=0.999),
        SamplingParams(top_p=0.3, temperature=0.3),
        SamplingParams(top_k=3000, top_p=0.9),
        SamplingParams(min_p=0.01),
        SamplingParams(),
    ]
    logits = rng.normal(0, 2, (len(rows), vocab)).astype(np.float32)
    temperature = np.array([p.temperature for p in rows], dtype=np.float32)[:, None]
    weights = torch.from_numpy(logits / temperature).softmax(-1)
    bounds = lower_bounds(
        weights,
        np.array([p.top_k for p in rows], dtype=np.int32),
        np.array([p.top_p for p in rows], dtype=np.float32),
        np.array([p.min_p for p in rows], dtype=np.float32),
    )
    assert bounds is not None
    for row, params in enumerate(rows):
        kept = int((weights[row].numpy() >= bounds[row]).sum())
        wanted = int((probabilities(logits[row], params) > 0).sum())
        assert kept == pytest.approx(wanted, abs=1), params  # a sum in another order may tip one


def test_ties_at_the_bound_all_stay() -> None:
    found = Bench(8).draws(np.array([2.0, 1, 1, 1, 0, 0, 0, 0]), SamplingParams(top_k=2), 2048)
    assert set(found) == {0, 1, 2, 3}


def test_greedy_takes_the_first_of_equals() -> None:
    bench = Bench(6)
    bench.admit(0, SamplingParams(temperature=0))
    bench.admit(1, SamplingParams(temperature=1e-6))
    logits = np.array([[0.0, 3, 1, 3, 2, -1]] * 2)
    assert bench.sample(logits, [0, 1]) == [1, 1]


def test_nobody_in_the_batch_matters() -> None:
    """Greedy, drawn, filtered, penalized: the same token alone as among 63 others."""
    rng, vocab = np.random.default_rng(2), 1000
    bench = Bench(vocab)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=7, temperature=3.0),
        SamplingParams(top_k=700, min_p=0.001),
        SamplingParams(logit_bias={3: 5.0}, frequency_penalty=0.5),
    ]
    logits = rng.normal(0, 2, (64, vocab))
    logits[:, 11] = logits.max() - 1  # a token all of them like, so that it repeats
    outputs: dict[str, list[list[int]]] = {"together": [], "alone": []}
    for way, collected in outputs.items():
        for slot in range(64):
            prompt = np.array([slot, 11], dtype=np.int32)
            bench.admit(slot, kinds[slot % 6], seed=slot, prompt_len=2, history=prompt)
        for position in range(2, 10):
            if way == "together":
                collected.append(bench.sample(logits, list(range(64)), position))
            else:
                single = [bench.sample(logits[[s]], [s], position)[0] for s in range(63, -1, -1)]
                collected.append(single[::-1])
    assert outputs["together"] == outputs["alone"]


def test_position_and_seed_choose_the_draw() -> None:
    bench = Bench(500)
    logits = np.zeros((1, 500))
    by_seed, by_position = set(), set()
    for i in range(40):
        bench.admit(0, SamplingParams(), seed=i - 20)
        by_seed.add(bench.sample(logits, [0])[0])
        bench.admit(0, SamplingParams(), seed=7)
        by_position.add(bench.sample(logits, [0], i)[0])
        assert bench.sample(logits, [0], i) == bench.sample(logits, [0], i)
    assert len(by_seed) > 30
    assert len(by_position) > 30


def test_bias_and_penalties_against_the_oracle() -> None:
    """Token by token; the logits are arranged so that each rule decides some of them."""
    rng, vocab = np.random.default_rng(8), 50
    bench = Bench(vocab)
    rows = [
        SamplingParams(temperature=0, repetition_penalty=1.4),
        SamplingParams(temperature=0, repetition_penalty=0.7),
        SamplingParams(temperature=0, presence_penalty=0.6),
        SamplingParams(temperature=0, frequency_penalty=0.3),
        SamplingParams(temperature=0, frequency_penalty=-0.2, presence_penalty=1.0),
        SamplingParams(
            temperature=0,
            repetition_penalty=1.2,
            frequency_penalty=0.2,
            presence_penalty=0.2,
            logit_bias={4: 1.5, 9: -100.0},
        ),
        SamplingParams(temperature=0, logit_bias={7: 2.5}),
    ]
    base = rng.normal(0, 0.7, (len(rows), vocab))
    prompts = [rng.integers(0, vocab, 12).tolist() for _ in rows]
    for slot, params in enumerate(rows):
        bench.admit(slot, params, prompt_len=12, history=np.array(prompts[slot], dtype=np.int32))
    outputs: list[list[int]] = [[] for _ in rows]
    for step in range(40):
        drift = np.random.default_rng(step).normal(0, 0.3, vocab)
        tokens = bench.sample(base + drift, list(range(len(rows))), 12 + step)
        for slot, params in enumerate(rows):
            wanted = penalized((base + drift)[slot], prompts[slot], outputs[slot], params)
            assert tokens[slot] == int(wanted.argmax()), (step, params)
            outputs[slot].append(tokens[slot])


def penalized(
    logits: np.ndarray, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    logits = logits.astype(np.float32)
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in set(prompt) | set(output):
        value = logits[token]
        factor = params.repetition_penalty
        logits[token] = value / factor if value > 0 else value * factor
    for token, times in Counter(output).items():
        logits[token] -= params.frequency_penalty * times + params.presence_penalty
    return logits


def test_penalty_rows_are_used_again() -> None:
    """More penalized requests than rows at first, one after another in the same slots."""
    bench, params = Bench(20), SamplingParams(temperature=0, presence_penalty=2.0)
    logits = np.linspace(1, 0, 20)
    for _ in range(3):
        for slot in range(20):
            bench.admit(slot, params, prompt_len=1, history=np.array([0], dtype=np.int32))
        batch = np.tile(logits, (20, 1))
        assert bench.sample(batch, list(range(20)), 1) == [0] * 20
        assert bench.sample(batch, list(range(20)), 2) == [1] * 20
    assert len(bench.sampler._penalties._counts) <= 32


def test_logits_that_are_not_numbers_give_a_token() -> None:
    """A broken model must not bring the runner down or index beyond the vocabulary."""
    bench = Bench(130)
    bench.admit(0, SamplingParams(top_p=0.9))
    bench.admit(1, SamplingParams(temperature=0))
    tokens = bench.sample(np.full((2, 130), np.nan), [0, 1])
    assert all(0 <= token < 130 for token in tokens)
