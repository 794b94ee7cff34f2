"""Whole scheduler, random lives: every stream must be what the request would say alone."""

from __future__ import annotations

import random
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scheduler_harness import Engine, make_ready

from tidemill.config import EngineConfig
from tidemill.scheduler.simulated import expected_output
from tidemill.wire.sampling import SamplingParams

VOCAB = 13


@dataclass
class Life:
    """One request, and what befalls it."""

    prompt: list[int]
    params: SamplingParams
    priority: int
    salt: str
    submit_at: int  # turn
    abort_after: int | None  # turns
    resume_after: int | None  # turns: submitted again from what was heard
    resumed_from: int  # output tokens that come with the first Submit


@dataclass
class World:
    page_size: int
    spare_pages: int  # beyond what the largest request needs
    slots: int
    budget: int
    run_ahead: int
    prefix_cache: bool
    detokenizers: int
    lives: list[Life]
    delivery: float  # probability that a finished result is there at a poll
    runner_dies_at: int | None
    seed: int


STEMS = [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2, 3, 4, 5, 9, 9, 9], [5] * 14]


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    stem = draw(st.sampled_from(STEMS))
    head = stem[: draw(st.integers(0, len(stem)))]
    tail = draw(st.lists(st.integers(0, VOCAB - 1), max_size=10))
    return [*head, *tail] or [0]


@st.composite
def lives(draw: st.DrawFn) -> Life:
    max_tokens = draw(st.integers(1, 24))
    params = SamplingParams(
        seed=draw(st.integers(0, 3)),  # few seeds: equal prompts often go on equally
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        stop_token_ids=draw(st.sampled_from([(), (0,), (0, 1, 2)])),
        logprobs=draw(st.sampled_from([None, None, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([None, None, None, 1])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.0])),
    )
    return Life(
        prompt=draw(prompts()),
        params=params,
        priority=draw(st.integers(-1, 1)),
        salt=draw(st.sampled_from(["", "", "tenant"])),
        submit_at=draw(st.integers(0, 12)),
        abort_after=draw(st.one_of(st.none(), st.none(), st.integers(0, 12))),
        resume_after=draw(st.one_of(st.none(), st.none(), st.integers(1, 12))),
        resumed_from=draw(st.sampled_from([0, 0, 0, 1, 3, 30])),
    )


worlds = st.builds(
    World,
    page_size=st.integers(1, 5),
    spare_pages=st.integers(0, 12),
    slots=st.integers(1, 6),
    budget=st.integers(1, 24),
    run_ahead=st.integers(0, 3),
    prefix_cache=st.sampled_from([True, True, True, False]),
    detokenizers=st.integers(1, 2),
    lives=st.lists(lives(), min_size=1, max_size=10),
    delivery=st.sampled_from([1.0, 0.7, 0.3]),
    runner_dies_at=st.one_of(st.none(), st.none(), st.integers(1, 15)),
    seed=st.integers(0, 2**16),
)


def needed(life: Life) -> int:
    return len(life.prompt) + (life.params.max_tokens or 0)


def live_through(world: World) -> Engine:
    """Everything that happens in `world`, and all that must hold."""
    longest = max(needed(life) for life in world.lives)
    rng = random.Random(world.seed)
    engine = Engine(
        make_ready(
            num_pages=-(-longest // world.page_size) + world.spare_pages,
            page_size=world.page_size,
            max_model_len=longest,
            max_running_requests=world.slots,
            max_batch_tokens=world.budget,
            vocab_size=VOCAB,
        ),
        EngineConfig(model="simulated", run_ahead=world.run_ahead, prefix_cache=world.prefix_cache),
        deliver=lambda: rng.random() < world.delivery,
    )
    resumed: dict[int, int] = {}
    aborted: set[int] = set()

    def submit(rid: int, life: Life, output: list[int], attempt: int) -> None:
        resumed[rid] = len(output)
        engine.submit(
            rid,
            life.prompt,
            life.params,
            output=output,
            attempt=attempt,
            priority=life.priority,
            salt=life.salt,
            detokenizer=rid % world.detokenizers,
        )

    for turn in range(30):
        for rid, life in enumerate(world.lives):
            since = turn - life.submit_at
            if since == 0:
                whole, _ = expected_output(
                    life.prompt, life.params, life.params.seed or 0, needed(life), VOCAB
                )
                submit(rid, life, whole[: life.resumed_from], 0)
            elif since == life.abort_after:
                engine.scheduler.abort(rid)
                aborted.add(rid)
            elif since == life.resume_after and rid not in aborted:
                whole, _ = expected_output(
                    life.prompt, life.params, life.params.seed or 0, needed(life), VOCAB
                )
                heard = resumed[rid] + len(engine.tokens.get(rid, []))
                submit(rid, life, whole[: rng.randint(0, heard)], 1)
        if turn == world.runner_dies_at:
            engine.lose_runner()
            engine.turn()
            engine.attach_runner()
        engine.turn()
    engine.run()
    engine.assert_idle()
    for rid, life in enumerate(world.lives):
        if rid in aborted:
            continue
        engine.assert_output(rid, life.prompt, life.params, needed(life), resumed[rid])
    return engine


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(worlds)
def test_every_stream_is_what_it_would_be_alone(world: World) -> None:
    live_through(world)


def test_crowded_worlds_preempt_and_share() -> None:
    """The random worlds reach what they are meant to reach."""
    preemptions = cached = 0
    for seed in range(25):
        rng = random.Random(seed)
        many = [
            Life(
                prompt=STEMS[0][: rng.randint(1, 11)] + [rng.randrange(VOCAB) for _ in range(4)],
                params=SamplingParams(seed=rid, max_tokens=rng.randint(1, 24)),
                priority=rng.randint(-1, 1),
                salt="",
                submit_at=rng.randint(0, 6),
                abort_after=None,
                resume_after=None,
                resumed_from=0,
            )
            for rid in range(12)
        ]
        world = World(3, 4, 6, 16, seed % 4, True, 2, many, 0.7, None, seed)
        stats = live_through(world).scheduler.stats
        preemptions += stats.preemptions
        cached += stats.cached_tokens
        assert stats.generated_tokens >= sum(life.params.max_tokens or 0 for life in many)
    assert preemptions > 50
    assert cached > 300
