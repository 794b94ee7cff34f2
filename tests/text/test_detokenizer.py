"""The text of any chunking is the one-shot text; stop strings never leak; a resume from what was
delivered continues it exactly."""

from __future__ import annotations

import codecs
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.text.detokenizer import Detokenizer
from tidemill.wire.messages import (
    ErrorInfo,
    RequestEnd,
    RequestStart,
    TextDelta,
    TokenBatch,
    TokenLogprobs,
    bytes_to_ids,
    ids_to_bytes,
)
from tidemill.wire.sampling import SamplingParams

RID = 7


def start(params=None, output=(), prompt=(65,), attempt=0, **more):
    return RequestStart(
        rid=RID,
        worker=1,
        attempt=attempt,
        prompt_ids=ids_to_bytes(list(prompt)),
        output_ids=ids_to_bytes(list(output)),
        cached_tokens=3,
        params=params or SamplingParams(),
        **more,
    )


def batch(tokens=(), starts=(), end=None, **more):
    return TokenBatch(
        rids=np.full(len(tokens), RID, dtype="<i8").tobytes(),
        tokens=ids_to_bytes(list(tokens)),
        starts=list(starts),
        ends=[end] if end is not None else [],
        **more,
    )


def run(vocab, chunks, params=None, end=None, **more) -> tuple[list[TextDelta], list]:
    """Feed chunks of tokens, the end with the last; returns all deltas and Stopped messages."""
    made, stopped = [], []
    detokenizer = Detokenizer(vocab)
    end = end or RequestEnd(rid=RID, reason="length")
    for number, chunk in enumerate(chunks):
        texts, stops = detokenizer.handle(
            batch(
                chunk,
                starts=[start(params, **more)] if number == 0 else [],
                end=end if number == len(chunks) - 1 else None,
            )
        )
        stopped += stops
        for worker, text in texts.items():
            assert worker == 1
            made += text.deltas
    assert not detokenizer._requests, "state is left behind"
    return made, stopped


def chunked(data, tokens):
    chunks, at = [], 0
    while at < len(tokens):
        size = data.draw(st.integers(1, 4))
        chunks.append(tokens[at : at + size])
        at += size
    return chunks or [[]]


def ids_of(vocab):
    return st.lists(st.integers(0, vocab.size - 1), max_size=40)


@pytest.mark.parametrize("kind", ["byte_level", "sentencepiece"])
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_chunking_gives_the_one_shot_text(kind, skip, data, request):
    vocab = request.getfixturevalue(kind)
    tokens = data.draw(ids_of(vocab))
    deltas, _ = run(vocab, chunked(data, tokens), SamplingParams(skip_special_tokens=skip))
    # A continuation keeps its first space, so the reference decodes with a token before it.
    anchor = vocab.token_bytes.index(b"A") if b"A" in vocab.token_bytes else 3 + 65
    expected = vocab.decode([anchor, *tokens], skip).removeprefix("A")
    assert "".join(delta.text for delta in deltas) == expected
    assert [delta.finish for delta in deltas].count("length") == 1
    assert deltas[-1].finish == "length"
    assert deltas[-1].generated == len(tokens)
    got = [i for delta in deltas for i in bytes_to_ids(delta.ids)]
    assert got == tokens
    at = 0
    for delta in deltas:
        assert delta.offset == at
        at += len(delta.text)


def test_the_package_decodes_alike(byte_level, sentencepiece):
    """Our byte tables against the tokenizers package's own decoder, on valid text."""
    for vocab in (byte_level, sentencepiece):
        texts = ["the cat", "日本 é", "a\n\nb", "🎉🎉 the"]
        for text in texts:
            ids = vocab.tokenizer.encode(
                text.replace(" ", "▁") if vocab.strips_first_space else text
            ).ids
            assert vocab.decode(ids, True) == vocab.tokenizer.decode(ids, skip_special_tokens=True)


def test_half_a_character_is_held_back(byte_level):
    emoji = list("🎉".encode())
    deltas, _ = run(byte_level, [[b] for b in emoji] + [[65]])
    assert [delta.text for delta in deltas] == ["🎉", "A"]
    assert list(bytes_to_ids(deltas[0].ids)) == emoji


def test_an_unfinished_character_is_replaced_at_the_end(byte_level):
    deltas, _ = run(byte_level, [[65, 0xF0]])
    assert deltas[-1].text == "A\ufffd"


STOPS = ["the", "EN", "END", "EE", " t", "xx", "é", "xéx", "the the"]


def texts_of(vocab):
    """Tokens that make stop strings likely, across tokens and within them; a few of all kinds."""
    known = {raw: token for token, raw in enumerate(vocab.token_bytes)}
    pieces = [b"t", b"h", b"e", b"E", b"N", b"D", b"x", b" ", b"th", b"the", b" the", b"END"]
    pieces += ["é".encode(), *(bytes([byte]) for byte in "é🎉".encode())]
    likely = st.sampled_from([known[piece] for piece in pieces])
    word = st.sampled_from(STOPS).map(lambda stop: list(stop.encode()))  # ids 0 … 255 are bytes
    token = st.one_of(likely, likely, st.integers(0, vocab.size - 1)).map(lambda one: [one])
    return st.lists(st.one_of(token, word), max_size=16).map(
        lambda some: list(itertools.chain.from_iterable(some))
    )


def stops():
    return st.lists(st.sampled_from(STOPS), min_size=1, max_size=3, unique=True).map(tuple)


def so_far(vocab, tokens):
    """The text of tokens that others may follow: a begun character is not there yet."""
    raw = b"".join(vocab.token_bytes[t] for t in tokens if t not in vocab.special)
    return codecs.getincrementaldecoder("utf-8")(errors="replace").decode(raw)


def expected_stop(vocab, tokens, params):
    """Naive: after each token, does what came since `min_tokens` hold a stop string? Returns
    text, stop string and number of tokens."""
    free = len(so_far(vocab, tokens[: max(0, params.min_tokens - 1)]))
    for count in range(max(1, params.min_tokens), len(tokens) + 1):
        whole = so_far(vocab, tokens[:count])
        found = [(whole.find(s, free), -len(s), s) for s in params.stop if s in whole[free:]]
        if found:
            at, _, stop = min(found)
            return whole[: at + len(stop) * params.include_stop_str_in_output], stop, count
    return vocab.decode(tokens, True), None, len(tokens)


@settings(max_examples=500, deadline=None)
@given(data=st.data())
def test_stop_strings_against_a_naive_search(data, byte_level):
    vocab = byte_level
    tokens = data.draw(texts_of(vocab))
    params = SamplingParams(
        stop=data.draw(stops()),
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 1, 3, 10])),
    )
    deltas, stopped = run(vocab, chunked(data, tokens), params)
    text, stop, count = expected_stop(vocab, tokens, params)
    assert "".join(delta.text for delta in deltas) == text
    assert [delta.finish for delta in deltas] == [None] * (len(deltas) - 1) + [
        "length" if stop is None else "stop"
    ]
    assert [s.rid for s in stopped] == ([] if stop is None else [RID])
    assert deltas[-1].stop_reason == stop
    assert deltas[-1].generated == count


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_resume_at_every_point_gives_the_same_text(data, byte_level):
    """The process dies after each token in turn; another starts from the delivered ids."""
    vocab = byte_level
    tokens = data.draw(texts_of(vocab))
    params = SamplingParams(stop=data.draw(stops()), min_tokens=data.draw(st.integers(0, 6)))
    expected, _, count = expected_stop(vocab, tokens, params)
    for cut in range(count):
        text, delivered = live(vocab, params, tokens[:cut])
        assert vocab.decode(delivered, True) == text[: len(vocab.decode(delivered, True))]
        rest, ended = tokens[len(delivered) :], RequestEnd(rid=RID, reason="length")
        text, _ = live(vocab, params, rest, ended, delivered, text)
        assert text == expected


def live(vocab, params, tokens, end=None, resumed=(), text=""):
    """One detokenizer's life. Returns the text that the server has, and the ids delivered."""
    detokenizer, delivered = Detokenizer(vocab), list(resumed)
    batches = [batch(starts=[start(params, resumed, attempt=int(bool(text)))])]
    batches += [batch([token]) for token in tokens] + [batch(end=end)]
    for each in batches:
        for delta in (d for made in detokenizer.handle(each)[0].values() for d in made.deltas):
            assert delta.offset <= len(text)
            text += delta.text[len(text) - delta.offset :]
            delivered += bytes_to_ids(delta.ids).tolist()
    return text, delivered


@pytest.mark.parametrize("stop", [("EN", "END"), ("END", "EN"), ("ND", "END")])
def test_of_two_stop_strings_the_first_and_longest_counts(byte_level, stop):
    token = byte_level.token_bytes.index(b"END")
    deltas, _ = run(byte_level, [[65, token]], SamplingParams(stop=stop))
    assert (deltas[-1].text, deltas[-1].stop_reason) == ("A", "END")


def test_stop_token_text_is_dropped(byte_level):
    end = RequestEnd(rid=RID, reason="stop", stop_token=ord("B"))
    deltas, _ = run(byte_level, [[65], [66]], end=end)
    assert "".join(delta.text for delta in deltas) == "A"
    assert deltas[-1].stop_reason == ord("B")
    kept = SamplingParams(include_stop_str_in_output=True)
    deltas, _ = run(byte_level, [[65], [66]], kept, end=end)
    assert "".join(delta.text for delta in deltas) == "AB"


def test_tokens_after_a_stop_string_are_ignored(byte_level):
    detokenizer = Detokenizer(byte_level)
    params = SamplingParams(stop=("B",))
    texts, stopped = detokenizer.handle(batch([65, 66, 67], starts=[start(params)]))
    assert [d.text for d in texts[1].deltas] == ["A"]
    assert len(stopped) == 1
    assert detokenizer.handle(batch([68], end=RequestEnd(rid=RID, reason="length"))) == ({}, [])


def test_errors_end_a_request_with_their_reason(byte_level):
    info = ErrorInfo(status=400, message="no")
    end = RequestEnd(rid=RID, reason="error", error=info)
    deltas, _ = run(byte_level, [[65]], end=end)
    assert deltas[-1].error == info
    assert deltas[-1].finish == "error"


def test_logprobs_carry_text_and_bytes(byte_level):
    entry = TokenLogprobs(token=65, logprob=-0.5, rank=0, ids=[65, 0xF0], values=[-0.5, -2.0])
    detokenizer = Detokenizer(byte_level)
    texts, _ = detokenizer.handle(batch([65], starts=[start()], logprobs=[entry]))
    (made,) = texts[1].deltas[0].logprobs
    assert (made.token, made.bytes, made.logprob) == ("A", [65], -0.5)
    assert made.top == [("A", 65, [65], -0.5), ("\ufffd", 0xF0, [0xF0], -2.0)]


def test_echo_and_prompt_logprobs_come_with_the_first_delta(byte_level):
    entry = TokenLogprobs(token=66, logprob=-1.0, rank=0, ids=[], values=[])
    params = SamplingParams(prompt_logprobs=0)
    detokenizer = Detokenizer(byte_level)
    texts, _ = detokenizer.handle(
        batch(
            [67],
            starts=[start(params, prompt=(65, 66), want_prompt_text=True)],
            prompt_logprobs=[(RID, [entry])],
        )
    )
    (delta,) = texts[1].deltas
    assert delta.prompt_text == "AB"
    assert delta.prompt_logprobs[0] is None
    assert delta.prompt_logprobs[1].token == "B"


def test_an_aborted_request_leaves_nothing_and_says_nothing(byte_level):
    detokenizer = Detokenizer(byte_level)
    detokenizer.handle(batch([65], starts=[start()]))
    assert detokenizer.handle(batch([], end=RequestEnd(rid=RID, reason="abort"))) == ({}, [])
    assert not detokenizer._requests


def test_an_error_comes_behind_the_text_before_it(byte_level):
    params = SamplingParams(stop=("AXY",))
    end = RequestEnd(rid=RID, reason="error", error=ErrorInfo(status=500, message="no"))
    deltas, _ = run(byte_level, [[66], [65]], params, end=end)
    assert [(delta.offset, delta.text) for delta in deltas] == [(0, "B"), (1, "A")]
    assert deltas[-1].error is not None


def test_a_resumed_request_does_not_repeat_the_prompt(byte_level):
    detokenizer = Detokenizer(byte_level)
    again = start(SamplingParams(prompt_logprobs=0), output=[66], want_prompt_text=True)
    texts, _ = detokenizer.handle(batch([67], starts=[again]))
    (delta,) = texts[1].deltas
    assert (delta.offset, delta.text, delta.generated) == (1, "C", 2)
    assert delta.prompt_text is None
    assert delta.prompt_logprobs is None
