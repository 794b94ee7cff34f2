from __future__ import annotations

import numpy as np
import pytest

from tidemill.runner import noise


def test_mix_is_splitmix64() -> None:
    """The reference generator's first outputs from state 1234567."""
    state, outputs = np.array([1234567], dtype=np.uint64), []
    for i in range(1, 4):
        outputs.append(int(noise._mix(state + np.array([i], dtype=np.uint64) * noise.GAMMA)[0]))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_noise_depends_on_seed_position_and_counter() -> None:
    seeds = np.array([1, 1, 2, 2**64 - 1], dtype=np.uint64)
    states = noise.keys(seeds, np.array([0, 1, 0, 0]))
    values = noise.uniform(states, np.arange(50)[None])
    assert len(np.unique(values)) == values.size
    one = noise.uniform(states[2:3], np.array([[7]]))
    assert one[0, 0] == values[2, 7]


def test_uniform_is_uniform() -> None:
    """Over counters, over positions and over seeds alike; 64 bins, chi-square with 63 degrees
    of freedom, whose 99.99 % quantile is 112."""
    many = 64_000
    counters, zero = np.arange(many)[None], np.zeros(1, dtype=np.int64)
    streams = [
        noise.uniform(noise.keys(np.array([3], dtype=np.uint64), zero), counters)[0],
        noise.uniform(noise.keys(np.full(many, 3, dtype=np.uint64), np.arange(many)), zero[None])[
            :, 0
        ],
        noise.uniform(
            noise.keys(np.arange(many, dtype=np.uint64), np.zeros(many, dtype=np.int64)),
            zero[None],
        )[:, 0],
    ]
    for values in streams:
        assert 0 < values.min() < values.max() < 1
        observed = np.bincount((values * 64).astype(int), minlength=64)
        assert ((observed - many / 64) ** 2 / (many / 64)).sum() < 112
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_gumbel_noise_is_finite_at_the_extremes(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(noise, "_mix", lambda x: np.full_like(x, bits))
    states = np.zeros(1, dtype=np.uint64)
    assert np.isfinite(noise.gumbel(states, np.zeros((1, 1), dtype=np.int64))).all()
