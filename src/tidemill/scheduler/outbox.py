"""What the scheduler has to tell each detokenizer, gathered over one turn."""

from __future__ import annotations

from dataclasses import dataclass, field

from tidemill.scheduler.slots import Recipients
from tidemill.wire.messages import (
    ErrorInfo,
    FinishReason,
    RequestEnd,
    RequestStart,
    Submit,
    TokenBatch,
    TokenLogprobs,
)
from tidemill.wire.plan import I32, Logprobs


@dataclass(slots=True)
class _Letter:
    """A TokenBatch in the making."""

    rids: list[bytes] = field(default_factory=list)
    tokens: list[bytes] = field(default_factory=list)
    count: int = 0
    starts: list[RequestStart] = field(default_factory=list)
    ends: list[RequestEnd] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] | None = None
    prompt_logprobs: list[tuple[int, list[TokenLogprobs]]] = field(default_factory=list)

    def add(self, rids: bytes, tokens: I32, logprobs: list[TokenLogprobs | None] | None) -> None:
        if logprobs is not None and self.logprobs is None:
            self.logprobs = [None] * self.count
        if self.logprobs is not None:
            self.logprobs += [None] * len(tokens) if logprobs is None else logprobs
        self.rids.append(rids)
        self.tokens.append(tokens.tobytes())
        self.count += len(tokens)

    def to_batch(self) -> TokenBatch:
        return TokenBatch(
            rids=b"".join(self.rids),
            tokens=b"".join(self.tokens),
            starts=self.starts,
            ends=self.ends,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


class Outbox:
    def __init__(self) -> None:
        self._letters: dict[int, _Letter] = {}

    def __bool__(self) -> bool:
        return bool(self._letters)

    def take(self) -> dict[int, TokenBatch]:
        """Everything since the last call, by detokenizer."""
        letters, self._letters = self._letters, {}
        return {index: letter.to_batch() for index, letter in letters.items()}

    def start(self, submit: Submit, cached_tokens: int) -> None:
        self._letter(submit.detokenizer).starts.append(
            RequestStart(
                rid=submit.rid,
                worker=submit.worker,
                attempt=submit.attempt,
                prompt_ids=submit.prompt_ids,
                output_ids=submit.output_ids,
                cached_tokens=cached_tokens,
                params=submit.params,
                want_prompt_text=submit.want_prompt_text,
            )
        )

    def end(
        self,
        submit: Submit,
        reason: FinishReason,
        stop_token: int | None = None,
        error: ErrorInfo | None = None,
    ) -> None:
        self._letter(submit.detokenizer).ends.append(
            RequestEnd(rid=submit.rid, reason=reason, stop_token=stop_token, error=error)
        )

    def forget(self, submit: Submit) -> None:
        """Drop the start and end of an earlier request with this rid, which is replaced."""
        letter = self._letters.get(submit.detokenizer)
        if letter is not None:
            letter.starts = [start for start in letter.starts if start.rid != submit.rid]
            letter.ends = [end for end in letter.ends if end.rid != submit.rid]

    def tokens(
        self, recipients: Recipients, tokens: I32, logprobs: list[TokenLogprobs | None] | None
    ) -> None:
        """One step's tokens: `tokens` and `logprobs` are parallel to the recipients."""
        for index, rows, rids in recipients.groups:
            if rows is None:  # all go to one detokenizer
                self._letter(index).add(rids, tokens, logprobs)
            else:
                chosen = None if logprobs is None else [logprobs[row] for row in rows]
                self._letter(index).add(rids, tokens[rows], chosen)

    def prompt_logprobs(self, submit: Submit, entries: list[TokenLogprobs]) -> None:
        """The next positions of a prompt."""
        self._letter(submit.detokenizer).prompt_logprobs.append((submit.rid, entries))

    def _letter(self, index: int) -> _Letter:
        letter = self._letters.get(index)
        if letter is None:
            letter = self._letters[index] = _Letter()
        return letter


def token_logprobs(logprobs: Logprobs, row: int, token: int, alternatives: int) -> TokenLogprobs:
    """One row of the runner's arrays as a message, with at most `alternatives` best tokens."""
    return TokenLogprobs(
        token=token,
        logprob=float(logprobs.chosen[row]),
        rank=int(logprobs.rank[row]),
        ids=logprobs.top_ids[row, :alternatives].tolist(),
        values=logprobs.top_values[row, :alternatives].tolist(),
    )
