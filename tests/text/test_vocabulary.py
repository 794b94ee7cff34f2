"""Vocabularies from GGUF and Hugging Face files, against transformers' own."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, processors

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
    (tmp_path / "config.json").write_text('{"vocab_size": 1000, "eos_token_id": 7}')
    dummy = vocabulary.load(EngineConfig(model=str(tmp_path), load_format="dummy"))
    assert dummy.decode([65, 256, 999], True) == "A 256 999"
    assert (dummy.size, dummy.eos_ids, dummy.template) == (1000, (7,), None)
    (tmp_path / "template").write_text("a template")
    named = {"load_format": "dummy", "chat_template": str(tmp_path / "template")}
    assert vocabulary.load(EngineConfig(model=str(tmp_path), **named)).template == "a template"


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("wanted", [True, False, None])
def test_add_bos_token_has_the_last_word(tmp_path, smollm2_vocabulary, begins, wanted):
    tokenizer = Tokenizer.from_str(smollm2_vocabulary.tokenizer.to_str())
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<|im_start|>"} | ({} if wanted is None else {"add_bos_token": wanted})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    made = vocabulary.load(EngineConfig(model=str(tmp_path)))
    expected = [1] if (begins if wanted is None else wanted) else []
    assert made.encode("system", True) == [*expected, 9690]
    assert made.encode("system", False) == [9690]


def test_the_first_space_goes_where_the_decoder_takes_it(tmp_path):
    """Llama 2's does, Gemma's does not."""
    tokenizer = Tokenizer(models.BPE({"▁": 0, "a": 1}, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    for ending, text in (([], " a"), ([decoders.Strip(" ", 1, 0)], "a")):
        tokenizer.decoder = decoders.Sequence(parts + ending)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        made = vocabulary.load(EngineConfig(model=str(tmp_path)))
        assert made.decode([0, 1], True) == text == tokenizer.decode([0, 1])


def test_a_byte_level_token_of_other_characters_is_itself(tmp_path):
    tokenizer = Tokenizer(models.BPE({"a": 0, "日 x": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    made = vocabulary.load(EngineConfig(model=str(tmp_path)))
    assert made.decode([0, 1], True) == "a日 x" == tokenizer.decode([0, 1])


@pytest.mark.parametrize("content", ["", "{}", "[1]", "not json"])
def test_a_broken_tokenizer_file(tmp_path, content):
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json|decoder"):
        vocabulary.load(EngineConfig(model=str(tmp_path)))
