from __future__ import annotations

import openai
import pytest

from served import serve_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A server with a tiny random model, a small KV cache and a short context."""
    flags = ("--max-model-len", "512", "--max-choices", "16", "--max-body-bytes", "100000")
    with serve_tiny(tmp_path_factory.mktemp("tiny"), *flags) as served:
        yield served


@pytest.fixture(scope="session")
def client(tiny):
    return openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0)
