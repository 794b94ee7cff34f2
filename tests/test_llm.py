"""The same tokens, however the engine gets to them: alone, in a batch, in chunks, from the prefix
cache, after preemption, planned ahead, in this process or served."""

from __future__ import annotations

import asyncio
import random
import threading

import pytest

from served import serve, tiny_model
from tidemill import LLM, SamplingParams
from tidemill.llm import RequestError
from tidemill.wire.errors import EngineError
from tidemill.wire.sampling import InvalidParam

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24, ignore_eos=True)


def prompts(count, seed=0):
    """Prompts of many lengths, some with a common beginning, some ending within a page."""
    rng = random.Random(seed)
    common = [rng.randrange(256) for _ in range(40)]
    made = []
    for index in range(count):
        own = [rng.randrange(256) for _ in range(rng.randint(1, 90))]
        made.append((common[: rng.randint(1, 40)] if index % 2 else []) + own)
    return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(tiny_model(tmp_path_factory.mktemp("model")))


def engine(model, **settings):
    defaults = {"load_format": "dummy", "dtype": "float32", "threads": 1, "max_model_len": 256}
    return LLM(model, **(defaults | settings))


def ids(outputs):
    return [[choice.token_ids for choice in output.choices] for output in outputs]


@pytest.fixture(scope="module")
def alone(model):
    """The oracle: one request at a time, in step, nothing cached."""
    with engine(model, prefix_cache=False, max_running_requests=1) as llm:
        return {
            params.seed: [ids(llm.generate(prompt, params))[0] for prompt in prompts(32)]
            for params in (GREEDY, SEEDED)
        }


SETTINGS = {
    "batch": {},
    "chunks of 7": {"max_batch_tokens": 7},
    "chunks of 40, few slots": {"max_batch_tokens": 40, "max_running_requests": 5},
    "no prefix cache": {"prefix_cache": False},
    "run-ahead 1": {"run_ahead": 1},
    "run-ahead 4": {"run_ahead": 4},
    "pages of 1": {"page_size": 1},
    "pages of 33": {"page_size": 33},
    "preemption": {"kv_memory": 40 * 16 * 512, "max_model_len": 160},
    "preemption, run-ahead 3": {"kv_memory": 40 * 16 * 512, "max_model_len": 160, "run_ahead": 3},
}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens(model, alone, name, params):
    with engine(model, **SETTINGS[name]) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert ids(llm.generate(prompts(32), params)) == alone[params.seed]
        stats = llm.scheduler.stats
        if name.startswith("preemption"):
            assert stats.preemptions > 0
        if name == "batch":
            assert stats.cached_tokens > 0
        assert stats.running == stats.waiting == stats.pages_used == 0


def test_served_gives_the_same_tokens(model, alone):
    flags = ["--load-format", "dummy", "--dtype", "float32", "--max-model-len", "256"]
    with serve(model, *flags) as served:
        for params in (GREEDY, SEEDED):
            body = {
                "model": "tiny",
                "prompt": prompts(32),
                "max_tokens": 24,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "seed": params.seed,
                "ignore_eos": True,
                "logprobs": 0,
            }
            status, made = served.post("/v1/completions", body)
            assert status == 200, made
            vocab = engine_vocabulary(model)
            for choice, expected in zip(made["choices"], alone[params.seed], strict=True):
                assert choice["text"] == vocab.decode(expected[0], True)


def engine_vocabulary(model):
    from tidemill.config import EngineConfig
    from tidemill.text import vocabulary

    return vocabulary.load(EngineConfig(model=model, load_format="dummy"))


@pytest.fixture(scope="module")
def llm(model):
    with engine(model) as made:
        yield made


def test_n_choices(llm):
    params = SamplingParams(temperature=1.5, seed=3, n=4, max_tokens=10, ignore_eos=True)
    (output,) = llm.generate([1, 2, 3], params)
    texts = [tuple(choice.token_ids) for choice in output.choices]
    assert len(set(texts)) == 4
    assert llm.generate([1, 2, 3], params)[0].choices[2].token_ids == list(texts[2])


def test_params_per_prompt_and_lengths(llm):
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 9)]
    outputs = llm.generate([[1], [2], [3]], each)
    assert [len(output.choices[0].token_ids) for output in outputs] == [1, 5, 9]
    with pytest.raises(ValueError, match="3 prompts, but 1"):
        llm.generate([[1], [2], [3]], each[:1])


def test_stream_is_the_whole_answer_in_pieces(llm):
    whole = llm.generate("tide", GREEDY)[0]
    pieces = list(llm.stream("tide", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [i for piece in pieces for i in piece.token_ids] == whole.choices[0].token_ids
    assert pieces[-1].finish_reason == "length"


def test_a_stream_that_is_left_frees_its_request(llm):
    stream = llm.stream("tide", GREEDY)
    next(stream)
    stream.close()
    llm.generate("x", SamplingParams(max_tokens=1))  # a turn of the engine
    stats = llm.scheduler.stats
    assert stats.running == stats.waiting == stats.pages_used == 0


def test_threads_and_coroutines_share_the_engine(llm):
    expected = llm.generate("tide", GREEDY)[0].text
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(llm.generate("tide", GREEDY)[0].text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    async def go():
        async def stream():
            return "".join([piece.text async for piece in llm.astream("tide", GREEDY)])

        outputs = await asyncio.gather(*(llm.agenerate("tide", GREEDY) for _ in range(3)))
        return [output.text for output in outputs] + [await stream()]

    assert found + asyncio.run(go()) == [expected] * 8


def test_bad_input_is_refused_and_leaves_nothing(llm):
    with pytest.raises(InvalidParam, match="temperature"):
        llm.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(InvalidParam, match="stop_token_ids"):
        llm.generate("x", SamplingParams(stop_token_ids=(256,)))
    with pytest.raises(ValueError, match="255"):
        llm.generate([256])
    with pytest.raises(RequestError, match="256"):
        llm.generate([1] * 300)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"role": "user", "content": "x"}])
    assert len(llm.generate("x", SamplingParams(max_tokens=2, ignore_eos=True))) == 1


def test_chat_through_a_template(model):
    with engine(model, chat_template=f"{model}/template.jinja") as llm:
        messages = [{"role": "user", "content": "hi"}]
        output = llm.chat(messages, GREEDY)[0]
        assert bytes(output.prompt_token_ids) == b"user: hi\nassistant: "
        assert llm.chat([messages, messages], GREEDY)[1].text == output.text


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_model_len": 10**7}, "max-model-len"),
        ({"kv_memory": 1000}, "kv-memory"),
        ({"chat_template": "/nothing/here"}, "chat template"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_settings_that_cannot_work_say_why(model, settings, says):
    with pytest.raises(EngineError, match=f"(?i){says}"):
        engine(model, **settings)


QUESTIONS = ["What is the capital of France?", "Name three colours.", "Write a line about the sea."]


def test_real_model_answers(smollm2):
    with LLM(smollm2, max_model_len=512) as llm:
        outputs = llm.chat(
            [[{"role": "user", "content": q}] for q in QUESTIONS],
            SamplingParams(temperature=0, max_tokens=32),
        )
    assert outputs[0].text == "The capital of France is Paris."
    assert outputs[0].choices[0].finish_reason == "stop"
