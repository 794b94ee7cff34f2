"""The engine's thread: who waits is never left waiting, and nobody's trouble is another's."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from served import tiny_model
from tidemill import LLM, SamplingParams
from tidemill.wire.errors import EngineError, RequestError

SETTINGS = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def llm(model):
    with LLM(model, **SETTINGS) as made:
        yield made


def idle(llm):
    """Wait until what was aborted is gone, then what is left."""
    llm.generate([1], SamplingParams(max_tokens=1))
    stats = llm.scheduler.stats
    return stats.running, stats.waiting, stats.pages_used, len(llm._engine._detokenizer._requests)


def test_coroutines_share_one_batch(llm):
    """More of them than asyncio has threads."""

    async def go():
        return await asyncio.gather(*(llm.agenerate([1, n], GREEDY) for n in range(64)))

    outputs = asyncio.run(go())
    steps = llm.scheduler.stats.steps
    assert sum(steps.values()) < 64
    one_by_one = [llm.generate([1, n], GREEDY)[0].text for n in range(64)]
    assert [output.text for output in outputs] == one_by_one


def test_a_call_starts_in_one_step(llm):
    llm.generate([[1, n] for n in range(20)], GREEDY)
    stats = llm.scheduler.stats
    assert stats.steps["prefill"] == 1
    assert stats.steps["mixed"] == 0


def test_a_batch_may_be_longer_than_the_servers_queue(llm):
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    outputs = llm.generate([[n % 256] for n in range(2100)], params)
    assert all(len(output.choices[0].token_ids) == 1 for output in outputs)


def test_no_prompts_no_outputs(llm):
    assert llm.generate([]) == []


def test_a_cancelled_coroutine_frees_its_request(llm):
    async def go():
        task = asyncio.create_task(llm.agenerate([1], LONG))
        async for _ in llm.astream([2], LONG):
            break
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(go())
    assert idle(llm) == (0, 0, 0, 0)


def test_one_refused_prompt_ends_its_call_alone(llm):
    async def go():
        good = asyncio.create_task(llm.agenerate([1], LONG))
        with pytest.raises(RequestError, match="256"):
            llm.generate([[2], [3] * 300, [4]], LONG)
        return await good

    assert len(asyncio.run(go()).choices[0].token_ids) == 200
    assert idle(llm) == (0, 0, 0, 0)


def test_an_interrupt_hits_the_caller_and_not_the_engine(llm, monkeypatch):
    def interrupted(self, timeout=None):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("concurrent.futures.Future.result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1], LONG)
    assert idle(llm) == (0, 0, 0, 0)


def test_closing_ends_those_who_wait(model):
    llm = LLM(model, **SETTINGS)
    stream = llm.stream([1], LONG)
    next(stream)
    errors = []

    def wait():
        try:
            llm.generate([[n] for n in range(200)], LONG)
        except (RequestError, EngineError) as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    llm.close()
    llm.close()
    thread.join(timeout=60)
    assert errors == ["the engine is closed"]
    with pytest.raises(RequestError, match="closed"):
        list(stream)
    with pytest.raises(EngineError, match="closed"):
        llm.generate([1])


def test_a_failed_step_reaches_everyone(model, monkeypatch):
    llm = LLM(model, **SETTINGS)

    def broken():
        raise ZeroDivisionError("in a kernel")

    stream = llm.stream([1], LONG)
    next(stream)
    monkeypatch.setattr(llm.scheduler, "advance", broken)
    with pytest.raises(RequestError, match="in a kernel"):
        list(stream)
    with pytest.raises(EngineError, match="in a kernel"):
        llm.generate([1])
    llm.close()


def test_a_forgotten_engine_ends(model):
    llm = LLM(model, **SETTINGS)
    thread, gone = llm._engine._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_streams_carry_what_whole_answers_do(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, n=2, seed=1)
    (whole,) = llm.generate([7], params)
    pieces = list(llm.stream([7], params))
    for choice in whole.choices:
        own = [piece for piece in pieces if piece.index == choice.index]
        assert "".join(piece.text for piece in own) == choice.text
        assert [entry for piece in own for entry in piece.logprobs or ()] == choice.logprobs
        assert [piece.finish_reason for piece in own][-1] == "length"
    assert len(whole.choices[0].logprobs) == 6


def test_prompt_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([[5, 6, 7]], params)
    first, *others = output.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in others] == [6, 7]
