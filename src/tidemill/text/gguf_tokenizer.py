"""A `tokenizers` tokenizer from a GGUF's metadata, which holds tokens, merges and scores but
names the pre-tokenizer only (`tokenizer.ggml.pre`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from tidemill.gguf_file import GGUFFile
from tidemill.wire.errors import ModelError

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Token types in GGUF.
_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6
_SPACE = "▁"


@dataclass(slots=True)
class GGUFTokenizer:
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    template: str | None
    template_tokens: dict[str, str]


def load(path: Path) -> GGUFTokenizer:
    """Raises ModelError for a file without a tokenizer, or with one of an unknown kind."""
    metadata = GGUFFile(path).metadata
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError(f"{path} holds no tokenizer; name one with --tokenizer")
    if kind == "gpt2":
        tokenizer = _byte_level(tokens, metadata, path)
    elif kind == "llama":
        tokenizer = _sentencepiece(tokens, metadata)
    else:
        raise ModelError(f"{path}: tokenizer model {kind!r}; gpt2 and llama are known")
    _add_special(tokenizer, tokens, metadata)
    named: dict[str, str] = {}
    for name in _NAMED:
        index = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if index is not None and int(index) < len(tokens):
            named[f"{name}_token"] = tokens[int(index)]
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", kind == "llama")
    if adds_bos and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, tokens.index(bos))],
        )
    eos = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    eos_ids = tuple(dict.fromkeys(int(index) for index in eos if index is not None))
    return GGUFTokenizer(tokenizer, eos_ids, metadata.get("tokenizer.chat_template"), named)


_NAMED = ("bos", "eos", "unk", "pad")


def _byte_level(tokens: list[str], metadata: dict[str, Any], path: Path) -> Tokenizer:
    """BPE over bytes (GPT-2), split first as the model was trained."""
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or []]
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    known = set(tokens)
    pairs = [(m[0], m[1]) for m in merges if len(m) == 2 and m[0] + m[1] in known]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, pairs, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in ("gpt-2", "default"):
        tokenizer.pre_tokenizer = byte_level
    elif pre in ("llama-bpe", "qwen2"):
        split = pre_tokenizers.Split(Regex(_LLAMA3 if pre == "llama-bpe" else _QWEN2), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        if pre == "qwen2":
            tokenizer.normalizer = normalizers.NFC()
    else:
        raise ModelError(
            f"{path}: pre-tokenizer {pre!r} is unknown; name a tokenizer.json with --tokenizer"
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], metadata: dict[str, Any]) -> Tokenizer:
    """Sentencepiece BPE: the merge that makes the best-scored token goes first."""
    scores = metadata["tokenizer.ggml.scores"]
    index = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token, number in index.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in index and right in index:
                merges.append((-float(scores[number]), index[left], index[right], left, right))
    merges.sort()
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        index,
        [(left, right) for *_, left, right in merges],
        unk_token=tokens[int(unknown)],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(_SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _add_special(tokenizer: Tokenizer, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Control and user-defined tokens are found whole in a text. Order by id keeps the ids."""
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        return
    added = [
        AddedToken(tokens[i], normalized=False, special=int(kind) != _USER_DEFINED)
        for i, kind in enumerate(types)
        if int(kind) in (_CONTROL, _USER_DEFINED, _UNKNOWN)
    ]
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for the 256 bytes: character -> byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    made = {chr(byte): byte for byte in kept}
    others = (byte for byte in range(256) if byte not in set(kept))
    return made | {chr(256 + number): byte for number, byte in enumerate(others)}


def bytes_only() -> Tokenizer:
    """One token a byte, for models with random weights that bring no tokenizer."""
    tokenizer = Tokenizer(models.BPE(byte_alphabet(), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
