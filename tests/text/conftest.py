"""Small vocabularies of both kinds, built here."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tidemill.text.gguf_tokenizer import byte_alphabet
from tidemill.text.vocabulary import Vocabulary, _token_bytes


def _vocabulary(tokenizer: Tokenizer, eos: int) -> Vocabulary:
    special, table, strips = _token_bytes(tokenizer, "test")
    return Vocabulary(tokenizer, table, special, (eos,), strips)


@pytest.fixture(scope="session")
def byte_level() -> Vocabulary:
    """Byte-level BPE with a few merges, some of which split characters, and two specials."""
    alphabet = byte_alphabet()
    stand_in = {byte: character for character, byte in alphabet.items()}
    pieces = [b"th", b"the", b" the", "é".encode(), "🎉".encode()[:2], "🎉".encode()[2:], b"END"]
    pieces += ["日".encode()[:1] + b"x", "日本".encode()[:4]]
    vocabulary = dict(alphabet)
    for piece in pieces:
        vocabulary["".join(stand_in[byte] for byte in piece)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return _vocabulary(tokenizer, len(vocabulary))


@pytest.fixture(scope="session")
def sentencepiece() -> Vocabulary:
    """Sentencepiece-like: spaces as ▁, bytes as <0xNN> where no token fits."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", "▁the", "the", "cat", "▁日本", "é", "▁▁", "\n"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return _vocabulary(tokenizer, 2)
