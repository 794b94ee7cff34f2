"""The tokenizer's answers, and templates that misbehave."""

from __future__ import annotations

import dataclasses

import pytest

from tidemill.text.chat import ChatError, ChatTemplate
from tidemill.text.tokenizer import TokenizerService
from tidemill.wire.errors import ModelError
from tidemill.wire.messages import (
    DetokenizeIds,
    TokenizeChat,
    TokenizeText,
    bytes_to_ids,
    ids_to_bytes,
)

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def service(vocab, template=CHATML):
    return TokenizerService(dataclasses.replace(vocab, template=template))


def chat(messages, **more):
    return TokenizeChat(call=1, worker=0, messages=messages, **more)


USER = {"role": "user", "content": "hi"}


def test_text_round_trip(byte_level):
    made = service(byte_level).handle(
        TokenizeText(call=5, worker=0, texts=["the END", ""], want_strings=True)
    )
    assert made.call == 5
    assert made.eos_ids == byte_level.eos_ids
    assert "".join(made.strings[0]) == "the END"
    assert made.prompts[1] == b""
    back = service(byte_level).handle(DetokenizeIds(call=6, worker=0, ids=made.prompts[0]))
    assert back.text == "the END"


def test_chat_is_rendered_with_special_tokens(byte_level):
    made = service(byte_level).handle(chat([USER]))
    ids = bytes_to_ids(made.prompts[0]).tolist()
    assert byte_level.eos_ids[0] in ids
    assert byte_level.decode(ids, False) == "<user>hi<eos><assistant>"


def test_content_parts_are_joined(byte_level):
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    made = service(byte_level).handle(chat([USER | {"content": parts}]))
    assert byte_level.decode(bytes_to_ids(made.prompts[0]).tolist(), False).startswith("<user>hi<")


def test_content_parts_stay_parts_where_the_template_loops_over_them(byte_level):
    template = (
        "{% for m in messages %}{% if m['content'] is string %}[{{ m['content'] }}]{% else %}"
        "{% for part in m['content'] %}({{ part['text'] }}){% endfor %}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    made = service(byte_level, template).handle(chat([USER, USER | {"content": parts}]))
    assert byte_level.decode(bytes_to_ids(made.prompts[0]).tolist(), False) == "[hi](h)(i)"


def test_what_transformers_gives_a_template_is_there():
    template = ChatTemplate(
        "{% generation %}{{ bos_token }}{% endgeneration %}{{ messages | tojson(indent=1) }}"
        "{{ tools is none }}{{ documents is none }}{{ thinking }}{{ strftime_now('%%') }}",
        {"bos_token": "<s>"},
    )
    text = template.render([USER], None, True, False, {"thinking": "no"})
    assert text == '<s>[\n {\n  "role": "user",\n  "content": "hi"\n }\n]TrueTrueno%'


def test_developer_becomes_system_unless_the_template_knows_it(byte_level):
    message = {"role": "developer", "content": "x"}
    made = service(byte_level).handle(chat([message]))
    assert b"system" in bytes(bytes_to_ids(made.prompts[0]).astype("u1"))
    template = ChatTemplate("{# developer #}{{ messages[0].role }}", {})
    assert template.render([message], None, True, False, {}) == "developer"


def test_continue_final_message_leaves_it_open(byte_level):
    messages = [USER, {"role": "assistant", "content": "The"}]
    call = chat(messages, add_generation_prompt=False, continue_final_message=True)
    made = service(byte_level).handle(call)
    text = byte_level.decode(bytes_to_ids(made.prompts[0]).tolist(), False)
    assert text == "<user>hi<eos><assistant>The"


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (chat([{"role": "pirate", "content": "arr"}]), "messages[0].role"),
        (chat(["hi"]), "messages[0]"),
        (chat([USER, USER | {"content": 3}]), "messages[1].content"),
        (chat([USER | {"content": [{"type": "image_url"}]}]), "messages[0].content"),
        (chat([USER | {"content": ["hi"]}]), "messages[0].content"),
        (chat([USER], template_kwargs={"messages": []}), "chat_template_kwargs"),
        (chat([USER], continue_final_message=True), "continue_final_message"),
        (TokenizeText(call=1, worker=0, texts=["\ud800"]), "prompt"),
        (DetokenizeIds(call=1, worker=0, ids=ids_to_bytes([10**6])), "tokens"),
        (DetokenizeIds(call=1, worker=0, ids=ids_to_bytes([-1])), "tokens"),
    ],
)
def test_bad_calls_name_the_field(byte_level, call, param):
    error = service(byte_level).handle(call).error
    assert error.status == 400
    assert error.param == param


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('only two turns') }}",
        "{{ undefined_function() }}",
        "{{ messages[99].content.x.y }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_fails_is_a_400_and_no_more(byte_level, template):
    made = service(byte_level, template)
    error = made.handle(chat([USER])).error
    assert error.status == 400
    assert "template" in error.message
    assert made.handle(TokenizeText(call=2, worker=0, texts=["fine"])).error is None


def test_no_template_says_so(byte_level):
    error = service(byte_level, None).handle(chat([USER])).error
    assert error.status == 400
    assert "--chat-template" in error.message


def test_a_template_that_is_not_jinja():
    with pytest.raises(ModelError, match="Jinja"):
        ChatTemplate("{% if %}", {})


def test_chat_error_names_the_message():
    with pytest.raises(ChatError, match="pirate"):
        ChatTemplate(CHATML, {}).render([USER, {"role": "pirate"}], None, True, False, {})
