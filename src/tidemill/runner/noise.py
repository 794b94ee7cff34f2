"""Counter-based randomness: noise is a function of (seed, position, counter), with no state.

SplitMix64 (Steele, Lea and Flood 2014): output i of the generator with state s is
mix(s + (i + 1) * GAMMA). A request's seed starts one generator; its output number `position` is
the state of another, whose outputs are the noise of that position. Plain 64-bit integer
arithmetic, so that any device can compute the same numbers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: U64) -> U64:
    """A bijection of 64-bit integers whose output bits all depend on all input bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def keys(seeds: U64, positions: npt.NDArray[np.integer]) -> U64:
    """The generator state of each (seed, position). Both [S]."""
    return _mix(_mix(seeds + GAMMA) + (positions.astype(np.uint64) + np.uint64(1)) * GAMMA)


def uniform(states: U64, counters: npt.NDArray[np.integer]) -> F64:
    """Uniform in the open interval (0, 1), from the outputs' upper 52 bits. [S], [S or 1, N]."""
    bits = _mix(states[:, None] + (counters.astype(np.uint64) + np.uint64(1)) * GAMMA)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(states: U64, counters: npt.NDArray[np.integer]) -> F64:
    """Standard Gumbel noise, between -3.6 and 36.8. [S], [S or 1, N] -> [S, N]."""
    noise: F64 = -np.log(-np.log(uniform(states, counters)))
    return noise
