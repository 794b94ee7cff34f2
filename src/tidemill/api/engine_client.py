"""The server's side of the wire: open requests, and how they survive the processes behind it.

The server holds each open request whole: its prompt's ids, its parameters, the output ids whose
text the client has. When a process that held a part of it dies, the request is submitted again
from there under a higher attempt number; what the old attempt still sends is ignored, and text
that overlaps with what was delivered is cut by its absolute offset.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from tidemill.config import EngineConfig
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    Abort,
    ComponentInfo,
    DetokenizeIds,
    RunnerReady,
    Snapshot,
    Submit,
    TextBatch,
    TextDelta,
    TokenizeChat,
    Tokenized,
    TokenizeText,
)
from tidemill.wire.sampling import SamplingParams
from tidemill.wire.sockets import PeerStuck, Receiver, Sender

log = logging.getLogger(__name__)

Call = TokenizeText | TokenizeChat | DetokenizeIds


class Inbox:
    """What has come for the sequences of one HTTP request, as (choice, delta), oldest first."""

    def __init__(self) -> None:
        self._news: list[tuple[int, TextDelta]] = []
        self._arrived = asyncio.Event()

    def put(self, choice: int, delta: TextDelta) -> None:
        self._news.append((choice, delta))
        self._arrived.set()

    async def take(self) -> list[tuple[int, TextDelta]]:
        """Everything since the last call; waits until there is something."""
        await self._arrived.wait()
        self._arrived.clear()
        news, self._news = self._news, []
        return news


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence in the making: what was asked for, and how much of it the client has."""

    submit: Submit  # of the present attempt
    choice: int
    inbox: Inbox
    delivered: bytearray = field(default_factory=bytearray)  # output ids whose text is out, int32
    emitted: int = 0  # characters
    generated: int = 0  # tokens
    ended: bool = False

    def take(self, delta: TextDelta) -> None:
        """A delta of the present attempt; what an earlier attempt delivered of it is left out."""
        if delta.offset < self.emitted or delta.generated <= self.generated:
            delta = self._news_of(delta)
        self.delivered += delta.ids
        self.emitted += len(delta.text)
        self.generated = max(self.generated, delta.generated)
        self.ended = delta.finish is not None
        self.inbox.put(self.choice, delta)

    def _news_of(self, delta: TextDelta) -> TextDelta:
        logprobs = delta.logprobs or []
        first = delta.generated - len(logprobs)  # the token that logprobs[0] is about
        return msgspec.structs.replace(
            delta,
            text=delta.text[max(0, self.emitted - delta.offset) :],
            offset=max(self.emitted, delta.offset),
            logprobs=logprobs[max(0, self.generated - first) :] or None,
            generated=max(self.generated, delta.generated),
        )

    def resume(self) -> Submit:
        """The next attempt. The prompt's own part of the answer comes with the first delta, so
        after that it is not asked for again."""
        submit = self.submit
        begun = self.generated > 0
        self.submit = msgspec.structs.replace(
            submit,
            attempt=submit.attempt + 1,
            output_ids=bytes(self.delivered),
            want_prompt_text=submit.want_prompt_text and not begun,
            params=msgspec.structs.replace(submit.params, prompt_logprobs=None)
            if begun
            else submit.params,
        )
        return self.submit


@dataclass(slots=True)
class _PendingCall:
    message: Call
    tokenizer: int
    answer: asyncio.Future[Tokenized]


class EngineClient:
    """Everything a server worker asks of the processes behind it. Lives in one event loop."""

    def __init__(self, config: EngineConfig, worker: int) -> None:
        self.config = config
        self.worker = worker
        self.started = int(time.time())
        self.snapshot = Snapshot(state="starting", components={})
        self.ready: RunnerReady | None = None  # the last runner that was ready
        context = zmq.Context()
        endpoints = Endpoints(config.run_dir)
        self._context = context
        self._inbox = Receiver.bind(context, endpoints.server(worker))
        self._events = Receiver.subscribe(context, endpoints.events)
        self._scheduler = Sender(context, endpoints.scheduler)
        self._tokenizers = [
            Sender(context, endpoints.tokenizer(i)) for i in range(config.tokenizers)
        ]
        # Unique across restarts of this worker, whose predecessor's requests may still run.
        self._next_id = secrets.randbits(62)
        self._calls: dict[int, _PendingCall] = {}
        self._open: dict[int, Generation] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._receive(), name="inbox"),
            asyncio.create_task(self._follow(), name="events"),
        ]
        for task in self._tasks:
            task.add_done_callback(_report_failure)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for generation in list(self._open.values()):
            self.abort(generation)
        for sender in (self._scheduler, *self._tokenizers):
            sender.close()
        self._context.destroy()

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # --- requests -----------------------------------------------------------------------------

    def new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    async def ask(self, message: Call) -> Tokenized:
        """Send a call to a tokenizer (`message.call` is from `new_id`) and wait for its answer.
        Raises PeerStuck."""
        tokenizer = message.call % len(self._tokenizers)
        pending = _PendingCall(message, tokenizer, asyncio.get_running_loop().create_future())
        self._tokenizers[tokenizer].send(message)
        self._calls[message.call] = pending
        try:
            return await pending.answer
        finally:
            del self._calls[message.call]

    def submit(
        self,
        prompt_ids: bytes,
        params: SamplingParams,
        inbox: Inbox,
        choice: int = 0,
        *,
        priority: int = 0,
        want_prompt_text: bool = False,
    ) -> Generation:
        """Start a sequence, whose deltas go to `inbox` as those of `choice`. Whoever holds the
        Generation ends it with `abort`. Raises PeerStuck."""
        rid = self.new_id()
        submit = Submit(
            rid=rid,
            worker=self.worker,
            detokenizer=rid % self.config.detokenizers,
            prompt_ids=prompt_ids,
            params=params,
            priority=priority,
            want_prompt_text=want_prompt_text,
        )
        self._scheduler.send(submit)
        generation = self._open[rid] = Generation(submit, choice, inbox)
        return generation

    def abort(self, generation: Generation) -> None:
        """Nobody waits for it any more. Harmless after its end."""
        if self._open.pop(generation.submit.rid, None) is not None:
            with contextlib.suppress(PeerStuck):  # it will not hear of anything else either
                self._scheduler.send(Abort(rid=generation.submit.rid))

    # --- what comes back ----------------------------------------------------------------------

    async def _receive(self) -> None:
        while True:
            for message in await self._inbox.receive_async():
                if isinstance(message, TextBatch):
                    for delta in message.deltas:
                        self._take(delta)
                elif isinstance(message, Tokenized):
                    pending = self._calls.get(message.call)
                    if pending is not None and not pending.answer.done():
                        pending.answer.set_result(message)
                else:
                    raise TypeError(f"not for a server: {type(message).__name__}")

    def _take(self, delta: TextDelta) -> None:
        generation = self._open.get(delta.rid)
        if generation is None or delta.attempt != generation.submit.attempt:
            return
        generation.take(delta)
        if generation.ended:
            del self._open[delta.rid]

    async def _follow(self) -> None:
        while True:
            for event in await self._events.receive_async():
                if isinstance(event, Snapshot):
                    before, self.snapshot = self.snapshot, event
                    self.ready = event.runner or self.ready
                    self._restore(_restarted(before.components, event.components))

    def _restore(self, restarted: Sequence[str]) -> None:
        """Ask and submit again what died with these components."""
        for name in restarted:
            role, _, index = name.partition("-")
            if role == "tokenizer":
                for call in self._calls.values():
                    if call.tokenizer == int(index) and not call.answer.done():
                        self._tokenizers[call.tokenizer].send(call.message)
            elif role == "scheduler":
                self._resubmit(list(self._open.values()))
            elif role == "detokenizer":
                lost = [g for g in self._open.values() if g.submit.detokenizer == int(index)]
                self._resubmit(lost)

    def _resubmit(self, generations: Sequence[Generation]) -> None:
        for generation in generations:
            self._scheduler.send(generation.resume())
        if generations:
            log.warning("resumed %d open requests", len(generations))


def _restarted(before: dict[str, ComponentInfo], after: dict[str, ComponentInfo]) -> list[str]:
    """Components that have lost their state between two snapshots."""
    return [
        name
        for name, info in after.items()
        if name in before and before[name].generation not in (0, info.generation)
    ]


def _report_failure(task: asyncio.Task[None]) -> None:
    """A worker that no longer hears the engine must not go on answering: it restarts."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("the %s task failed", task.get_name(), exc_info=error)
        raise SystemExit(1)
