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

from tokenizers import Tokenizer, processors

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
    strips_first_space: bool  # sentencepiece puts a space before a text, which is not part of it
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
        vocab = _from_gguf(source)
    elif (file := source / "tokenizer.json" if source.is_dir() else source).exists():
        vocab = _from_json(file)
    elif config.load_format == "dummy":
        vocab = _dummy(source)
    else:
        raise ModelError(f"{source} has no tokenizer.json; name one with --tokenizer")
    if config.chat_template is not None:
        vocab.template = _read(Path(config.chat_template))
    return vocab


def _from_gguf(path: Path) -> Vocabulary:
    made = gguf_tokenizer.load(path)
    special, token_bytes, strips = _token_bytes(made.tokenizer, str(path))
    return Vocabulary(
        made.tokenizer,
        token_bytes,
        special,
        made.eos_ids,
        strips,
        made.template,
        made.template_tokens,
    )


def _from_json(path: Path) -> Vocabulary:
    """From a tokenizer.json and what lies beside it."""
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises nothing more specific
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    settings = _json(path.parent / "tokenizer_config.json")
    tokens = _named_tokens(path.parent, settings)
    _apply_bos(tokenizer, settings.get("add_bos_token"), tokens.get("bos_token"))
    special, token_bytes, strips = _token_bytes(tokenizer, str(path))
    eos_ids = _eos_ids(path.parent, tokenizer, tokens)
    template = _template(path.parent, settings)
    return Vocabulary(tokenizer, token_bytes, special, eos_ids, strips, template, tokens)


def _dummy(folder: Path) -> Vocabulary:
    """For random weights without a tokenizer: the first 256 ids are bytes, the others show their
    number, so that every token of a benchmark makes text."""
    size = _json(folder / "config.json").get("vocab_size")
    numbers = range(256, size) if isinstance(size, int) else ()
    tokenizer = gguf_tokenizer.bytes_only()
    special, token_bytes, _ = _token_bytes(tokenizer, str(folder))
    token_bytes += [f" {number}".encode() for number in numbers]
    return Vocabulary(tokenizer, token_bytes, special, _config_eos(folder), False)


def _is_gguf(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"


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
            known = all(character in alphabet for character in token)
            table[index] = bytes(alphabet[c] for c in token) if known else token.encode()
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
    return special, table, _strips_first_space(decoder)


def _strips_first_space(decoder: dict[str, Any]) -> bool:
    """Whether this decoder, or a part of it, takes a space from a text's beginning."""
    match decoder:
        case {"type": "Sequence", "decoders": parts}:
            return any(_strips_first_space(part) for part in parts)
        case {"type": "Metaspace"}:
            return str(decoder.get("prepend_scheme")) != "never"
        case {"type": "Strip", "content": " ", "start": 1}:
            return True
    return False


def _apply_bos(tokenizer: Tokenizer, wanted: bool | None, bos: str | None) -> None:
    """tokenizer_config.json's add_bos_token has the last word, as in transformers."""
    index = tokenizer.token_to_id(bos) if bos is not None else None
    if wanted is None or bos is None or index is None:
        return
    begins = index in tokenizer.encode("").ids
    if wanted and not begins:
        gguf_tokenizer.begin_with(tokenizer, bos)
    elif begins and not wanted:
        tokenizer.post_processor = processors.Sequence([])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot read the chat template: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        made = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot read it as JSON: {error}") from None
    return made if isinstance(made, dict) else {}


def _named_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by their part, such as bos_token."""
    tokens = {}
    for key, value in (_json(folder / "special_tokens_map.json") | settings).items():
        if key.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                tokens[key] = text
    return tokens


def _template(folder: Path, settings: dict[str, Any]) -> str | None:
    """The chat template: a file of its own, or in tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read(file)
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict)]
        named = {entry.get("name"): entry.get("template") for entry in entries}
        template = named.get("default")
    return template if isinstance(template, str) else None


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
