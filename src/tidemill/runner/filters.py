"""top_k, top_p and min_p as one number a row: the smallest probability that may be drawn.

top_k keeps the k largest; top_p the smallest set of the largest among those whose probability
reaches p of theirs (nucleus sampling, Holtzman et al. 2020); min_p what has at least that share
of the largest's probability (Nguyen et al. 2024). Tokens that tie with the bound stay, so the
set depends on values alone, never on the order in which a sort leaves equals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tidemill.runner.reductions import group_maxima
from tidemill.wire.plan import F32, I32


def lower_bounds(probabilities: Tensor, top_k: I32, top_p: F32, min_p: F32) -> F32 | None:
    """float32[S]: what is smaller may not be drawn. None: no row filters.

    probabilities: float32[S, V], each row adding up to 1.
    """
    vocab = probabilities.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    ranking = np.flatnonzero((limit < vocab) | (top_p < 1))
    if not len(ranking) and not min_p.any():
        return None
    maxima: F32 = group_maxima(probabilities).cpu().numpy()
    bounds: F32 = min_p * maxima.max(axis=1)
    if len(ranking):
        limit, top_p = limit[ranking], top_p[ranking]
        floor = _floor(maxima[ranking], limit, top_p, vocab)
        rows = probabilities if len(ranking) == len(probabilities) else probabilities[ranking]
        for at, values in enumerate(_from_floor(rows.cpu().numpy(), floor)):
            last = _last_kept(values, int(limit[at]), float(top_p[at]), vocab)
            bounds[ranking[at]] = max(bounds[ranking[at]], last)
    return bounds


def _floor(maxima: F32, limit: npt.NDArray[np.intp], top_p: F32, vocab: int) -> F32:
    """A bound that leaves few candidates, and all that matter. float32[S]

    The groups' maxima are tokens too. So k tokens reach the k-th largest maximum; and if the
    largest maxima add up to p, the tokens that are no smaller do, and the nucleus is among them.
    Failing that, tokens below (1 - p) / V together weigh less than 1 - p, and the nucleus is
    complete without them.
    """
    groups = maxima.shape[1]
    descending = np.sort(maxima, axis=1)[:, ::-1]
    needed = np.count_nonzero(descending.cumsum(axis=1, dtype=np.float64) < top_p[:, None], axis=1)
    needed = np.where(limit < vocab, limit - 1, needed)
    floor = np.take_along_axis(descending, np.minimum(needed, groups - 1)[:, None], axis=1)[:, 0]
    otherwise = np.where(limit < vocab, 0, (1 - top_p) / np.float32(vocab))
    result: F32 = np.where(needed < groups, floor, otherwise).astype(np.float32)
    return result


def _from_floor(probabilities: F32, floor: F32) -> list[F32]:
    """Each row's values from its floor up, in the order of the tokens."""
    rows, vocab = probabilities.shape
    found = np.flatnonzero(probabilities >= floor[:, None])
    ends = np.searchsorted(found, np.arange(1, rows) * vocab)
    return np.split(probabilities.ravel()[found], ends)


def _last_kept(values: F32, limit: int, top_p: float, vocab: int) -> float:
    """The smallest of one row's candidates that both top_k and top_p keep."""
    best = np.sort(values)[::-1][:limit]
    if not len(best):  # not a number: nothing compares
        return 0.0
    if top_p == 1:
        return float(best[-1])
    mass = best.cumsum(dtype=np.float64)
    wanted = top_p * (mass[-1] if limit < vocab else 1.0)
    index = min(int(np.searchsorted(mass, wanted)), len(best) - 1)
    return float(best[index])
