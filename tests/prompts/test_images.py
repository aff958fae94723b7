"""Keys of prompts with images: what tells two images apart, what is shared, and what is refused."""

import random
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.errors import PromptError
from hybrid.key import TOKEN_BYTES, Key, PagedUnits, Unit
from hybrid.prompts.images import Image, ImagePrompt, Media, PixelHash
from hybrid.tree.policies import LeastRecentlyUsed
from hybrid.tree.tree import Tree

SIZE, PAGE = 4, 8
PAD = 7
"""The placeholder."""


def ids_of(key: Key) -> list[int]:
    return memoryview(key.ids).cast("i").tolist()


def media(prompt: ImagePrompt, page_size: int = PAGE) -> Media:
    return Media.of(prompt, SIZE, page_size)


def key(prompt: ImagePrompt, page_size: int = PAGE) -> Key:
    return media(prompt, page_size).key(prompt.token_ids, "")


def values(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, SIZE, generator=torch.Generator().manual_seed(seed))


def with_image(seed: int, start: int = 3, count: int = 1, length: int = 40) -> ImagePrompt:
    return ImagePrompt([PAD] * length, [Image(start, values(seed, count))])


# What tells images apart


@pytest.mark.usefixtures("untraced")  # thousands of keys by the same lines
@pytest.mark.parametrize(("start", "count"), [(PAGE - 1, 50_000), (3, 10_000), (0, 10_000)])
def test_images_of_one_position_have_keys_of_their_own(start: int, count: int) -> None:
    """With 31 bits per position, 65,165 contents had a collision. It is in every page with a part of the image that
    keys must differ: the tree shares page by page."""
    prompt = [PAD] * PAGE
    pages = {
        PagedUnits(prompt, [Unit(start, start + 1, number.to_bytes(16, "little"))], PAGE).key(prompt).ids
        for number in range(count)
    }
    assert len(pages) == count
    words = np.frombuffer(b"".join(pages), "<i4").reshape(-1, PAGE)
    assert (words < 0).all()
    few = words[:2000]
    for place in range(PAGE):  # every id of the page holds 31 bits of hash: 248 together
        assert len(set(few[:, place].tolist())) > 1990


@given(
    start=st.integers(0, 30), count=st.integers(1, 30), page_size=st.sampled_from([8, 16, 32]), more=st.integers(0, 40)
)
def test_two_images_differ_in_every_page_that_they_reach(start: int, count: int, page_size: int, more: int) -> None:
    length = start + count + more
    one, two = (ids_of(key(with_image(seed, start, count, length), page_size)) for seed in (1, 2))
    reached = range(start // page_size, (start + count - 1) // page_size + 1)
    for at in range(length):
        if at // page_size in reached:
            assert one[at] < 0
            assert one[at] != two[at]
        else:
            assert one[at] == two[at] == PAD


@given(starts=st.lists(st.integers(0, 60), unique=True, max_size=6), prompt_len=st.integers(61, 90), data=st.data())
def test_a_key_is_the_beginning_of_the_key_of_any_longer_one(starts: list[int], prompt_len: int, data: Any) -> None:
    units = [Unit(start, start + 1, bytes([start] * 16)) for start in starts]
    prompt = data.draw(st.lists(st.integers(0, 99), min_size=prompt_len, max_size=prompt_len))
    answer = data.draw(st.lists(st.integers(0, 99), max_size=20))
    paged = PagedUnits(prompt, units, 16)
    whole = paged.key([*prompt, *answer]).ids
    for end in range(prompt_len, prompt_len + len(answer) + 1):
        assert whole.startswith(paged.key([*prompt, *answer][:end]).ids)
    again = PagedUnits([*prompt, *answer], units, 16).key([*prompt, *answer]).ids
    assert again == whole  # as the prompt of the next turn
    other = PagedUnits(prompt, units, 16).key([*prompt, *([100] * 20)]).ids
    assert other[: prompt_len * TOKEN_BYTES] == whole[: prompt_len * TOKEN_BYTES]
    assert other != whole


def test_of_two_images_the_pages_of_the_first_one_are_shared_and_those_of_another_second_one_are_not() -> None:
    prompts = [ImagePrompt([PAD] * 80, [Image(10, values(0, 20)), Image(45, values(seed, 20))]) for seed in (1, 2)]
    one, two = (ids_of(key(prompt)) for prompt in prompts)
    assert one[:40] == two[:40]
    assert not set(one[40:72]) & set(two[40:72])
    assert one[72:] == two[72:] == [PAD] * 8


def test_the_tree_keeps_a_page_for_each_image_of_one_position() -> None:
    """Inserted under one key, found under no other, in pages of their own."""
    tree = Tree(PAGE, PAGE, LeastRecentlyUsed())
    keys = [key(with_image(seed, start=PAGE - 1, length=2 * PAGE)) for seed in range(300)]
    for page, one in enumerate(keys):
        assert tree.insert(one, 2 * PAGE, [2 * page, 2 * page + 1]).num_existing == 0
    for page, one in enumerate(keys):
        match = tree.match(one, 2 * PAGE)
        assert match.num_page_tokens == 2 * PAGE
        assert list(tree.pages(match.deepest, 2 * PAGE)) == [2 * page, 2 * page + 1]


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_in_pages_too_small_for_a_hash_nothing_is_shared_from_the_first_image_on(page_size: int) -> None:
    one = key(with_image(0, start=9), page_size)
    assert one.whole(40, page_size) == 9 // page_size * page_size
    assert one.whole(8, page_size) == 8


# What identifies an image


def named(content: Any, seed: int = 0) -> Key:
    return key(ImagePrompt([PAD] * 16, [Image(2, values(seed, 3), content)]))


def test_a_name_identifies_an_image_and_its_embeddings_do_without_one() -> None:
    assert named(b"cat", 0) == named(b"cat", 1) != named(b"dog", 0)
    assert named(None, 0) == named(None, 0) != named(None, 1)


def test_names_pixels_and_embeddings_are_domains_of_their_own() -> None:
    """Whoever knows the hash of another's image cannot name his own so."""
    raw = values(0, 3).numpy().tobytes()
    names = ["a" * 32, b"a" * 32, PixelHash(b"a" * 32), raw, PixelHash(raw), None]
    assert len({named(name).ids for name in names}) == len(names)


def test_an_image_in_another_shape_or_length_is_another_one() -> None:
    positions = torch.arange(16).expand(3, -1).clone()
    positions[1:, 3:5] = 2
    flat = ImagePrompt([PAD] * 16, [Image(2, values(0, 3), b"x")])
    shaped = ImagePrompt([PAD] * 16, [Image(2, values(0, 3), b"x")], positions)
    longer = ImagePrompt([PAD] * 16, [Image(2, values(0, 4), b"x")])
    assert len({key(prompt).ids for prompt in (flat, shaped, longer)}) == 3


def text_at(positions: torch.Tensor, length: int = 24) -> list[int]:
    return ids_of(key(ImagePrompt(list(range(length)), [], positions)))


def test_equal_tokens_at_other_rotary_positions_are_not_shared() -> None:
    """K holds the rotary position: a prompt whose positions are not those that count up is another prompt."""
    plain = torch.arange(24).expand(3, -1)
    assert text_at(plain) == list(range(24))
    doubled, shifted, jumps = 2 * plain, plain + 5, plain.clone()
    jumps[:, 12:] += 1
    assert not set(text_at(doubled)) & set(range(24))
    assert all(token < 0 for token in text_at(shifted)[:8])
    assert text_at(shifted)[8:] == list(range(8, 24))  # they follow from those before them
    assert text_at(jumps)[:8] == list(range(8))
    assert all(token < 0 for token in text_at(jumps)[8:16])
    assert text_at(jumps)[16:] == list(range(16, 24))


def test_text_after_an_image_counts_on_from_its_largest_position() -> None:
    positions = torch.arange(40).expand(3, -1).clone()
    positions[:, 2:8] = torch.tensor([[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]])
    positions[:, 8:] = torch.arange(5, 37)
    prompt = ImagePrompt([PAD] * 40, [Image(2, values(0, 6))], positions)
    assert media(prompt).shift == -3
    assert ids_of(key(prompt))[8:] == [PAD] * 32


# Parts of a prompt


@pytest.mark.parametrize("prompt_len", [10, 16])
def test_rotary_positions_of_any_part_are_those_of_the_whole(prompt_len: int) -> None:
    """A part that ends before the prompt does was an error: an arange that ends before it begins."""
    positions = torch.stack([torch.arange(prompt_len) * factor for factor in (1, 2, 3)])
    whole = media(ImagePrompt([PAD] * prompt_len, [Image(2, values(0, 5))], positions))
    expected = torch.cat((positions, (torch.arange(5) + 3 * prompt_len - 2).expand(3, -1)), dim=1)
    for start, end in product(range(prompt_len + 5), repeat=2):
        if start < end:
            part = whole.rotary_positions(start, end)
            assert torch.equal(part, expected[:, start:end]), (start, end)


def test_embeddings_of_any_part_are_those_of_the_whole() -> None:
    prompt = ImagePrompt([PAD] * 30, [Image(20, values(1, 6)), Image(3, values(0, 9))])
    whole = media(prompt)
    table = torch.full((30, SIZE), torch.nan)
    table[3:12], table[20:26] = values(0, 9), values(1, 6)
    for start, end in product(range(31), repeat=2):
        if start < end:
            part = torch.full((end - start, SIZE), torch.nan)
            for first, rows in whole.embeddings(start, end):
                part[first : first + len(rows)] = rows
            assert torch.equal(part.nan_to_num(9), table[start:end].nan_to_num(9))


# What is refused


def bad(**changes: Any) -> ImagePrompt:
    image = {"start": 2, "embeddings": values(0, 3), "content": None, **changes}
    return ImagePrompt([PAD] * 9, [Image(**image)])


def with_value(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    embeddings = values(0, 3).to(dtype)
    embeddings[1, 2] = value
    return embeddings


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (bad(embeddings=with_value(torch.nan)), "position 2 contain NaN or infinity"),
        (bad(embeddings=with_value(torch.inf)), "NaN or infinity"),
        (bad(embeddings=with_value(-torch.inf, torch.bfloat16)), "NaN or infinity"),
        (bad(embeddings=values(0, 3).long()), "floating point"),
        (bad(embeddings=[[0.0] * SIZE]), "must be a tensor"),
        (bad(embeddings=torch.zeros(SIZE)), r"\[positions, 4\]"),
        (bad(embeddings=torch.zeros(0, SIZE)), "outside the prompt"),
        (bad(start=-1), "outside the prompt"),
        (bad(start=10**400), "outside the prompt|integer"),
        (bad(start=1.0), "an integer"),
        (bad(start=True), "an integer"),
        (bad(content=5), "must be bytes"),
        (bad(content=["a"]), "must be bytes"),
        (ImagePrompt([PAD] * 9, [], torch.zeros(3, 9)), "must be integers"),
        (ImagePrompt([PAD] * 9, [], torch.full((3, 9), -1)), "from 0 to"),
        (ImagePrompt([PAD] * 9, [], torch.full((3, 9), 2**31)), "from 0 to"),
        (ImagePrompt([PAD] * 9, [], [[0] * 9] * 3), r"positions must be \[3, 9\], got list"),  # type: ignore[arg-type]
    ],
)
def test_images_that_cannot_be_used_are_refused_where_they_come_in(prompt: ImagePrompt, words: str) -> None:
    with pytest.raises(PromptError, match=words) as raised:
        media(prompt)
    assert len(str(raised.value)) < 1000


def test_a_key_of_many_images_is_made_in_linear_time() -> None:
    rng = random.Random(0)
    starts = sorted(rng.sample(range(0, 200_000, 4), 10_000))
    units = [Unit(start, start + rng.randint(1, 3), rng.randbytes(16)) for start in starts]
    ids = [PAD] * 200_000
    made = PagedUnits(ids, units, PAGE).key(ids)
    assert len(made) == 200_000
    assert made.whole(200_000, PAGE) == 200_000
