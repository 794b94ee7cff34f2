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
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What `tokenizer.ggml.pre` may be.
_SPLITS = {"qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "tekken": _TEKKEN}
_SPLITS |= dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3)
_GPT2 = ("gpt-2", "default", "phi-2")
_GPT2_BY_DIGIT = ("smollm", "starcoder", "refact")
# These take a word that is a token whole, and begin a text with BOS unless the file says otherwise.
_TIKTOKEN = ("llama-bpe", "llama3", "llama-v3", "tekken")
# Special tokens that end a turn. Not every file names its own as eos or eot.
_TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
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
    try:
        return _build(path, metadata)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers package raises nothing more specific
        raise ModelError(
            f"{path}: the tokenizer's metadata makes no sense ({type(error).__name__}: {error}); "
            "fetch the file again, or name a tokenizer.json with --tokenizer"
        ) from None


def _build(path: Path, metadata: dict[str, Any]) -> GGUFTokenizer:
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
    by_default = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _TIKTOKEN
    if metadata.get("tokenizer.ggml.add_bos_token", by_default) and "bos_token" in named:
        begin_with(tokenizer, named["bos_token"])
    template: str | None = metadata.get("tokenizer.chat_template")
    eos = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos += [tokenizer.token_to_id(text) for text in _TURN_ENDS if text in (template or "")]
    eos_ids = tuple(dict.fromkeys(int(index) for index in eos if index is not None))
    return GGUFTokenizer(tokenizer, eos_ids, template, named)


_NAMED = ("bos", "eos", "unk", "pad")


def begin_with(tokenizer: Tokenizer, bos: str) -> None:
    """Make `bos` the first token of whatever is encoded with special tokens."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A",
        pair=f"{bos} $A {bos} $B",
        special_tokens=[(bos, tokenizer.token_to_id(bos))],
    )


def _byte_level(tokens: list[str], metadata: dict[str, Any], path: Path) -> Tokenizer:
    """BPE over bytes (GPT-2), split first as the model was trained."""
    merges = [tuple(m.split(" ", 1)) for m in metadata.get("tokenizer.ggml.merges") or []]
    pre = str(metadata.get("tokenizer.ggml.pre", "default"))
    known = set(tokens)
    pairs = [(m[0], m[1]) for m in merges if len(m) == 2 and m[0] + m[1] in known]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    model = models.BPE(vocabulary, pairs, ignore_merges=pre in _TIKTOKEN)
    tokenizer = Tokenizer(model)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _GPT2_BY_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    elif pre in _GPT2:
        tokenizer.pre_tokenizer = byte_level
    elif pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, plain])
        if _SPLITS[pre] is _QWEN2:
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
    back: list[decoders.Decoder] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback()]
    back.append(decoders.Fuse())
    if metadata.get("tokenizer.ggml.add_space_prefix", True):
        steps.insert(0, normalizers.Prepend(_SPACE))
        back.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(back)
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
