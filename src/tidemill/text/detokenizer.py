"""The detokenizer: token ids to text, a piece at a time.

Text is built from the tokens' bytes through an incremental UTF-8 decoder, so each token costs the
same however long the answer is, characters are never split, and any chunking gives the text that
decoding everything at once would give. What might be the beginning of a stop string is held back
until it cannot be one any more.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq

from tidemill.config import EngineConfig
from tidemill.text import vocabulary
from tidemill.text.vocabulary import Vocabulary
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    ErrorInfo,
    FinishReason,
    LogprobText,
    RequestEnd,
    RequestStart,
    Stopped,
    TextBatch,
    TextDelta,
    TokenBatch,
    TokenLogprobs,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.sockets import Receiver, Sender
from tidemill.wire.status import StatusReporter

_Utf8 = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one growing token sequence.

    `pending` is decoded text that is not out yet; `offset` counts the characters that are.
    """

    def __init__(self, vocab: Vocabulary, skip_special: bool, strip_first_space: bool) -> None:
        self._vocab = vocab
        self._skip_special = skip_special
        self._strip = strip_first_space
        self._decoder = _Utf8(errors="replace")
        self.pending = ""
        self.offset = 0

    def add(self, token: int) -> None:
        """Append a token. Ids beyond the vocabulary (padding of the model's head) add nothing."""
        vocab = self._vocab
        if (self._skip_special and token in vocab.special) or token >= vocab.size:
            return
        text = self._decoder.decode(vocab.token_bytes[token])
        if self._strip and text:
            text, self._strip = text.removeprefix(" "), False
        self.pending += text

    def finish(self) -> None:
        """No token follows: an incomplete character becomes a replacement character."""
        self.pending += self._decoder.decode(b"", final=True)

    @property
    def complete(self) -> bool:
        """Whether no character is begun."""
        return not self._decoder.getstate()[0]

    def take(self, count: int) -> str:
        text, self.pending = self.pending[:count], self.pending[count:]
        self.offset += len(text)
        return text


@dataclass(slots=True)
class _Request:
    start: RequestStart  # without its ids
    text: TextStream
    generated: int
    ids: list[int] = field(default_factory=list)  # whose text is not out yet
    logprobs: list[LogprobText] = field(default_factory=list)
    prompt_logprobs: list[LogprobText | None] | None = None
    prompt_text: str | None = None
    out: list[str] = field(default_factory=list)  # text that goes out with this batch


class Detokenizer:
    """All requests of one shard. A request's state goes with its end, whoever brings it: the
    scheduler, a stop string, or a client that left (an end with the reason "abort")."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._requests: dict[int, _Request] = {}

    def handle(self, batch: TokenBatch) -> tuple[dict[int, TextBatch], list[Stopped]]:
        """One step's tokens. Returns text by server worker, and requests that a stop string ends.

        Exactly one delta of a request has `finish` set; nothing of that request follows it.
        """
        made: dict[int, list[TextDelta]] = {}
        stopped: list[Stopped] = []
        for start in batch.starts:
            self._start(start)
        for rid, entries in batch.prompt_logprobs:
            self._add_prompt_logprobs(rid, entries)
        ends = {end.rid: end for end in batch.ends}
        touched = self._add_tokens(batch, ends, made, stopped)
        for rid in touched | dict.fromkeys(ends):
            request = self._requests.get(rid)
            if request is None:
                continue
            end = ends.get(rid)
            delta = self._flush(request) if end is None else self._end(request, end)
            if delta is not None:
                made.setdefault(request.start.worker, []).append(delta)
        return {worker: TextBatch(deltas=deltas) for worker, deltas in made.items()}, stopped

    def _start(self, start: RequestStart) -> None:
        # The first space belongs to the text where the output continues a prompt.
        strip = self._vocab.strips_first_space and not start.prompt_ids
        stream = TextStream(self._vocab, start.params.skip_special_tokens, strip)
        resumed = bytes_to_ids(start.output_ids)
        for token in resumed.tolist():
            stream.add(token)
        stream.take(len(stream.pending))  # delivered before
        light = msgspec.structs.replace(start, prompt_ids=b"", output_ids=b"")
        request = _Request(light, stream, generated=len(resumed))
        if not len(resumed):  # otherwise they went out with the first delta
            if start.want_prompt_text:
                prompt = bytes_to_ids(start.prompt_ids).tolist()
                request.prompt_text = self._vocab.decode(prompt, skip_special_tokens=False)
            if start.params.prompt_logprobs is not None:
                request.prompt_logprobs = [None]  # nothing predicts the first token
        self._requests[start.rid] = request

    def _add_tokens(
        self,
        batch: TokenBatch,
        ends: dict[int, RequestEnd],
        made: dict[int, list[TextDelta]],
        stopped: list[Stopped],
    ) -> dict[int, None]:
        """Add the batch's tokens; returns the requests (in order) that may have news."""
        touched: dict[int, None] = {}
        rids = np.frombuffer(batch.rids, dtype="<i8").tolist()
        tokens = np.frombuffer(batch.tokens, dtype="<i4").tolist()
        last = {rid: place for place, rid in enumerate(rids) if rid in ends}
        logprobs: Sequence[TokenLogprobs | None] = batch.logprobs or [None] * len(rids)
        for place, (rid, token, entry) in enumerate(zip(rids, tokens, logprobs, strict=True)):
            request = self._requests.get(rid)
            if request is None:
                continue  # a stop string ended it; the scheduler will hear of it
            end = ends.get(rid)
            hidden = (
                end is not None
                and end.stop_token is not None
                and place == last[rid]
                and not request.start.params.include_stop_str_in_output
            )
            match = self._add_token(request, token, hidden, entry)
            if match is None:
                touched[rid] = None
                continue
            stopped.append(Stopped(rid=rid, attempt=request.start.attempt))
            touched.pop(rid, None)
            delta = self._finish(request, "stop", match)
            made.setdefault(request.start.worker, []).append(delta)
        return touched

    def _add_token(
        self, request: _Request, token: int, hidden: bool, entry: TokenLogprobs | None
    ) -> str | None:
        """Returns the stop string that the token completes, if it does."""
        request.generated += 1
        request.ids.append(token)
        if entry is not None:
            request.logprobs.append(self._logprob_text(entry))
        if hidden:
            return None
        stream, params = request.text, request.start.params
        stream.add(token)
        if params.stop and request.generated >= params.min_tokens:
            if (found := _first_stop(stream.pending, params.stop)) is not None:
                at, stop = found
                keep = at + len(stop) if params.include_stop_str_in_output else at
                request.out.append(stream.take(keep))
                return stop
            held = _held_back(stream.pending, params.stop)
        else:
            held = 0
        request.out.append(stream.take(len(stream.pending) - held))
        return None

    def _flush(self, request: _Request) -> TextDelta | None:
        """What this batch made visible, if anything."""
        if not any(request.out):
            return None
        whole = not request.text.pending and request.text.complete
        return self._delta(request, whole)

    def _end(self, request: _Request, end: RequestEnd) -> TextDelta | None:
        """The scheduler's end of a request. Nobody waits for news of an aborted one."""
        if end.reason == "abort":
            del self._requests[end.rid]
            return None
        request.text.finish()
        request.out.append(request.text.take(len(request.text.pending)))
        return self._finish(request, end.reason, end.stop_token, end.error)

    def _finish(
        self,
        request: _Request,
        reason: FinishReason,
        stop_reason: int | str | None,
        error: ErrorInfo | None = None,
    ) -> TextDelta:
        del self._requests[request.start.rid]
        return self._delta(request, True, reason, stop_reason, error)

    def _delta(
        self,
        request: _Request,
        whole: bool,
        finish: FinishReason | None = None,
        stop_reason: int | str | None = None,
        error: ErrorInfo | None = None,
    ) -> TextDelta:
        """All that is to be told. `whole`: no token's text is partly held back."""
        text = "".join(request.out)
        start = request.start
        delta = TextDelta(
            rid=start.rid,
            attempt=start.attempt,
            offset=request.text.offset - len(text),
            text=text,
            ids=ids_to_bytes(request.ids) if whole else b"",
            generated=request.generated,
            cached_tokens=start.cached_tokens,
            finish=finish,
            stop_reason=stop_reason,
            logprobs=request.logprobs or None,
            prompt_logprobs=request.prompt_logprobs,
            prompt_text=request.prompt_text,
            error=error,
        )
        request.out = []
        if whole:
            request.ids = []
        request.logprobs, request.prompt_logprobs, request.prompt_text = [], None, None
        return delta

    def _add_prompt_logprobs(self, rid: int, entries: list[TokenLogprobs]) -> None:
        request = self._requests.get(rid)
        if request is None:
            return
        made = [self._logprob_text(entry) for entry in entries]
        request.prompt_logprobs = [*(request.prompt_logprobs or []), *made]

    def _logprob_text(self, entry: TokenLogprobs) -> LogprobText:
        text, raw = self._token_text(entry.token)
        top = [
            (*self._named(index), value)
            for index, value in zip(entry.ids, entry.values, strict=True)
        ]
        return LogprobText(
            token=text, token_id=entry.token, bytes=list(raw), logprob=entry.logprob, top=top
        )

    def _named(self, index: int) -> tuple[str, int, list[int]]:
        text, raw = self._token_text(index)
        return text, index, list(raw)

    def _token_text(self, index: int) -> tuple[str, bytes]:
        raw = self._vocab.token_bytes[index] if index < self._vocab.size else b""
        return raw.decode("utf-8", errors="replace"), raw


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """The stop string that begins first in `text` (the longer one of two at one place)."""
    found = [(at, -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    at, _, stop = min(found)
    return at, stop


def _held_back(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest


def main(config: EngineConfig, index: int) -> None:
    """Run until killed."""
    context = zmq.Context()
    endpoints = Endpoints(config.run_dir)
    reporter = StatusReporter(context, config.run_dir, f"detokenizer-{index}")
    reporter.starting("reading the vocabulary")
    detokenizer = Detokenizer(vocabulary.load(config))
    inbox = Receiver.bind(context, endpoints.detokenizer(index))
    servers = [Sender(context, endpoints.server(i)) for i in range(config.servers)]
    scheduler = Sender(context, endpoints.scheduler)
    reporter.ready()
    while True:
        for batch in inbox.receive():
            if not isinstance(batch, TokenBatch):
                raise TypeError(f"not for a detokenizer: {type(batch).__name__}")
            texts, stopped = detokenizer.handle(batch)
            for worker, text in texts.items():
                servers[worker].send(text)
            for message in stopped:
                scheduler.send(message)
