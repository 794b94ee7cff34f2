"""top_k, top_p and min_p as one number a row: the smallest value that may be drawn.

top_k keeps the k largest; top_p the smallest set of the largest among those whose probability
reaches p of theirs (nucleus sampling, Holtzman et al. 2020); min_p what has at least that share
of the largest's probability (Nguyen et al. 2024). Tokens that tie with the bound stay, so the
set depends on values alone, never on the order in which a sort leaves equals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from tidemill.runner.reductions import largest
from tidemill.wire.plan import F32, I32

FIRST_WIDTH = 512  # the nucleus is rarely larger; rows where it is take 8 times as many


def lower_bounds(scaled: Tensor, weights: Tensor, top_k: I32, top_p: F32, min_p: F32) -> F32 | None:
    """float32[S]: what is smaller may not be drawn. None: no row filters.

    scaled: float32[S, V], logits over temperature, each row's largest being 0.
    weights: exp(scaled).
    """
    filtering = np.flatnonzero((top_k > 0) | (top_p < 1))
    if not len(filtering) and not min_p.any():
        return None
    with np.errstate(divide="ignore"):
        bounds: F32 = np.log(min_p)
    rows, vocab, width = filtering, scaled.shape[1], FIRST_WIDTH
    while len(rows):
        width = min(width, vocab)
        everything = len(rows) == len(scaled)
        best = largest(scaled if everything else scaled[rows], width)
        total = (weights if everything else weights[rows]).sum(-1).cpu().numpy()
        found, index = _last_kept(best, total, top_k[rows], top_p[rows], vocab)
        done = rows[found]
        bounds[done] = np.maximum(bounds[done], best[found, index[found]])
        rows, width = rows[~found], width * 8
    return bounds


def _last_kept(
    best: F32, total: F32, top_k: I32, top_p: F32, vocab: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.intp]]:
    """Where in `best` (largest first) the last token stands that both filters keep, and whether
    `best` reaches that far at all."""
    width = best.shape[1]
    limit = np.where((top_k > 0) & (top_k < vocab), top_k, vocab)
    mass = np.exp(best.astype(np.float64)).cumsum(axis=1)
    last_of_k = np.minimum(limit, width) - 1
    of_k = np.take_along_axis(mass, last_of_k[:, None], axis=1)[:, 0]
    wanted = top_p * np.where(limit < vocab, of_k, total)
    before = np.count_nonzero(mass < wanted[:, None], axis=1)
    index = np.where(top_p < 1, np.minimum(before, last_of_k), last_of_k)
    nucleus_inside = (limit == vocab) & (top_p < 1) & (mass[:, -1] >= wanted)
    found = (limit <= width) | nucleus_inside
    return found, index
