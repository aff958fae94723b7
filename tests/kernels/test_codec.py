"""States that rest in fewer bytes: what a record holds, what comes back, and how far a model's answer moves."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hybrid.kernels import codec
from hybrid.kernels.codec import STORED_AS, StoredLayout, dequantize_rows, quantize_rows, restore, store, stored_layout
from hybrid.spec import HybridSpec, StateTensor, TokenTensor
from support.engines import GRID, answer, cold, engine_on, greedy
from support.tensors import same_bits

NAN, INF, TINY = float("nan"), float("inf"), torch.finfo(torch.float32).tiny
every_kind = pytest.mark.parametrize("stored_as", STORED_AS)


def spec_of(recurrent: tuple[int, ...], conv: tuple[int, ...], conv_dtype: torch.dtype) -> HybridSpec:
    state = (StateTensor("recurrent", recurrent, torch.float32), StateTensor("conv", conv, conv_dtype))
    return HybridSpec((TokenTensor.kv(1, 1, 1, conv_dtype),), state)


SPEC = spec_of((3, 4, 10, 17), (3, 3, 21), torch.float32)  # three layers; no size is round


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def layout_of(stored_as: str, spec: HybridSpec = SPEC) -> StoredLayout:
    return stored_layout([(tensor.name, tensor.shape, tensor.dtype) for tensor in spec.state], stored_as)


def random_slots() -> list[dict[str, Tensor]]:
    """Five slots, views of one memory as in the engine, full of random numbers, rows of very different sizes."""
    memory = torch.empty(5, SPEC.state_bytes, dtype=torch.uint8)
    slots: list[dict[str, Tensor]] = [{} for _ in memory]
    for name, shape, dtype, start, num_bytes in SPEC.state_places:
        for slot, part in zip(slots, memory[:, start : start + num_bytes].view(dtype), strict=True):
            slot[name] = part.view(shape)
            slot[name].copy_(torch.randn(shape) * 10 ** (4 * torch.randn(*shape[:-1], 1)))
    return slots


def stored_state_of(layout: StoredLayout, slot: dict[str, Tensor]) -> Tensor:
    record = torch.full((layout.num_bytes,), 0xAB, dtype=torch.uint8)
    store(layout, slot, record)
    return record


def there_and_back(layout: StoredLayout, slot: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a slot after it was stored and restored."""
    target = {name: torch.full_like(tensor, NAN) for name, tensor in slot.items()}
    restore(layout, stored_state_of(layout, slot), target)
    return target


def restored_rows(values: Tensor) -> Tensor:
    out = torch.full_like(values, NAN)
    dequantize_rows(*quantize_rows(values), out)
    return out


def within_half_a_step(near: Tensor, values: Tensor) -> bool:
    """A step is a 127th of the row's largest value, or the smallest normal number; a division may round."""
    steps = (values.double().abs().amax(-1, keepdim=True) / 127).clamp(min=TINY)
    return bool(((near.double() - values.double()).abs() <= steps * (0.5 + 127 * 2**-24)).all())


# Rows

NUMBERS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def assert_comes_back_and_stays(values: Tensor) -> None:
    codes, scales = quantize_rows(values)
    assert (codes.dtype, scales.dtype, int(codes.min()) >= -127) == (torch.int8, torch.float32, True)
    assert (codes.shape, scales.shape) == (values.shape, values.shape[:-1])
    once = restored_rows(values)
    assert within_half_a_step(once, values)
    assert bool((once.abs().amax(-1) <= values.abs().amax(-1).clamp(min=127 * TINY)).all())
    assert all(same_bits(x, y) for x, y in zip(quantize_rows(once), (codes, scales), strict=True))


@given(rows=st.integers(1, 33).flatmap(lambda n: st.lists(st.lists(NUMBERS, min_size=n, max_size=n), min_size=1)))
def test_every_row_comes_back_within_half_its_step_and_then_stays(rows: list[list[float]]) -> None:
    assert_comes_back_and_stays(torch.tensor(rows, dtype=torch.float32))


def test_rows_of_all_sizes_come_back_and_then_stay() -> None:
    assert_comes_back_and_stays(torch.randn(20000, 8) * 10 ** (10 * torch.randn(20000, 1)).clamp(-37, 37))


@pytest.mark.parametrize("odd", [1e30, 3.4e38, -3.4e38, 1e-44, NAN, INF, -INF])
def test_an_odd_row_does_not_disturb_its_neighbours(odd: float) -> None:
    values, others = torch.randn(2, 3, 5, 16), torch.ones(2, 3, 5, dtype=torch.bool)
    others[1, 1, 2] = False
    expected = restored_rows(values)
    values[1, 1, 2] = 0.0
    assert bool((restored_rows(values)[1, 1, 2] == 0).all())
    values[1, 1, 2, 7] = odd
    near = restored_rows(values)
    assert same_bits(near[others], expected[others])
    if abs(odd) < INF:
        assert within_half_a_step(near, values)
    else:  # no step fits: the row is broken, and says so
        assert bool(near[1, 1, 2].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_another_type_are_rounded_to_it_once(dtype: torch.dtype) -> None:
    values = torch.randn(6, 40).to(dtype)
    assert same_bits(restored_rows(values), restored_rows(values.float()).to(dtype))


# Records


def test_a_float32_record_is_the_slot_byte_for_byte() -> None:
    layout, slot = layout_of("float32"), random_slots()[2]
    assert (layout.num_bytes, [part.offset for part in layout.tensors]) == (
        SPEC.state_bytes,
        [place.start for place in SPEC.state_places],
    )
    slot["recurrent"][1, 2, 3, 4:7] = torch.tensor([NAN, -0.0, INF])
    back = there_and_back(layout, slot)
    assert all(same_bits(back[name], slot[name]) for name in slot)


def test_a_bfloat16_record_keeps_eight_bits_of_every_number() -> None:
    slot = random_slots()[2]
    for name, near in there_and_back(layout_of("bfloat16"), slot).items():
        torch.testing.assert_close(near, slot[name], rtol=2**-8, atol=0)
        assert same_bits(near, slot[name].bfloat16().float())


def test_an_int8_record_quantises_what_is_recurrent_and_rounds_the_rest() -> None:
    slot = random_slots()[2]
    back = there_and_back(layout_of("int8"), slot)
    assert within_half_a_step(back["recurrent"], slot["recurrent"])
    assert same_bits(back["recurrent"], restored_rows(slot["recurrent"]))
    assert same_bits(back["conv"], slot["conv"].bfloat16().float())


@every_kind
def test_what_was_restored_once_is_stored_again_bit_by_bit(stored_as: str) -> None:
    layout, slot = layout_of(stored_as), random_slots()[2]
    assert same_bits(stored_state_of(layout, there_and_back(layout, slot)), stored_state_of(layout, slot))


@every_kind
def test_store_and_restore_write_their_record_and_their_slot_and_nothing_else(stored_as: str) -> None:
    layout, slots = layout_of(stored_as), random_slots()
    records = torch.full((3, layout.num_bytes), 0xCD, dtype=torch.uint8)
    expected = [{name: tensor.clone() for name, tensor in slot.items()} for slot in slots]
    expected[4] = there_and_back(layout, slots[2])
    store(layout, slots[2], records[1])
    restore(layout, records[1], slots[4])
    assert bool((records[::2] == 0xCD).all())
    assert all(same_bits(slot[name], rest[name]) for slot, rest in zip(slots, expected, strict=True) for name in rest)


@every_kind
def test_a_slot_may_have_any_strides(stored_as: str) -> None:
    layout, slot = layout_of(stored_as), random_slots()[2]
    wide = {name: torch.stack((tensor, torch.full_like(tensor, NAN)), dim=-1) for name, tensor in slot.items()}
    strided = {name: tensor[..., 0] for name, tensor in wide.items()}
    record, expected = stored_state_of(layout, strided), there_and_back(layout, slot)
    for tensor in strided.values():
        tensor.fill_(NAN)
    restore(layout, record, strided)
    assert all(same_bits(strided[name], expected[name]) for name in slot)
    assert all(bool(tensor[..., 1].isnan().all()) for tensor in wide.values())


@pytest.mark.parametrize("num_bytes", [1, 2 * 4 * 10 * 17 * 4])
def test_layers_are_quantised_alike_however_many_go_together(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, slot = layout_of("int8"), random_slots()[2]
    expected = stored_state_of(layout, slot)
    monkeypatch.setattr(codec, "PIECE_BYTES", num_bytes)
    assert same_bits(stored_state_of(layout, slot), expected)


@every_kind
def test_parts_of_a_record_are_aligned_and_do_not_overlap(stored_as: str) -> None:
    layout = layout_of(stored_as)
    record = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    views = [view for part in layout.tensors for view in (part.values(record), part.scales(record)) if view is not None]
    for view in views:
        assert (view.data_ptr() - record.data_ptr()) % codec.ALIGNMENT == 0
        view.view(torch.uint8).add_(1)
    assert (int(record.max()), int(record.sum())) == (1, sum(view.nbytes for view in views))


def test_a_state_as_large_as_that_of_qwen3_5_4b_takes_these_bytes() -> None:
    spec = spec_of((24, 32, 128, 128), (24, 3, 8192), torch.bfloat16)
    sizes = [layout_of(stored_as, spec).num_bytes for stored_as in STORED_AS]
    assert sizes == [51_511_296, 26_345_472, 14_155_776]


def test_only_wide_floats_are_made_smaller() -> None:
    kinds = [((2, 3, 4, 5), torch.int64), ((2, 3, 4, 5), torch.int8), ((2, 3, 4), torch.float16)]
    kinds += [((2, 3, 4), torch.float32), ((2, 3, 4, 5), torch.float16), ((2, 3, 4, 5, 6), torch.float32)]
    layout = stored_layout([(str(at), shape, dtype) for at, (shape, dtype) in enumerate(kinds)], "int8")
    smaller = [torch.int64, torch.int8, torch.float16, torch.bfloat16, torch.int8, torch.int8]
    assert [part.stored_dtype for part in layout.tensors] == smaller
    assert [part.scales_offset is None for part in layout.tensors] == [True] * 4 + [False] * 2


def test_what_does_not_fit_the_layout_is_refused_before_anything_is_written() -> None:
    layout, slot = layout_of("int8"), random_slots()[2]
    record = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"one of 'float32', 'bfloat16', 'int8'; got 'int4'"):
        layout_of("int4")
    for wrong in (record[1:], record.view(2, -1), record.view(torch.int8), torch.zeros(2 * len(record)).byte()[::2]):
        with pytest.raises(ValueError, match="a stored state of this layout is"):
            store(layout, slot, wrong)
    with pytest.raises(ValueError, match=r"has the tensors \['conv', 'recurrent'\]; got \['recurrent'\]"):
        store(layout, {"recurrent": slot["recurrent"]}, record)
    for odd in (slot["conv"][:2], slot["conv"].half()):
        with pytest.raises(ValueError, match=r"'conv' is \[3, 3, 21\] torch.float32 in this layout; got"):
            store(layout, {**slot, "conv": odd}, record)
    assert not record.any()


# The model

PASSAGE = """Return a new list that holds the items of the first list, in the order in which they are found there. If
the optional argument is given, it must be a function of one item; items for which it returns a false value are left
out. Raises a TypeError if the object is not iterable, and a ValueError when the number of items is negative."""


@pytest.mark.parametrize(("stored_as", "most"), [("float32", 0.0), ("bfloat16", 0.05), ("int8", 0.1)])
def test_a_model_that_goes_on_from_a_stored_state_says_almost_the_same(tiny: Any, stored_as: str, most: float) -> None:
    engine, tokens, params = engine_on(tiny), tiny.tokenizer.encode(PASSAGE), greedy(16, logprobs=100)
    end = len(tokens) // GRID * GRID
    answer(engine, tokens[:end], greedy(1))
    layout = layout_of(stored_as, engine.model.spec(engine.model.config, torch.float32))
    for slot in [node.slot for _, node in engine.cache.tree.nodes() if node.slot is not None]:
        state = {name: tensor[slot] for name, tensor in engine.cache.state_tensors.items()}
        restore(layout, stored_state_of(layout, state), state)
    exact, near = cold(tiny, tokens[: end + 1], params), answer(engine, tokens[: end + 1], params)
    assert (near.usage.cached_tokens, near.token_ids) == (end, exact.token_ids)
    assert exact.logprobs is not None and near.logprobs is not None
    for ours, theirs in zip(near.logprobs, exact.logprobs, strict=True):
        errors = [abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()]
        assert (len(errors) > 90, max(errors) <= most) == (True, True)
