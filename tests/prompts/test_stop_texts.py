"""Stop texts are searched for in linear time, however many there are and however long they are."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid.prompts.detokenizer import Detokenizer, StopMatch, StopTexts
from support.lines import counted_lines

short = st.text(st.sampled_from("ab"), min_size=1, max_size=5)


@given(texts=st.lists(short, max_size=5).map(tuple), text=st.text(st.sampled_from("abc"), max_size=40), cuts=st.data())
def test_the_text_whose_last_character_comes_first_is_found_however_the_text_is_cut(
    texts: tuple[str, ...], text: str, cuts: Any
) -> None:
    expected = min(
        ((at + len(stop), at) for stop in texts if (at := text.find(stop)) >= 0),
        default=None,
    )
    automaton = StopTexts(texts)
    places = sorted({0, len(text), *cuts.draw(st.lists(st.integers(0, len(text)), max_size=5))})
    state = 0
    for start, end in pairwise(places):
        state, found = automaton.find(text[start:end], state)
        if found is not None:
            assert (start + found.end, start + found.start) == expected
            return
        seen = text[:end]
        held = max((n for stop in texts for n in range(1, len(stop)) if seen.endswith(stop[:n])), default=0)
        assert automaton.num_held(state) == held
    assert expected is None


def test_of_texts_that_end_together_the_longest_is_found() -> None:
    assert StopTexts(("b", "aab", "ab")).find("caab", 0)[1] == StopMatch(1, 4)


def lines_of(tokenizer: Any, stop: tuple[str, ...], count: int) -> int:
    """The lines of an answer of many equal tokens."""
    token, stream = tokenizer.convert_tokens_to_ids("a"), Detokenizer(tokenizer, stop)
    with counted_lines() as lines:
        for _ in range(count):
            assert not stream.append(token)
    return lines.count


@pytest.mark.parametrize(
    "stop",
    [
        ("a" * 16000 + "b",),
        tuple("a" * length + "b" for length in range(1, 170)),
        tuple(f"{'ab' * 30}{number}" for number in range(256)),
    ],
    ids=["one long text", "many that begin alike", "256 texts"],
)
def test_an_answer_takes_no_longer_with_the_longest_stop_texts(stop: tuple[str, ...], tokenizer: Any) -> None:
    """The search that began anew with every token took a second for four tokens and 200,000 characters."""
    short = lines_of(tokenizer, ("b",), 2000)
    assert lines_of(tokenizer, stop, 2000) <= 1.5 * short
