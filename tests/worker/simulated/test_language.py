"""The invented language: reversible, chunk-independent, and readable."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinpool.worker.engines.simulated.logic import language


@given(st.text())
def test_text_survives_the_tokenizer(text):
    assert language.decode(language.encode(text)).encode("utf-8", "replace") == text.encode("utf-8", "replace")


@given(st.lists(st.integers(0, language.VOCABULARY_SIZE - 1)), st.integers(0, 20))
def test_the_state_does_not_depend_on_how_it_was_reached(ids, cut):
    head = language.advance(language.EMPTY, ids[:cut])
    assert language.advance(head, ids[cut:]) == language.advance(language.EMPTY, ids)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_an_answer_is_made_of_sentences_that_encode_to_themselves(prompt):
    content, ids = language.Content.of(prompt), []
    for _ in range(40):
        ids.append(content.next_token(may_end=False))
        content = content.after(ids[-1])
    text = language.decode(ids)
    assert language.encode(text) == ids
    assert text[0] == " "
    assert all(sentence[1].isupper() for sentence in text.split(".") if sentence)


@pytest.mark.parametrize(
    ("prompt", "asked"),
    [
        ("What is the capital of France?", True),
        ("the CAPITAL  of\nfrance", True),
        ("What is the capital of France? Paris", False),
        ("What is the capital of Spain?", False),
        ("capital of France" + "x" * 4000, False),
    ],
)
def test_only_the_open_question_for_the_capital_of_france_is_known(prompt, asked):
    opening = language.Content.of(language.encode(prompt)).opening
    assert (opening is not None) == asked


@pytest.mark.parametrize("token", [-1, language.VOCABULARY_SIZE])
def test_a_token_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match="out of vocabulary"):
        language.token_bytes(token)


def test_the_end_of_an_answer_has_no_text():
    assert language.decode([language.EOS]) == ""


@given(st.text(st.sampled_from("ab. ée"), max_size=60), st.integers(1, 10))
def test_encoding_stops_beyond_a_limit_but_not_before(text, limit):
    whole, cut = language.encode(text), language.encode(text, limit)
    if len(whole) <= limit:
        assert cut == whole
    else:
        assert cut == whole[: len(cut)]
        assert limit < len(cut)
    assert len(language.encode(text * 1000, limit)) <= 5 * (limit + 2)
