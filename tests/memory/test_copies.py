"""The division of contents among layers, and what is asked of a GPU so that they arrive when they are waited for."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid import Engine
from hybrid.errors import ArgumentError
from hybrid.memory.copies import (
    Copy,
    Downloads,
    LayerGroup,
    StreamCopier,
    Uploads,
    copier_for,
    layer_groups,
    outward_copier_for,
)
from hybrid.memory.memory import CacheMemory
from hybrid.memory.tensors import CacheTensors
from hybrid.spec import HybridSpec, LayerTensors, Place, StateTensor, TokenTensor
from support.arriving import CopyError, LateCopier, late_copiers
from support.tensors import CPU

PAGE = 4

SPEC = HybridSpec(
    tokens=(
        TokenTensor.kv(2, 1, 6, torch.bfloat16),
        TokenTensor("index", (2,), (7,), torch.float16),
        TokenTensor("position", (), (), torch.int32),
    ),
    state=(
        StateTensor("recurrent", (3, 2, 5), torch.float32),
        StateTensor("conv", (3, 11), torch.bfloat16),
        StateTensor("history", (7,), torch.int32),
    ),
    layers=(
        LayerTensors(0, state=("recurrent", "conv")),
        LayerTensors(0, tokens=("kv", "index")),
        LayerTensors(1, state=("recurrent", "conv")),
        LayerTensors(2, state=("recurrent", "conv")),
        LayerTensors(1, tokens=("kv", "index")),
    ),
)


def described(shares: Any, places: tuple[Place, ...]) -> list[str]:
    """The rows of tensors in some shares, by the first byte of each."""
    rows = {}
    for place in places:
        count = place.shape[0] if place.shape else 1
        for row in range(count):
            rows[place.start + row * place.num_bytes // count] = f"{place.name} {row}"
    return sorted(
        name for start, name in rows.items() for share in shares if share.start <= start < share.start + share.num_bytes
    )


def test_each_layer_has_its_rows_and_what_none_lists_comes_first() -> None:
    groups = layer_groups(SPEC, PAGE, 1)
    pages, states = SPEC.page_places(PAGE), SPEC.state_places
    assert [group.first for group in groups] == [0, 1, 2, 3, 4]
    assert [described(group.page, pages) for group in groups] == [
        [f"position {row}" for row in range(PAGE)],
        ["index 0", "kv 0"],
        [],
        [],
        ["index 1", "kv 1"],
    ]
    history = [f"history {row}" for row in range(7)]
    assert [described(group.state, states) for group in groups] == [
        ["conv 0", *history, "recurrent 0"],
        [],
        ["conv 1", "recurrent 1"],
        ["conv 2", "recurrent 2"],
        [],
    ]


def test_small_parts_of_pages_arrive_together() -> None:
    assert [group.first for group in layer_groups(SPEC, PAGE, 100)] == [0, 2, 3, 4]
    (one,) = layer_groups(SPEC, PAGE, 10**6)
    assert one.first == 0
    (whole,) = layer_groups(HybridSpec(SPEC.tokens, SPEC.state), PAGE, 1)
    assert whole == one, "a model that says nothing of its layers has them in one"
    (of_kv,) = layer_groups(HybridSpec((TokenTensor.kv(9, 1, 6, torch.float16),), ()), PAGE, 1)
    assert len(of_kv.page) == 1 and not of_kv.state, "what is one range of bytes is one copy"


@pytest.mark.parametrize("min_bytes", [1, 100, 10**6])
def test_groups_have_every_byte_once(tiny: Engine, min_bytes: int) -> None:
    for spec in (SPEC, tiny.model.own_spec()):
        groups = layer_groups(spec, PAGE, min_bytes)
        for places, shares in (
            (spec.page_places(PAGE), [share for group in groups for share in group.page]),
            (spec.state_places, [share for group in groups for share in group.state]),
        ):
            target = [at for share in shares for at in range(share.start, share.start + share.num_bytes)]
            source = [at for share in shares for at in range(share.source, share.source + share.num_bytes)]
            bytes_of = [at for place in places for at in range(place.start, place.start + place.num_bytes)]
            assert sorted(target) == bytes_of
            assert sorted(source) == [*range(len(bytes_of))]
            at_source = dict(zip(target, source, strict=True))
            assert [at_source[at] for at in bytes_of] == [*range(len(bytes_of))], "contents have no gaps"


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (LayerTensors(2, ("kv",)), "row 2 of 'kv'"),
        (LayerTensors(0, ("kv",)), "row 0 of 'kv', which another layer lists too"),
        (LayerTensors(0, state=("kv",)), "row 0 of 'kv'"),
        (LayerTensors(1, ("position",)), "row 1 of 'position'"),
    ],
)
def test_layers_that_list_what_is_not_theirs_are_refused(layer: LayerTensors, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        HybridSpec(SPEC.tokens, SPEC.state, (LayerTensors(0, ("kv",)), layer))


# What is on its way


def arriving() -> tuple[Uploads, LateCopier, list[Tensor]]:
    """Two groups of copies, of page 3 and of checkpoint 5, on their way to two tensors."""
    copier, targets = LateCopier(), [torch.zeros(4, dtype=torch.uint8) for _ in range(2)]
    uploads = Uploads(copier, (LayerGroup(0, (), ()), LayerGroup(2, (), ())))
    uploads.begin([[Copy(target, torch.ones(4, dtype=torch.uint8))] for target in targets], [3], 5)
    return uploads, copier, targets


def are_there(targets: list[Tensor]) -> list[bool]:
    return [bool(target.eq(1).all()) for target in targets]


def test_a_layer_waits_for_its_contents_and_those_before() -> None:
    uploads, _, targets = arriving()
    assert uploads.are_pending
    for layer, there in ((0, [True, False]), (1, [True, False]), (2, [True, True])):
        uploads.wait_for_layer(layer)
        assert are_there(targets) == there
    assert uploads.are_pending, "another pass may wait, too"
    uploads.wait_for_all()
    assert not uploads.are_pending


@pytest.mark.parametrize(
    ("pages", "checkpoints", "waits"),
    [((1, 2), (4,), False), ((), (3,), False), ((5,), (), False), ((2, 3), (), True), ((), {5: 6}, True)],
)
def test_who_uses_what_is_on_its_way_waits(pages: Any, checkpoints: Any, waits: bool) -> None:
    uploads, _, targets = arriving()
    uploads.wait_if_pending(pages, checkpoints)
    assert are_there(targets) == [waits, waits]
    assert uploads.are_pending is not waits
    uploads.wait_for_all()
    uploads.wait_if_pending((3,), (5,))
    assert are_there(targets) == [True, True]


def test_waiting_for_the_latest_is_waiting_for_all() -> None:
    uploads, _, targets = arriving()
    more = torch.zeros(4, dtype=torch.uint8)
    uploads.begin([[Copy(more, torch.ones(4, dtype=torch.uint8))], []], [7], 8)
    uploads.wait_for_layer(0)
    assert are_there([*targets, more]) == [True] * 3
    uploads.wait_if_pending([3])
    assert not uploads.are_pending


def test_copies_that_cannot_all_be_begun_are_not_on_their_way() -> None:
    uploads, copier, targets = arriving()
    copier.fails_at = copier.num_calls + 2
    more = [torch.zeros(4, dtype=torch.uint8) for _ in range(4)]
    copies = [Copy(target, torch.ones(4, dtype=torch.uint8)) for target in more]
    with pytest.raises(CopyError):
        uploads.begin([copies[:2], copies[2:]], [7], 8)
    assert not uploads.are_pending
    assert are_there([*targets, *more]) == [True] * 5 + [False]
    assert copier.num_made == len(copier.begun)


def test_on_a_cpu_nothing_is_ever_on_its_way() -> None:
    assert copier_for(CPU) is None
    uploads = Uploads()
    uploads.wait_for_all()
    uploads.wait_for_layer(0)
    uploads.wait_if_pending([1], [2])
    assert not uploads.are_pending and uploads.seconds(10**9) == 0


def units_of(memory: CacheMemory, num_pages: int) -> tuple[CacheTensors, list[int], int]:
    """Its tensors, pages, and a place for a checkpoint."""
    pages, places = memory.pages.allocate(num_pages), memory.checkpoints.allocate(1)
    assert memory.tensors is not None and pages is not None and places is not None
    return memory.tensors, pages, places[0]


def random_contents(tensors: CacheTensors, num_pages: int, seed: int = 0) -> tuple[list[bytes], bytes]:
    """Return random contents of pages and of a checkpoint."""
    rng = Random(seed)
    pages = [rng.randbytes(len(tensors.read_page(0))) for _ in range(num_pages)]
    return pages, rng.randbytes(len(tensors.read_checkpoint(1)))


@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_contents_arrive_as_they_were_read(monkeypatch: pytest.MonkeyPatch, state_dtype: str) -> None:
    late_copiers(monkeypatch)
    memory = CacheMemory.for_spec(SPEC, 40_000, CPU, page_size=PAGE, state_dtype=state_dtype)
    tensors, pages, place = units_of(memory, 3)
    contents, checkpoint = random_contents(tensors, 3)
    memory.contents.write(pages, contents, place, checkpoint)
    assert tensors.tokens["position"][pages[0]].eq(-1).all(), "it is not there yet"
    assert [bytes(tensors.read_page(page)) for page in pages] == contents
    assert bytes(tensors.read_checkpoint(place)) == checkpoint


# What is asked of a GPU


class Event:
    """In the place of `torch.cuda.Event`."""

    def __init__(self, gpu: "Gpu", enable_timing: bool) -> None:
        self.gpu, self.is_over, self.number = gpu, False, len(gpu.events)
        assert enable_timing
        gpu.events.append(self)

    def record(self, stream: str) -> None:
        self.gpu.said.append(f"event {self.number} on {stream}")

    def query(self) -> bool:
        return self.is_over

    def elapsed_time(self, end: "Event") -> float:
        return 2.0

    def synchronize(self) -> None:
        self.gpu.said.append(f"the host waits for event {self.number}")


class Stream(str):
    """One of two streams: "own" and "current"."""

    said: list[str]

    def wait_stream(self, other: str) -> None:
        self.said.append(f"{self} waits for {other}")

    def wait_event(self, event: Event) -> None:
        self.said.append(f"{self} waits for event {event.number}")


class Gpu:
    """In the place of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.events: list[Event] = []
        copy = Tensor.copy_

        def copied(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            self.said.append("copy" if non_blocking else "blocking copy")
            if source.numel() and source.flatten()[0] == 13:
                raise CopyError("refused")
            return copy(target, source)

        @contextmanager
        def stream(own: str) -> Iterator[None]:
            self.said.append(f"on {own}")
            yield
            self.said.append(f"off {own}")

        def pin_memory(tensor: Tensor) -> Tensor:
            self.said.append("pin")
            return tensor.clone()

        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self._stream("own"))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self._stream("current"))
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(self, enable_timing))
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(Tensor, "copy_", copied)
        monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: False)
        monkeypatch.setattr(Tensor, "pin_memory", pin_memory)

    def _stream(self, name: str) -> Stream:
        stream = Stream(name)
        stream.said = self.said
        return stream


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def bytes_of(value: int) -> Tensor:
    return torch.full((4,), value, dtype=torch.uint8)


TWO_COPIES = [
    "own waits for current",
    "event 0 on own",
    "on own",
    "copy",
    "copy",
    "off own",
    "event 1 on own",
]
"""What a GPU is given for two copies in a stream of their own."""


def test_a_gpu_copies_in_a_stream_of_its_own_after_its_work_and_before_what_waits(gpu: Gpu) -> None:
    copier = StreamCopier(torch.device("cuda"))
    source = copier.prepare(bytes_of(1))
    copier.begin()
    copier.copy([Copy(bytes_of(0), source), Copy(bytes_of(0), source)]).wait()
    copier.wait()
    assert gpu.said == [
        "pin",
        *TWO_COPIES,
        "current waits for event 1",
        "current waits for own",
    ]


def test_sources_live_until_they_are_copied_and_no_longer(gpu: Gpu) -> None:
    copier = StreamCopier(torch.device("cuda"))
    sources = [copier.prepare(bytes_of(1)) for _ in range(2)]
    alive = [weakref.ref(source) for source in sources]
    copier.begin()
    for source in sources:
        copier.copy([Copy(bytes_of(0), source)])
    del source, sources

    def num_alive() -> int:
        gc.collect()
        return sum(ref() is not None for ref in alive)

    assert num_alive() == 2 and copier.seconds_per_byte == 0
    gpu.events[1].is_over = True
    copier.begin()
    assert num_alive() == 1
    gpu.events[3].is_over = True
    assert copier.seconds_per_byte == pytest.approx(0.002 / 4)
    assert num_alive() == 0


def test_sources_of_copies_that_fail_live_until_those_before_them_end(gpu: Gpu) -> None:
    copier = StreamCopier(torch.device("cuda"))
    source = copier.prepare(bytes_of(1))
    alive = weakref.ref(source)
    with pytest.raises(CopyError):
        copier.copy([Copy(bytes_of(0), source), Copy(bytes_of(0), bytes_of(13))])
    del source
    gc.collect()
    assert alive() is not None
    assert gpu.said[-1] == "event 1 on own"
    gpu.events[1].is_over = True
    assert copier.seconds_per_byte > 0


def test_what_leaves_a_gpu_is_copied_between_what_wrote_it_and_what_may_overwrite_it(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty, pinned = torch.empty, list[bool]()

    def allocated(*shape: Any, pin_memory: bool, **rest: Any) -> Tensor:
        pinned.append(pin_memory)
        return empty(*shape, **rest)

    monkeypatch.setattr(torch, "empty", allocated)
    downloads = Downloads(outward_copier_for(torch.device("cuda")))
    contents = downloads.begin([bytes_of(1), bytes_of(2)])
    assert gpu.said == [
        *TWO_COPIES,
        "current waits for own",
    ]
    assert pinned == [True]
    gpu.said.clear()
    assert downloads.wait(contents) is contents and bytes(contents) == bytes([1] * 4 + [2] * 4)
    assert gpu.said == ["the host waits for event 1"]
    gpu.said.clear()
    gpu.events[1].is_over = True
    downloads.wait(contents)
    assert not gpu.said
    assert bytes(downloads.wait(downloads.begin([]))) == b""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("state_dtype", ["float32", "int8"])
def test_on_a_gpu_contents_arrive_while_it_computes(state_dtype: str) -> None:
    """Restores into memory that the GPU still writes, whose work follows without a wait of the host."""
    spec = HybridSpec(
        tokens=(TokenTensor.kv(4, 8, 64, torch.bfloat16),),
        state=(StateTensor("recurrent", (4, 64, 64), torch.float32),),
        layers=tuple(
            layer
            for row in range(4)
            for layer in (LayerTensors(row, state=("recurrent",)), LayerTensors(row, tokens=("kv",)))
        ),
    )
    device = torch.device("cuda")
    memory = CacheMemory.for_spec(spec, 64 * 2**20, device, page_size=64, state_dtype=state_dtype)
    tensors, pages, place = units_of(memory, 16)
    old, new = torch.tensor(pages, device=device).split(8)
    busy = torch.randn(2048, 2048, device=device)
    for turn in range(10):
        contents, checkpoint = random_contents(tensors, 8, turn)
        for _ in range(50):
            busy = (busy @ busy).clamp(-1, 1)
        tensors.kv[old] = 1
        memory.contents.write(pages[:8], contents, place, checkpoint)
        seen = []
        for layer in range(8):
            memory.uploads.wait_for_layer(layer)
            if layer % 2:
                seen.append(tensors.kv[old, layer // 2])
        memory.uploads.wait_for_all()
        tensors.kv[new] = tensors.kv[old]
        found = torch.stack(seen, 1).view(torch.uint8).flatten(1).cpu()
        assert [row.numpy().tobytes() for row in found] == contents
        assert [bytes(tensors.read_page(page)) for page in pages[8:]] == contents
        assert bytes(tensors.read_checkpoint(place)) == checkpoint
