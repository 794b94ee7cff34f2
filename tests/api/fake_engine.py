"""The processes behind a server worker, played in the test's own event loop, one move at a time.

The messages, the sockets and the detokenizers' work are the real ones. The scheduler is a script:
the n-th token of every answer is the n-th byte of SCRIPT, so what an answer must be is known, and
a resume that starts at the wrong place shows.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine
from typing import Any

import zmq
from tokenizers import Tokenizer, models

from tidemill.api.engine_client import EngineClient
from tidemill.config import EngineConfig
from tidemill.text.detokenizer import Detokenizer
from tidemill.text.tokenizer import TokenizerService
from tidemill.text.vocabulary import Vocabulary
from tidemill.wire.endpoints import Endpoints
from tidemill.wire.messages import (
    Abort,
    ComponentInfo,
    DetokenizeIds,
    ErrorInfo,
    FinishReason,
    RequestEnd,
    RequestStart,
    RunnerReady,
    Snapshot,
    Submit,
    TextBatch,
    TokenBatch,
    TokenizeChat,
    TokenizeText,
    TokenLogprobs,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.sockets import Publisher, Receiver, Sender

TEXT = "Ebb é 日本 🎉🎉 flood\n" * 2
SCRIPT = TEXT.encode()  # tokens are bytes, and many characters are several
EOS = 0
READY = RunnerReady(
    ring="",
    num_pages=64,
    page_size=16,
    max_model_len=512,
    max_running_requests=16,
    max_batch_tokens=64,
    vocab_size=256,
    device="none",
)
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class ByteVocabulary(Vocabulary):
    """256 tokens, each a byte."""

    def __init__(self) -> None:
        super().__init__(
            Tokenizer(models.BPE({}, [])),  # nobody asks it
            [bytes([each]) for each in range(256)],
            frozenset([EOS]),
            (EOS,),
            strips_first_space=False,
            template=TEMPLATE,
        )

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return list(text.encode())


class FakeEngine:
    def __init__(self, config: EngineConfig) -> None:
        self._vocabulary = ByteVocabulary()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        endpoints = Endpoints(config.run_dir)
        self._events = Publisher(self._context, endpoints.events)
        self._scheduler = Receiver.bind(self._context, endpoints.scheduler)
        self._tokenizers = [
            Receiver.bind(self._context, endpoints.tokenizer(i)) for i in range(config.tokenizers)
        ]
        self._server = Sender(self._context, endpoints.server(0))
        self._subscribed = False  # the server listens to Snapshots
        self._service = TokenizerService(self._vocabulary)
        self.generations = {"scheduler": 1, "runner-0": 1}
        for index in range(config.tokenizers):
            self.generations[f"tokenizer-{index}"] = 1
        for index in range(config.detokenizers):
            self.generations[f"detokenizer-{index}"] = 1
        self.detokenizers = [Detokenizer(self._vocabulary) for _ in range(config.detokenizers)]
        self.running: dict[int, tuple[Submit, int]] = {}  # what the scheduler knows, tokens made
        self._unannounced: list[int] = []
        self.submits: list[Submit] = []  # all that ever came
        self.aborts: list[int] = []
        self.calls: list[tuple[int, TokenizeText | TokenizeChat | DetokenizeIds]] = []
        self.refuse_with: ErrorInfo | None = None

    def close(self) -> None:
        self._context.destroy(linger=0)

    # --- the supervisor -----------------------------------------------------------------------

    async def publish(self, client: EngineClient, state: Any = "ready", **details: Any) -> None:
        """A Snapshot with this state; returns when the server has heard it."""
        components = {
            name: ComponentInfo(state="ready", pid=1, generation=generation, **details)
            for name, generation in self.generations.items()
        }
        runner = None if state == "starting" else READY
        snapshot = Snapshot(state=state, components=components, runner=runner)
        before = client.snapshot
        if not self._subscribed:
            await until(self._events.has_new_subscribers)
            self._subscribed = True
        self._events.send(snapshot)
        await until(lambda: client.snapshot is not before)

    async def kill(self, client: EngineClient, name: str) -> None:
        """A component loses all that it knows, and the server hears that it was restarted."""
        role, _, index = name.partition("-")
        if role == "scheduler":
            self.running.clear()
            self._unannounced.clear()
        elif role == "detokenizer":
            self.detokenizers[int(index)] = Detokenizer(self._vocabulary)
        elif role == "tokenizer":
            self.calls = [(at, call) for at, call in self.calls if at != int(index)]
        self.generations[name] += 1
        await self.publish(client)

    # --- the tokenizers -----------------------------------------------------------------------

    def take_calls(self) -> int:
        """Take in what servers ask; how many of it wait for an answer."""
        for index, inbox in enumerate(self._tokenizers):
            for call in inbox.drain():
                assert isinstance(call, TokenizeText | TokenizeChat | DetokenizeIds)
                self.calls.append((index, call))
        return len(self.calls)

    def answer_calls(self) -> None:
        self.take_calls()
        for _, call in self.calls:
            self._server.send(self._service.handle(call))
        self.calls.clear()

    # --- the scheduler ------------------------------------------------------------------------

    def take_requests(self) -> int:
        """Take in what servers submit and abort; how many sequences run."""
        for message in self._scheduler.drain():
            if isinstance(message, Abort):
                self.aborts.append(message.rid)
                self.running.pop(message.rid, None)
                continue
            assert isinstance(message, Submit)
            self.submits.append(message)
            self.running[message.rid] = (message, len(message.output_ids) // 4)
            self._unannounced.append(message.rid)
        return len(self.running)

    def step(self) -> list[TextBatch]:
        """One token of every sequence, through the detokenizers. The texts are not sent yet."""
        self.take_requests()
        made: list[TextBatch] = []
        for shard, detokenizer in enumerate(self.detokenizers):
            batch = self._batch([s for s, _ in self.running.values() if s.detokenizer == shard])
            texts, stopped = detokenizer.handle(batch)
            made += texts.values()
            for each in stopped:
                self.running.pop(each.rid, None)
        self._unannounced.clear()
        return made

    def _batch(self, submits: list[Submit]) -> TokenBatch:
        starts, ends, tokens = [], [], []
        entries: list[TokenLogprobs | None] = []
        prompt_logprobs = []
        for submit in submits:
            rid, params = submit.rid, submit.params
            if rid in self._unannounced:
                starts.append(_start(submit))
                if params.prompt_logprobs is not None:
                    prompt = bytes_to_ids(submit.prompt_ids).tolist()
                    known = [_logprobs(at, prompt[at]) for at in range(1, len(prompt))]
                    prompt_logprobs.append((rid, known))
            if self.refuse_with is not None:
                ends.append(RequestEnd(rid=rid, reason="error", error=self.refuse_with))
                del self.running[rid]
                continue
            at = self.running[rid][1]
            token = SCRIPT[at % len(SCRIPT)]
            tokens.append((rid, token))
            entries.append(_logprobs(at, token) if params.logprobs is not None else None)
            self.running[rid] = (submit, at + 1)
            reason: FinishReason | None = None
            if token in params.stop_token_ids:
                reason = "stop"
            elif at + 1 == params.max_tokens:
                reason = "length"
            if reason is not None:
                stop_token = token if reason == "stop" else None
                ends.append(RequestEnd(rid=rid, reason=reason, stop_token=stop_token))
                del self.running[rid]
        return TokenBatch(
            rids=b"".join(rid.to_bytes(8, "little") for rid, _ in tokens),
            tokens=ids_to_bytes([token for _, token in tokens]),
            starts=starts,
            ends=ends,
            logprobs=entries,
            prompt_logprobs=prompt_logprobs,
        )

    # --- towards the server -------------------------------------------------------------------

    def send(self, batches: list[TextBatch]) -> None:
        for batch in batches:
            self._server.send(batch)

    async def deliver(self, client: EngineClient, batches: list[TextBatch]) -> None:
        """Send, and return when the server has taken it in: what follows on the same socket has
        come by then."""
        self.send(batches)
        probe = TokenizeText(call=client.new_id(), worker=0, texts=[])
        asked = asyncio.ensure_future(client.ask(probe))
        await until(lambda: any(call.call == probe.call for _, call in self._peek()))
        mine = next(pair for pair in self.calls if pair[1].call == probe.call)
        self.calls.remove(mine)
        self._server.send(self._service.handle(probe))
        await asked

    def _peek(self) -> list[tuple[int, TokenizeText | TokenizeChat | DetokenizeIds]]:
        self.take_calls()
        return self.calls

    async def run(self, done: Callable[[], bool]) -> None:
        """Answer, step and send until `done`."""
        while not done():
            self.answer_calls()
            self.send(self.step())
            await asyncio.sleep(0.0005)


def _start(submit: Submit) -> RequestStart:
    return RequestStart(
        rid=submit.rid,
        worker=submit.worker,
        attempt=submit.attempt,
        prompt_ids=submit.prompt_ids,
        output_ids=submit.output_ids,
        cached_tokens=3 if not submit.attempt else 5,
        params=submit.params,
        want_prompt_text=submit.want_prompt_text,
    )


def _logprobs(position: int, token: int) -> TokenLogprobs:
    """Values that name their position."""
    return TokenLogprobs(token=token, logprob=-float(position), rank=0, ids=[token], values=[-1.0])


async def until(condition: Callable[[], Any], limit_s: float = 20) -> None:
    deadline = asyncio.get_running_loop().time() + limit_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise TimeoutError("a peer did not get what it waits for")
        await asyncio.sleep(0.0005)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


_COUNTER = itertools.count()


def make_config(run_dir: Any, **changes: Any) -> EngineConfig:
    folder = run_dir / str(next(_COUNTER))  # one of their own for every case of a test
    folder.mkdir()
    return EngineConfig(model="fake", run_dir=str(folder), **changes)
