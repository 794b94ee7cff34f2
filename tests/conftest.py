"""What several test folders share: the real model, where it has been fetched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill import hub


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Path of SmolLM2-135M-Instruct (Q4_1), which `make test` fetches first."""
    named = os.environ.get("TIDEMILL_TEST_MODEL")
    path = Path(named) if named else hub.cached_default_model()
    if path is None or not path.exists():
        pytest.skip("the default model is not in the cache: run `tidemill pull`")
    return str(path)
