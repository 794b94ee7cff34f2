"""From logits to tokens.

Order: logit_bias, penalties, bans of stop ids (min_tokens); temperature, top_k, top_p, min_p;
one draw. Log-probabilities are those of the untouched logits. Greedy is the largest logit, the
lowest id among equals.

A draw is Gumbel-max on two levels. The largest of (logit + Gumbel noise) falls on a token with
its softmax probability (Maddison, Tarlow and Minka 2014), but noise for a whole vocabulary
costs more than all the rest. So the vocabulary is cut into blocks of 128 tokens: the largest of
(log of a block's mass + noise) picks a block, the largest of (logit + noise) in it a token. The
distribution is the same, and some hundred noises do instead of V. As with plain Gumbel-max,
small changes of the logits change few draws.

The noise depends on the request's seed and the token's position alone (see `noise`): a
request's tokens depend on nobody who shares its batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.runner import logprobs, noise
from tidemill.runner.filters import lower_bounds
from tidemill.runner.penalties import Penalties
from tidemill.runner.reductions import BLOCK, argmax, block_sums, zero_below
from tidemill.runner.slots import BIASED, DRAWN, LOGPROBS, MIN_TOKENS, NO_STOP, PENALIZED, Slots
from tidemill.wire.plan import F32, I32, Logprobs, StepPlan

Index = npt.NDArray[np.intp]
Traits = npt.NDArray[np.uint8]

FIRST_TOKEN_COUNTER = 1 << 32  # noise counters: blocks from 0, tokens from here


class Sampler:
    def __init__(self, slots: Slots, vocab: int, max_len: int, device: torch.device) -> None:
        self._slots = slots
        self._penalties = Penalties(slots, vocab, max_len, device)
        # A CPU pays for pages of these only once rows are drawn.
        self._scaled = torch.empty((slots.count, vocab), device=device)
        self._weights = torch.empty((slots.count, vocab), device=device)

    def update(self, plan: StepPlan) -> None:
        """Follow the plan's releases and admissions."""
        self._penalties.update(plan)

    def sample(self, logits: Tensor, slots: I32, positions: I32) -> tuple[Tensor, Logprobs | None]:
        """Tokens int64[S] for float32[S, V], which is overwritten; and their log-probabilities
        if any of the rows wants them. Row i belongs to slots[i], its token to positions[i]."""
        traits = self._slots.traits[slots]
        if not traits.any():
            return argmax(logits), None
        asking = np.flatnonzero(traits & LOGPROBS)
        raw = logits[torch.from_numpy(asking)] if len(asking) else None

        penalized = np.flatnonzero(traits & PENALIZED)
        self._adjust(logits, slots, positions, traits, penalized)
        tokens = self._choose(logits, slots, positions, traits)
        if len(penalized):
            self._penalties.record(slots[penalized], tokens[torch.from_numpy(penalized)])
        if raw is None:
            return tokens, None
        report = logprobs.empty(len(slots), int(self._slots.logprobs[slots[asking]].max()))
        logprobs.fill(report, asking, raw, tokens[torch.from_numpy(asking)])
        return tokens, report

    def _adjust(
        self, logits: Tensor, slots: I32, positions: I32, traits: Traits, penalized: Index
    ) -> None:
        """Bias, penalties and bans, in place."""
        biased = np.flatnonzero(traits & BIASED)
        if len(biased):
            entries = [self._slots.bias[slot] for slot in slots[biased].tolist()]
            ids = np.concatenate([ids for ids, _ in entries])
            values = np.concatenate([values for _, values in entries])
            rows = np.repeat(biased, [len(ids) for ids, _ in entries])
            _add_at(logits, rows, ids, values)
        if len(penalized):
            self._penalties.apply(logits, penalized, slots[penalized])
        early = np.flatnonzero((traits & MIN_TOKENS) > 0)
        early = early[positions[early] < self._slots.stop_from[slots[early]]]
        if len(early):
            stop_ids = self._slots.stop_ids[slots[early]]
            row, column = np.nonzero(stop_ids != NO_STOP)
            ban = np.full(len(row), -np.inf, dtype=np.float32)
            _add_at(logits, early[row], stop_ids[row, column], ban)

    def _choose(self, logits: Tensor, slots: I32, positions: I32, traits: Traits) -> Tensor:
        drawn = np.flatnonzero(traits & DRAWN)
        if not len(drawn):
            return argmax(logits)
        if len(drawn) == len(slots):
            return self._draw(logits, slots, positions)
        tokens = argmax(logits)
        rows = torch.from_numpy(drawn).to(logits.device)
        scaled = torch.index_select(logits, 0, rows, out=self._scaled[: len(drawn)])
        tokens[rows] = self._draw(scaled, slots[drawn], positions[drawn])
        return tokens

    def _draw(self, logits: Tensor, slots: I32, positions: I32) -> Tensor:
        """One token a row, int64[S]. Overwrites `logits`."""
        params, device = self._slots, logits.device
        rows, vocab = logits.shape
        logits.mul_(torch.from_numpy(1 / params.temperature[slots])[:, None].to(device))
        weights = torch.softmax(logits, dim=-1, out=self._weights[:rows])
        bounds = lower_bounds(
            weights, params.top_k[slots], params.top_p[slots], params.min_p[slots]
        )
        if bounds is not None:
            zero_below(weights, bounds)

        states = noise.keys(params.seed[slots], positions)
        mass = block_sums(weights).cpu().numpy()
        block = _gumbel_argmax(mass, states, np.arange(mass.shape[1])[None])
        ids = block[:, None] * BLOCK + np.arange(BLOCK)
        inside = weights.gather(1, torch.from_numpy(np.minimum(ids, vocab - 1)).to(device))
        masses = np.where(ids < vocab, inside.cpu().numpy(), np.float32(0))
        lane = _gumbel_argmax(masses, states, ids + FIRST_TOKEN_COUNTER)
        return torch.from_numpy(block * BLOCK + lane).to(device)


def _gumbel_argmax(weights: F32, states: noise.U64, counters: Index) -> Index:
    """Index i in each row with a probability in proportion to weights[i]."""
    with np.errstate(divide="ignore"):
        scores = np.log(weights.astype(np.float64))
    winners: Index = (scores + noise.gumbel(states, counters)).argmax(axis=-1)
    return winners


def _add_at(logits: Tensor, rows: Index, ids: I32, values: F32) -> None:
    at = (torch.from_numpy(rows).to(logits.device), torch.from_numpy(ids).to(logits.device))
    logits.index_put_(at, torch.from_numpy(values).to(logits.device), accumulate=True)
