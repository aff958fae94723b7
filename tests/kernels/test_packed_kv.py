"""Rows of keys and values in a byte per element: errors, bits, and attention over them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.packed_kv import KV_DTYPES, pack, row_size, unpack
from hybrid.kernels.reference import paged_attention, store_kv
from hybrid.kernels.triton import attention, elementwise, memory
from hybrid.models.attention import copy_keys_and_values
from support.tensors import ints, same_bits, starts_of

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def values_of(*shape: int, seed: int = 0) -> Tensor:
    """Rows of magnitudes that differ by factors of thousands."""
    rng = torch.Generator().manual_seed(seed)
    scales = 10 ** (4 * torch.rand(*shape[:-1], 1, generator=rng) - 2)
    return torch.randn(*shape, generator=rng) * scales


def restored(values: Tensor, name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    kept = KV_DTYPES[name]
    return unpack(pack(values, kept), values.shape[-1], kept, dtype)


@pytest.mark.parametrize("head_dim", [1, 4, 26, 64, 255])
def test_a_row_is_its_codes_and_its_scale(head_dim: int) -> None:
    assert head_dim + 4 <= row_size(head_dim) < head_dim + 8
    assert row_size(head_dim) % 4 == 0
    for kept in KV_DTYPES.values():
        assert pack(values_of(3, 2, head_dim), kept).shape == (3, 2, row_size(head_dim))


@pytest.mark.parametrize("dtype", FLOATS)
def test_int8_is_off_by_half_a_scale_at_most(dtype: torch.dtype) -> None:
    values = values_of(200, 40).to(dtype)
    largest = values.float().abs().amax(-1, keepdim=True)
    assert ((restored(values, "int8") - values.float()).abs() <= largest / 127 * 0.5001).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_is_off_by_a_sixteenth_of_an_element_at_most(dtype: torch.dtype) -> None:
    values = values_of(200, 40).to(dtype).float()
    largest = values.abs().amax(-1, keepdim=True)
    allowed = torch.maximum(values.abs() / 16, largest / 448 / 1024) * 1.0001
    assert ((restored(values, "fp8") - values).abs() <= allowed).all()


@pytest.mark.parametrize("name", KV_DTYPES)
def test_rows_do_not_depend_on_each_other(name: str) -> None:
    values = values_of(50, 2, 26)
    packed = pack(values, KV_DTYPES[name])
    assert all(torch.equal(pack(values[at : at + 1], KV_DTYPES[name]), packed[at : at + 1]) for at in range(50))


@pytest.mark.parametrize("name", KV_DTYPES)
def test_what_was_restored_once_is_packed_to_the_same_bytes(name: str) -> None:
    packed = pack(values_of(300, 33), KV_DTYPES[name])
    assert torch.equal(pack(unpack(packed, 33, KV_DTYPES[name], torch.float32), KV_DTYPES[name]), packed)


@pytest.mark.parametrize("name", KV_DTYPES)
def test_zeros_stay_and_what_is_not_finite_does_not_become_finite(name: str) -> None:
    values = values_of(5, 8)
    values[0], values[1], values[2, 3], values[3, 4] = 0, 1e-42, float("nan"), float("inf")
    found = restored(values, name)
    assert (found[0] == 0).all()
    assert (found[1].abs() < 1e-40).all()
    assert found[2, 3].isnan()
    assert not found[3, 4].isfinite()
    assert found[4].isfinite().all()


def pages_of(name: str, kv_heads: int, head_dim: int) -> Tensor:
    """One of three layers, full of the codes of NaN."""
    shape = (9, 3, 2, 16, kv_heads, row_size(head_dim))
    return torch.full(shape, 255, dtype=torch.uint8).view(KV_DTYPES[name])[:, 1]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", KV_DTYPES)
def test_attention_sees_what_was_kept(name: str, dtype: torch.dtype) -> None:
    """Bit by bit what attention over unpacked pages gives; nothing but the slots is written."""
    heads, kv_heads, head_dim, length, new = 4, 2, 26, 37, 6
    pages, table = pages_of(name, kv_heads, head_dim), ints([[4, 1, 7]])
    before = pages.view(torch.uint8).clone()
    k, v = (values_of(length, kv_heads, head_dim, seed=seed).clamp(-3, 3).to(dtype) for seed in (1, 2))
    slots = ints([int(table[0, at // 16]) * 16 + at % 16 for at in range(length)])
    store_kv(k, v, pages, slots)
    plain = torch.zeros(9, 2, 16, kv_heads, head_dim, dtype=dtype)
    store_kv(restored(k, name, dtype), restored(v, name, dtype), plain, slots)
    query = torch.randn(new, heads, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    where = (table, starts_of([new]), ints([length]), head_dim**-0.5, 16)
    assert same_bits(paged_attention(query, pages, *where), paged_attention(query, plain, *where))
    untouched = torch.ones(9, 16, dtype=torch.bool)
    untouched.view(-1)[slots] = False
    after = pages.view(torch.uint8)
    assert torch.equal(after.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])


@pytest.mark.parametrize("name", KV_DTYPES)
def test_copies_of_slots_are_not_rounded_again(name: str) -> None:
    pages = pages_of(name, 2, 26)
    store_kv(values_of(2, 2, 26), values_of(2, 2, 26, seed=1), pages, ints([20, 21]))
    copy_keys_and_values(pages, ints([[20, 21], [100, 37]]))
    rows = pages.view(torch.uint8)
    assert torch.equal(rows[6, :, 4], rows[1, :, 4])
    assert torch.equal(rows[2, :, 5], rows[1, :, 5])


# The Triton kernels, interpreted where there is no GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("head_dim", [8, 26, 64])
@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_kernel_packs_the_same_bytes(name: str, head_dim: int, dtype: torch.dtype) -> None:
    """Halves between two codes, denormals, signed zeros and the largest numbers among them."""
    k, v = (values_of(12, 2, head_dim, seed=seed).to(dtype) for seed in (1, 2))
    k[0], k[1, 0], k[2, 0, :4] = 0, -0.0, 1e-7
    steps = torch.tensor([0.5, 1.5, -2.5, 127.0, 0.25, -126.5, 3.5, 1.0])
    k[3, 1, :8], v[3, 1, :8] = steps, 448 / 127 * steps
    k[3, 1, 8:], v[3, 1, 8:] = 0, 0
    found, expected = (pages_of(name, 2, head_dim).to(DEVICE) for _ in range(2))
    slots = torch.randperm(9 * 16, generator=torch.Generator().manual_seed(4))[:12]
    slots[5] = -1
    places = (slots.to(DEVICE),)
    memory.store_kv(k.to(DEVICE), v.to(DEVICE), found, *places)
    store_kv(k.to(DEVICE), v.to(DEVICE), expected, *places)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_kernel_keeps_what_is_not_finite(name: str) -> None:
    k, pages = values_of(2, 2, 8), pages_of(name, 2, 8).to(DEVICE)
    k[0, 0, 3], k[1, 1, 5] = float("nan"), float("inf")
    memory.store_kv(k.to(DEVICE), k.to(DEVICE), pages, ints([3, 4]).to(DEVICE))
    rows = pages.view(torch.uint8)[0, 0, [3, 4]]
    found = unpack(rows, 8, pages.dtype, torch.float32)
    assert found[0, 0, 3].isnan()
    assert not found[1, 1, 5].isfinite()
    assert found[0, 1].isfinite().all()
    assert found[1, 0].isfinite().all()


@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_kernel_stores_what_was_normed_and_rotated(name: str) -> None:
    q, k, v = values_of(5, 4, 32), values_of(5, 2, 32, seed=1), values_of(5, 2, 32, seed=2)
    q, k, v = (part.to(DEVICE) for part in (q, k, v))
    scales, angles = (torch.rand(32, device=DEVICE) for _ in range(2)), torch.rand(5, 16, device=DEVICE)
    arguments = (q, k, v, *scales, 1e-6, angles.cos(), angles.sin())
    found, expected = (pages_of(name, 2, 32).to(DEVICE) for _ in range(2))
    slots = ints([3, 70, -1, 20, 21]).to(DEVICE)
    y = elementwise.norm_rotate_store(*arguments, found, slots)
    torch.testing.assert_close(y, reference.norm_rotate_store(*arguments, expected, slots), rtol=1e-5, atol=1e-5)
    both = [
        unpack(pages.view(torch.uint8)[[0, 4, 1, 1], :, [3, 6, 4, 5]], 32, pages.dtype, torch.float32)
        for pages in (found, expected)
    ]
    torch.testing.assert_close(*both, rtol=0.08, atol=0.02)  # a code may differ where a norm's last bit does


PATHS: dict[str, tuple[list[tuple[int, int]], int | None]] = {
    "decode": ([(0, 1), (14, 1), (15, 1), (16, 1), (70, 1)], 1),
    "decode in pieces": ([(5, 1), (100, 1)], 16),
    "prompts": ([(0, 15), (0, 17), (16, 1), (37, 28)], 1),
}


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", KV_DTYPES)
def test_the_kernel_attends_to_what_was_kept(name: str, path: str, dtype: torch.dtype, page_size: int) -> None:
    """The kernel attends as to unpacked pages, bit by bit where its tiles are the same, and close to the twin."""
    requests, splits = PATHS[path]
    heads, kv_heads, head_dim = 4, 2, 26
    lengths, counts = [sum(request) for request in requests], [new for _, new in requests]
    width = -(-max(lengths) // page_size)
    table = torch.arange(len(requests) * width).view(-1, width)
    shape = (table.numel(), 2, page_size, kv_heads)
    values = values_of(*shape, head_dim).clamp(-3, 3).to(dtype)
    kept = KV_DTYPES[name]
    packed = pack(values, kept).view(kept)
    plain = restored(values, name, dtype)
    query = torch.randn(sum(counts), heads, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    where = (table, starts_of(counts), ints(lengths))

    def attend(function: Callable[..., Any], pages: Tensor) -> Tensor:
        arguments = (tensor.to(DEVICE) for tensor in (query, pages, *where))
        y: Tensor = function(*arguments, head_dim**-0.5, 16, splits)
        return y

    y = attend(attention.paged_attention, packed)
    if dtype == torch.float32:
        assert same_bits(y, attend(attention.paged_attention, plain))
    tolerance = {torch.float32: 1e-5, HALF: 4e-3}[dtype]
    torch.testing.assert_close(y, attend(reference.paged_attention, packed), rtol=tolerance, atol=tolerance)
