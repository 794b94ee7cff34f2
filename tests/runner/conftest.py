from __future__ import annotations

import pytest
from runner_harness import make_runner, tiny_decoder

from tidemill.models.decoder import Decoder
from tidemill.runner.model_runner import ModelRunner


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    return tiny_decoder()


@pytest.fixture(scope="session")
def shared_runner(decoder: Decoder) -> ModelRunner:
    return make_runner(decoder)


@pytest.fixture
def runner(shared_runner: ModelRunner) -> ModelRunner:
    """A runner without requests, as after a scheduler's restart."""
    shared_runner.reset()
    return shared_runner
