"""Host memory as a store of copies: what has the highest value per byte stays, and nothing exceeds its size."""

import time
from collections.abc import Callable
from random import Random

import pytest

from hybrid.tiers.host import HostTier
from hybrid.tiers.tier import Name, Offer, UnavailableError, checksum_of

PAGE, STATE = 4, 10


def names(text: str) -> list[bytes]:
    """The names of the prefixes of a text, the longest first: a letter is a page."""
    return [text[:end].encode() for end in range(len(text), 0, -1)]


def state(text: str) -> Name:
    return "checkpoint", text.encode()


def page(text: str) -> Name:
    return "page", text.encode()


def offer_state(
    tier: HostTier, text: str, value: float = 1.0, read: Callable[[], bytes] = lambda: bytes(STATE), seconds: float = 1
) -> bool:
    """The checkpoint after a text leaves the device. It is worth `value` in all."""
    offer = Offer(
        state(text),
        STATE,
        read,
        None,
        seconds > 0,
        lambda pages: value / (STATE + pages * PAGE),
        iter(names(text)),
    )
    return tier.offer(offer)


def offer_page(tier: HostTier, text: str, read: Callable[[], bytes] = lambda: bytes(PAGE)) -> bool:
    """The last page of a text leaves the device."""
    return tier.offer(Offer(page(text), PAGE, read, path=iter(names(text)[1:])))


def offer(tier: HostTier, text: str, value: float = 1.0) -> None:
    """A checkpoint leaves the device, and then the pages before it, the last first."""
    offer_state(tier, text, value)
    for name in names(text):
        offer_page(tier, name.decode())


def held(tier: HostTier) -> set[str]:
    """The checkpoints that it has with all their pages."""
    found = {name.decode() for kind, name in tier.names() if kind == "checkpoint"}
    return {text for text in found if all(("page", name) in tier for name in names(text))}


def test_what_fits_is_kept() -> None:
    tier = HostTier(100)
    offer(tier, "ab")
    offer(tier, "ac")
    assert held(tier) == {"ab", "ac"}
    assert (tier.num_checkpoints, tier.num_pages) == (2, 3)
    assert (tier.bytes_used, tier.bytes_written) == (2 * STATE + 3 * PAGE, 2 * STATE + 3 * PAGE)
    assert tier.bytes_offered == 2 * STATE + 4 * PAGE
    assert tier.begin([state("ab"), page("a")]).take() == [bytes(STATE), bytes(PAGE)]
    assert tier.violations() == []


def test_a_copy_that_is_there_is_not_written_again() -> None:
    tier = HostTier(100)
    offer(tier, "a")
    assert offer_state(tier, "a", read=lambda: pytest.fail("it is read again"))
    assert offer_page(tier, "a", read=lambda: pytest.fail("it is read again"))
    assert tier.bytes_written == STATE + PAGE


def test_a_page_that_no_checkpoint_needs_is_not_read() -> None:
    tier = HostTier(100)
    assert not offer_page(tier, "a", read=lambda: pytest.fail("nothing needs it"))
    offer_state(tier, "ab")
    assert not offer_page(tier, "abc", read=lambda: pytest.fail("nothing needs it"))
    assert not offer_page(tier, "b", read=lambda: pytest.fail("nothing needs it"))
    assert offer_page(tier, "ab")


def test_what_is_worth_more_replaces_what_is_worth_less_and_not_the_other_way() -> None:
    tier = HostTier(2 * (STATE + PAGE))
    offer(tier, "a", 5.0)
    offer(tier, "b", 1.0)
    assert not offer_state(tier, "c", 0.5, read=lambda: pytest.fail("it is read for nothing"))
    assert held(tier) == {"a", "b"}, "nothing is dropped for what is not kept"
    offer(tier, "d", 3.0)
    assert held(tier) == {"a", "d"}
    assert tier.violations() == []


def test_a_checkpoint_is_valued_with_the_pages_that_only_it_needs() -> None:
    tier = HostTier(2 * STATE + 6 * PAGE)
    offer(tier, "abcd", 1.0)  # 1 / 26 per byte
    offer(tier, "xy", 0.9)  # 0.9 / 18
    offer(tier, "z", 0.8)  # 0.8 / 14
    assert held(tier) == {"xy", "z"}
    assert tier.num_pages == 3, "the pages of what was dropped went with it"


def test_pages_that_another_checkpoint_needs_stay() -> None:
    tier = HostTier(2 * STATE + 3 * PAGE)
    offer(tier, "ab", 5.0)
    offer(tier, "ac", 1.0)
    offer(tier, "d", 3.0)
    assert held(tier) == {"ab", "d"}


def test_a_page_for_which_only_its_own_checkpoint_could_go_takes_it_along() -> None:
    tier = HostTier(STATE + PAGE)
    offer(tier, "ab")
    assert (len(tier), tier.bytes_used) == (0, 0)
    assert tier.violations() == []


def test_what_saves_no_time_and_what_is_too_large_is_not_kept() -> None:
    tier = HostTier(STATE - 1)
    assert not offer_state(tier, "a")
    tier = HostTier(100)
    assert not offer_state(tier, "a", seconds=0)
    assert not offer_state(tier, "a", seconds=-1)
    assert len(tier) == 0


def test_what_is_dropped_goes_on_each_checkpoint_before_its_pages_the_last_first() -> None:
    tier = HostTier(STATE + 3 * PAGE, passes_on=True)
    offer(tier, "abc", 1.0)
    offer_state(tier, "x", 5.0)
    passed = [(one.name, one.path) for one in tier.take_dropped()]
    pages = [(page("abc"), (b"ab",)), (page("ab"), (b"a",)), (page("a"), ())]
    assert passed == [(state("abc"), (b"abc", b"ab", b"a")), *pages]
    assert tier.take_dropped() == []


def test_what_the_device_has_too_is_dropped_before_what_it_has_not() -> None:
    tier = HostTier(2 * (STATE + PAGE))
    offer(tier, "a", 5.0)
    offer(tier, "b", 1.0)
    tier.restored(b"a", is_copied_again=True)
    offer(tier, "c", 0.1)
    assert held(tier) == {"b", "c"}
    tier.restored(b"b", is_copied_again=True)
    offer_state(tier, "b", 1.0)  # it leaves the device again
    offer(tier, "d", 0.5)
    assert held(tier) == {"b", "d"}
    assert tier.violations() == []


def test_of_a_restored_checkpoint_that_requests_continue_the_pages_stay_while_there_is_room() -> None:
    tier = HostTier(2 * STATE + 3 * PAGE)
    offer(tier, "ab")
    tier.restored(b"ab", is_copied_again=False)
    assert (tier.num_checkpoints, tier.num_pages, tier.bytes_used) == (0, 2, 2 * PAGE)
    written = tier.bytes_written
    offer(tier, "abc")
    assert held(tier) == {"abc"}
    assert tier.bytes_written == written + STATE + PAGE, "the pages of ab are not written again"
    assert tier.violations() == []
    tier.restored(b"abc", is_copied_again=False)
    offer(tier, "x", 0.1)
    offer_state(tier, "y", 0.1)
    assert (tier.num_checkpoints, tier.num_pages) == (2, 1), "and give way to anything"
    assert tier.violations() == []


def test_of_what_the_device_has_too_the_state_goes_before_the_pages() -> None:
    tier = HostTier(3 * STATE + 6 * PAGE)
    offer(tier, "abc", 5.0)
    offer(tier, "xy", 1.0)
    offer(tier, "z", 0.2)
    tier.restored(b"abc", is_copied_again=True)
    offer_state(tier, "v", 0.1)
    assert (tier.num_checkpoints, tier.num_pages) == (3, 6)
    written = tier.bytes_written
    offer(tier, "abcd", 9.0)
    assert tier.bytes_written == written + STATE + PAGE, "the pages of abc are not written again"
    assert held(tier) == {"xy", "abcd"}
    assert tier.violations() == []


def test_what_the_device_has_too_is_not_passed_on() -> None:
    tier = HostTier(2 * (STATE + PAGE), passes_on=True)
    offer(tier, "a", 5.0)
    offer(tier, "b", 1.0)
    tier.restored(b"a", is_copied_again=True)
    offer(tier, "c", 3.0)
    assert held(tier) == {"b", "c"}
    assert tier.take_dropped() == []
    offer(tier, "d", 5.0)
    assert [one.name for one in tier.take_dropped()] == [state("b"), page("b")]


def test_a_checkpoint_of_which_the_pages_are_left_may_come_again() -> None:
    tier = HostTier(100)
    offer(tier, "ab")
    tier.restored(b"ab", is_copied_again=False)
    offer_state(tier, "ab")
    assert held(tier) == {"ab"}
    tier.restored(b"nothing", is_copied_again=False)
    assert tier.violations() == []


def test_cleared_is_empty_and_works() -> None:
    tier = HostTier(100)
    offer(tier, "ab")
    tier.clear()
    assert (len(tier), tier.bytes_used, tier.num_checkpoints, tier.num_pages) == (0, 0, 0, 0)
    assert tier.is_empty
    offer(tier, "ab")
    assert held(tier) == {"ab"}
    assert tier.violations() == []


@pytest.mark.parametrize("seed", range(4))
def test_bookkeeping_holds_through_random_calls(seed: int) -> None:
    rng, tier = Random(seed), HostTier(200, passes_on=seed % 2 == 1)

    def read() -> bytes:
        if rng.random() < 0.1:
            raise OSError("planted")
        return bytes(rng.choice((PAGE, STATE, 33)))

    for _ in range(3000):
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(1, 7)))
        before = tier.bytes_used
        try:
            if rng.random() < 0.2:
                tier.restored(text.encode(), rng.random() < 0.5)
            elif rng.random() < 0.4:
                kept = offer_state(tier, text, rng.random() - 0.1, read)
                assert kept == (state(text) in tier)
            else:
                kept = offer_page(tier, text, read)
                assert kept == (page(text) in tier)
        except OSError:
            assert tier.bytes_used <= before
        if rng.random() < 0.01:
            tier.clear()
        assert tier.bytes_used <= 200
        assert tier.violations() == []
        tier.take_dropped()


@pytest.mark.parametrize("device_has", [None, "checkpoints", "pages"])
def test_what_an_offer_takes_does_not_grow_with_what_is_kept(device_has: str | None) -> None:
    """Whatever is dropped first: what the device has too, pages alone that are left, or a sample."""

    def seconds(num_kept: int) -> float:
        tier = HostTier(num_kept * (STATE + PAGE))
        for number in range(num_kept):
            offer(tier, chr(number), 2.0)
            if device_has is not None:
                tier.restored(chr(number).encode(), device_has == "checkpoints")
        assert len(tier) >= num_kept
        times = []
        for number in range(30):
            start = time.process_time()
            for letter in "abcde":
                offer(tier, chr(40_000 + number) + letter, 1.0)
            times.append(time.process_time() - start)
        return min(times)

    assert seconds(30_000) < 4 * seconds(300)


def test_a_state_whose_read_fails_changes_nothing_that_counts() -> None:
    tier = HostTier(100)

    def fail() -> bytes:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        offer_state(tier, "abc", read=fail)
    assert tier.violations() == []
    assert len(tier) == 0


def test_a_page_whose_read_fails_takes_the_checkpoints_along_that_need_it() -> None:
    tier = HostTier(100)
    offer_state(tier, "abc")
    offer_state(tier, "abd")
    offer_state(tier, "x")

    def fail() -> bytes:
        raise OSError("planted")

    with pytest.raises(OSError, match="planted"):
        offer_page(tier, "ab", fail)
    assert [*tier.names()] == [state("x")]
    assert tier.violations() == []


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1003])
def test_a_checksum_changes_with_every_bit(size: int) -> None:
    contents = bytearray(Random(size).randbytes(size))
    expected = checksum_of(bytes(contents))
    assert checksum_of(memoryview(contents)) == expected
    for bit in range(8 * size):
        contents[bit // 8] ^= 1 << bit % 8
        assert checksum_of(contents) != expected
        contents[bit // 8] ^= 1 << bit % 8


@pytest.mark.parametrize("name", ["page a", "page ab", "state ab"])
def test_a_copy_that_went_bad_is_dropped_with_what_needs_it(name: str) -> None:
    tier = HostTier(200)
    states = {text: bytearray(STATE) for text in ("a", "ab", "ac")}
    pages = {text: bytearray(PAGE) for text in ("a", "ab", "ac")}
    for text, contents in states.items():
        offer_state(tier, text, read=lambda contents=contents: contents)
        for own in names(text):
            offer_page(tier, own.decode(), read=lambda own=own: pages[own.decode()])
    kind, text = name.split()
    (states if kind == "state" else pages)[text][2] ^= 1
    wanted = [page("a"), page("ab"), state("ab")]
    with pytest.raises(UnavailableError, match="is not what was copied, and is dropped"):
        tier.begin(wanted)
    assert tier.num_damaged == 1
    assert held(tier) == {"page a": set(), "page ab": {"a", "ac"}, "state ab": {"a", "ac"}}[name]
    assert tier.violations() == []
    with pytest.raises(UnavailableError, match="not there any more"):
        tier.begin(wanted)


def test_contents_that_are_on_their_way_are_summed_when_they_are_there() -> None:
    is_there, contents, state_of_a = False, bytearray(PAGE), bytearray(STATE)
    tier = HostTier(200, has_arrived=lambda own: is_there)
    offer_state(tier, "a", read=lambda: state_of_a)
    offer_page(tier, "a", read=lambda: contents)
    contents[0] = 1  # it comes
    assert tier.begin([page("a")]).take() == [contents], "the device has it before the host could read it"
    is_there = True
    assert tier.begin([page("a")]).take() == [contents]
    contents[0] = 2
    with pytest.raises(UnavailableError, match="is not what was copied"):
        tier.begin([page("a")])


def test_what_is_passed_on_keeps_the_checksum_that_it_came_with() -> None:
    tier, contents = HostTier(STATE + 3 * PAGE, passes_on=True), bytearray(PAGE)
    offer_state(tier, "a", 1.0)
    offer_page(tier, "a", read=lambda: contents)
    contents[0] ^= 8
    tier.drop_all()
    assert {one.name[0]: one.copy.is_intact for one in tier.take_dropped()} == {"checkpoint": True, "page": False}
