"""A request as the scheduler sees it, and the reasons to refuse one."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from tidemill.scheduler.kv_cache import Lease
from tidemill.wire.messages import ErrorInfo, FinishReason, RunnerReady, Submit, bytes_to_ids
from tidemill.wire.plan import I32
from tidemill.wire.sampling import SamplingParams


class State(Enum):
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence, from Submit to its end. While it runs, its token ids live in its slot."""

    submit: Submit
    arrival: int
    ids: I32  # prompt and known output; current only while waiting
    prompt_len: int
    max_len: int  # prompt and output together never exceed this
    seed: int
    state: State = State.WAITING
    announced: bool = False  # RequestStart has been sent
    prompt_logprobs_sent: int = 0  # positions 1 … n of the prompt have been reported
    slot: int = -1
    lease: Lease | None = None
    submitted_at: float = 0.0  # time.monotonic(), for queue times

    @property
    def rid(self) -> int:
        return self.submit.rid

    @property
    def params(self) -> SamplingParams:
        return self.submit.params

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the lower priority number, then the earlier arrival."""
        return self.submit.priority, self.arrival

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Some positions of the prompt are still to be reported."""
        return (
            self.params.prompt_logprobs is not None
            and self.prompt_logprobs_sent < self.prompt_len - 1
        )

    @property
    def needs_history(self) -> bool:
        """The runner wants the known tokens when the request enters a slot."""
        return self.params.has_penalties or self.wants_prompt_logprobs

    @property
    def reusable(self) -> int:
        """How many leading tokens may come from the cache: the last one is always computed for
        its logits, and so is every one whose log-probabilities are still wanted."""
        if self.wants_prompt_logprobs:
            return self.prompt_logprobs_sent
        return len(self.ids) - 1

    def ended_by(self) -> tuple[FinishReason, int | None] | None:
        """(reason, stop token) if the output that came with Submit is complete already."""
        output = self.ids[self.prompt_len :]
        if len(output) and int(output[-1]) in self.params.stop_token_ids:
            return "stop", int(output[-1])
        if len(self.ids) >= self.max_len:
            return "length", None
        return None


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one request can have."""

    max_model_len: int  # tokens, prompt and output
    cache_tokens: int  # tokens that the whole KV cache holds
    vocab_size: int

    @classmethod
    def of(cls, ready: RunnerReady) -> Capacity:
        return cls(ready.max_model_len, ready.num_pages * ready.page_size, ready.vocab_size)

    @property
    def tokens(self) -> int:
        return min(self.max_model_len, self.cache_tokens)


def make_request(
    submit: Submit, arrival: int, capacity: Capacity, engine_seed: int
) -> Request | ErrorInfo:
    """A request that fits, or the reason why it never will."""
    if len(submit.prompt_ids) % 4 or len(submit.output_ids) % 4:
        return _bad("prompt", "prompt_ids and output_ids must hold whole int32 token ids")
    prompt_len = len(submit.prompt_ids) // 4
    ids = np.concatenate([bytes_to_ids(submit.prompt_ids), bytes_to_ids(submit.output_ids)])
    params = submit.params
    error = _check_ids(ids, prompt_len, params, capacity.vocab_size) or _check_length(
        prompt_len, params.max_tokens, capacity
    )
    if error is not None:
        return error
    wanted = capacity.tokens if params.max_tokens is None else prompt_len + params.max_tokens
    request = Request(
        submit=submit,
        arrival=arrival,
        ids=ids,
        prompt_len=prompt_len,
        max_len=wanted,
        seed=params.seed if params.seed is not None else _derive_seed(engine_seed, submit.rid),
    )
    if len(ids) > prompt_len:  # its first output, and with it these, was delivered before
        request.prompt_logprobs_sent = prompt_len - 1
    return request


def _check_ids(
    ids: I32, prompt_len: int, params: SamplingParams, vocab_size: int
) -> ErrorInfo | None:
    if not prompt_len:
        return _bad("prompt", "the prompt is empty: at least one token is needed")
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        return _bad("prompt", f"token id {wrong} is outside the vocabulary of {vocab_size}")
    for name, listed in (
        ("stop_token_ids", params.stop_token_ids),
        ("logit_bias", params.logit_bias or ()),
    ):
        for token in listed:
            if not 0 <= token < vocab_size:
                return _bad(
                    name, f"{name}: token id {token} is outside the vocabulary of {vocab_size}"
                )
    return None


def _check_length(prompt_len: int, max_tokens: int | None, capacity: Capacity) -> ErrorInfo | None:
    """Refuse what can never fit, with the numbers and the flag that would change them."""
    needed = prompt_len + (1 if max_tokens is None else max_tokens)
    if needed <= capacity.tokens:
        return None
    output = "at least 1" if max_tokens is None else f"max_tokens {max_tokens}"
    if needed > capacity.max_model_len:
        limit, flag = f"the context is {capacity.max_model_len} tokens", "--max-model-len"
    else:
        limit, flag = f"the KV cache holds {capacity.cache_tokens} tokens", "--kv-memory"
    return ErrorInfo(
        status=400,
        message=f"{needed} tokens are needed (prompt {prompt_len}, output {output}), but {limit}; "
        f"shorten the request, or restart with a larger {flag}",
        param="max_tokens" if prompt_len < capacity.tokens else "prompt",
        code="context_length_exceeded",
    )


def queue_full(limit: int) -> ErrorInfo:
    return ErrorInfo(
        status=429,
        message=f"{limit} requests are waiting already (--max-waiting-requests {limit}); "
        "try again later",
        code="queue_full",
    )


def _bad(param: str, message: str) -> ErrorInfo:
    return ErrorInfo(status=400, message=message, param=param, code="invalid_value")


def _derive_seed(engine_seed: int, rid: int) -> int:
    """A seed for a request that brings none: the same after a restart, unlike its neighbours'."""
    data = np.array([engine_seed, rid], dtype="<i8").tobytes()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
