"""Vocabularies from GGUF and Hugging Face files, against transformers' own."""

from __future__ import annotations

import json

import pytest

from tidemill.config import EngineConfig
from tidemill.text import vocabulary
from tidemill.wire.errors import ModelError

TEXTS = [
    "Hello world",
    "The year 2024 had 365.25 days, or 1,234,567 hours!",
    "  indented\n\n\tdef code(x):\n        return x ** 2  # ok\r\n",
    "日本語のテキスト、中文文本，한국어",
    "🎉👩‍👩‍👧 emoji ✨",
    "<|im_start|>user\nhi<|im_end|>\n",
    "don't we'll I'm you've",
    "a" * 100,
    "     ",
    "",
    "naïve café — “quotes” … §±µ",
    "\x00\x01\x7f\u200b",
]


@pytest.fixture(scope="module")
def smollm2_vocabulary(smollm2):
    return vocabulary.load(EngineConfig(model=smollm2))


def test_gguf_encodes_as_transformers_does(smollm2, smollm2_vocabulary):
    transformers = pytest.importorskip("transformers")
    folder, _, name = smollm2.rpartition("/")
    reference = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    for text in TEXTS:
        ids = smollm2_vocabulary.encode(text, add_special_tokens=True)
        assert ids == reference.encode(text), text
        assert smollm2_vocabulary.decode(ids, skip_special_tokens=False) == text


def test_gguf_special_ids_and_template(smollm2_vocabulary):
    assert smollm2_vocabulary.eos_ids == (2,)
    assert smollm2_vocabulary.template_tokens["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in smollm2_vocabulary.template
    assert smollm2_vocabulary.size == 49152
    assert smollm2_vocabulary.decode([1, 9690, 2], skip_special_tokens=True) == "system"


def test_folder_of_a_hugging_face_model(tmp_path, smollm2_vocabulary):
    smollm2_vocabulary.tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 2]}))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"})
    )
    made = vocabulary.load(EngineConfig(model=str(tmp_path)))
    assert made.eos_ids == (5, 2)
    assert made.template == "{{ messages }}"
    for text in TEXTS:
        assert made.encode(text, True) == smollm2_vocabulary.encode(text, True)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert vocabulary.load(EngineConfig(model=str(tmp_path))).template == "file"


def test_lone_surrogates_are_an_error(smollm2_vocabulary):
    with pytest.raises(UnicodeEncodeError):
        smollm2_vocabulary.encode("a\ud800b", True)


def test_a_folder_without_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="--tokenizer"):
        vocabulary.load(EngineConfig(model=str(tmp_path)))
    dummy = vocabulary.load(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert dummy.decode(dummy.encode("bytes é", True), True) == "bytes é"


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json"])
def test_a_broken_tokenizer_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json|decoder"):
        vocabulary.load(EngineConfig(model=str(tmp_path)))
