from __future__ import annotations

import numpy as np
import torch

from tidemill.runner.slots import Slots
from tidemill.wire.plan import SlotInit, StepPlan
from tidemill.wire.sampling import SamplingParams


def admitted(*inits: SlotInit) -> Slots:
    slots = Slots(8, 100, 16, torch.device("cpu"))
    slots.apply(StepPlan(0, admit=list(inits)))
    return slots


def finished(slots: Slots, slot: int, position: int, token: int) -> int:
    row = [np.array([value], dtype=np.int32) for value in (slot, position, token)]
    return int(slots.finished(*row)[0])


def test_a_stop_id_ends_from_min_tokens_on() -> None:
    params = SamplingParams(stop_token_ids=(7, 9), min_tokens=3)
    slots = admitted(SlotInit(2, params, 0, prompt_len=10, max_len=50))
    assert [finished(slots, 2, position, 9) for position in (11, 12, 13, 14)] == [0, 0, 1, 1]
    assert finished(slots, 2, 13, 8) == 0


def test_max_len_ends_and_a_stop_id_comes_first() -> None:
    slots = admitted(
        SlotInit(0, SamplingParams(stop_token_ids=(7,)), 0, prompt_len=10, max_len=20),
        SlotInit(1, SamplingParams(), 0, prompt_len=10, max_len=20),
    )
    assert [finished(slots, 1, position, 7) for position in (18, 19)] == [0, 2]
    assert finished(slots, 0, 19, 7) == 1


def test_more_stop_ids_than_before_leave_the_others_alone() -> None:
    slots = admitted(
        SlotInit(0, SamplingParams(stop_token_ids=(7,)), 0, prompt_len=1, max_len=20),
        SlotInit(1, SamplingParams(stop_token_ids=tuple(range(100, 130))), 0, 1, 20),
    )
    assert [finished(slots, 0, 5, token) for token in (7, 100, 0)] == [1, 0, 0]
    assert [finished(slots, 1, 5, token) for token in (7, 100, 129)] == [0, 1, 1]
    slots.apply(StepPlan(1, admit=[SlotInit(1, SamplingParams(), 0, 1, 20)]))
    assert finished(slots, 1, 5, 129) == 0
