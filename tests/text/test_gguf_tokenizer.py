"""Tokenizers built from GGUF metadata alone, on small files written here."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.config import EngineConfig
from tidemill.text import gguf_tokenizer, vocabulary
from tidemill.text.gguf_tokenizer import byte_alphabet
from tidemill.wire.errors import ModelError

NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6
SCORED = {"▁t": -1.0, "he": -2.0, "▁the": -3.0, "th": -4.0, "▁c": -5.0, "at": -6.0, "▁cat": -7.0}


def write(path, model, tokens, types, **fields):
    """A GGUF file that holds a tokenizer and nothing else."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def sentencepiece_file(path, **fields):
    tokens = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    tokens |= {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    tokens |= dict.fromkeys(["▁", *"thecaéb日", *SCORED], NORMAL)
    scores = [SCORED.get(token, -100.0) for token in tokens]
    fields = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2} | fields
    return write(path, "llama", list(tokens), list(tokens.values()), **fields)


def byte_level_file(path, pre, **fields):
    tokens = [*byte_alphabet(), "AB", "<|begin|>", "<|eot_id|>"]
    types = [NORMAL] * 257 + [CONTROL] * 2
    fields = {"token_merges": ["A B"], "bos_token_id": 257} | fields
    return write(path, "gpt2", tokens, types, tokenizer_pre=pre, **fields)


def load(path):
    return vocabulary.load(EngineConfig(model=str(path)))


def naive_sentencepiece(text, index):
    """Merge the best-scored neighbours until none can be; what is no token falls into bytes."""
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(SCORED.get(a + b), -at) for at, (a, b) in enumerate(pairwise(pieces))]
        best = max((pair for pair in pairs if pair[0] is not None), default=None)
        if best is None:
            break
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids = []
    for piece in pieces:
        spelled = [f"<0x{byte:02X}>" for byte in piece.encode()]
        ids += [index[piece]] if piece in index else [index[byte] for byte in spelled]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return load(sentencepiece_file(tmp_path_factory.mktemp("gguf") / "model.gguf"))


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet="the catéb日🎉\n", max_size=30))
def test_sentencepiece_against_a_naive_one(sentencepiece, text):
    ids = sentencepiece.encode(text, add_special_tokens=False)
    assert ids == (naive_sentencepiece(text, sentencepiece.tokenizer.get_vocab()) if text else [])
    assert sentencepiece.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_specials(sentencepiece):
    ids = sentencepiece.encode("the", add_special_tokens=True)
    assert ids[0] == 1
    assert sentencepiece.decode(ids, skip_special_tokens=True) == "the"
    assert sentencepiece.decode(ids, skip_special_tokens=False) == "<s> the"
    assert sentencepiece.eos_ids == (2,)
    assert sentencepiece.special == {0, 1, 2}


def test_sentencepiece_without_a_space_in_front(tmp_path):
    vocab = load(sentencepiece_file(tmp_path / "model.gguf", add_space_prefix=False))
    for text in ("the cat", " the", "  "):
        assert vocab.decode(vocab.encode(text, False), True) == text
    assert vocab.encode("t", False) == [vocab.tokenizer.token_to_id("t")]


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["DON", "'", "T", " x", "12345", "  ", " Ab", "\n"]),
        ("smollm", ["DON", "'", "T", " x", *"12345", "  ", " Ab", "\n"]),
        ("llama-bpe", ["DON", "'T", " x", "123", "45", "  ", " Ab", "\n"]),
        ("qwen2", ["DON", "'T", " x", *"12345", "  ", " Ab", "\n"]),
        ("tekken", ["DON", "'T", " x", *"12345", "  ", " Ab", "\n"]),
    ],
)
def test_pre_tokenizers_split_as_the_model_was_trained(tmp_path, pre, words):
    made = gguf_tokenizer.load(byte_level_file(tmp_path / "model.gguf", pre))
    split = made.tokenizer.pre_tokenizer.pre_tokenize_str("DON'T x12345   Ab\n")
    alphabet = byte_alphabet()
    assert [bytes(alphabet[c] for c in word).decode() for word, _ in split] == words


@pytest.mark.parametrize(
    ("pre", "fields", "begins"),
    [
        ("llama-bpe", {}, True),
        ("tekken", {}, True),
        ("smollm", {}, False),
        ("llama-bpe", {"add_bos_token": False}, False),
        ("smollm", {"add_bos_token": True}, True),
    ],
)
def test_bos(tmp_path, pre, fields, begins):
    vocab = load(byte_level_file(tmp_path / "model.gguf", pre, **fields))
    assert vocab.encode("AB", add_special_tokens=True) == [257] * begins + [256]
    assert vocab.encode("AB", add_special_tokens=False) == [256]


def test_a_turn_ends_where_the_template_ends_it(tmp_path):
    """Not every Llama 3 file names its eot token."""
    template = "{{ messages[0].content }}<|eot_id|>"
    fields = {"eos_token_id": 257, "chat_template": template}
    assert load(byte_level_file(tmp_path / "a.gguf", "llama-bpe", **fields)).eos_ids == (257, 258)
    del fields["chat_template"]
    assert load(byte_level_file(tmp_path / "b.gguf", "llama-bpe", **fields)).eos_ids == (257,)


def test_unknown_kinds_are_named(tmp_path):
    with pytest.raises(ModelError, match="'strange'"):
        load(byte_level_file(tmp_path / "pre.gguf", "strange"))
    with pytest.raises(ModelError, match="'rwkv'"):
        load(write(tmp_path / "model.gguf", "rwkv", ["a"], [NORMAL]))
    with pytest.raises(ModelError, match="scores"):
        load(write(tmp_path / "scores.gguf", "llama", ["a"], [NORMAL]))


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_broken_file_is_a_model_error(tmp_path, data):
    """Cut anywhere, or with any byte changed: it loads, or the error is the one
    that a user is shown."""
    whole = byte_level_file(tmp_path / "model.gguf", "llama-bpe").read_bytes()
    broken = bytearray(whole)
    if data.draw(st.booleans()):
        broken = broken[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        broken[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "broken.gguf").write_bytes(broken)
    with contextlib.suppress(ModelError):
        load(tmp_path / "broken.gguf")
