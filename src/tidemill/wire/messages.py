"""Messages between the outer processes, msgspec structs sent as msgpack over ZeroMQ.

    server ──TokenizeText/TokenizeChat──► tokenizer ──Tokenized──► server
    server ──Submit/Abort──► scheduler ──TokenBatch──► detokenizer ──TextBatch──► server
    detokenizer ──Stopped──► scheduler            (a stop string was found)
    everyone ──Status──► supervisor ──Snapshot──► servers, scheduler

The server is the only one who submits: it holds each open request whole, so the message that
starts a request and the one that resumes it after a process died are the same `Submit`.
Token ids travel as little-endian int32 bytes (`ids_to_bytes`), never as lists.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from tidemill.wire.sampling import SamplingParams

Ids = npt.NDArray[np.int32]
FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]


def ids_to_bytes(ids: list[int] | Ids) -> bytes:
    return np.asarray(ids, dtype="<i4").tobytes()


def bytes_to_ids(data: bytes) -> Ids:
    return np.frombuffer(data, dtype="<i4")


class Message(msgspec.Struct, tag=True, kw_only=True):
    """Base of everything that goes over a socket; the tag is the class name."""


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error the client sees, in OpenAI's terms. `status` is the HTTP status."""

    status: int
    message: str
    param: str | None = None
    code: str | None = None


# --- server <-> tokenizer -------------------------------------------------------------------


class TokenizeText(Message):
    """Tokenize plain texts. `call` is unique per server worker; the reply goes to `worker`."""

    call: int
    worker: int
    texts: list[str]
    add_special_tokens: bool = True
    want_strings: bool = False


class TokenizeChat(Message):
    """Apply the chat template and tokenize. `messages` and `tools` are decoded JSON."""

    call: int
    worker: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    want_strings: bool = False


class DetokenizeIds(Message):
    call: int
    worker: int
    ids: bytes
    skip_special_tokens: bool = False


class Tokenized(Message):
    """Reply to TokenizeText, TokenizeChat (`prompts`) and DetokenizeIds (`text`).

    `eos_ids` are the token ids that end an answer for this model.
    """

    call: int
    prompts: list[bytes] = []
    strings: list[list[str]] | None = None
    text: str | None = None
    eos_ids: tuple[int, ...] = ()
    error: ErrorInfo | None = None


# --- server -> scheduler ---------------------------------------------------------------------


class Submit(Message):
    """Start a sequence, or resume it from `output_ids`.

    A request with n > 1 is n Submits whose seeds differ. `params.stop_token_ids` is complete:
    the server has added the model's EOS ids unless `ignore_eos`. `params.max_tokens` and
    `params.seed` are set. A second Submit with a known `rid` replaces the first (resume).
    """

    rid: int
    worker: int
    detokenizer: int
    prompt_ids: bytes
    params: SamplingParams
    output_ids: bytes = b""
    attempt: int = 0
    priority: int = 0  # lower runs first
    salt: str = ""  # prefix pages are shared only within one salt
    want_prompt_text: bool = False  # echo: the detokenizer emits the prompt's text first


class Abort(Message):
    """The client is gone. The detokenizer gets a RequestEnd, the server hears no more."""

    rid: int


class WorkerGone(Message):
    """A server worker died: its requests are aborted (supervisor -> scheduler)."""

    worker: int


# --- scheduler -> detokenizer -> server ------------------------------------------------------


class RequestStart(msgspec.Struct, frozen=True, kw_only=True):
    """All that the detokenizer must know of a request; precedes its first token."""

    rid: int
    worker: int
    attempt: int
    prompt_ids: bytes
    output_ids: bytes  # not empty after a resume
    cached_tokens: int  # prompt tokens found in the prefix cache
    params: SamplingParams
    want_prompt_text: bool = False


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Log-probabilities at one position. `ids`/`values` are the alternatives, best first."""

    token: int
    logprob: float
    rank: int  # 0 is the most likely token
    ids: list[int]
    values: list[float]


class RequestEnd(msgspec.Struct, frozen=True, kw_only=True):
    rid: int
    reason: FinishReason
    stop_token: int | None = None  # the stop token id that ended it, if one did
    error: ErrorInfo | None = None


class TokenBatch(Message):
    """One step's output for one detokenizer. `rids[i]` produced `tokens[i]`.

    Order: `starts` first, then prompt logprobs, then the tokens, then `ends`. `logprobs` is
    parallel to `tokens` when any request in the batch wants them (None entries for others).
    """

    rids: bytes  # int64
    tokens: bytes  # int32
    starts: list[RequestStart] = []
    ends: list[RequestEnd] = []
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = []  # (rid, positions 1, 2, …)


class LogprobText(msgspec.Struct, frozen=True, kw_only=True):
    """A token with its text, as the API reports it."""

    token: str
    token_id: int
    bytes: list[int]
    logprob: float
    top: list[tuple[str, int, list[int], float]] = []  # (text, id, bytes, logprob)


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """New text of one request.

    `offset` is the absolute position (in characters of the output) where `text` begins, so a
    server that has already delivered a part of it after a resume drops exactly that part.
    `ids` are the output tokens whose text is complete with this delta: what a resume starts
    from. `generated` counts all output tokens so far, delivered or held back.
    """

    rid: int
    attempt: int
    offset: int
    text: str
    ids: bytes = b""
    generated: int = 0
    cached_tokens: int = 0
    finish: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobText] | None = None
    prompt_logprobs: list[LogprobText | None] | None = None
    prompt_text: str | None = None
    error: ErrorInfo | None = None


class TextBatch(Message):
    deltas: list[TextDelta]


class Stopped(Message):
    """A stop string was found: free the request; the detokenizer has sent the terminal delta."""

    rid: int
    attempt: int


# --- supervision -----------------------------------------------------------------------------

ComponentState = Literal["starting", "ready", "dead"]


class RunnerReady(msgspec.Struct, frozen=True, kw_only=True):
    """What the runner measured. `ring` is where the scheduler attaches."""

    ring: str
    num_pages: int
    page_size: int
    max_model_len: int
    max_running_requests: int
    max_batch_tokens: int
    vocab_size: int
    device: str
    memory: dict[str, int] = {}  # bytes by part, for `info` and /metrics


class Status(Message):
    """A component tells the supervisor how it is. `progress` is 0..1 of `detail`."""

    component: str  # "server-0", "tokenizer-0", "scheduler", "runner-0", "detokenizer-0"
    state: ComponentState
    pid: int
    detail: str = ""
    progress: float | None = None
    runner: RunnerReady | None = None
    fatal: str | None = None  # a one-line reason why a restart cannot help


EngineState = Literal["starting", "ready", "degraded", "draining"]


class ComponentInfo(msgspec.Struct, frozen=True, kw_only=True):
    state: ComponentState
    pid: int
    generation: int  # counts starts; a change means that the component lost its state
    detail: str = ""
    progress: float | None = None


class Snapshot(Message):
    """The supervisor's view, published on every change and once a second to new subscribers."""

    state: EngineState
    components: dict[str, ComponentInfo]
    runner: RunnerReady | None = None


AnyMessage = (
    TokenizeText
    | TokenizeChat
    | DetokenizeIds
    | Tokenized
    | Submit
    | Abort
    | WorkerGone
    | TokenBatch
    | TextBatch
    | Stopped
    | Status
    | Snapshot
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(data: bytes | memoryview) -> AnyMessage:
    return _decoder.decode(data)
