"""SmolLM2 against transformers, which reads the same GGUF by its own code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from model_harness import Sequences, hf_logits, load, relative
from tidemill.config import EngineConfig
from tidemill.models.decoder import Decoder
from tidemill.text import vocabulary

NEW_TOKENS = 64
TIE = 1e-2  # logits closer than this may change places
PROMPTS = (
    "The tide comes in twice a day because",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are:",
    "Question: What is the capital of France?\nAnswer:",
    "Translate to German: Good morning, how are you?",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The ingredients of a good soup are",
    "In 1969, the first human",
    "SELECT name, age FROM users WHERE",
    "Photosynthesis is the process by which",
    "My favourite book is",
    "Roses are red,\nViolets are blue,",
    "<html>\n<head>\n<title>",
    "To be, or not to be, that is",
    "The difference between a virus and a bacterium is",
    "import numpy as np\n\ndef normalize(x):",
    "A short history of the Roman Empire:",
    "日本の首都は",
    "Le petit chat est",
    "🎉 Congratulations! You have",
    "Water boils at 100 degrees Celsius, which is",
    "The old man looked at the sea and said:",
)


@pytest.fixture(scope="module")
def prompts(smollm2: str) -> list[list[int]]:
    vocab = vocabulary.load(EngineConfig(model=smollm2))
    return [vocab.encode(text, add_special_tokens=True) for text in PROMPTS]


@pytest.fixture(scope="module")
def theirs(smollm2: str) -> LlamaForCausalLM:
    path = Path(smollm2)
    model = LlamaForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def ours(smollm2: str) -> Decoder:
    return load(Path(smollm2), max_len=256)


def greedy(decoder: Decoder, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Continuations of all prompts, decoded as one batch."""
    sequences = Sequences(decoder, page_size=16, pages=12 * len(prompts))
    logits = [sequences.feed([(n, p)], every=False)[0][0] for n, p in enumerate(prompts)]
    made: list[list[int]] = [[] for _ in prompts]
    for _ in range(count):
        for own, row in zip(made, logits, strict=True):
            own.append(int(row.argmax()))
        rows = [(n, [own[-1]]) for n, own in enumerate(made)]
        logits = [row[0] for row in sequences.feed(rows, every=False)]
    return made


def gaps(judge: Tensor, chosen: Sequence[int]) -> Tensor:
    """How far each chosen token's logit lies below the best, by the judge's logits."""
    picked = judge.gather(1, torch.tensor(chosen)[:, None])[:, 0]
    return judge.max(dim=1).values - picked


def test_logits(theirs: LlamaForCausalLM, ours: Decoder, prompts: list[list[int]]) -> None:
    ids = [token for prompt in prompts for token in prompt][:200]
    (found,) = Sequences(ours, page_size=16).feed([(0, ids)])
    assert relative(found, hf_logits(theirs, ids)) < 1e-4


def test_greedy_continuations(
    theirs: LlamaForCausalLM, ours: Decoder, prompts: list[list[int]]
) -> None:
    """Token for token what transformers would say: at every position of our continuation its
    logits, given the same text so far, have the same maximum (or a near-tie)."""
    assert len(prompts) >= 20
    for prompt, made in zip(prompts, greedy(ours, prompts, NEW_TOKENS), strict=True):
        judge = hf_logits(theirs, [*prompt, *made])[len(prompt) - 1 : -1]
        assert float(gaps(judge, made).max()) < TIE
