"""The Python API: the whole engine in this process.

`LLM` puts the tokenizer, the scheduler, the model runner and the detokenizer together with the
inline transport: the same classes that the server's processes run, called in step by whoever
waits for an answer. Any number of threads and coroutines may wait at once; their requests run in
one batch.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidemill import hub
from tidemill.config import EngineConfig
from tidemill.runner.model_runner import ModelRunner
from tidemill.scheduler.scheduler import Scheduler
from tidemill.text import vocabulary
from tidemill.text.detokenizer import Detokenizer
from tidemill.text.tokenizer import Call, TokenizerService
from tidemill.wire.errors import RequestError
from tidemill.wire.link import InlineLink
from tidemill.wire.messages import (
    ErrorInfo,
    LogprobText,
    Submit,
    TextDelta,
    TokenizeChat,
    Tokenized,
    TokenizeText,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.sampling import SamplingParams, check_vocabulary, for_choice

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]


@dataclass(slots=True)
class Choice:
    """One answer. `finish_reason` is "stop" or "length"; `stop_reason` the stop string or token
    id that ended it, if one did."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobText] | None = None


@dataclass(slots=True)
class RequestOutput:
    """All answers to one prompt."""

    prompt_token_ids: list[int]
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_logprobs: list[LogprobText | None] | None = None

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """A piece of one answer. `token_ids` are those whose text is complete with it."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


class LLM:
    """An engine for offline use.

    `model` is anything that `tidemill serve` takes; `settings` are fields of `EngineConfig`.
    Raises `EngineError`, in one line, when the model cannot be loaded or does not fit.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # In one thread nothing runs while a step executes, so planning ahead gains nothing and
        # costs a wasted row behind every stop.
        settings.setdefault("run_ahead", 0)
        self.config = EngineConfig(model=str(hub.resolve(model)), **settings)
        self._tokenizer = TokenizerService(vocabulary.load(self.config))
        self._detokenizer = Detokenizer(self._tokenizer.vocab)
        runner = ModelRunner(self.config)
        self.ready = runner.ready
        self.scheduler = Scheduler(self.config, runner.ready, InlineLink(runner))
        self._rids = itertools.count(1)
        self._sinks: dict[int, Callable[[TextDelta], None]] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort whatever runs. The engine may not be used afterwards."""
        with self._lock:
            for rid in list(self._sinks):
                self.scheduler.abort(rid)
            self._sinks.clear()

    # --- whole answers ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text or token ids). One output a prompt, in their order.

        Raises `InvalidParam` and `RequestError`; nothing then goes on running.
        """
        many = [prompts] if _is_one(prompts) else list(prompts)
        return self._run([self._encode(p) for p in many], params, progress)  # type: ignore[arg-type]

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template."""
        one = bool(conversations) and isinstance(conversations[0], dict)
        many = [conversations] if one else list(conversations)
        return self._run([self._render(m) for m in many], params, progress)  # type: ignore[arg-type]

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> RequestOutput:
        """`generate` for one prompt; concurrent calls share batches."""
        return (await asyncio.to_thread(self.generate, prompt, params))[0]

    async def achat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> RequestOutput:
        return (await asyncio.to_thread(self.chat, messages, params))[0]

    # --- streams ------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """The answer in pieces as they are made. Closing the iterator aborts the request."""
        return self._stream(self._encode(prompt), params or SamplingParams())

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None
    ) -> Iterator[StreamDelta]:
        return self._stream(self._render(messages), params or SamplingParams())

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[StreamDelta]:
        """`stream` for coroutines."""
        pieces = self.stream(prompt, params)
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            pieces.close()  # type: ignore[attr-defined]

    # --- the loop -----------------------------------------------------------------------------

    def _run(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(prompts)
        else:
            each = list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        for one in each:
            self._check(one)
        outputs = [
            RequestOutput(ids, [Choice(i) for i in range(one.n)])
            for ids, one in zip(prompts, each, strict=True)
        ]
        pending: set[int] = set()
        errors: list[ErrorInfo] = []
        with _bar(progress, sum(one.n for one in each)) as advance:

            def sink(output: RequestOutput, choice: Choice) -> Callable[[TextDelta], None]:
                def take(delta: TextDelta) -> None:
                    _add(output, choice, delta)
                    if delta.error is not None:
                        errors.append(delta.error)
                    if delta.finish is not None:
                        pending.discard(delta.rid)
                        advance()

                return take

            with self._lock:
                for output, one in zip(outputs, each, strict=True):
                    for choice in output.choices:
                        rid = self._submit(
                            output.prompt_token_ids, one, choice.index, sink(output, choice)
                        )
                        pending.add(rid)
            try:
                while pending and not errors:
                    self._turn(lambda: bool(pending))
            finally:
                self._abort(pending)
        if errors:
            raise RequestError(errors[0])
        return outputs

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[StreamDelta]:
        self._check(params)
        deltas: queue.SimpleQueue[tuple[int, TextDelta]] = queue.SimpleQueue()
        pending: set[int] = set()

        def sink(index: int) -> Callable[[TextDelta], None]:
            return lambda delta: deltas.put((index, delta))

        try:
            with self._lock:
                for index in range(params.n):
                    pending.add(self._submit(ids, params, index, sink(index)))
            while pending:
                self._turn(deltas.empty)
                while not deltas.empty():
                    index, delta = deltas.get()
                    if delta.finish is not None:
                        pending.discard(delta.rid)
                    if delta.error is not None:
                        raise RequestError(delta.error)
                    yield StreamDelta(
                        index, delta.text, bytes_to_ids(delta.ids).tolist(), delta.finish
                    )
        finally:
            self._abort(pending)

    def _turn(self, wanted: Callable[[], bool]) -> None:
        """One turn of the engine, unless another thread's turn has brought what was wanted."""
        with self._lock:
            if not wanted():
                return
            for batch in self.scheduler.advance().values():
                texts, stopped = self._detokenizer.handle(batch)
                for message in stopped:
                    self.scheduler.stopped(message.rid, message.attempt)
                for text in texts.values():
                    for delta in text.deltas:
                        self._deliver(delta)

    def _deliver(self, delta: TextDelta) -> None:
        sink = self._sinks.get(delta.rid)
        if sink is None:
            return  # aborted meanwhile
        if delta.finish is not None:
            del self._sinks[delta.rid]
        sink(delta)

    def _submit(
        self, ids: list[int], params: SamplingParams, choice: int, sink: Callable[[TextDelta], None]
    ) -> int:
        rid = next(self._rids)
        self._sinks[rid] = sink
        self.scheduler.submit(
            Submit(
                rid=rid,
                worker=0,
                detokenizer=0,
                prompt_ids=ids_to_bytes(ids),
                params=for_choice(params, choice, self._tokenizer.vocab.eos_ids),
            )
        )
        return rid

    def _abort(self, rids: set[int]) -> None:
        with self._lock:
            for rid in rids:
                if self._sinks.pop(rid, None) is not None:
                    self.scheduler.abort(rid)

    # --- prompts ------------------------------------------------------------------------------

    def _check(self, params: SamplingParams) -> None:
        params.validate()
        check_vocabulary(params, self.ready.vocab_size)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._ids(TokenizeText(call=0, worker=0, texts=[prompt]))
        ids = [int(token) for token in prompt]
        outside = [token for token in ids if not 0 <= token < self.ready.vocab_size]
        if outside:
            raise ValueError(
                f"token ids must be between 0 and {self.ready.vocab_size - 1}, got {outside[0]}"
            )
        return ids

    def _render(self, messages: Messages) -> list[int]:
        return self._ids(TokenizeChat(call=0, worker=0, messages=messages))

    def _ids(self, call: Call) -> list[int]:
        answer: Tokenized = self._tokenizer.handle(call)
        if answer.error is not None:
            raise RequestError(answer.error)
        return [int(token) for token in bytes_to_ids(answer.prompts[0])]


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or a sequence of ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


def _add(output: RequestOutput, choice: Choice, delta: TextDelta) -> None:
    choice.text += delta.text
    choice.token_ids += bytes_to_ids(delta.ids).tolist()
    choice.finish_reason = delta.finish
    choice.stop_reason = delta.stop_reason
    if delta.logprobs is not None:
        choice.logprobs = [*(choice.logprobs or []), *delta.logprobs]
    if delta.prompt_logprobs is not None:
        output.prompt_logprobs = [*(output.prompt_logprobs or []), *delta.prompt_logprobs]
    output.cached_tokens = max(output.cached_tokens, delta.cached_tokens)


class _bar:
    """A progress bar over sequences; entering gives the function that counts one."""

    def __init__(self, shown: bool, total: int) -> None:
        columns = (TextColumn("Generating"), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), disable=not shown)
        self._task = self._progress.add_task("", total=total)

    def __enter__(self) -> Callable[[], None]:
        self._progress.start()
        return lambda: self._progress.advance(self._task)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
