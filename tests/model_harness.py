"""Tiny models saved by transformers, and sequences fed to a decoder over scattered pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tidemill.models.decoder import Decoder
from tidemill.models.loader import load_model
from tidemill.ops.backend import Batch
from tidemill.ops.reference import ReferenceBackend

SHAPE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 64,
}


def make_hf(model_class: type, config: Any, seed: int = 0) -> PreTrainedModel:
    """A float32 model whose weights are all random: norms and biases too, which transformers
    starts at ones and zeros, where a mistake would not show."""
    generator = torch.Generator().manual_seed(seed)
    model: PreTrainedModel = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            else:
                parameter.copy_(1 + 0.3 * noise)
    return model


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    """Change fields of config.json; None removes one."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in fields.items() if v is not None}))


def reference() -> ReferenceBackend:
    return ReferenceBackend(torch.device("cpu"), torch.float32)


def load(path: Path, max_len: int = 64, load_format: str = "auto") -> Decoder:
    return load_model(path, load_format, reference(), max_len)


@torch.no_grad()
def hf_logits(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([list(ids)])).logits[0].float()


def relative(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((found - wanted).abs().max() / wanted.abs().max())


class Sequences:
    """Feeds any number of sequences, over pages that lie in no order."""

    def __init__(self, decoder: Decoder, page_size: int = 4, pages: int = 256) -> None:
        config = decoder.config
        self.decoder = decoder
        self.page_size = page_size
        self.kv = decoder.ops.allocate_kv(config.attention(0), config.layers, pages, page_size)
        self.forward = decoder.ops.graph(lambda batch: decoder.forward(batch, self.kv))
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(7))
        self._free = order.tolist()
        self._pages: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def feed(
        self, rows: Sequence[tuple[int, Sequence[int]]], *, every: bool = True
    ) -> list[Tensor]:
        """One forward pass: (sequence, its next tokens) for each row, one-token rows first.
        Returns each row's logits, of all its tokens or of the last."""
        batch = self.batch(rows, every=every)
        logits = self.forward(batch).clone()
        counts = [len(tokens) if every else 1 for _, tokens in rows]
        return list(logits.split(counts))

    def batch(self, rows: Sequence[tuple[int, Sequence[int]]], *, every: bool) -> Batch:
        ids: list[int] = []
        positions: list[int] = []
        kv_slots: list[int] = []
        starts, contexts = [0], []
        for sequence, tokens in rows:
            start = self.lengths.get(sequence, 0)
            end = self.lengths[sequence] = start + len(tokens)
            pages = self._pages.setdefault(sequence, [])
            while len(pages) * self.page_size < end:
                pages.append(self._free.pop())
            ids += tokens
            positions += range(start, end)
            kv_slots += (
                pages[p // self.page_size] * self.page_size + p % self.page_size
                for p in range(start, end)
            )
            starts.append(len(ids))
            contexts.append(end)
        width = -(-max(contexts) // self.page_size)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for row, (sequence, _) in enumerate(rows):
            own = self._pages[sequence][:width]
            table[row, : len(own)] = torch.tensor(own)
        wanted = range(len(ids)) if every else [end - 1 for end in starts[1:]]
        return Batch(
            ids=_ints(ids),
            positions=_ints(positions),
            kv_slots=_ints(kv_slots),
            row_starts=_ints(starts),
            contexts=_ints(contexts),
            page_table=table,
            logit_tokens=_ints(list(wanted)),
            num_tokens=len(ids),
            num_rows=len(rows),
            max_query=max(len(tokens) for _, tokens in rows),
            max_context=max(contexts),
        )


def _ints(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def one_row(context: int, query: int, page_size: int = 4) -> Batch:
    """One row whose last `query` of `context` tokens are in the pass; pages in reverse."""
    count = -(-context // page_size)
    pages = torch.arange(count, 0, -1, dtype=torch.int32)
    positions = torch.arange(context - query, context, dtype=torch.int32)
    slots = pages[(positions // page_size).long()] * page_size + positions % page_size
    return Batch(
        ids=torch.zeros(query, dtype=torch.int32),
        positions=positions,
        kv_slots=slots,
        row_starts=torch.tensor([0, query], dtype=torch.int32),
        contexts=torch.tensor([context], dtype=torch.int32),
        page_table=pages[None],
        logit_tokens=torch.tensor([query - 1], dtype=torch.int32),
        num_tokens=query,
        num_rows=1,
        max_query=query,
        max_context=context,
    )


def feed_in_chunks(sequences: Sequences, name: int, ids: Sequence[int], size: int) -> Tensor:
    """All logits of a sequence that is fed `size` tokens at a time."""
    parts = [ids[at : at + size] for at in range(0, len(ids), size)]
    return torch.cat([sequences.feed([(name, part)])[0] for part in parts])


def ids_of(seed: int, count: int, vocab: int = SHAPE["vocab_size"]) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (count,), generator=generator).tolist()
