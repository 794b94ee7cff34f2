"""Open requests outlive the processes behind the server, whenever these die."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest
from fake_engine import SCRIPT, TEXT, FakeEngine, make_config, run, until

from tidemill.api.engine_client import EngineClient, Generation, Inbox
from tidemill.wire.messages import TextBatch, TextDelta, TokenizeText, bytes_to_ids, ids_to_bytes
from tidemill.wire.sampling import SamplingParams

TOKENS = 36
WHOLE = SCRIPT[:TOKENS].decode(errors="replace")
PROMPT = ids_to_bytes(list(b"prompt"))
PARAMS = SamplingParams(max_tokens=TOKENS, logprobs=0, prompt_logprobs=0)


@contextlib.asynccontextmanager
async def connected(tmp_path, **changes):
    config = make_config(tmp_path, **changes)
    engine = FakeEngine(config)
    client = EngineClient(config, 0)
    try:
        await client.start()
        await engine.publish(client)
        yield engine, client
    finally:
        await client.stop()
        engine.close()


async def everything(inbox: Inbox, count: int) -> list[list[TextDelta]]:
    """All deltas of `count` choices, in order."""
    made: list[list[TextDelta]] = [[] for _ in range(count)]
    left = count
    while left:
        for choice, delta in await inbox.take():
            made[choice].append(delta)
            left -= delta.finish is not None
    return made


def check(deltas: list[TextDelta]) -> None:
    """An answer without a gap, a repetition or a second end."""
    assert "".join(delta.text for delta in deltas) == WHOLE
    at = 0
    for delta in deltas:
        assert delta.offset == at or not delta.text
        at += len(delta.text)
    logprobs = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.logprob for entry in logprobs] == [-float(at) for at in range(TOKENS)]
    assert [delta.finish for delta in deltas if delta.finish is not None] == ["length"]
    assert deltas[-1].generated == TOKENS
    generated = [delta.generated for delta in deltas]
    assert generated == sorted(generated)
    assert [delta.prompt_text for delta in deltas if delta.prompt_text is not None] == ["prompt"]
    prompt = [each for delta in deltas for each in delta.prompt_logprobs or ()]
    assert [each and each.logprob for each in prompt] == [None, -1, -2, -3, -4, -5]


async def one_life(
    tmp_path, kills: dict[int, tuple[str, ...]], lost: int = 0, late: bool = False, params=PARAMS
) -> None:
    """Two requests of two shards, through deaths after these steps. The last `lost` steps before
    a death had not reached the server; `late`: they do after all, when it has resubmitted."""
    async with connected(tmp_path, detokenizers=2) as (engine, client):
        inbox = Inbox()
        generations = [
            client.submit(PROMPT, params, inbox, choice, want_prompt_text=True)
            for choice in range(2)
        ]
        assert {each.submit.detokenizer for each in generations} == {0, 1}
        answers = asyncio.ensure_future(everything(inbox, 2))
        await until(lambda: engine.take_requests() == 2)
        step = 0
        while not answers.done():
            upcoming = min((at for at in kills if at >= step), default=None)
            texts = engine.step()
            if upcoming is None or step < upcoming - lost:
                engine.send(texts)
            elif late:
                held = texts
            if step == upcoming:
                await engine.deliver(client, [])  # what was sent has come
                for name in kills[step]:
                    await engine.kill(client, name)
                expected = client.open_requests
                if "scheduler" in kills[step]:
                    await until(lambda n=expected: engine.take_requests() >= n)
                if late and lost:
                    await engine.deliver(client, held)
                # The server resubmits before it answers what is asked later.
                await engine.deliver(client, [])
            if not engine.running:
                await engine.deliver(client, [])
            step += 1
            assert step < 10 * TOKENS
        for deltas in await answers:
            check(deltas)
        assert client.open_requests == 0


def test_undisturbed(tmp_path):
    run(one_life(tmp_path, {}))


@pytest.mark.parametrize("lost", [0, 1, 4])
@pytest.mark.parametrize("names", [("scheduler",), ("detokenizer-0", "detokenizer-1")], ids=str)
def test_a_death_at_every_step(tmp_path, names, lost):
    async def go():
        for at in range(TOKENS):
            await one_life(tmp_path, {at: names}, lost)

    run(go())


@pytest.mark.parametrize("names", [("scheduler",), ("detokenizer-0", "detokenizer-1")], ids=str)
def test_what_the_dead_sent_comes_late(tmp_path, names):
    async def go():
        for at in range(0, TOKENS, 5):
            await one_life(tmp_path, {at: names}, lost=1, late=True)

    run(go())


@pytest.mark.parametrize("names", [("scheduler",), ("detokenizer-0", "detokenizer-1")], ids=str)
def test_deaths_while_text_is_held_back(tmp_path, names):
    """The first delta has text and no ids: "E" is out, "bb" might still become "bbq". So the
    next attempt starts at the beginning, though the client has the beginning."""
    params = msgspec.structs.replace(PARAMS, stop=("Ebz", "bbq"))

    async def go():
        for at in range(8):
            await one_life(tmp_path, {at: names}, params=params)

    run(go())


def test_a_resume_starts_at_what_was_delivered(tmp_path):
    async def go():
        async with connected(tmp_path) as (engine, client):
            client.submit(PROMPT, PARAMS, Inbox())
            await until(lambda: engine.take_requests() == 1)
            for _ in range(len("Ebb é ".encode()) + 2):  # and two bytes of three
                await engine.deliver(client, engine.step())
            await engine.kill(client, "scheduler")
            await until(lambda: engine.take_requests() == 1)
            first, second = engine.submits
            assert bytes_to_ids(second.output_ids).tolist() == list("Ebb é ".encode())
            assert (second.rid, second.attempt) == (first.rid, 1)
            assert second.prompt_ids == first.prompt_ids

    run(go())


def test_many_deaths(tmp_path):
    detokenizers = ("detokenizer-0", "detokenizer-1")
    turns = [("scheduler",), detokenizers, ("scheduler", *detokenizers)]
    kills = {at: turns[at % 3] for at in range(0, 60, 4)} | {9: turns[2], 10: turns[2]}
    run(one_life(tmp_path, kills, lost=1))


def test_a_detokenizer_s_death_leaves_the_other_shard_alone(tmp_path):
    async def go():
        async with connected(tmp_path, detokenizers=2) as (engine, client):
            inbox = Inbox()
            both = [client.submit(PROMPT, PARAMS, inbox, choice) for choice in range(2)]
            await until(lambda: engine.take_requests() == 2)
            await engine.kill(client, "detokenizer-1")
            await engine.deliver(client, [])
            await until(lambda: engine.take_requests() and len(engine.submits) == 3)
            assert {each.submit.detokenizer: each.submit.attempt for each in both} == {0: 0, 1: 1}

    run(go())


def test_a_runner_s_death_is_the_scheduler_s_affair(tmp_path):
    async def go():
        async with connected(tmp_path) as (engine, client):
            client.submit(PROMPT, PARAMS, Inbox())
            await until(lambda: engine.take_requests() == 1)
            await engine.kill(client, "runner-0")
            await engine.deliver(client, [])
            engine.take_requests()
            assert len(engine.submits) == 1

    run(go())


def test_a_tokenizer_s_death_repeats_its_calls_alone(tmp_path):
    async def go():
        async with connected(tmp_path, tokenizers=2) as (engine, client):
            calls = [TokenizeText(call=client.new_id(), worker=0, texts=["ab"]) for _ in range(4)]
            asked = [asyncio.ensure_future(client.ask(call)) for call in calls]
            await until(lambda: engine.take_calls() == 4)
            others = {call.call for at, call in engine.calls if at == 1}
            await engine.kill(client, "tokenizer-0")  # it forgets its two
            await until(lambda: engine.take_calls() == 4)
            assert {call.call for at, call in engine.calls if at == 1} == others
            engine.answer_calls()
            answers = await asyncio.gather(*asked)
            assert [answer.call for answer in answers] == [call.call for call in calls]
            assert all(answer.prompts == [ids_to_bytes(list(b"ab"))] for answer in answers)

    run(go())


def test_a_call_that_nobody_waits_for(tmp_path):
    async def go():
        async with connected(tmp_path) as (engine, client):
            call = TokenizeText(call=client.new_id(), worker=0, texts=["ab"])
            asked = asyncio.ensure_future(client.ask(call))
            await until(engine.take_calls)
            asked.cancel()
            engine.answer_calls()
            await engine.deliver(client, [])  # it still listens

    run(go())


def test_abort_tells_the_scheduler_once_and_late_news_are_ignored(tmp_path):
    async def go():
        async with connected(tmp_path) as (engine, client):
            generation = client.submit(PROMPT, PARAMS, Inbox())
            await until(lambda: engine.take_requests() == 1)
            texts = engine.step()
            client.abort(generation)
            client.abort(generation)
            await engine.deliver(client, texts)
            await until(lambda: engine.take_requests() == 0)
            assert engine.aborts == [generation.submit.rid]
            assert client.open_requests == 0
            assert generation.generated == 0

    run(go())


def test_request_ids_of_two_lives_differ(tmp_path):
    async def go():
        async with connected(tmp_path) as (_, client):
            first = {client.new_id() for _ in range(100)}
        async with connected(tmp_path) as (_, client):
            assert not first & {client.new_id() for _ in range(100)}

    run(go())


def test_unknown_requests_are_ignored(tmp_path):
    async def go():
        async with connected(tmp_path) as (engine, client):
            stray = TextDelta(rid=5, attempt=0, offset=0, text="stray", generated=1)
            await engine.deliver(client, [TextBatch(deltas=[stray])])
            assert client.open_requests == 0

    run(go())


def test_the_script_has_characters_of_every_length():
    """Otherwise the tests above would not cut inside one."""
    assert {len(character.encode()) for character in TEXT} == {1, 2, 3, 4}


def test_overlap_is_cut_to_the_character():
    inbox = Inbox()
    generation = Generation(submit=None, choice=0, inbox=inbox)
    for offset, text, generated in ((0, "ab", 2), (1, "bcd", 4), (0, "abcd", 4), (4, "e", 5)):
        generation.take(TextDelta(rid=1, attempt=0, offset=offset, text=text, generated=generated))
    news = asyncio.run(inbox.take())
    assert [(delta.offset, delta.text) for _, delta in news] == [
        (0, "ab"),
        (2, "cd"),
        (4, ""),
        (4, "e"),
    ]
