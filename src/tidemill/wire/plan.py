"""StepPlan and StepResult: what passes between the scheduler and a model runner.

Both are flat int32 arrays on the wire (floats as their bit patterns), so a ring can carry them
without pickling. A plan holds *changes* only: the runner keeps each running request's state in
a slot (a row of its device arrays) from `admit` until `release`.

Lengths are planned, tokens are not: a row without HOST_TOKENS reads its input from the slot,
where the previous step's sampler left it. A token that is not known yet has no representation.

Order of effects within a step: release, admit, pages, copies, then the rows' forward pass. In a
layer every row's K and V are written before any row attends, so a row may attend to a page that
another row of the same step fills.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import IntFlag

import numpy as np
import numpy.typing as npt

from tidemill.wire.sampling import SamplingParams

I32 = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]

EMPTY = np.empty(0, dtype=np.int32)


def _rows(width: int) -> I32:
    return np.empty((0, width), dtype=np.int32)


class RowFlags(IntFlag):
    SAMPLE = 1  # sample a token after the row's last position
    HOST_TOKENS = 2  # the row's input ids are in `tokens`; else: the slot's last sampled token
    PROMPT_LOGPROBS = 4  # report log-probabilities of the row's input tokens


@dataclass(slots=True)
class SlotInit:
    """A request enters a slot.

    Positions count from the start of the prompt. `stop_ids` end the request when sampled at
    output position >= min_tokens (before that they are banned); `max_len` ends it when prompt
    plus output reach it. `history` (prompt, then resumed output) is filled only when penalties
    or prompt log-probabilities need it (the token after a chunk is in none of the chunk's rows).
    The randomness of the token at position p depends on (`seed`, p) alone.
    """

    slot: int
    params: SamplingParams
    seed: int  # 64-bit
    prompt_len: int
    max_len: int
    history: I32 = field(default_factory=lambda: EMPTY)

    def encode(self) -> I32:
        p = self.params
        bias = p.logit_bias or {}
        ints = np.array(
            [
                self.slot,
                self.prompt_len,
                self.max_len,
                p.min_tokens,
                p.top_k,
                -1 if p.logprobs is None else p.logprobs,
                -1 if p.prompt_logprobs is None else p.prompt_logprobs,
                len(p.stop_token_ids),
                len(bias),
                len(self.history),
            ],
            dtype=np.int32,
        )
        seed = np.array([self.seed & (2**64 - 1)], dtype=np.uint64).view(np.int32)
        floats = np.array(
            [
                p.temperature,
                p.top_p,
                p.min_p,
                p.presence_penalty,
                p.frequency_penalty,
                p.repetition_penalty,
            ],
            dtype=np.float32,
        ).view(np.int32)
        return np.concatenate(
            [
                ints,
                seed,
                floats,
                np.array(p.stop_token_ids, dtype=np.int32),
                np.fromiter(bias.keys(), np.int32, len(bias)),
                np.fromiter(bias.values(), np.float32, len(bias)).view(np.int32),
                self.history,
            ]
        )

    @classmethod
    def decode(cls, words: I32, at: int) -> tuple[SlotInit, int]:
        """Read one SlotInit at word `at`; returns it and the position behind it."""
        (
            slot,
            prompt_len,
            max_len,
            min_tokens,
            top_k,
            logprobs,
            plogprobs,
            n_stop,
            n_bias,
            n_hist,
        ) = (int(v) for v in words[at : at + 10])
        seed = int(words[at + 10 : at + 12].copy().view(np.uint64)[0])
        f = [float(v) for v in words[at + 12 : at + 18].copy().view(np.float32)]
        at += 18
        stop = tuple(int(v) for v in words[at : at + n_stop])
        at += n_stop
        bias_ids = words[at : at + n_bias]
        bias_values = words[at + n_bias : at + 2 * n_bias].copy().view(np.float32)
        at += 2 * n_bias
        bias = {int(i): float(v) for i, v in zip(bias_ids, bias_values, strict=True)}
        params = SamplingParams(
            temperature=f[0],
            top_p=f[1],
            min_p=f[2],
            presence_penalty=f[3],
            frequency_penalty=f[4],
            repetition_penalty=f[5],
            top_k=top_k,
            min_tokens=min_tokens,
            logprobs=None if logprobs < 0 else logprobs,
            prompt_logprobs=None if plogprobs < 0 else plogprobs,
            stop_token_ids=stop,
            logit_bias=bias or None,
        )
        init = cls(slot, params, seed, prompt_len, max_len, words[at : at + n_hist].copy())
        return init, at + n_hist


@dataclass(slots=True)
class StepPlan:
    """One step for the runner.

    `rows` is int32[R, 4]: slot, start position, number of tokens, RowFlags. Decode rows (one
    token, no HOST_TOKENS) come first. `tokens` holds the ids of all HOST_TOKENS rows, in row
    order. `pages` is int32[N, 3]: slot, index in the slot's page table, page. `copies` is
    int32[N, 3]: source page, destination page, number of leading tokens to copy.
    """

    step: int
    rows: I32 = field(default_factory=lambda: _rows(4))
    tokens: I32 = field(default_factory=lambda: EMPTY)
    release: I32 = field(default_factory=lambda: EMPTY)
    admit: list[SlotInit] = field(default_factory=list)
    pages: I32 = field(default_factory=lambda: _rows(3))
    copies: I32 = field(default_factory=lambda: _rows(3))

    def encode(self) -> list[I32]:
        """The plan as arrays to be laid end to end."""
        head = np.array(
            [
                self.step,
                len(self.rows),
                len(self.tokens),
                len(self.release),
                len(self.admit),
                len(self.pages),
                len(self.copies),
            ],
            dtype=np.int32,
        )
        arrays = [head, self.rows.ravel(), self.tokens, self.release, self.pages.ravel()]
        return [*arrays, self.copies.ravel(), *(init.encode() for init in self.admit)]

    @classmethod
    def decode(cls, words: I32) -> StepPlan:
        """Inverse of `encode`. The arrays are views of `words`."""
        step, rows, tokens, release, admit, pages, copies = words[:7].tolist()
        sizes = (rows * 4, tokens, release, pages * 3, copies * 3)
        ends = list(itertools.accumulate(sizes, initial=7))
        parts = [words[a:b] for a, b in itertools.pairwise(ends)]
        inits: list[SlotInit] = []
        at = ends[-1]
        for _ in range(admit):
            init, at = SlotInit.decode(words, at)
            inits.append(init)
        return cls(
            step=step,
            rows=parts[0].reshape(-1, 4),
            tokens=parts[1],
            release=parts[2],
            admit=inits,
            pages=parts[3].reshape(-1, 3),
            copies=parts[4].reshape(-1, 3),
        )


@dataclass(slots=True)
class Logprobs:
    """Log-probabilities of N tokens with their best K alternatives (best first).

    K is the most that any row in the step asked for; each reader takes as many as it wants.
    """

    chosen: F32  # [N]
    rank: I32  # [N], 0 is the most likely token
    top_ids: I32  # [N, K]
    top_values: F32  # [N, K]

    def encode(self) -> list[I32]:
        head = np.array(self.top_ids.shape, dtype=np.int32)
        return [
            head,
            self.chosen.view(np.int32),
            self.rank,
            self.top_ids.ravel(),
            self.top_values.ravel().view(np.int32),
        ]

    @classmethod
    def decode(cls, words: I32, at: int) -> tuple[Logprobs, int]:
        n, k = int(words[at]), int(words[at + 1])
        cut = np.cumsum([at + 2, n, n, n * k, n * k])
        chosen, rank, ids, values = (words[a:b] for a, b in itertools.pairwise(cut))
        made = cls(
            chosen.view(np.float32), rank, ids.reshape(n, k), values.view(np.float32).reshape(n, k)
        )
        return made, int(cut[-1])


@dataclass(slots=True)
class StepResult:
    """What a step produced. `tokens` and `finished` are parallel to the plan's SAMPLE rows, in
    row order; so is `logprobs` when any of them asked for it. `finished` is the runner's own
    stop check (1: a stop id was sampled, 2: max_len reached, 0: goes on). A row whose request
    finished in an earlier step of the same run-ahead window yields a token nobody may use.

    `prompt_logprobs` has one entry per PROMPT_LOGPROBS row: (row index, log-probabilities of
    the tokens that FOLLOW each of the row's positions, i.e. of input positions start+1 …
    start+n; the one after the prompt's last token is left out).
    """

    step: int
    tokens: I32
    finished: I32
    logprobs: Logprobs | None = None
    prompt_logprobs: list[tuple[int, Logprobs]] = field(default_factory=list)
    device_us: int = 0  # execution time of the step, microseconds

    def encode(self) -> list[I32]:
        head = np.array(
            [
                self.step,
                len(self.tokens),
                0 if self.logprobs is None else 1,
                len(self.prompt_logprobs),
                self.device_us,
            ],
            dtype=np.int32,
        )
        arrays = [head, self.tokens, self.finished]
        if self.logprobs is not None:
            arrays += self.logprobs.encode()
        for row, logprobs in self.prompt_logprobs:
            arrays += [np.array([row], dtype=np.int32), *logprobs.encode()]
        return arrays

    @classmethod
    def decode(cls, words: I32) -> StepResult:
        step, n, has_logprobs, n_prompt, device_us = words[:5].tolist()
        tokens, finished = words[5 : 5 + n], words[5 + n : 5 + 2 * n]
        at = 5 + 2 * n
        logprobs = None
        if has_logprobs:
            logprobs, at = Logprobs.decode(words, at)
        prompt: list[tuple[int, Logprobs]] = []
        for _ in range(n_prompt):
            row = int(words[at])
            entry, at = Logprobs.decode(words, at + 1)
            prompt.append((row, entry))
        return cls(step, tokens, finished, logprobs, prompt, device_us)
