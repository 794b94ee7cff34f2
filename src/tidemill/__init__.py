"""Tidemill, an inference engine for language models.

`from tidemill import LLM, SamplingParams` is the Python API. Submodules are imported lazily, so
that processes that never run a model do not pay for torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tidemill.wire.sampling import SamplingParams

if TYPE_CHECKING:
    from tidemill.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from tidemill.llm import LLM

        return LLM
    raise AttributeError(f"module 'tidemill' has no attribute {name!r}")
