"""The workloads are the published ones, and functions of their seed."""

import random

import pytest

from tidemill.bench.workloads import Range, Sizes, make


def test_mixed_draws_as_the_published_benchmark_does():
    """All prompts first (each: length, then ids), then all output lengths, from one generator."""
    rng = random.Random(1)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    made = make("mixed", Sizes(), seed=1)
    assert [request.prompt for request in made.requests] == prompts
    assert [request.output_len for request in made.requests] == lengths
    assert made.temperature == 0.6


def test_prefix_is_shared_and_fresh_for_each_seed():
    first, second = (make("prefix", Sizes(), seed) for seed in (0, 1))
    heads = {tuple(request.prompt[:4096]) for request in first.requests}
    assert len(heads) == 1
    assert len({tuple(request.prompt) for request in first.requests}) == 256
    assert {len(request.prompt) for request in first.requests} == {4096 + 64}
    assert heads.isdisjoint({tuple(request.prompt[:4096]) for request in second.requests})


def test_sizes_override_defaults():
    made = make("decode", Sizes(8, Range(5, 5), Range(7, 7), 3, vocab=9), seed=0)
    assert len(made.requests) == 8
    assert made.prompt_tokens == 8 * (5 + 3)
    assert made.output_tokens == 8 * 7
    assert max(max(request.prompt) for request in made.requests) <= 9


@pytest.mark.parametrize("text", ["", "x", "0", "5:3", "-1"])
def test_bad_ranges_say_what_is_accepted(text):
    with pytest.raises(ValueError, match="length"):
        Range.parse(text)
