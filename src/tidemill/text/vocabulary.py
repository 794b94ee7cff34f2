"""A model's vocabulary: encoding, the bytes of each token, special ids, the chat template.

Read from a Hugging Face folder (tokenizer.json and the files beside it) or from a GGUF's own
metadata. Decoding works on bytes: every token is a fixed byte string, so text can be built
incrementally and exactly, whatever the chunks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tidemill.config import EngineConfig
from tidemill.text import gguf_tokenizer
from tidemill.wire.errors import ModelError

SPACE = "▁"  # what sentencepiece writes for a space


@dataclass(slots=True)
class Vocabulary:
    """`token_bytes[id]` is what token `id` adds to a text; `special` ids add nothing when
    special tokens are skipped."""

    tokenizer: Tokenizer
    token_bytes: list[bytes]
    special: frozenset[int]
    eos_ids: tuple[int, ...]
    strips_first_space: bool  # sentencepiece: a text's first space is not part of it
    template: str | None = None
    template_tokens: dict[str, str] = field(default_factory=dict)  # bos_token, eos_token …

    @property
    def size(self) -> int:
        return len(self.token_bytes)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Raises UnicodeEncodeError for lone surrogates."""
        text.encode()
        return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; bytes that are not UTF-8 become replacement characters.

        Raises IndexError for an id outside the vocabulary.
        """
        pieces = [
            self.token_bytes[i] for i in ids if not (skip_special_tokens and i in self.special)
        ]
        text = b"".join(pieces).decode("utf-8", errors="replace")
        return text[1:] if self.strips_first_space and text.startswith(" ") else text


def load(config: EngineConfig) -> Vocabulary:
    """The vocabulary that `config` names. Raises ModelError in one line."""
    model = Path(config.model)
    source = Path(config.tokenizer) if config.tokenizer else model
    if source.is_dir() and not (source / "tokenizer.json").exists():
        found = sorted(source.glob("*.gguf"))
        source = found[0] if len(found) == 1 else source
    if source.suffix == ".gguf" or _is_gguf(source):
        made = gguf_tokenizer.load(source)
        tokenizer, template, tokens = made.tokenizer, made.template, made.template_tokens
        eos_ids = made.eos_ids
    elif (file := source / "tokenizer.json" if source.is_dir() else source).exists():
        tokenizer = _from_file(file)
        template, tokens = _template(file.parent)
        eos_ids = _eos_ids(file.parent, tokenizer, tokens)
    elif config.load_format == "dummy":
        tokenizer, template, tokens = gguf_tokenizer.bytes_only(), None, {}
        eos_ids = _config_eos(source)
    else:
        raise ModelError(f"{source} has no tokenizer.json; name one with --tokenizer")
    if config.chat_template is not None:
        try:
            template = Path(config.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"cannot read the chat template: {error}") from None
    special, token_bytes, strips = _token_bytes(tokenizer, str(source))
    return Vocabulary(tokenizer, token_bytes, special, eos_ids, strips, template, tokens)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


def _from_file(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ModelError(f"{path}: not a tokenizer: {error}") from None


def _token_bytes(tokenizer: Tokenizer, where: str) -> tuple[frozenset[int], list[bytes], bool]:
    """Each token's bytes, by the kind of decoder. Raises ModelError for kinds without any."""
    description = json.loads(tokenizer.to_str())
    decoder = description.get("decoder") or {}
    kinds = {decoder.get("type")} | {d.get("type") for d in decoder.get("decoders", [])}
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    if "ByteLevel" in kinds:
        alphabet = gguf_tokenizer.byte_alphabet()
        for token, index in vocabulary.items():
            if index not in added:
                table[index] = bytes(alphabet[c] for c in token if c in alphabet)
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        for token, index in vocabulary.items():
            if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
                table[index] = bytes([int(token[3:5], 16)])
            else:
                table[index] = token.replace(SPACE, " ").encode()
    else:
        raise ModelError(
            f"{where}: a tokenizer with the decoder {sorted(str(k) for k in kinds)} is not "
            "supported; byte-level and sentencepiece ones are"
        )
    for index, entry in added.items():
        table[index] = entry.content.encode()
    special = frozenset(index for index, entry in added.items() if entry.special)
    return special, table, "ByteLevel" not in kinds


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read it as JSON: {error}") from None
    return made if isinstance(made, dict) else {}


def _template(folder: Path) -> tuple[str | None, dict[str, str]]:
    """The chat template and the special tokens that it may name."""
    settings = _json(folder / "tokenizer_config.json")
    tokens = {}
    for key, value in (_json(folder / "special_tokens_map.json") | settings).items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8"), tokens
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None, tokens


def _config_eos(folder: Path) -> tuple[int, ...]:
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id") if folder.is_dir() else None
        for index in value if isinstance(value, list) else [value]:
            if isinstance(index, int):
                found[index] = None
    return tuple(found)


def _eos_ids(folder: Path, tokenizer: Tokenizer, tokens: dict[str, str]) -> tuple[int, ...]:
    """All ids that end an answer: the generation configuration's, then the tokenizer's."""
    found = dict.fromkeys(_config_eos(folder))
    if (eos := tokens.get("eos_token")) and (index := tokenizer.token_to_id(eos)) is not None:
        found[index] = None
    return tuple(found)
