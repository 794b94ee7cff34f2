"""Slots: what the runner keeps of each running request, as rows of arrays.

A plan carries changes only. Whatever a step needs and the plan does not say is here, from the
request's `admit` until its `release`: the last sampled token (on the device), the page table,
the sampling parameters, and where the request ends.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.wire.plan import F32, I32, SlotInit, StepPlan

NO_STOP = -1  # pads the rows of `stop_ids`; no token has this id
GREEDY_BELOW = 1e-5  # temperatures below mean the largest logit

# Bits of `traits`: what a request needs beside the largest logit.
DRAWN, BIASED, PENALIZED, MIN_TOKENS, LOGPROBS = 1, 2, 4, 8, 16


class Slots:
    """One row per slot. All columns but the last tokens live on the host."""

    def __init__(self, count: int, max_len: int, page_size: int, device: torch.device) -> None:
        def ints(fill: int = 0) -> I32:
            return np.full(count, fill, dtype=np.int32)

        def floats() -> F32:
            return np.zeros(count, dtype=np.float32)

        self.count = count
        self._last_token = torch.zeros(count, dtype=torch.int32, device=device)
        self.page_table: I32 = np.zeros((count, -(-max_len // page_size)), dtype=np.int32)
        self.traits: npt.NDArray[np.uint8] = np.zeros(count, dtype=np.uint8)

        self.temperature, self.top_p, self.min_p = floats(), floats(), floats()
        self.presence, self.frequency, self.repetition = floats(), floats(), floats()
        self.top_k = ints()
        self.seed: npt.NDArray[np.uint64] = np.zeros(count, dtype=np.uint64)
        self.logprobs = ints(-1)  # alternatives per token; -1: none wanted
        self.prompt_logprobs = ints(-1)

        self.max_len = ints()
        self.stop_from = ints()  # the first position at which a stop id ends the request
        self.stop_ids: I32 = np.full((count, 1), NO_STOP, dtype=np.int32)

        # What few requests have is kept by slot.
        self.bias: dict[int, tuple[I32, F32]] = {}  # token ids, what to add
        self.prompts: dict[int, I32] = {}  # token ids, while prompt logprobs are wanted

    def apply(self, plan: StepPlan) -> None:
        """Carry out the plan's releases, admissions and page table changes, in this order."""
        for slot in plan.release.tolist():
            self._release(slot)
        for init in plan.admit:
            self._admit(init)
        if len(plan.pages):
            rows, columns, pages = plan.pages.T
            self.page_table[rows, columns] = pages

    def remember(self, slots: I32, tokens: Tensor) -> None:
        """Keep what was sampled, int64[S], for the next step to read."""
        if tokens.device.type == "cpu":
            self._last_token.numpy()[slots] = tokens.numpy()
        else:
            self._last_token[torch.from_numpy(slots).to(tokens.device)] = tokens.int()

    def recall(self, slots: I32, into: Tensor) -> None:
        """Put the slots' last sampled tokens into int32[S]."""
        if into.device.type == "cpu":
            np.take(self._last_token.numpy(), slots, out=into.numpy(), mode="clip")
        else:
            into.copy_(self._last_token[torch.from_numpy(slots).to(into.device)])

    def _admit(self, init: SlotInit) -> None:
        slot, params = init.slot, init.params
        self._release(slot)
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.repetition[slot] = params.repetition_penalty
        self.seed[slot] = init.seed & (2**64 - 1)
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.max_len[slot] = init.max_len
        self.stop_from[slot] = init.prompt_len + params.min_tokens
        self._set_stop_ids(slot, params.stop_token_ids)
        self.traits[slot] = (
            DRAWN * (params.temperature >= GREEDY_BELOW)
            + BIASED * bool(params.logit_bias)
            + PENALIZED * params.has_penalties
            + MIN_TOKENS * (params.min_tokens > 0 and len(params.stop_token_ids) > 0)
            + LOGPROBS * (params.logprobs is not None)
        )
        if params.logit_bias:
            self.bias[slot] = (
                np.array(list(params.logit_bias), dtype=np.int32),
                np.array(list(params.logit_bias.values()), dtype=np.float32),
            )
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[slot] = params.prompt_logprobs
            self.prompts[slot] = init.history[: init.prompt_len].copy()

    def _release(self, slot: int) -> None:
        self.traits[slot] = 0
        self.prompt_logprobs[slot] = -1
        self.bias.pop(slot, None)
        self.prompts.pop(slot, None)

    def _set_stop_ids(self, slot: int, ids: tuple[int, ...]) -> None:
        missing = len(ids) - self.stop_ids.shape[1]
        if missing > 0:
            self.stop_ids = np.pad(self.stop_ids, ((0, 0), (0, missing)), constant_values=NO_STOP)
        self.stop_ids[slot] = NO_STOP
        self.stop_ids[slot, : len(ids)] = ids

    def finished(self, slots: I32, positions: I32, tokens: I32) -> I32:
        """Who ends with this token: 1 by a stop id, 2 by length, 0 goes on. All int32[S];
        `positions` is where the tokens will stand in their sequences."""
        stops = (self.stop_ids[slots] == tokens[:, None]).any(axis=1)
        stops &= positions >= self.stop_from[slots]
        ended = np.where(positions + 1 >= self.max_len[slots], np.int32(2), np.int32(0))
        ended[stops] = 1
        return ended
