from __future__ import annotations

import openai
import pytest

from served import serve_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A server with a tiny random model and a short context, in the exact mode: whatever shares a
    batch, and whatever comes from the prefix cache, the same request gets the same answer."""
    flags = ("--max-model-len", "512", "--max-choices", "16", "--max-body-bytes", "100000")
    flags += ("--dtype", "float32")
    with serve_tiny(tmp_path_factory.mktemp("tiny"), *flags) as served:
        yield served


@pytest.fixture(scope="session")
def client(tiny):
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
