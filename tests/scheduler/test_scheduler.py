"""What the scheduler promises, one promise at a time."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import Engine, make_ready

from tidemill.config import EngineConfig
from tidemill.scheduler.simulated import PlanError, SimulatedRunner, expected_output
from tidemill.wire.link import RunnerGone
from tidemill.wire.plan import RowFlags, SlotInit, StepPlan, StepResult
from tidemill.wire.sampling import SamplingParams


def config(**changes: object) -> EngineConfig:
    return EngineConfig(model="simulated", **changes)  # type: ignore[arg-type]


def params(max_tokens: int | None = 8, seed: int | None = 1, **more: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, **more)  # type: ignore[arg-type]


# --- steps ------------------------------------------------------------------------------------


def test_run_ahead_plans_before_results_are_there() -> None:
    engine = Engine(config=config(run_ahead=2), deliver=lambda: False)
    engine.submit(1, [1, 2, 3])
    engine.turn()
    assert engine.scheduler.in_flight == 3
    assert [plan.rows[:, 1:3].tolist() for plan in engine.link.plans] == [
        [[0, 3]],
        [[3, 1]],
        [[4, 1]],
    ]
    assert len(engine.link.plans[1].tokens) == 0  # a decode row's input stays on the device


def test_synchronous_mode_plans_one_step_at_a_time() -> None:
    engine = Engine(config=config(run_ahead=0), deliver=lambda: False)
    engine.submit(1, [1, 2, 3])
    for _ in range(3):
        engine.turn()
    assert engine.scheduler.in_flight == 1


def test_no_step_is_planned_beyond_max_tokens() -> None:
    engine = Engine(config=config(run_ahead=3))
    engine.submit(1, [1, 2, 3], params(max_tokens=4))
    engine.run()
    engine.assert_output(1, [1, 2, 3], params(max_tokens=4), 7)
    assert len(engine.link.plans) == 4
    assert engine.scheduler.stats.generated_tokens == 4


def test_tokens_behind_a_stop_are_dropped_and_the_stop_token_is_named() -> None:
    prompt, seed = [1, 2, 3], 5
    free, _ = expected_output(prompt, params(20, seed), seed, 23, 50)
    wanted = params(20, seed, stop_token_ids=(free[4],))
    engine = Engine(config=config(run_ahead=3), deliver=lambda: engine.turns % 5 == 0)
    engine.submit(1, prompt, wanted)
    engine.run()
    assert engine.ends[1].reason == "stop"
    assert engine.ends[1].stop_token == free[4]
    assert engine.tokens[1] == free[:5]
    assert len(engine.link.plans) > len(engine.tokens[1])  # found late
    engine.assert_idle()


def test_a_long_prompt_does_not_stall_running_streams() -> None:
    engine = Engine(make_ready(max_batch_tokens=8), config(run_ahead=0))
    engine.submit(1, [1, 2, 3], params(max_tokens=30))
    engine.turn()
    engine.turn()
    engine.submit(2, list(range(40)), params(max_tokens=4))
    before = len(engine.tokens[1])
    for _ in range(6):
        engine.turn()
    assert len(engine.tokens[1]) == before + 6
    mixed = engine.link.plans[-6:]
    assert all(plan.rows[0].tolist()[2:] == [1, RowFlags.SAMPLE] for plan in mixed)
    assert [int(plan.rows[1, 2]) for plan in mixed] == [7, 7, 7, 7, 7, 5]
    assert engine.scheduler.stats.steps == {"prefill": 1, "decode": 1, "mixed": 6}


def test_priority_comes_before_arrival() -> None:
    engine = Engine(make_ready(max_running_requests=1), config(run_ahead=0))
    for rid, priority in ((1, 5), (2, 0), (3, -1), (4, 0)):
        engine.submit(rid, [rid], params(max_tokens=2), priority=priority)
    engine.run()
    assert list(engine.starts) == [3, 2, 4, 1]


def test_a_batch_larger_than_the_token_budget_is_never_formed() -> None:
    engine = Engine(make_ready(max_running_requests=8, max_batch_tokens=3))
    for rid in range(6):
        engine.submit(rid, [rid, 1], params(max_tokens=6, seed=rid))
    engine.run()
    for rid in range(6):
        engine.assert_output(rid, [rid, 1], params(max_tokens=6, seed=rid), 8)


def test_penalties_bring_the_history_and_nothing_else_does() -> None:
    engine = Engine()
    engine.submit(1, [1, 2, 3], params(presence_penalty=0.5), output=[7])
    engine.submit(2, [1, 2, 3], params())
    engine.turn()
    first, second = engine.link.plans[0].admit
    assert first.history.tolist() == [1, 2, 3, 7]
    assert first.prompt_len == 3
    assert len(second.history) == 0


def test_requests_without_a_seed_get_one_that_is_theirs_for_good() -> None:
    def seeds(engine_seed: int) -> list[int]:
        engine = Engine(config=config(seed=engine_seed))
        for rid in (1, 2):
            engine.submit(rid, [1, 2, 3], params(seed=None))
        engine.turn()
        return [init.seed for init in engine.link.plans[0].admit]

    assert seeds(0) == seeds(0)
    assert len({*seeds(0), *seeds(1)}) == 4


# --- the prefix cache -------------------------------------------------------------------------


def test_a_fresh_shared_prefix_is_computed_once() -> None:
    """All at once, none cached before: later requests share pages that the same step fills."""
    prefix = [index % 50 for index in range(64)]
    engine = Engine(make_ready(num_pages=256, max_running_requests=32, max_batch_tokens=512))
    for rid in range(32):
        engine.submit(rid, [*prefix, rid, 3], params(max_tokens=4, seed=rid))
    engine.turn()
    assert len(engine.link.plans[0].rows) == 32
    engine.run()
    for rid in range(32):
        engine.assert_output(rid, [*prefix, rid, 3], params(max_tokens=4, seed=rid), 70)
    assert engine.runner.computed_tokens == 64 + 32 * 2 + 32 * 3
    assert engine.starts[0].cached_tokens == 0
    assert all(engine.starts[rid].cached_tokens == 64 for rid in range(1, 32))


def test_a_fully_cached_prompt_computes_its_last_token_alone() -> None:
    engine = Engine()
    prompt = list(range(16))  # four whole pages
    engine.submit(1, prompt, params())
    engine.run()
    engine.submit(2, prompt, params())
    engine.turn()
    plan = engine.link.plans[-2]
    assert plan.rows.tolist() == [[0, 15, 1, RowFlags.SAMPLE | RowFlags.HOST_TOKENS]]
    assert plan.copies[:, 2].tolist() == [3]
    engine.run()
    assert engine.starts[2].cached_tokens == 15
    assert engine.tokens[2] == engine.tokens[1]
    engine.assert_idle()


def test_a_prompt_that_ends_inside_a_page_is_reused_to_the_token() -> None:
    engine = Engine()
    engine.submit(1, list(range(18)), params())
    engine.run()
    engine.submit(2, [*range(18), 40, 41, 42], params())
    engine.run()
    assert engine.starts[2].cached_tokens == 18
    engine.submit(3, [*range(17), 40, 41, 42], params())
    engine.run()
    assert engine.starts[3].cached_tokens == 17
    for rid, prompt in ((2, [*range(18), 40, 41, 42]), (3, [*range(17), 40, 41, 42])):
        engine.assert_output(rid, prompt, params(), len(prompt) + 8)


def test_the_next_turn_of_a_chat_finds_the_answer_cached() -> None:
    engine = Engine()
    engine.submit(1, list(range(10)), params(max_tokens=9))
    engine.run()
    chat = [*range(10), *engine.tokens[1], 30, 31]
    engine.submit(2, chat, params())
    engine.run()
    assert engine.starts[2].cached_tokens == 18  # all but the last answer token
    engine.assert_output(2, chat, params(), len(chat) + 8)


def test_what_a_step_writes_behind_a_stop_is_not_cached() -> None:
    """Steps in flight run on past the stop token: their KV is nobody's."""
    prompt, seed = list(range(10)), 5
    free, _ = expected_output(prompt, params(20, seed), seed, 30, 50)
    wanted = params(20, seed, stop_token_ids=(free[6],))
    engine = Engine(config=config(run_ahead=3), deliver=lambda: engine.turns % 5 == 0)
    engine.submit(1, prompt, wanted)
    engine.run()
    assert len(engine.tokens[1]) == 7
    chat = [*prompt, *free[:7], 30, 31]
    engine.submit(2, chat, params())
    engine.run()
    assert engine.starts[2].cached_tokens == 16
    engine.assert_output(2, chat, params(), len(chat) + 8)


def test_salts_do_not_share() -> None:
    engine = Engine()
    for rid, salt in enumerate(["a", "b", "a"]):
        engine.submit(rid, list(range(20)), params(), salt=salt)
        engine.run()
    assert [engine.starts[rid].cached_tokens for rid in range(3)] == [0, 0, 19]


def test_prefix_cache_can_be_switched_off() -> None:
    engine = Engine(config=config(prefix_cache=False))
    for rid in range(2):
        engine.submit(rid, list(range(20)), params())
        engine.run()
    assert engine.starts[1].cached_tokens == 0
    assert engine.scheduler.stats.pages_free == engine.ready.num_pages


def test_prompt_logprobs_compute_the_prompt_in_full() -> None:
    wanted = params(prompt_logprobs=2, logprobs=1)
    engine = Engine(make_ready(max_batch_tokens=7))
    engine.submit(1, list(range(20)), params())
    engine.run()
    engine.submit(2, list(range(20)), wanted)
    engine.run()
    assert engine.starts[2].cached_tokens == 0
    engine.assert_output(2, list(range(20)), wanted, 28)
    assert len(engine.prompt_logprobs[2]) == 19
    assert all(len(entry.ids) == 2 for entry in engine.prompt_logprobs[2])


def test_logprobs_go_to_those_who_asked_in_a_shared_batch() -> None:
    engine = Engine(config=config(run_ahead=2), deliver=lambda: engine.turns % 3 == 0)
    each = [params(12, rid, logprobs=n) for rid, n in enumerate([None, 0, 3])]
    for rid, wanted in enumerate(each):
        engine.submit(rid, [1, 2, rid], wanted, detokenizer=rid % 2)
    engine.run()
    for rid, wanted in enumerate(each):
        engine.assert_output(rid, [1, 2, rid], wanted, 15)


# --- preemption -------------------------------------------------------------------------------


def test_preemption_takes_the_youngest_of_the_lowest_priority() -> None:
    engine = Engine(make_ready(num_pages=12, max_model_len=48), config(run_ahead=0))
    for rid, priority in ((1, 1), (2, 0), (3, 1)):
        engine.submit(rid, [rid] * 7, params(max_tokens=24, seed=rid), priority=priority)
    while not engine.scheduler.stats.preemptions:
        engine.turn()
    waiting = [request.rid for request in engine.scheduler._queue]
    assert waiting == [3]
    engine.run()
    for rid in (1, 2, 3):
        engine.assert_output(rid, [rid] * 7, params(max_tokens=24, seed=rid), 31)
    assert next(iter(engine.ends)) == 2


def test_a_preempted_request_goes_on_from_the_cache() -> None:
    """Its pages went to the tree: what the others did not need is not computed again."""
    engine = Engine(make_ready(num_pages=14, max_model_len=40), config(run_ahead=0))
    engine.submit(1, [1] * 15, params(max_tokens=20, seed=1))
    engine.submit(2, [2] * 15, params(max_tokens=20, seed=2))
    engine.run()
    assert engine.scheduler.stats.preemptions == 1
    admissions = [(init.prompt_len, plan) for plan in engine.link.plans for init in plan.admit]
    assert len(admissions) == 3
    resumed = admissions[2][1]
    row = next(row for row in resumed.rows.tolist() if row[3] & RowFlags.HOST_TOKENS)
    known = row[1] + row[2]
    assert row[1] >= 16, "most of it was still cached"
    assert known > 15
    for rid in (1, 2):
        engine.assert_output(rid, [rid] * 15, params(20, rid), 35)
    engine.assert_idle()


def test_nobody_starts_on_the_last_pages_that_the_running_soon_need() -> None:
    engine = Engine(make_ready(num_pages=10, max_model_len=40), config(run_ahead=0))
    engine.submit(1, [1] * 15, params(max_tokens=10, seed=1))
    engine.submit(2, [2] * 23, params(max_tokens=10, seed=2))  # just fits beside it, at first
    engine.turn()
    assert (engine.scheduler.stats.running, engine.scheduler.stats.waiting) == (1, 1)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0
    for rid, prompt in ((1, [1] * 15), (2, [2] * 23)):
        engine.assert_output(rid, prompt, params(10, rid), len(prompt) + 10)


def test_results_from_before_a_preemption_are_nobodys() -> None:
    """A request is preempted mid-prefill; some of its results come while it waits, the others
    when it has started again."""
    arrived = 0

    def deliver() -> bool:
        nonlocal arrived
        arrived -= 1
        return arrived >= 0

    engine = Engine(
        make_ready(num_pages=10, max_model_len=40, max_batch_tokens=3),
        config(run_ahead=13),
        deliver=deliver,
    )
    wanted = params(4, seed=2, prompt_logprobs=1)
    engine.submit(1, [1] * 7, params(30, seed=1))
    engine.submit(2, list(range(23)), wanted)
    engine.turn()
    stats = engine.scheduler.stats
    assert (stats.preemptions, stats.running, stats.waiting) == (1, 1, 1)
    arrived = 6
    engine.turn()
    assert engine.scheduler.stats.waiting == 1
    engine.scheduler.abort(1)
    engine.scheduler._config = config(run_ahead=20)
    engine.turn()
    assert (engine.scheduler.stats.running, engine.scheduler.in_flight) == (1, 21)
    arrived = 1000
    engine.run()
    engine.assert_output(2, list(range(23)), wanted, 27)


def test_everyone_ends_in_a_cache_that_barely_holds_one() -> None:
    engine = Engine(make_ready(num_pages=10, max_model_len=40), config(run_ahead=2))
    prompts = {rid: [rid] * (10 + rid) for rid in range(8)}
    for rid, prompt in prompts.items():
        engine.submit(rid, prompt, params(40 - len(prompt), seed=rid))
    engine.run(limit=2000)
    for rid, prompt in prompts.items():
        engine.assert_output(rid, prompt, params(40 - len(prompt), seed=rid), 40)
    engine.assert_idle()


# --- refusals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_pages", "prompt", "max_tokens", "numbers"),
    [
        (64, 100, 29, ["129", "100", "29", "128", "--max-model-len"]),
        (64, 128, None, ["129", "128", "at least 1", "--max-model-len"]),
        (10, 20, 21, ["41", "20", "21", "40", "--kv-memory"]),
        (10, 40, None, ["41", "40", "--kv-memory"]),
    ],
)
def test_what_can_never_fit_is_refused_with_the_numbers(
    num_pages: int, prompt: int, max_tokens: int | None, numbers: list[str]
) -> None:
    engine = Engine(make_ready(num_pages=num_pages))
    engine.submit(1, [1] * prompt, params(max_tokens=max_tokens))
    engine.run()
    error = engine.ends[1].error
    assert error is not None
    assert (engine.ends[1].reason, error.status) == ("error", 400)
    assert error.code == "context_length_exceeded"
    for number in numbers:
        assert number in error.message
    assert engine.starts[1].worker == 0  # the detokenizer knows where to send it
    assert not engine.link.plans
    engine.assert_idle()


def test_the_largest_request_that_fits_runs() -> None:
    engine = Engine(make_ready(num_pages=10))
    engine.submit(1, [1] * 20, params(max_tokens=20))
    engine.run()
    engine.assert_output(1, [1] * 20, params(max_tokens=20), 40)


def test_without_max_tokens_a_request_runs_until_the_context_is_full() -> None:
    engine = Engine(make_ready(num_pages=10))
    engine.submit(1, [1] * 30, params(max_tokens=None))
    engine.run()
    assert (engine.ends[1].reason, len(engine.tokens[1])) == ("length", 10)


@pytest.mark.parametrize(
    ("prompt", "more", "field", "words"),
    [
        ([], {}, "prompt", "empty"),
        ([1, 50], {}, "prompt", "token id 50 is outside the vocabulary of 50"),
        ([1, -1], {}, "prompt", "token id -1"),
        ([1], {"stop_token_ids": (3, 99)}, "stop_token_ids", "99"),
        ([1], {"logit_bias": {77: 1.0}}, "logit_bias", "77"),
    ],
)
def test_bad_ids_are_refused_with_the_field(
    prompt: list[int], more: dict[str, object], field: str, words: str
) -> None:
    engine = Engine()
    engine.submit(1, prompt, params(**more))
    engine.submit(2, [1, 2], params())
    engine.run()
    error = engine.ends[1].error
    assert error is not None
    assert (error.status, error.param) == (400, field)
    assert words in error.message
    engine.assert_output(2, [1, 2], params(), 10)


def test_a_full_queue_says_429_but_lets_resumed_requests_in() -> None:
    engine = Engine(make_ready(max_running_requests=1), config(max_waiting_requests=2))
    for rid in range(4):
        engine.submit(rid, [1, 2], params())
    error = None
    engine.submit(4, [1, 2], params(), attempt=1)
    engine.run()
    for rid in (2, 3):
        error = engine.ends[rid].error
        assert error is not None
        assert (error.status, error.code) == (429, "queue_full")
        assert "2" in error.message
    assert [engine.ends[rid].reason for rid in (0, 1, 4)] == ["length"] * 3


# --- aborts, resumption, restarts -------------------------------------------------------------


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
@pytest.mark.parametrize("after", range(12))
def test_an_abort_leaves_nothing_behind_at_any_moment(run_ahead: int, after: int) -> None:
    """Waiting, mid-prefill, in flight, last step."""
    engine = Engine(
        make_ready(max_batch_tokens=5),
        config(run_ahead=run_ahead),
        deliver=lambda: engine.turns % 2 == 0,
    )
    engine.submit(1, list(range(11)), params(max_tokens=3))
    engine.submit(2, list(range(9)), params(max_tokens=12))
    for _ in range(after):
        engine.turn()
    heard = len(engine.tokens.get(1, []))
    ended = 1 in engine.ends
    engine.scheduler.abort(1)
    engine.scheduler.abort(1)
    engine.run()
    assert len(engine.tokens.get(1, [])) == heard
    assert (1 in engine.ends) == ended
    assert engine.aborts == ([] if ended else [1])
    engine.assert_output(2, list(range(9)), params(max_tokens=12), 21)
    engine.assert_idle()


def test_unknown_ids_are_ignored() -> None:
    engine = Engine()
    engine.scheduler.abort(99)
    engine.scheduler.stopped(99, 0)
    engine.scheduler.worker_gone(3)
    assert not engine.scheduler.has_work


def test_a_stop_string_ends_the_attempt_that_it_was_found_in() -> None:
    engine = Engine()
    engine.submit(1, [1, 2], params(max_tokens=20), attempt=1)
    engine.turn()
    engine.turn()
    engine.scheduler.stopped(1, 0)  # of the attempt before
    assert engine.scheduler.stats.running == 1
    engine.scheduler.stopped(1, 1)
    engine.run()
    assert 1 not in engine.ends
    engine.assert_idle()


def test_a_workers_death_aborts_its_requests_alone() -> None:
    engine = Engine(make_ready(max_running_requests=2))
    for rid in range(6):
        engine.submit(rid, [1, rid], params(), worker=rid % 2)
    engine.turn()
    engine.scheduler.worker_gone(1)
    engine.run()
    assert sorted(engine.ends) == [0, 2, 4]
    assert sorted(engine.aborts) == [1, 3, 5]
    engine.assert_idle()


def test_a_request_resumes_where_its_output_ends() -> None:
    prompt, wanted = [3, 1, 4, 1, 5], params(max_tokens=20)
    whole, _ = expected_output(prompt, wanted, 1, 25, 50)
    engine = Engine()
    engine.submit(1, prompt, wanted, output=whole[:7], attempt=1)
    engine.run()
    engine.assert_output(1, prompt, wanted, 25, resumed=7)
    assert engine.starts[1].attempt == 1
    assert np.frombuffer(engine.starts[1].output_ids, "<i4").tolist() == whole[:7]


def test_output_that_is_complete_ends_at_once() -> None:
    engine = Engine()
    engine.submit(1, [1, 2], params(max_tokens=3), output=[5, 6, 7])
    engine.submit(2, [1, 2], params(max_tokens=9, stop_token_ids=(6,)), output=[5, 6])
    engine.run()
    assert (engine.ends[1].reason, engine.ends[1].stop_token) == ("length", None)
    assert (engine.ends[2].reason, engine.ends[2].stop_token) == ("stop", 6)
    assert not engine.link.plans


def test_a_second_submit_replaces_the_first() -> None:
    engine = Engine(make_ready(max_running_requests=2))
    engine.submit(1, [1, 2, 3], params(max_tokens=20))
    for _ in range(3):
        engine.turn()
    heard = engine.tokens[1][:2]
    engine.submit(1, [1, 2, 3], params(max_tokens=20), output=heard, attempt=1)
    engine.run()
    engine.assert_output(1, [1, 2, 3], params(max_tokens=20), 23, resumed=2)
    engine.assert_idle()


def test_a_refusal_is_forgotten_when_its_request_is_submitted_anew() -> None:
    engine = Engine()
    engine.submit(1, [], params())
    engine.submit(1, [1, 2], params())
    engine.run()
    engine.assert_output(1, [1, 2], params(), 10)


def test_streams_go_on_with_a_new_runner() -> None:
    engine = Engine(config=config(run_ahead=2), deliver=lambda: engine.turns % 3 == 0)
    for rid in range(10):
        engine.submit(rid, [1, 2, rid], params(max_tokens=20, seed=rid))
    for _ in range(7):
        engine.turn()
    engine.lose_runner()
    assert engine.scheduler.has_work
    assert engine.scheduler.in_flight == 0
    engine.turn()  # nothing to run on: nothing happens
    engine.attach_runner()
    engine.run()
    for rid in range(10):
        engine.assert_output(rid, [1, 2, rid], params(max_tokens=20, seed=rid), 23)
    assert all(start.attempt == 0 for start in engine.starts.values())  # told once


def test_prompt_logprobs_that_were_reported_are_not_again_with_a_new_runner() -> None:
    wanted = params(prompt_logprobs=0)
    engine = Engine(make_ready(max_batch_tokens=5), config(run_ahead=0))
    engine.submit(1, list(range(20)), wanted)
    for _ in range(3):
        engine.turn()
    assert len(engine.prompt_logprobs[1]) == 10
    engine.lose_runner()
    engine.attach_runner()
    engine.run()
    engine.assert_output(1, list(range(20)), wanted, 28)


def test_a_smaller_new_runner_ends_open_requests_earlier() -> None:
    engine = Engine()
    engine.submit(1, [1] * 10, params(max_tokens=None))
    engine.turn()
    engine.lose_runner()
    engine.attach_runner(make_ready(max_model_len=40))
    engine.run()
    assert (engine.ends[1].reason, len(engine.tokens[1])) == ("length", 30)


def test_a_smaller_new_runner_refuses_what_no_longer_fits() -> None:
    engine = Engine()
    engine.submit(1, [1] * 10, params(max_tokens=60))
    engine.submit(2, [2] * 10, params(max_tokens=8))
    for _ in range(4):
        engine.turn()
    engine.lose_runner()
    engine.attach_runner(make_ready(max_model_len=40))
    engine.starts.pop(1)
    engine.run()
    error = engine.ends[1].error
    assert error is not None
    assert "70" in error.message
    engine.assert_output(2, [2] * 10, params(max_tokens=8), 18)


def test_a_runner_that_dies_in_the_middle_loses_no_output() -> None:
    engine = Engine(config=config(run_ahead=0))
    engine.submit(1, [1, 2], params())
    engine.turn()
    send = engine.link.send

    def fail(plan: StepPlan) -> None:
        raise RunnerGone("killed")

    engine.link.send = fail  # type: ignore[method-assign]
    with pytest.raises(RunnerGone):
        engine.turn()
    engine.link.send = send  # type: ignore[method-assign]
    engine.lose_runner()
    engine.attach_runner()
    engine.run()
    engine.assert_output(1, [1, 2], params(), 10)


def test_results_out_of_order_are_an_error() -> None:
    engine = Engine(deliver=lambda: False)
    engine.submit(1, [1, 2], params())
    engine.turn()
    none = np.empty(0, dtype=np.int32)
    engine.link.poll = lambda: StepResult(7, none, none)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="step 0 was due, got 7"):
        engine.scheduler.advance()


# --- figures ----------------------------------------------------------------------------------


def test_counters_add_up() -> None:
    engine = Engine()
    engine.submit(1, list(range(16)), params())
    engine.run()
    engine.submit(2, list(range(20)), params())
    engine.turn()
    stats = engine.scheduler.stats
    assert (stats.running, stats.waiting) == (1, 0)
    assert stats.pages_used + stats.pages_cached + stats.pages_free == engine.ready.num_pages
    assert stats.pages_used == 6  # 20 tokens and room for the next
    engine.run()
    stats = engine.scheduler.stats
    assert stats.prompt_tokens == 36
    assert stats.cached_tokens == engine.starts[2].cached_tokens == 16
    assert stats.generated_tokens == 16
    assert sum(stats.steps.values()) == len(engine.link.plans)
    times = engine.scheduler.take_step_times()
    assert len(times) == len(engine.link.plans)
    assert sum(step.device_seconds for step in times) == pytest.approx(stats.device_seconds)
    assert len(engine.scheduler.take_queue_times()) == 2
    assert engine.scheduler.take_step_times() == []


# --- the simulated runner is strict -----------------------------------------------------------


def rows(*values: tuple[int, int, int, int]) -> np.ndarray:
    return np.array(values, dtype=np.int32).reshape(-1, 4)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


PREFILL = int(RowFlags.HOST_TOKENS | RowFlags.SAMPLE)


def admitted(slot: int, pages: list[int], step: int = 0) -> StepPlan:
    return StepPlan(
        step,
        rows=rows((slot, 0, 2, PREFILL)),
        tokens=ids(1, 2),
        admit=[SlotInit(slot, params(), 1, 2, 10)],
        pages=np.array([(slot, index, page) for index, page in enumerate(pages)], dtype=np.int32),
    )


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (StepPlan(1, rows=rows((3, 0, 1, PREFILL)), tokens=ids(1)), "slot 3, which is empty"),
        (StepPlan(1, rows=rows((0, 2, 3, PREFILL)), tokens=ids(1, 2, 3)), "no page"),
        (StepPlan(1, rows=rows((0, 3, 1, PREFILL)), tokens=ids(1)), "3 after 2"),
        (StepPlan(1, rows=rows((0, 2, 2, 1))), "decode row"),
        (StepPlan(1, release=ids(4)), "released but not admitted"),
        (StepPlan(1, rows=rows((0, 2, 1, 1), (0, 3, 1, 1))), "two rows"),
        (admitted(0, [7], 1), "admitted twice"),
        (admitted(1, [0], 1), "written under slot 0"),
        (StepPlan(0), "step 0 after step 0"),
        (StepPlan(1), "an empty step"),
    ],
)
def test_the_simulated_runner_refuses_bad_plans(plan: StepPlan, words: str) -> None:
    runner = SimulatedRunner(make_ready())
    runner.execute(admitted(0, [0]))
    with pytest.raises(PlanError, match=words):
        runner.execute(plan)


def test_the_simulated_runner_notices_kv_that_was_never_written() -> None:
    runner = SimulatedRunner(make_ready())
    plan = admitted(0, [5])
    plan.rows[0, 1] = 1  # as if position 0 were cached in page 5
    with pytest.raises(PlanError, match="never written"):
        runner.execute(plan)
