"""The server's side of the wire: open requests, and how they survive the processes behind it.

The server holds each open request whole: its prompt's ids, its parameters, the output ids whose
text the client has. When a process that held a part of it dies, the request is submitted again
from there under a higher attempt number; what the old attempt still sends is ignored, and text
that overlaps with what was delivered is cut by its absolute offset.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
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
from tidemill.wire.sockets import Receiver, Sender

log = logging.getLogger(__name__)

Call = TokenizeText | TokenizeChat | DetokenizeIds


@dataclass(slots=True, eq=False)
class Generation:
    """One sequence in the making. `news` is set while `deltas` holds something."""

    submit: Submit
    deltas: list[TextDelta] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    delivered: bytearray = field(default_factory=bytearray)  # ids, int32
    emitted: int = 0  # characters
    logprobs: int = 0  # positions reported
    ended: bool = False

    async def next(self) -> list[TextDelta]:
        """What has come since the last call; waits until there is something."""
        await self.news.wait()
        self.news.clear()
        deltas, self.deltas = self.deltas, []
        return deltas

    def take(self, delta: TextDelta) -> None:
        """A delta of the present attempt, less what an earlier attempt delivered."""
        start = delta.generated - len(delta.logprobs or ())
        logprobs = (delta.logprobs or [])[max(0, self.logprobs - start) :]
        text = delta.text[max(0, self.emitted - delta.offset) :]
        self.delivered += delta.ids
        self.emitted += len(text)
        self.logprobs = max(self.logprobs, delta.generated)
        if len(text) != len(delta.text) or len(logprobs) != len(delta.logprobs or ()):
            delta = msgspec.structs.replace(delta, text=text, logprobs=logprobs or None)
        self.ended = delta.finish is not None
        self.deltas.append(delta)
        self.news.set()


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
        """Send a call to a tokenizer (`message.call` is from `new_id`) and wait for its answer."""
        tokenizer = message.call % len(self._tokenizers)
        pending = _PendingCall(message, tokenizer, asyncio.get_running_loop().create_future())
        self._calls[message.call] = pending
        self._tokenizers[tokenizer].send(message)
        try:
            return await pending.answer
        finally:
            del self._calls[message.call]

    def submit(
        self,
        prompt_ids: bytes,
        params: SamplingParams,
        *,
        priority: int = 0,
        want_prompt_text: bool = False,
    ) -> Generation:
        """Start a sequence. Whoever holds the Generation ends it with `abort`."""
        rid = self.new_id()
        generation = Generation(
            Submit(
                rid=rid,
                worker=self.worker,
                detokenizer=rid % self.config.detokenizers,
                prompt_ids=prompt_ids,
                params=params,
                priority=priority,
                want_prompt_text=want_prompt_text,
            )
        )
        self._open[rid] = generation
        self._scheduler.send(generation.submit)
        return generation

    def abort(self, generation: Generation) -> None:
        """Nobody waits for it any more. Harmless after its end."""
        if self._open.pop(generation.submit.rid, None) is not None:
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
            generation.submit = msgspec.structs.replace(
                generation.submit,
                attempt=generation.submit.attempt + 1,
                output_ids=bytes(generation.delivered),
            )
            self._scheduler.send(generation.submit)
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
