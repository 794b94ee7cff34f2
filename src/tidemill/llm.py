"""The Python API: the whole engine in this process.

`LLM` puts the tokenizer before and around the engine of `tidemill.inline`, which runs in a thread
of its own. Any number of threads and coroutines may wait for answers at once; their requests run
in one batch.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, cast

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tidemill import hub
from tidemill.config import EngineConfig
from tidemill.inline import InlineEngine, Job, Sink
from tidemill.scheduler.scheduler import Scheduler
from tidemill.text import vocabulary
from tidemill.text.tokenizer import Call, TokenizerService
from tidemill.wire.errors import RequestError
from tidemill.wire.messages import (
    LogprobText,
    RunnerReady,
    TextDelta,
    TokenizeChat,
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
    """A piece of one answer. `token_ids` are those whose text is complete with it. The last
    piece of each answer has `finish_reason` set."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[LogprobText] | None = None


class LLM:
    """An engine for offline use.

    `model` is anything that `tidemill serve` takes; `settings` are fields of `EngineConfig`.
    Raises `EngineError`, in one line, when the model cannot be loaded or does not fit.

    Calls raise `InvalidParam` for a parameter that is out of range, `RequestError` for a request
    that the engine refuses, and `EngineError` once the engine is closed. Nothing of a call that
    raised, or was interrupted or cancelled, goes on running.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        # Nothing else runs in the engine's thread while a step executes, so planning ahead gains
        # nothing and costs a wasted row behind every stop.
        settings.setdefault("run_ahead", 0)
        settings.setdefault("max_waiting_requests", 2**31)  # a batch may be as long as it is
        self.config = EngineConfig(model=str(hub.resolve(model)), **settings)
        self._tokenizer = TokenizerService(vocabulary.load(self.config))
        self._engine = InlineEngine(self.config, self._tokenizer.vocab)
        self._close = weakref.finalize(self, self._engine.close)

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
        """End the engine. Whoever still waits for an answer gets an error."""
        self._close()

    @property
    def ready(self) -> RunnerReady:
        """What was measured at start: the context and the KV cache that fit."""
        return self._engine.ready

    @property
    def scheduler(self) -> Scheduler:
        """For its `stats`. Everything else in it belongs to the engine's thread."""
        return self._engine.scheduler

    # --- whole answers ------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete each prompt (a text or token ids). One output a prompt, in their order."""
        many = [cast(Prompt, prompts)] if _is_one(prompts) else cast(Sequence[Prompt], prompts)
        return self._wait([self._encode(prompt) for prompt in many], params, progress)

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several, through the model's chat template.

        `continue_final_message`: go on with the last message instead of answering it.
        `template_kwargs` are what the template takes besides messages.
        """
        one = bool(conversations) and isinstance(conversations[0], dict)
        many = cast(list[Messages], [conversations] if one else conversations)
        rendered = [self._render(m, continue_final_message, template_kwargs) for m in many]
        return self._wait(rendered, params, progress)

    async def agenerate(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> RequestOutput:
        """`generate` for one prompt; concurrent calls share batches."""
        return await self._answer(await asyncio.to_thread(self._encode, prompt), params)

    async def achat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> RequestOutput:
        """`chat` for one conversation."""
        ids = await asyncio.to_thread(
            self._render, messages, continue_final_message, template_kwargs
        )
        return await self._answer(ids, params)

    # --- streams ------------------------------------------------------------------------------

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[StreamDelta]:
        """The answer in pieces as they are made. Closing the iterator aborts the request."""
        return self._stream(self._encode(prompt), self._checked(params))

    def stream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> Iterator[StreamDelta]:
        """`stream` for a conversation."""
        ids = self._render(messages, continue_final_message, template_kwargs)
        return self._stream(ids, self._checked(params))

    async def astream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> AsyncIterator[StreamDelta]:
        """`stream` for coroutines."""
        ids = await asyncio.to_thread(self._encode, prompt)
        async for piece in self._astream(ids, self._checked(params)):
            yield piece

    async def astream_chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> AsyncIterator[StreamDelta]:
        """`stream_chat` for coroutines."""
        ids = await asyncio.to_thread(
            self._render, messages, continue_final_message, template_kwargs
        )
        async for piece in self._astream(ids, self._checked(params)):
            yield piece

    # --- from jobs to answers -----------------------------------------------------------------

    def _wait(
        self,
        prompts: list[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            each = [self._checked(params)] * len(prompts)
        else:
            each = [self._checked(one) for one in params]
        if len(each) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts, but {len(each)} sampling parameters")
        with _bar(progress, sum(one.n for one in each)) as advance:
            answers = _Answers(prompts, each, advance)
            with self._running(answers.jobs(self._tokenizer.vocab.eos_ids)):
                return answers.future.result()

    async def _answer(self, ids: list[int], params: SamplingParams | None) -> RequestOutput:
        answers = _Answers([ids], [self._checked(params)], lambda: None)
        with self._running(answers.jobs(self._tokenizer.vocab.eos_ids)):
            return (await asyncio.wrap_future(answers.future))[0]

    def _stream(self, ids: list[int], params: SamplingParams) -> Iterator[StreamDelta]:
        news: queue.SimpleQueue[tuple[int, TextDelta]] = queue.SimpleQueue()
        with self._running(self._stream_jobs(ids, params, news.put)):
            left = params.n
            while left:
                index, delta = news.get()
                left -= delta.finish is not None
                yield _piece(index, delta)

    async def _astream(self, ids: list[int], params: SamplingParams) -> AsyncIterator[StreamDelta]:
        news: asyncio.Queue[tuple[int, TextDelta]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: tuple[int, TextDelta]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits
                loop.call_soon_threadsafe(news.put_nowait, item)

        with self._running(self._stream_jobs(ids, params, put)):
            left = params.n
            while left:
                index, delta = await news.get()
                left -= delta.finish is not None
                yield _piece(index, delta)

    def _stream_jobs(
        self, ids: list[int], params: SamplingParams, put: Callable[[tuple[int, TextDelta]], None]
    ) -> list[Job]:
        def sink(index: int) -> Sink:
            return lambda delta: put((index, delta))

        prompt, eos_ids = ids_to_bytes(ids), self._tokenizer.vocab.eos_ids
        return [Job(prompt, for_choice(params, i, eos_ids), sink(i)) for i in range(params.n)]

    @contextlib.contextmanager
    def _running(self, jobs: list[Job]) -> Iterator[None]:
        """Run the jobs; what has not ended on leaving is aborted."""
        rids = self._engine.submit(jobs)
        try:
            yield
        finally:
            self._engine.abort(rids)

    # --- prompts ------------------------------------------------------------------------------

    def _checked(self, params: SamplingParams | None) -> SamplingParams:
        params = params or SamplingParams()
        params.validate()
        check_vocabulary(params, self.ready.vocab_size)
        return params

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

    def _render(
        self, messages: Messages, continue_final: bool, template_kwargs: dict[str, Any] | None
    ) -> list[int]:
        return self._ids(
            TokenizeChat(
                call=0,
                worker=0,
                messages=messages,
                add_generation_prompt=not continue_final,
                continue_final_message=continue_final,
                template_kwargs=template_kwargs or {},
            )
        )

    def _ids(self, call: Call) -> list[int]:
        answer = self._tokenizer.handle(call)
        if answer.error is not None:
            raise RequestError(answer.error)
        return [int(token) for token in bytes_to_ids(answer.prompts[0])]


class _Answers:
    """The answers to several prompts. `future` has them when the last sequence has ended, or
    raises RequestError when the first has failed."""

    def __init__(
        self,
        prompts: list[list[int]],
        params: list[SamplingParams],
        ended: Callable[[], None],
    ) -> None:
        self.future: Future[list[RequestOutput]] = Future()
        self.future.set_running_or_notify_cancel()  # cancelling is the waiter's affair
        self._params = params
        self._outputs = [
            RequestOutput(ids, [Choice(index) for index in range(one.n)])
            for ids, one in zip(prompts, params, strict=True)
        ]
        self._left = sum(one.n for one in params)
        self._ended = ended
        if not self._left:
            self.future.set_result(self._outputs)

    def jobs(self, eos_ids: tuple[int, ...]) -> list[Job]:
        return [
            Job(prompt, for_choice(one, choice.index, eos_ids), self._sink(output, choice))
            for output, one in zip(self._outputs, self._params, strict=True)
            for prompt in (ids_to_bytes(output.prompt_token_ids),)
            for choice in output.choices
        ]

    def _sink(self, output: RequestOutput, choice: Choice) -> Sink:
        """Gathers one answer. Called in the engine's thread."""
        pieces: list[str] = []

        def take(delta: TextDelta) -> None:
            pieces.append(delta.text)
            choice.token_ids += bytes_to_ids(delta.ids).tolist()
            if delta.logprobs is not None:
                choice.logprobs = choice.logprobs or []
                choice.logprobs += delta.logprobs
            if delta.prompt_logprobs is not None:
                output.prompt_logprobs = delta.prompt_logprobs
            if delta.finish is not None:
                output.cached_tokens = max(output.cached_tokens, delta.cached_tokens)
                choice.text = "".join(pieces)
                choice.finish_reason, choice.stop_reason = delta.finish, delta.stop_reason
                self._end(delta)

        return take

    def _end(self, delta: TextDelta) -> None:
        self._ended()
        self._left -= 1
        if self.future.done():
            return  # another sequence has failed
        if delta.error is not None:
            self.future.set_exception(RequestError(delta.error))
        elif not self._left:
            self.future.set_result(self._outputs)


def _piece(index: int, delta: TextDelta) -> StreamDelta:
    """Raises RequestError if the sequence failed."""
    if delta.error is not None:
        raise RequestError(delta.error)
    return StreamDelta(
        index,
        delta.text,
        bytes_to_ids(delta.ids).tolist(),
        delta.finish,
        delta.stop_reason,
        delta.logprobs,
    )


def _is_one(prompts: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is one prompt: a text, or a sequence of ids."""
    return isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))


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
