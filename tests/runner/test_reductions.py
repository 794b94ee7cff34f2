from __future__ import annotations

import pytest
import torch

from tidemill.runner import reductions


@pytest.mark.parametrize("vocab", [1, 127, 128, 129, 1000, 1024])
def test_block_sums_cover_every_token_once(vocab: int) -> None:
    x = torch.randn(3, vocab, generator=torch.Generator().manual_seed(vocab))
    expected = [block.sum(-1) for block in x.split(reductions.BLOCK, dim=1)]
    torch.testing.assert_close(reductions.block_sums(x), torch.stack(expected, dim=1))


@pytest.mark.parametrize("vocab", [1, 15, 16, 17, 1000, 1024])
def test_group_maxima_cover_every_token_once(vocab: int) -> None:
    """A token that is the largest of all is the maximum of one group."""
    top = torch.eye(vocab)
    maxima = reductions.group_maxima(top)
    assert torch.equal(maxima.sum(-1), torch.ones(vocab))
    assert maxima.shape[1] == vocab // 16 + vocab % 16


@pytest.mark.parametrize(("vocab", "count"), [(50, 20), (1000, 1), (1000, 5), (5007, 20)])
def test_topk_is_torchs(vocab: int, count: int) -> None:
    x = torch.randn(4, vocab, generator=torch.Generator().manual_seed(vocab))
    x[0, -count:] += 10  # the last tokens, which are no part of a whole group
    expected = x.topk(count, dim=-1)
    values, ids = reductions.topk(x, count)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)
