"""The runner driven by hand-written plans, against one full forward pass of the same model."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runner_harness import (
    CONTEXT,
    GREEDY,
    PAGE,
    PlanWriter,
    full_logits,
    greedy_oracle,
    make_runner,
)

from tidemill.models.decoder import Decoder
from tidemill.runner.memory import CapacityError
from tidemill.runner.model_runner import ModelRunner
from tidemill.wire.plan import RowFlags, StepPlan
from tidemill.wire.sampling import SamplingParams

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, 300, size).tolist() for size in RNG.integers(1, 40, 32)]
DRAWN = SamplingParams(temperature=1.0, top_p=0.9)


def alone(runner: ModelRunner, prompt: list[int], params: SamplingParams, count: int) -> list[int]:
    runner.reset()
    writer = PlanWriter(runner)
    writer.start(0, prompt, params, seed=5)
    return writer.run(count)[0]


def test_greedy_is_the_full_forward_pass(runner: ModelRunner, decoder: Decoder) -> None:
    for prompt in PROMPTS[:6]:
        assert alone(runner, prompt, GREEDY, 10) == greedy_oracle(decoder, prompt, 10)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("chunk", [1, 3, PAGE, 7, 31])
def test_any_chunking_gives_the_same_tokens(
    runner: ModelRunner, params: SamplingParams, chunk: int
) -> None:
    prompt = list(range(100, 133))
    expected = alone(runner, prompt, params, 8)
    runner.reset()
    writer = PlanWriter(runner, seed=chunk)
    writer.start(3, prompt, params, seed=5)
    assert writer.run(8, chunk)[3] == expected


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_batch_of_32_is_each_alone(runner: ModelRunner, params: SamplingParams) -> None:
    writer = PlanWriter(runner)
    for slot, prompt in enumerate(PROMPTS):
        writer.start(slot, prompt, params, seed=5)
    together = writer.run(12, chunk=9)
    for slot, prompt in enumerate(PROMPTS):
        assert together[slot] == alone(runner, prompt, params, 12), f"slot {slot}"


def test_copied_pages_stand_for_computed_ones(runner: ModelRunner, decoder: Decoder) -> None:
    """A second request shares 2 whole pages and copies a part of the third."""
    prompt = list(range(40, 54))
    shared = 2 * PAGE + 3
    other = [*prompt[:shared], 7, 8, 9]
    writer = PlanWriter(runner)
    writer.start(0, prompt)
    writer.run(1)
    writer.start(1, other, cached=shared)
    source, target = writer.pages[0][2], writer.free.pop()
    writer.pages[1] = [*writer.pages[0][:2], target]
    writer._pages = [(1, i, page) for i, page in enumerate(writer.pages[1])]
    writer.copies = [(source, target, 3)]
    assert writer.run(6)[1] == greedy_oracle(decoder, other, 6)


def test_a_slot_and_its_pages_are_used_again(runner: ModelRunner, decoder: Decoder) -> None:
    writer = PlanWriter(runner)
    params = SamplingParams(
        temperature=1.5, logit_bias={5: 100.0}, presence_penalty=2.0, stop_token_ids=(1, 2, 3)
    )
    writer.start(0, PROMPTS[0], params, max_len=len(PROMPTS[0]) + 3)
    writer.run(3)
    assert writer.sequences[0].ended == 2
    writer.release(0)
    writer.start(0, PROMPTS[1])
    assert writer.run(8)[0] == greedy_oracle(decoder, PROMPTS[1], 8)
    assert writer.sequences[0].ended == 0


def test_a_row_that_ended_changes_nobody(runner: ModelRunner, decoder: Decoder) -> None:
    """Run-ahead: slot 0 ended by its length, and stays in the plans that were sent before."""
    writer = PlanWriter(runner)
    writer.start(0, PROMPTS[0], max_len=len(PROMPTS[0]) + 2)
    writer.start(1, PROMPTS[1])
    outputs = writer.run(10)
    assert writer.sequences[0].ended == 2
    assert outputs[1] == greedy_oracle(decoder, PROMPTS[1], 10)
    writer.release(0)
    writer.start(0, PROMPTS[2])
    outputs = writer.run(14)
    assert outputs[0] == greedy_oracle(decoder, PROMPTS[2], 14)
    assert outputs[1] == greedy_oracle(decoder, PROMPTS[1], 14)


def test_decode_reads_the_slot_not_the_plan(runner: ModelRunner, decoder: Decoder) -> None:
    """Two steps planned before the first one's token is known."""
    prompt = PROMPTS[3]
    writer = PlanWriter(runner)
    writer.start(0, prompt)
    first = writer.step({0: len(prompt)})
    row = np.array([[0, len(prompt), 1, int(RowFlags.SAMPLE)]], dtype=np.int32)
    page = np.array([[0, len(writer.pages[0]), writer.free.pop()]], dtype=np.int32)
    second = runner.execute(StepPlan(2, rows=row, pages=page))
    row[0, 1] += 1
    third = runner.execute(StepPlan(3, rows=row))
    got = [int(result.tokens[0]) for result in (first, second, third)]
    assert got == greedy_oracle(decoder, prompt, 3)


def test_finish_by_stop_id_and_by_length(runner: ModelRunner, decoder: Decoder) -> None:
    prompt = PROMPTS[4]
    answer = greedy_oracle(decoder, prompt, 6)
    stop = answer[3]
    at = answer.index(stop)
    writer = PlanWriter(runner)
    writer.start(0, prompt, SamplingParams(temperature=0, stop_token_ids=(299, stop)))
    writer.start(1, prompt, max_len=len(prompt) + 4)
    ended: dict[int, list[int]] = {0: [], 1: []}
    for _ in range(6):
        work = {s: len(q.ids) - q.planned for s, q in writer.sequences.items()}
        for slot, finished in enumerate(writer.step(work).finished.tolist()):
            ended[slot].append(finished)
    assert ended[0].index(1) == at
    assert ended[1][:4] == [0, 0, 0, 2]


def test_min_tokens_bans_stop_ids_until_then(runner: ModelRunner, decoder: Decoder) -> None:
    prompt = PROMPTS[4]
    stops = tuple(dict.fromkeys(greedy_oracle(decoder, prompt, 4)))
    writer = PlanWriter(runner)
    params = SamplingParams(temperature=0, stop_token_ids=stops, min_tokens=5)
    writer.start(0, prompt, params)
    output = writer.run(5)[0]
    assert not set(output) & set(stops)
    ids = list(prompt)
    for token in output:
        logits = full_logits(decoder, ids)[-1]
        logits[list(stops)] = -torch.inf
        assert token == int(logits.argmax())
        ids.append(token)
    logits = full_logits(decoder, ids)[-1]
    writer.run(6)
    assert output[5] == int(logits.argmax())  # no ban at output position min_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_penalties_survive_a_resume(runner: ModelRunner, temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature,
        presence_penalty=0.7,
        frequency_penalty=1.1,
        repetition_penalty=1.3,
    )
    prompt = PROMPTS[5]
    whole = alone(runner, prompt, params, 20)
    plain = alone(runner, prompt, SamplingParams(temperature=temperature), 20)
    assert whole != plain
    runner.reset()
    writer = PlanWriter(runner, seed=3)
    writer.start(9, prompt, params, output=whole[:8], seed=5)
    assert whole[:8] + writer.run(12, chunk=5)[9] == whole


def test_logprobs_are_those_of_the_model(runner: ModelRunner, decoder: Decoder) -> None:
    """Bias and temperature change the token, not what is reported of it."""
    prompt = PROMPTS[6]
    params = SamplingParams(temperature=0.7, logit_bias={17: 100.0}, logprobs=5)
    writer = PlanWriter(runner)
    writer.start(0, PROMPTS[7])
    writer.start(1, prompt, params)
    result = writer.step({0: len(PROMPTS[7]), 1: len(prompt)})
    expected = full_logits(decoder, prompt)[-1].log_softmax(-1)
    report = result.logprobs
    assert report is not None
    assert result.tokens[1] == 17
    assert report.chosen[1] == pytest.approx(float(expected[17]), abs=1e-4)
    assert report.rank[1] == int((expected > expected[17]).sum())
    best = expected.topk(5)
    assert report.top_ids[1].tolist() == best.indices.tolist()
    np.testing.assert_allclose(report.top_values[1], best.values.numpy(), atol=1e-4)


@pytest.mark.parametrize("chunk", [4, 64])
def test_prompt_logprobs(runner: ModelRunner, decoder: Decoder, chunk: int) -> None:
    """Of every prompt token but the first, whatever the chunks and the neighbours."""
    prompt = RNG.integers(0, 300, 45).tolist()
    params = SamplingParams(temperature=0, prompt_logprobs=3)
    writer = PlanWriter(runner)
    writer.start(0, PROMPTS[0])
    writer.run(1)
    writer.start(1, prompt, params)
    chosen, ids, ranks = [], [], []
    while not writer.sequences[1].output:
        work = {0: 1, 1: min(chunk, len(prompt) - writer.sequences[1].planned, 63)}
        result = writer.step(work)
        [(row, report)] = result.prompt_logprobs
        assert row == 1
        chosen += report.chosen.tolist()
        ids += report.top_ids.tolist()
        ranks += report.rank.tolist()
    expected = full_logits(decoder, prompt)[:-1].log_softmax(-1)
    following = torch.tensor(prompt[1:])
    wanted = expected.gather(1, following[:, None])
    np.testing.assert_allclose(chosen, wanted[:, 0].numpy(), atol=1e-4)
    assert ids == expected.topk(3).indices.tolist()
    assert ranks == (expected > wanted).sum(-1).tolist()
    assert writer.run(6)[1] == greedy_oracle(decoder, prompt, 6)


def test_prompt_logprobs_stop_at_the_prompt(runner: ModelRunner) -> None:
    """A resumed request reports nothing of its output."""
    writer = PlanWriter(runner)
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    writer.start(0, [1, 2, 3, 4], params, output=[5, 6, 7])
    assert len(writer.step({0: 5}).prompt_logprobs[0][1].chosen) == 3
    assert len(writer.step({0: 2}).prompt_logprobs[0][1].chosen) == 0


def test_reset_forgets_requests_and_keeps_the_model(runner: ModelRunner, decoder: Decoder) -> None:
    writer = PlanWriter(runner)
    writer.start(0, PROMPTS[0], SamplingParams(temperature=1, frequency_penalty=2.0))
    writer.run(3)
    runner.reset()
    writer = PlanWriter(runner)
    writer.start(0, PROMPTS[1])
    assert writer.run(5)[0] == greedy_oracle(decoder, PROMPTS[1], 5)


def test_ready_states_what_fits(runner: ModelRunner) -> None:
    ready = runner.ready
    assert ready.max_model_len == CONTEXT
    assert ready.num_pages * PAGE * 2 * 2 * 2 * 8 * 4 <= 8 << 20 < (ready.num_pages + 1) * 1024
    assert ready.memory["total"] == sum(
        ready.memory[part] for part in ("weights", "kv", "activations")
    )
    assert ready.memory["kv"] == ready.num_pages * 1024


def test_prompt_logprobs_never_need_more_logits_than_a_decode_step(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make_runner(decoder, max_running_requests=5)
    sizes: list[int] = []
    logits = decoder.ops.logits

    def spy(x: torch.Tensor, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        sizes.append(len(tokens))
        return logits(x, tokens, *rest)

    monkeypatch.setattr(decoder.ops, "logits", spy)
    writer = PlanWriter(runner)
    writer.start(0, list(range(50)), SamplingParams(temperature=0, prompt_logprobs=1))
    result = writer.step({0: 50})
    assert len(result.prompt_logprobs[0][1].chosen) == 49
    assert max(sizes) <= 5


def test_fewer_tokens_a_step_than_requests_is_refused(decoder: Decoder) -> None:
    with pytest.raises(CapacityError, match=r"--max-batch-tokens 8 .*--max-running-requests 9"):
        make_runner(decoder, max_batch_tokens=8, max_running_requests=9)


def test_a_failed_allocation_is_one_line(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*shape: object) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.uint8)

    monkeypatch.setattr(decoder.ops, "allocate_kv", fail)
    with pytest.raises(CapacityError, match="out of memory") as caught:
        make_runner(decoder)
    assert "\n" not in str(caught.value)
