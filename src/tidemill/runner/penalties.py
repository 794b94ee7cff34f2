"""Repetition, frequency and presence penalties: counts per request, kept incrementally.

Only requests with penalties have a row here. A row knows how often each token occurred and,
as a list, which tokens occurred at all, so that a step costs work in proportion to the
request's distinct tokens, not to the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.runner.slots import Slots
from tidemill.wire.plan import F32, I32, StepPlan

NEVER = -1  # in `counts`: occurred neither in the prompt (0) nor in the output (1 and up)


class Penalties:
    def __init__(self, slots: Slots, vocab: int, max_len: int, device: torch.device) -> None:
        self._slots = slots
        self._row: I32 = np.full(slots.count, -1, dtype=np.int32)
        self._free: list[int] = []
        # One row per request: occurrences in the output, the distinct tokens, their number.
        # Entries of `seen` behind that number repeat tokens that are in front of it.
        self._counts = torch.empty((0, vocab), dtype=torch.int32, device=device)
        self._seen = torch.empty((0, min(max_len, vocab) + 1), dtype=torch.int64, device=device)
        self._distinct = torch.empty(0, dtype=torch.int64, device=device)

    def update(self, plan: StepPlan) -> None:
        """Follow the plan's releases and admissions."""
        for slot in plan.release.tolist():
            self._give_back(slot)
        for init in plan.admit:
            self._give_back(init.slot)
            if init.params.has_penalties:
                self._load(init.slot, init.history, init.prompt_len)

    def apply(self, logits: Tensor, rows: npt.NDArray[np.intp], slots: I32) -> None:
        """Penalize float32[S, V] in place in `rows`, which belong to `slots`.

        Repetition as in CTRL (Keskar et al. 2019): a positive logit is divided by the penalty,
        a negative one multiplied, once for whatever occurred in prompt or output. Frequency and
        presence as in OpenAI's API: subtracted per occurrence, or once, in the output alone.
        """
        device = logits.device
        own = torch.from_numpy(self._row[slots]).to(device)
        width = int(self._distinct[own].max())
        ids = self._seen[own, :width]
        at = (torch.from_numpy(rows).to(device)[:, None], ids)
        counts = self._counts[own[:, None], ids]
        values = logits[at]

        def column(values: F32) -> Tensor:
            return torch.from_numpy(values[slots]).to(device)[:, None]

        repetition = column(self._slots.repetition)
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= column(self._slots.frequency) * counts
        values -= column(self._slots.presence) * (counts > 0)
        logits[at] = values  # a token listed twice gets the same value twice

    def record(self, slots: I32, tokens: Tensor) -> None:
        """These slots' newest output tokens, int64[S]."""
        own = torch.from_numpy(self._row[slots]).to(tokens.device).long()
        counts = self._counts[own, tokens]
        # Written whether new or not: behind `distinct` a known token does no harm.
        self._seen[own, self._distinct[own]] = tokens
        self._distinct[own] += counts == NEVER
        self._counts[own, tokens] = counts.clamp(min=0) + 1

    def _load(self, slot: int, history: I32, prompt_len: int) -> None:
        if not self._free:
            self._grow()
        row = self._row[slot] = self._free.pop()
        device = self._counts.device
        distinct = torch.from_numpy(np.unique(history).astype(np.int64)).to(device)
        output, times = np.unique(history[prompt_len:], return_counts=True)
        self._counts[row].fill_(NEVER)
        self._counts[row, distinct] = 0
        self._counts[row, torch.from_numpy(output.astype(np.int64)).to(device)] = torch.from_numpy(
            times.astype(np.int32)
        ).to(device)
        self._seen[row].fill_(int(history[0]))
        self._seen[row, : len(distinct)] = distinct
        self._distinct[row] = len(distinct)

    def _give_back(self, slot: int) -> None:
        if self._row[slot] >= 0:
            self._free.append(int(self._row[slot]))
            self._row[slot] = -1

    def _grow(self) -> None:
        """Twice as many rows."""
        old = len(self._counts)
        more = max(4, old)
        self._free.extend(reversed(range(old, old + more)))
        self._counts = torch.cat(
            [self._counts, self._counts.new_zeros(more, self._counts.shape[1])]
        )
        self._seen = torch.cat([self._seen, self._seen.new_zeros(more, self._seen.shape[1])])
        self._distinct = torch.cat([self._distinct, self._distinct.new_zeros(more)])
