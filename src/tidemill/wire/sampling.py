"""Sampling parameters, with the limits that make them valid."""

from __future__ import annotations

import hashlib
import math

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024  # characters
MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024  # entries
MAX_SEED = 2**63 - 1


class InvalidParam(ValueError):
    """A parameter is out of range. `param` names the field, the message names the limit."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose tokens, and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch the filter off.
    Penalties follow the OpenAI (presence, frequency; over output tokens) and the CTRL paper's
    (repetition; over prompt and output) definitions. `logprobs` is the number of alternatives
    reported per output token (0: the chosen token alone; None: off). `max_tokens` None means
    "until the context is full". `seed` None lets the engine pick one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    def validate(self) -> None:
        """Raise `InvalidParam` for the first field that is out of range."""
        _between("temperature", self.temperature, 0.0, 100.0)
        _between("top_k", self.top_k, 0, 2**31 - 1)
        if not (0.0 < self.top_p <= 1.0):
            raise InvalidParam("top_p", f"top_p must be in (0, 1], got {self.top_p}")
        _between("min_p", self.min_p, 0.0, 1.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if not (0.0 < self.repetition_penalty <= 100.0):
            raise InvalidParam(
                "repetition_penalty",
                f"repetition_penalty must be in (0, 100], got {self.repetition_penalty}",
            )
        _between("n", self.n, 1, 2**16)
        if self.seed is not None:
            _between("seed", self.seed, -MAX_SEED, MAX_SEED)
        if self.max_tokens is not None:
            _between("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _between("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParam(
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidParam(
                "stop", f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.stop)}"
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise InvalidParam(
                    "stop", f"a stop string must have 1 to {MAX_STOP_LENGTH} characters"
                )
        if len(self.stop_token_ids) > 128:
            raise InvalidParam("stop_token_ids", f"at most 128 ids, got {len(self.stop_token_ids)}")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                _between(name, count, 0, MAX_LOGPROBS)
        bias = self.logit_bias or {}
        if len(bias) > MAX_LOGIT_BIAS:
            raise InvalidParam("logit_bias", f"at most {MAX_LOGIT_BIAS} entries, got {len(bias)}")
        for value in bias.values():
            _between("logit_bias", value, -100.0, 100.0)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise `InvalidParam` for a token id that the model does not have."""
    for name, ids in (
        ("logit_bias", tuple(params.logit_bias or ())),
        ("stop_token_ids", params.stop_token_ids),
    ):
        for index in ids:
            if not 0 <= index < vocab_size:
                raise InvalidParam(
                    name, f"{name}: token ids must be between 0 and {vocab_size - 1}, got {index}"
                )


def for_choice(params: SamplingParams, choice: int, eos_ids: tuple[int, ...]) -> SamplingParams:
    """The parameters of one of n sequences: a seed of its own, all stop ids in one place.

    Choice 0 keeps the request's seed, so that n = 1 and the first of n give the same text.
    """
    stops = params.stop_token_ids
    if not params.ignore_eos:
        stops = tuple(dict.fromkeys((*stops, *eos_ids)))
    seed = params.seed
    if seed is not None and choice:
        mixed = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=8).digest()
        seed = int.from_bytes(mixed, "little") & MAX_SEED
    return msgspec.structs.replace(params, n=1, seed=seed, stop_token_ids=stops)


def _between(name: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidParam(name, f"{name} must be between {low} and {high}, got {value}")
