"""The settings of the cache: what is accepted, what is refused, and what the refusal says."""

import re
from typing import Any

import pytest

import hybrid
from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError, HybridError, MemoryBudgetError
from hybrid.units import format_bytes, parse_memory


@pytest.mark.parametrize("name", ["page_size", "chunk_size"])
@pytest.mark.parametrize("value", [0, -1, 3, 63, 8192, 64.0, "64", None])
def test_sizes_are_powers_of_two(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{name} must be a power of two from 1 to 4096; got {value!r}"):
        CacheConfig(**{name: value})


@pytest.mark.parametrize(("page_size", "chunk_size", "grid"), [(64, 64, 64), (16, 64, 64), (256, 64, 256), (1, 1, 1)])
def test_the_grid_is_a_multiple_of_both_sizes(page_size: int, chunk_size: int, grid: int) -> None:
    assert CacheConfig(page_size=page_size, chunk_size=chunk_size).grid == grid


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, float("nan")])
def test_the_state_share_lies_between_zero_and_one(share: float) -> None:
    with pytest.raises(ArgumentError, match="state_share"):
        CacheConfig(state_share=share)


def test_without_a_word_a_gpu_gives_nine_tenths_of_what_is_free_and_a_cpu_four_gib() -> None:
    assert CacheConfig().memory_bytes(free=10 * 2**30, on_gpu=True) == 9 * 2**30
    assert CacheConfig().memory_bytes(free=10 * 2**30) == 4 * 2**30
    with pytest.raises(MemoryBudgetError, match=r"the default is 4\.0 GiB, but only 1\.0 GiB is free"):
        CacheConfig().memory_bytes(free=2**30)


@pytest.mark.parametrize(
    "memory", [0, -1, -0.5, 0.0, True, [], "", "much", "-1GB", "0", "0MiB", "1.2.3GB", "5 parsecs", "GiB"]
)
def test_memory_that_is_no_amount_is_refused(memory: Any) -> None:
    with pytest.raises(ArgumentError, match="memory"):
        CacheConfig(memory=memory)


@pytest.mark.parametrize("memory", [float("nan"), float("inf")])
def test_memory_that_is_no_number_is_refused(memory: float) -> None:
    with pytest.raises(ArgumentError, match="memory"):
        CacheConfig(memory=memory)


@pytest.mark.parametrize("memory", ["2TiB", 2**41])
def test_a_config_may_ask_for_what_this_machine_does_not_have(memory: int | str) -> None:
    assert CacheConfig(memory=memory).memory_bytes(free=2**42) == 2**41
    with pytest.raises(MemoryBudgetError, match=r"is 2.0 TiB, but only 512.0 MiB is free"):
        CacheConfig(memory=memory).memory_bytes(free=2**29)


@pytest.mark.parametrize(
    ("memory", "num_bytes"),
    [(1, 1), (1000, 1000), (1.0, 5000), (0.5, 2500), ("2KB", 2000), ("2 KiB", 2048), ("4000", 4000), (2000.0, 2000)],
)
def test_memory_is_bytes_a_text_or_a_part_of_what_is_free(memory: int | float | str, num_bytes: int) -> None:
    assert CacheConfig(memory=memory).memory_bytes(free=5000) == num_bytes


@pytest.mark.parametrize(
    ("text", "amount"),
    [
        ("7", 7),
        ("7B", 7),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        (" 2 gb ", 2 * 10**9),
        ("3kb", 3000),
        ("1TiB", 2**40),
        ("0.5KiB", 512),
        ("512M", 512 * 2**20),
        ("2g", 2 * 2**30),
        ("3Ki", 3 * 2**10),
        ("50%", 0.5),
        ("100 %", 1.0),
        ("0.25", 0.25),
        ("1", 1),
        ("1.0", 1.0),
    ],
)
def test_texts_of_amounts_are_read(text: str, amount: float) -> None:
    """A number without a unit is bytes where it is whole, as in Python, and a fraction otherwise."""
    assert parse_memory(text) == amount
    assert type(parse_memory(text)) is type(amount)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (49.5 * 2**20, "49.5 MiB"),
        (2**40, "1.0 TiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_counts_of_bytes_are_written_for_people(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("settings", "given", "meant"),
    [
        (CacheConfig, "block_size", "CacheConfig has no 'block_size'; did you mean page_size?"),
        (CacheConfig, "evicton", "did you mean eviction?"),
        (hybrid.SamplingParams, "max_tokens", "did you mean max_new_tokens?"),
        (hybrid.EngineConfig, "max_running_requests", "did you mean max_num_seqs?"),
        (hybrid.SpeculationConfig, "zzz", "there are: drafters, max_drafts, adaptive"),
    ],
)
def test_a_setting_that_is_not_there_is_refused_with_the_one_that_is_meant(
    settings: type, given: str, meant: str
) -> None:
    with pytest.raises(hybrid.KeywordError, match=re.escape(meant)):
        settings(**{given: 1})


def test_settings_are_given_by_name_and_do_not_change() -> None:
    with pytest.raises(TypeError):
        CacheConfig(True)  # type: ignore[misc]
    with pytest.raises(TypeError):
        CacheConfig(pagesize=64)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        CacheConfig().page_size = 32  # type: ignore[misc]


def test_errors_of_settings_are_value_errors_and_ours() -> None:
    assert issubclass(ArgumentError, ValueError) and issubclass(ArgumentError, HybridError)
    assert issubclass(MemoryBudgetError, ArgumentError)
