"""Paged attention in Triton: interpreted where there is no GPU, against its twin and against torch in fp64.

Pages are random permutations in a strided pool. What a kernel must not read is full of NaN, the rest of a request's
last page included, and what a table holds beyond a request's pages is a page of NaN.
"""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hybrid.kernels import reference
from hybrid.kernels.cpu import attention as cpu_attention
from hybrid.kernels.triton import attention
from hybrid.kernels.triton.attention import HOPPER_SHARED_MEMORY, MIN_PIECE, choose_splits, choose_tile
from support.tensors import ints, same_bits, starts_of

pytestmark = pytest.mark.usefixtures("untraced")  # the lines of other tests, through interpreted kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DECODES = [(0, 1), (15, 1), (16, 1), (70, 1)]
PROMPTS = [(0, 15), (0, 17), (16, 1), (37, 28)]
"""(tokens cached, tokens that come) of the requests of a batch."""


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted, every program costs milliseconds: what is left to the kernel is cut as for a small device."""
    if DEVICE == "cpu":
        monkeypatch.setattr(attention, "_multiprocessors", lambda device: 1)


class Batch:
    """Requests over poisoned pages: the new tokens of each at the end of its sequence, all K and V stored.

    Args:
        requests: (tokens cached, tokens that come) of each; (-1, 1) is a padding row.
        kind: type of the indices.
    """

    def __init__(
        self,
        requests: list[tuple[int, int]],
        page_size: int = 16,
        heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 16,
        dtype: torch.dtype = torch.float32,
        kind: torch.dtype = torch.int64,
    ) -> None:
        self.requests, self.scale = requests, head_dim**-0.5
        self.lengths = [cached + new for cached, new in requests]
        self.counts = [new for _, new in requests]
        self.query = torch.randn(sum(self.counts), heads, 2 * head_dim).to(DEVICE, dtype)[..., :head_dim]
        self.key = [torch.randn(length, kv_heads, head_dim).to(DEVICE, dtype) for length in self.lengths]
        self.value = [torch.randn(length, kv_heads, head_dim).to(DEVICE, dtype) for length in self.lengths]
        needed = [-(-length // page_size) for length in self.lengths]
        pool = torch.full((sum(needed) + 3, 3, 2, page_size, kv_heads, head_dim), float("nan"))
        self.pages = pool.to(DEVICE, dtype)[:, 1]
        order = (1 + torch.randperm(sum(needed) + 2)).tolist()  # page 0 is nobody's
        self.table = torch.full((len(requests), max(needed) + 2), order.pop())
        for row, length in enumerate(self.lengths):
            self.table[row, : needed[row]] = ints([order.pop() for _ in range(needed[row])])
            at = torch.arange(length)
            slots = self.table[row, at // page_size] * page_size + at % page_size
            reference.store_kv(self.key[row], self.value[row], self.pages, slots.to(DEVICE))
        self.table = self.table.to(DEVICE, kind)
        self.starts, self.seq_lens = starts_of(self.counts).to(DEVICE, kind), ints(self.lengths).to(DEVICE, kind)

    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, float, int]:
        return self.query, self.pages, self.table, self.starts, self.seq_lens, self.scale, 16

    def attend(self, num_splits: int | None = None) -> Tensor:
        return attention.paged_attention(*self.arguments(), num_splits)

    def alone(self, row: int, num_splits: int | None, first: int = 0, end: int | None = None) -> Tensor:
        """New tokens `[first, end)` of one request, in a call of their own: as a prompt that is cut there."""
        end = self.counts[row] if end is None else end
        start, cached = int(self.starts[row]), self.requests[row][0]
        return attention.paged_attention(
            self.query[start + first : start + end],
            self.pages,
            self.table[row : row + 1],
            ints([0, end - first]).to(DEVICE),
            ints([cached + end]).to(DEVICE),
            self.scale,
            16,
            num_splits,
        )

    def expected(self) -> Tensor:
        """The same by scaled_dot_product_attention in fp64, on K and V that lie in one piece."""
        outputs, start = [], 0
        for (cached, new), key, value in zip(self.requests, self.key, self.value, strict=True):
            query, start = self.query[start : start + new], start + new
            if not len(key):
                outputs.append(torch.zeros_like(query).double())
                continue
            mask = torch.ones(new, cached + new, dtype=torch.bool, device=DEVICE).tril(cached)
            q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale, enable_gqa=True)
            outputs.append(mixed.transpose(0, 1))
        return torch.cat(outputs)

    def check(self, got: Tensor) -> None:
        """That the output is right, and that nothing was written."""
        tolerance = TOLERANCE[self.query.dtype]
        assert got.dtype == self.query.dtype and got.is_contiguous()
        torch.testing.assert_close(got.double(), self.expected(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [16, 24, 128])
@pytest.mark.parametrize("requests", [DECODES, PROMPTS], ids=["decodes", "prompts"])
def test_it_agrees_with_fp64_and_with_its_twin(
    requests: list[tuple[int, int]], page_size: int, dtype: torch.dtype
) -> None:
    batch = Batch(requests, page_size, dtype=dtype)
    whole = batch.pages._base
    assert whole is not None
    before, query = whole.clone(), batch.query.clone()
    got = batch.attend()
    batch.check(got)
    twin = reference.paged_attention(*batch.arguments())
    torch.testing.assert_close(got, twin, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    assert same_bits(whole, before)
    assert same_bits(batch.query, query)


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (6, 1), (24, 1)], ids=lambda number: str(number)
)
@pytest.mark.parametrize("requests", [DECODES[2:], [(33, 5), (0, 12)]], ids=["decodes", "prompts"])
def test_any_number_of_heads_may_share_a_kv_head(requests: list[tuple[int, int]], heads: int, kv_heads: int) -> None:
    batch = Batch(requests, heads=heads, kv_heads=kv_heads)
    batch.check(batch.attend())
    batch.check(batch.attend(num_splits=1))


@pytest.mark.parametrize("head_dim", [16, 24, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("requests", [[(40, 1)], [(37, 9)]], ids=["decodes", "prompts"])
def test_any_head_dim(requests: list[tuple[int, int]], dtype: torch.dtype, head_dim: int) -> None:
    batch = Batch(requests, 64, heads=2, kv_heads=1, head_dim=head_dim, dtype=dtype)
    batch.check(batch.attend())


@pytest.mark.parametrize("page_size", [1, 16, 32, 64, 100, 256])
def test_any_page_size(page_size: int) -> None:
    for requests in ([(150, 1), (63, 1)], [(70, 30)]):
        batch = Batch(requests, page_size, heads=2, kv_heads=1)
        batch.check(batch.attend())


def test_indices_may_have_32_bits() -> None:
    for requests in (DECODES, [(20, 9)]):
        batch = Batch(requests, kind=torch.int32)
        batch.check(batch.attend())


def test_padding_rows_give_zeros() -> None:
    padding = (-1, 1)
    for requests in ([(20, 1), padding, padding], [padding, (20, 9)]):
        for num_splits in (1, 3):
            batch = Batch(requests, heads=2, kv_heads=1)
            got = batch.attend(num_splits)
            batch.check(got)
            rows = [sum(batch.counts[:row]) for row, request in enumerate(requests) if request == padding]
            assert got[rows].eq(0).all()


def test_no_tokens_give_nothing() -> None:
    batch = Batch([(5, 1)])
    got = attention.paged_attention(
        batch.query[:0], batch.pages, batch.table[:0], batch.starts[:1], batch.seq_lens[:0], batch.scale, 16
    )
    assert got.shape == (0, 4, 16)


@pytest.mark.parametrize("num_splits", [1, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "requests",
    [[(MIN_PIECE - 1, 1), (MIN_PIECE, 1), (1100, 1)], [(600, 3), (20, 2)], [(530, 9)]],
    ids=["decodes", "drafts", "prompts"],
)
def test_keys_in_several_pieces_give_the_same(
    requests: list[tuple[int, int]], dtype: torch.dtype, num_splits: int
) -> None:
    batch = Batch(requests, 64, heads=2, kv_heads=1, dtype=dtype)
    batch.check(batch.attend(num_splits))


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize(
    "requests",
    [[(700, 1), (3, 1)], [(300, 1), (20, 7)], [(270, 12), (0, 9)]],
    ids=["decodes", "drafts", "prompts"],
)
def test_a_request_gives_the_same_bits_alone_and_in_a_batch(
    requests: list[tuple[int, int]], num_splits: int, dtype: torch.dtype
) -> None:
    batch = Batch(requests, 64, heads=3, kv_heads=1, dtype=dtype)
    together = batch.attend(num_splits).split(batch.counts)
    for row, expected in enumerate(together):
        assert same_bits(batch.alone(row, num_splits), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompt_gives_the_same_bits_however_it_is_cut(dtype: torch.dtype) -> None:
    batch = Batch([(17, 90)], heads=3, kv_heads=1, dtype=dtype)
    (whole,) = batch.attend(num_splits=1).split(batch.counts)
    for cuts in ([0, 64, 90], [0, 1, 33, 89, 90]):
        parts = [batch.alone(0, 1, first, end) for first, end in pairwise(cuts)]
        assert same_bits(torch.cat(parts), whole)


def test_a_decoded_token_gives_the_same_bits_with_drafts_behind_it() -> None:
    batch = Batch([(300, 4)], 64, heads=2, kv_heads=1)
    drafts = batch.attend(num_splits=4)
    for token in (0, 3):
        assert same_bits(batch.alone(0, 4, token, token + 1), drafts[token : token + 1])


@pytest.mark.parametrize("num_splits", [None, 1, 3])
@pytest.mark.parametrize("requests", [DECODES, [(0, 15), (16, 1), (37, 28)]], ids=["decodes", "prompts"])
def test_tokens_before_the_first_one_are_not_seen(requests: list[tuple[int, int]], num_splits: int | None) -> None:
    """The result is as if the sequence began with it: rotations aside, which are done before, keys have no
    positions."""
    requests = [(cached + 1, new) for cached, new in requests]
    batch = Batch(requests, dtype=torch.float32)
    arguments = (*batch.arguments(), num_splits, 1)
    for row in range(len(requests)):
        batch.pages[batch.table[row, 0], :, 0] = float("nan")
    shorter = Batch([(cached - 1, new) for cached, new in requests])
    shorter.query = batch.query
    shorter.key, shorter.value = ([each[1:] for each in part] for part in (batch.key, batch.value))
    for found in (attention, reference, *([cpu_attention] if DEVICE == "cpu" else [])):
        shorter.check(found.paged_attention(*arguments))


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize("part", ["query", "key", "value"])
def test_what_is_not_a_number_is_not_lost_among_pieces(part: str, num_splits: int) -> None:
    """It fails the request; a piece that has it must not count as one without keys."""
    batch = Batch([(600, 1), (620, 1)])
    if part == "query":
        batch.query[0] = float("nan")
    else:
        page, kind = int(batch.table[0, 300 // 16]), ("key", "value").index(part)
        batch.pages[page, kind, 300 % 16, :, 3] = float("nan")
    for found in (attention, reference):
        y = found.paged_attention(*batch.arguments(), num_splits)
        has_nan = y.isnan()
        assert has_nan[0, :, 3].all() and not has_nan[1].any()


def test_large_scores_do_not_overflow() -> None:
    for requests in ([(40, 1)], [(20, 20)]):
        batch = Batch(requests)
        batch.query *= 1e4
        got = batch.attend()
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), batch.expected(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda batch: {"num_splits": 0}, "num_splits must be"),
        (lambda batch: {"num_splits": attention.MAX_SPLITS + 1}, "num_splits must be"),
        (lambda batch: {"scale": -1.0}, "scale must be positive"),
        (lambda batch: {"query": batch.query.half()}, "head_dim and dtype must be equal"),
        (lambda batch: {"query": batch.query[:, :3]}, "heads a multiple of kv_heads"),
        (lambda batch: {"query": torch.zeros(1, 16, 4).transpose(1, 2).to(DEVICE)}, "must be contiguous"),
    ],
)
def test_what_it_cannot_take_is_refused(change, message: str) -> None:  # type: ignore[no-untyped-def]
    batch = Batch([(4, 1)])
    names = ("query", "cache", "block_table", "cu_seqlens", "seq_lens", "scale", "chunk_size")
    with pytest.raises(ValueError, match=message):
        attention.paged_attention(**{**dict(zip(names, batch.arguments(), strict=True)), **change(batch)})


# The choice of tiles and pieces


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_that_a_number_of_splits_fixes_does_not_depend_on_the_batch(head_dim: int, dtype: torch.dtype) -> None:
    def tiles(batches: list[tuple[int, int]], num_splits: int) -> int:
        found = {choose_tile(*sizes, 4, head_dim, dtype, num_splits, HOPPER_SHARED_MEMORY) for sizes in batches}
        assert all(MIN_PIECE % tile.keys == 0 for tile in found)
        return len(found)

    assert tiles([(1, 1), (64, 64), (8, 1), (100, 64)], num_splits=8) == 1
    assert tiles([(1, 1), (64, 64), (8, 1), (100, 64), (4096, 3)], num_splits=1) == 1


def test_pieces_fill_an_idle_device_and_no_more() -> None:
    assert choose_splits(programs=4, slots=264, width=32768, decoding=True) == 128
    assert choose_splits(programs=4, slots=264, width=1024, decoding=True) == 4
    assert choose_splits(programs=256, slots=264, width=1024, decoding=True) == 2
    assert choose_splits(programs=4096, slots=264, width=1024, decoding=True) == 1
    assert choose_splits(programs=4096, slots=264, width=131072, decoding=True) == 16
    assert choose_splits(programs=20, slots=132, width=65536, decoding=False) == 13
    assert choose_splits(programs=132, slots=132, width=65536, decoding=False) == 1
    assert choose_splits(programs=1, slots=132, width=16, decoding=False) == 1
