"""Log-probabilities: of the model's own distribution, before bias, penalties, temperature and
filters (what OpenAI's API documents and vLLM calls raw logprobs)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tidemill.runner.reductions import count_above, topk
from tidemill.wire.plan import F32, Logprobs


def empty(count: int, alternatives: int) -> Logprobs:
    """Room for `count` tokens; what stays unfilled means nothing."""
    return Logprobs(
        np.zeros(count, dtype=np.float32),
        np.zeros(count, dtype=np.int32),
        np.zeros((count, alternatives), dtype=np.int32),
        np.zeros((count, alternatives), dtype=np.float32),
    )


def fill(
    into: Logprobs, rows: slice | npt.NDArray[np.intp], logits: Tensor, tokens: Tensor
) -> None:
    """Enter the log-probabilities of `tokens` int64[N] under `logits` float32[N, V], and as
    many best alternatives as `into` has room for."""
    alternatives = into.top_ids.shape[1]
    norm = torch.logsumexp(logits, dim=-1, keepdim=True)
    chosen = logits.gather(1, tokens[:, None])
    into.chosen[rows] = _host(chosen - norm)[:, 0]
    into.rank[rows] = _host(count_above(logits, chosen))
    if alternatives:
        values, ids = topk(logits, alternatives)
        into.top_values[rows] = _host(values - norm)
        into.top_ids[rows] = _host(ids)


def _host(x: Tensor) -> F32:
    values: F32 = x.cpu().numpy()
    return values
