"""From token ids to text as they come: whole characters, stop texts cut off, and nothing told that is taken back."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream

from hybrid.prompts.detokenizer import Detokenizer, StopMatch, StopTexts
from support.checkpoints import SPECIAL
from support.lines import counted_lines

LETTERS = "aéö日本🙂 \nb"
"""Of one to four bytes each. The tokenizer has a token for every byte, and few for more."""

texts = st.text(st.sampled_from(LETTERS), max_size=30)
any_ids = st.lists(st.integers(0, 299), max_size=30)


def told(tokenizer: Any, ids: list[int], stop: tuple[str, ...] = ()) -> tuple[Detokenizer, list[str]]:
    """Run a stream up to its stop or its end. Returns it, and what became certain with each token and at the end."""
    stream, pieces, before = Detokenizer(tokenizer, stop), [], ""
    for token in ids:
        stopped = stream.append(token)
        assert stream.text.startswith(before)  # what was told stays
        pieces.append(stream.text[len(before) :])
        before = stream.text
        assert stopped == stream.stopped
        if stopped:
            break
    stream.finish()
    assert stream.text.startswith(before)
    return stream, [*pieces, stream.text[len(before) :]]


@given(ids=any_ids)
def test_pieces_of_any_tokens_together_are_what_the_tokenizer_decodes(ids: list[int], tokenizer: Any) -> None:
    """Among them bytes that are no text at all, and special tokens, which are left out."""
    stream, pieces = told(tokenizer, ids)
    assert "".join(pieces) == stream.text == tokenizer.decode(ids, skip_special_tokens=True)
    assert not stream.stopped


@given(ids=st.lists(st.sampled_from(range(300)), min_size=60, max_size=120), data=st.data())
@settings(max_examples=50)
def test_long_runs_of_bytes_that_are_no_character_are_what_the_tokenizer_decodes(
    ids: list[int], data: Any, tokenizer: Any
) -> None:
    run = tokenizer("日").input_ids[data.draw(st.integers(0, 2))]
    at, count = data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, 100))
    ids[at:at] = [run] * count
    stream, pieces = told(tokenizer, ids)
    assert "".join(pieces) == stream.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_bytes_that_are_no_character_cost_the_same_however_many_there_are(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder decodes all bytes that wait for a character with every token: 3 ms per token at 8,000."""
    decoded: list[int] = []

    class Counted:
        def __init__(self, **options: Any) -> None:
            self.stream, self.num_waiting = DecodeStream(**options), 0

        def step(self, backend: Any, token: int) -> str | None:
            self.num_waiting += 1
            decoded.append(self.num_waiting)
            piece = self.stream.step(backend, token)
            self.num_waiting = 0 if piece else self.num_waiting
            return piece

    monkeypatch.setattr("hybrid.prompts.detokenizer.DecodeStream", Counted)
    token, stream = tokenizer("日").input_ids[1], Detokenizer(tokenizer)
    for _ in range(4000):
        stream.append(token)
    assert len(stream.text) > 3900
    assert max(decoded) <= 40
    assert len(decoded) < 2 * 4000


@given(text=texts)
def test_a_text_comes_back_in_whole_characters(text: str, tokenizer: Any) -> None:
    _, pieces = told(tokenizer, tokenizer(text).input_ids)
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)


def test_the_bytes_of_a_character_are_told_when_it_is_whole(tokenizer: Any) -> None:
    ids = tokenizer("bîb").input_ids
    assert len(ids) == 4
    _, pieces = told(tokenizer, ids)
    assert pieces == ["b", "", "î", "b", ""]


def test_a_character_that_stays_incomplete_is_told_at_the_end(tokenizer: Any) -> None:
    ids = tokenizer("b日").input_ids[:-1]
    stream, pieces = told(tokenizer, ids)
    assert "".join(pieces[:-1]) == "b"
    assert stream.text == tokenizer.decode(ids) == "b\ufffd"


def test_special_tokens_are_no_text(tokenizer: Any) -> None:
    special = tokenizer.convert_tokens_to_ids(SPECIAL)
    stream, _ = told(
        tokenizer, [special[0], *tokenizer("ab").input_ids, special[1], *tokenizer("é").input_ids, special[2]]
    )
    assert stream.text == "abé"


# Stop texts


@given(text=texts, stop=st.text(st.sampled_from(LETTERS), min_size=1, max_size=4))
@settings(max_examples=300)
def test_an_answer_ends_before_the_first_place_of_its_stop_text(text: str, stop: str, tokenizer: Any) -> None:
    stream, pieces = told(tokenizer, tokenizer(text).input_ids, (stop,))
    assert stream.stopped == (stop in text)
    assert "".join(pieces) == stream.text == text.split(stop)[0]


@given(text=texts, stops=st.lists(st.text(st.sampled_from(LETTERS), min_size=1, max_size=4), max_size=4).map(tuple))
@example(text="\naé", stops=("a", "\naé"))  # a token may hold a letter and a part of the next
@settings(max_examples=300)
def test_of_several_stop_texts_the_one_that_is_complete_first_ends_the_answer(
    text: str, stops: tuple[str, ...], tokenizer: Any
) -> None:
    ids = tokenizer(text).input_ids
    stream, _ = told(tokenizer, ids, stops)
    whole = [text[:count] for count in range(len(text) + 1)]  # however tokens cut it
    seen = next((seen for seen in whole if any(stop in seen for stop in stops)), None)
    assert stream.stopped == (seen is not None)
    expected = text if seen is None else seen[: min(seen.find(stop) for stop in stops if stop in seen)]
    assert stream.text == expected


@given(text=texts, stop=st.text(st.sampled_from(LETTERS), min_size=1, max_size=4))
@settings(max_examples=300)
def test_the_tokens_kept_are_those_whose_text_lies_before_the_stop(text: str, stop: str, tokenizer: Any) -> None:
    """A byte of a character that the stop text begins with is not kept, though nothing was told of it."""
    ids = tokenizer(text + stop).input_ids
    stream, _ = told(tokenizer, ids, (stop,))
    assert stream.stopped
    kept = tokenizer.decode(ids[: stream.num_kept])
    assert stream.text.startswith(kept)
    assert not any(
        stream.text.startswith(tokenizer.decode(ids[:more])) for more in range(stream.num_kept + 1, len(ids))
    )


def test_text_that_may_become_a_stop_text_is_held_back_and_told_when_it_does_not(tokenizer: Any) -> None:
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "abab-x"]
    stream = Detokenizer(tokenizer, ("abc", "b-y"))
    shown = []
    for token in ids:
        stream.append(token)
        shown.append(stream.text)
    assert shown == ["", "", "ab", "ab", "aba", "abab-x"]
    stream.finish()
    assert stream.text == "abab-x"


def test_what_is_held_back_at_the_end_is_told_then(tokenizer: Any) -> None:
    stream = Detokenizer(tokenizer, ("abc",))
    for letter in "xab":
        stream.append(tokenizer.convert_tokens_to_ids(letter))
    assert stream.text == "x"
    stream.finish()
    assert stream.text == "xab"
    assert not stream.stopped


def test_a_stop_text_within_one_token_cuts_that_token(tokenizer: Any) -> None:
    ids = tokenizer(" the letter").input_ids
    assert tokenizer.decode(ids[:1]) == " the"
    stream, _ = told(tokenizer, ids, ("he",))
    assert stream.text == " t"
    assert stream.num_kept == 0


def test_a_stop_text_may_span_many_tokens(tokenizer: Any) -> None:
    text = "a日本🙂b"
    ids = tokenizer("xy" + text + " and more").input_ids
    stream, pieces = told(tokenizer, ids, (text,))
    assert stream.stopped
    assert "".join(pieces) == tokenizer.decode(ids[: stream.num_kept]) == "xy"


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
    assert StopTexts(("b", "aab", "ab")).find("caab", 0)[1] == StopMatch(1, 4, "aab")


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


@given(data=st.data())
def test_stop_texts_are_searched_among_the_names_of_control_tokens_too(data: Any, tokenizer: Any) -> None:
    """The text is what stands before the first stop text in the answer with all names, without those names."""
    ids = [
        token
        for word in data.draw(st.lists(st.sampled_from([*SPECIAL, "a", "user\n", "日", "b"]), max_size=12))
        for token in tokenizer(word, add_special_tokens=False).input_ids
    ]
    stop = tuple(data.draw(st.lists(st.sampled_from([*SPECIAL, f"{SPECIAL[1]}user", "ab", "|>", f"a{SPECIAL[0]}b"]))))
    stream, pieces = told(tokenizer, ids, stop)
    whole = tokenizer.decode(ids)
    places = [(whole.find(text) + len(text), -len(text)) for text in stop if text in whole]
    assert stream.stopped == bool(places)
    before = whole[: sum(min(places))] if places else whole
    for name in SPECIAL:
        before = before.replace(name, "")
    if not (places and any(before.endswith(name[:size]) for name in SPECIAL for size in range(1, len(name)))):
        assert "".join(pieces) == stream.text == before
    shown = Detokenizer(tokenizer, stop, skip_special_tokens=False)
    shown_stops = [shown.append(token) for token in ids[: len(pieces) - 1]]
    assert any(shown_stops) == stream.stopped
    shown.finish()
    assert shown.text == (whole[: sum(min(places))] if places else whole)
