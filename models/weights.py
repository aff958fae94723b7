"""Weights from safetensors files to parameters: which tensors on disk make up a parameter, and how they are read.

A family lists for each parameter the tensors on disk that make it up (`Layouts`), and the loader does the rest. It
reads each tensor once, in slices. So loading takes the memory of the model and a slice, and errors name a missing or
unexpected tensor by its name on disk. Files are read and not mapped: a model does not change, or end its process, when
another process writes to its file.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hybrid.checks import is_file
from hybrid.errors import CheckpointError
from hybrid.kernels.packed_weights import BLOCK, quantize
from hybrid.models.json_files import MAX_INDEX_BYTES, read_json
from hybrid.tensor_file import FileBytes, HeldBytes, UnknownTypeError, read_header

SLICE_BYTES = 4 * 2**20
"""Bytes of a tensor that are read at a time."""

MAX_HEADER_BYTES = 32 * 2**20
"""The maximum size of the header of a file of weights: about 250,000 tensors."""

MAX_FILES = 10_000
"""The maximum number of files of weights."""

MAX_NAMED = 20
"""The maximum number of tensors that an error names."""

SCALE = "_scale_inv"
"""End of the name of a tensor with the factors of another one, which is stored as 8-bit floats."""

WAY_OUT = (
    "use the checkpoint that it was made from, in bfloat16 or float32; on a CPU load_dtype='int8' or 'int4' quantizes "
    "that while it is loaded"
)
"""The remedy for weights that are quantized in another way."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Types that weights are read from."""


@dataclass(frozen=True)
class Source:
    """A tensor on disk, or some of its rows, that makes up a parameter or a part of one.

    Attributes:
        name: of the tensor on disk.
        rows: its rows to take, in this order; None: all.
        at: index of the part in the parameter; `()`: the whole parameter.
        transposed: rows and columns of its matrices are the other way round.
    """

    name: str
    rows: Tensor | None = None
    at: tuple[int | slice, ...] = ()
    transposed: bool = False


Layouts = Sequence[Sequence[Source]]
"""The ways to store a parameter, each a list of sources."""


def renamed(parameter: str, names: Mapping[str, str]) -> Layouts:
    """The layout of a parameter that is stored whole, under another name.

    Args:
        names: parts of names, and what they are on disk.
    """
    return with_names(((Source(parameter),),), names)


def with_names(layouts: Layouts, names: Mapping[str, str]) -> Layouts:
    """The same layouts, of tensors that have other names on disk. `names`: as for `renamed`."""

    def name_of(source: Source) -> str:
        name = source.name
        for part, stored in names.items():
            name = name.replace(part, stored)
        return name

    return [[replace(source, name=name_of(source)) for source in each] for each in layouts]


@dataclass(frozen=True)
class Quantization:
    """The form of weights that have fewer bits than floats.

    Attributes:
        group: numbers of a row that share a scale and a minimum, in four bits (`hybrid.kernels.packed_weights`); None:
            int8, a scale for each row.
        scales: the type of scales and minimums, in four bits.
    """

    group: int | None = None
    scales: torch.dtype = torch.bfloat16

    def tensors(self, shape: torch.Size) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """The shapes and types of weights of this form and of their scales. `shape`: `(..., outputs, inputs)`."""
        *rows, inputs = shape
        if self.group is None:
            return ((*rows, inputs), torch.int8), ((*rows,), torch.float32)
        blocks = -(-inputs // BLOCK)
        scales = *rows, blocks, BLOCK // self.group, 2
        return ((*rows, blocks * BLOCK // 2), torch.uint8), (scales, self.scales)

    def quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """A weight `[outputs, inputs]` in this form, and its scales."""
        return quantize_rows(weight) if self.group is None else quantize(weight, self.group)

    def empty(self, shape: torch.Size, memory: WeightMemory) -> tuple[Tensor, Tensor]:
        """A weight of this form and its scales, not initialized."""
        weight, scales = (memory.empty(*each) for each in self.tensors(shape))
        return weight, scales

    def num_bytes(self, shape: torch.Size) -> int:
        """Bytes of a weight and its scales, each rounded up to `ALIGNMENT`."""
        return sum(aligned(prod(own) * dtype.itemsize) for own, dtype in self.tensors(shape))


@dataclass(frozen=True)
class Stored(ABC):
    """A tensor in a file.

    Attributes:
        path: of the file.
        name: of the tensor.
        dtype, shape: of what is read.
    """

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of what is read."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def form(self) -> Quantization | None:
        """The form that keeps its numbers exactly, in fewer bits than floats; None: there is none."""
        return None

    def opened(self) -> Stored:
        """The tensor, ready to be read in parts: of what can only be read whole, that is in memory."""
        return self

    def tensor(self) -> Tensor:
        """Read all of it."""
        return self.part(0, self.shape, torch.empty(self.num_bytes, dtype=torch.uint8))

    def has_values_of(self, other: Stored) -> bool:
        """Tell whether another tensor has the same shape and values."""
        if self.shape != other.shape:
            return False
        step = SLICE_BYTES // max(self.dtype.itemsize, other.dtype.itemsize)
        buffers = [torch.empty(SLICE_BYTES, dtype=torch.uint8) for _ in range(2)]
        opened = self.opened(), other.opened()
        for first in range(0, prod(self.shape), step):
            shape = (min(step, prod(self.shape) - first),)
            one, two = (each.part(first, shape, own) for each, own in zip(opened, buffers, strict=True))
            if not torch.equal(one.float(), two.float()):
                return False
        return True

    @abstractmethod
    def part(self, first: int, shape: Sequence[int], buffer: Tensor) -> Tensor:
        """Read consecutive elements, and return them; they may be a view of the buffer.

        Args:
            first: the first of them.
            shape: of what is returned.
            buffer: `[N]` uint8, at least as large.

        Raises:
            CheckpointError: they cannot be read: the file was cut off meanwhile, or its disk fails.
        """


@dataclass(frozen=True)
class FileTensor(Stored):
    """A tensor whose numbers lie in a file as they are.

    Attributes:
        file: its bytes.
        start: its first byte in the file.
    """

    file: FileBytes | HeldBytes
    start: int

    def part(self, first: int, shape: Sequence[int], buffer: Tensor) -> Tensor:
        """Read consecutive elements into a buffer, as a view of it."""
        size = self.dtype.itemsize
        own = buffer[: prod(shape) * size]
        try:
            self.file.read_into(self.start + first * size, memoryview(own.numpy()))  # type: ignore[arg-type]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path} is damaged or truncated: {self.name[:100]!r}: {error}") from error
        return own.view(self.dtype).view(tuple(shape))


@dataclass(frozen=True)
class RestoredTensor(Stored):
    """A tensor whose numbers are restored from what is in a file, some rows at a time.

    All dimensions but the last one count its rows. Of a vector each number is a row.
    """

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.shape[-1] if len(self.shape) > 1 else 1

    @property
    def is_quantized(self) -> bool:
        """Tell whether the file has fewer bits than floats have."""
        return True

    @abstractmethod
    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`, `[rows, width]` fp32."""

    def packed(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows from `begin` to `end` of a matrix in its `form`, and their scales."""
        raise NotImplementedError

    def part(self, first: int, shape: Sequence[int], buffer: Tensor) -> Tensor:
        """Read consecutive elements; the buffer is not used."""
        count, width = prod(shape), self.width
        begin, end = first // width, -(-(first + count) // width)
        own = self.rows(begin, end).flatten()[first - begin * width :][:count]
        return own.to(self.dtype).view(tuple(shape))


def stored_tensors(path: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint by its name on disk, from one file or several.

    Raises:
        CheckpointError: a file is missing, damaged or truncated, or has an unknown dtype.
    """
    weight_map = _weight_map(path)
    names = sorted(set(weight_map.values())) if weight_map is not None else ["model.safetensors"]
    missing = next((name for name in names if not is_file(path / name)), None)
    if missing is not None:
        raise CheckpointError(f"{path} has no weights: {missing} is missing")
    tensors: dict[str, Stored] = {}
    for stored in (stored for name in names for stored in _read_header(path / name)):
        other = tensors.setdefault(stored.name, stored)
        if other is not stored:
            raise CheckpointError(
                f"{path}: {stored.name} is in {other.path.name} and in {stored.path.name}; each tensor has one place"
            )
    for name, file in (weight_map or {}).items():
        if name not in tensors or tensors[name].path.name != file:
            raise CheckpointError(f"{path}: the index says that {name[:200]} is in {file}, and it is not there")
    return tensors


def tensors_of(contents: HeldBytes, path: Path) -> dict[str, Stored]:
    """Every tensor of the contents of one file by its name.

    Args:
        path: of the file, for errors.

    Raises:
        CheckpointError: it is damaged or truncated, or has an unknown dtype.
    """
    return {stored.name: stored for stored in _tensors(contents, path)}


def _weight_map(path: Path) -> dict[str, str] | None:
    """For each tensor its file, from the index of weights; None: there is no index."""
    index = path / "model.safetensors.index.json"
    if not is_file(index):
        return None
    content = read_json(index, MAX_INDEX_BYTES)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index} is not an index of weights: it needs a weight_map of names to files")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{index}: {name[:100]!r} must be in a file of the same folder, not in {file!r:.100}")
    if len(set(weight_map.values())) > MAX_FILES:
        raise CheckpointError(
            f"{index} names {len(set(weight_map.values()))} files; a checkpoint has up to {MAX_FILES}"
        )
    return weight_map


def _read_header(path: Path) -> Iterator[Stored]:
    """The tensors of a file."""
    try:
        file = FileBytes(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check its permissions, or copy it again") from error
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return _tensors(file, path)


def _tensors(file: FileBytes | HeldBytes, path: Path) -> Iterator[Stored]:
    try:
        header = read_header(file.read, file.num_bytes, MAX_HEADER_BYTES)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; check its permissions, or copy it again") from error
    except UnknownTypeError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged or truncated: {error}") from error
    for name, (dtype, shape, start, _) in header.tensors.items():
        yield FileTensor(path, name, dtype, shape, file, start)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight as int8, and the value of 1 in each row: the largest of the row is 127. An element changes by at most
    half of that value.

    Args:
        weight: `[out, in]`.

    Returns:
        `[out, in]` int8, `[out]` fp32. A row that is not finite has a scale of NaN: what it gives is refused.
    """
    exact = weight.float()
    scale = exact.abs().amax(1) / 127
    scale = torch.where(scale.isfinite(), scale, float("nan"))
    divisor = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return (exact / divisor).round_().to(torch.int8), scale


# Memory for the weights of a model on a CPU. A step that decodes reads all weights once, and with pages of 4 kB the CPU
# looks up the address of each of them first, which takes up to a third of the step. Huge pages (2 MB) need a lookup for
# 512 times as many bytes. They are asked for where the system has as many free: to make them, it would move other
# memory, which can take longer than loading.

ALIGNMENT = 64
"""Bytes; weights begin at multiples of it."""

MIN_PAGES = 8
"""Huge pages that weights fill before they are asked for: the CPU remembers where fewer bytes are."""

HUGE_PAGE_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
"""Holds the bytes of a huge page, on Linux."""

FREE_BLOCKS = Path("/proc/buddyinfo")
"""Holds for each part of memory the numbers of free blocks of 1, 2, 4, ... small pages, on Linux."""


class WeightMemory:
    """Memory for tensors of a known size in all, in huge pages if they are free.

    Args:
        num_bytes: of all tensors, each rounded up to `ALIGNMENT`. What is more has memory of its own.
        device: of the tensors. Only on a CPU there are huge pages.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._left = huge_pages(num_bytes) if device.type == "cpu" else None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor, not initialized."""
        if self._left is not None:
            size = torch.Size(shape).numel() * dtype.itemsize
            if size <= len(self._left):
                own, self._left = self._left[:size], self._left[aligned(size) :]
                return own.view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=self._device)


def aligned(num_bytes: int) -> int:
    """A number of bytes, rounded up to `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def huge_pages(num_bytes: int) -> Tensor | None:
    """`[num_bytes]` uint8 in huge pages, not initialized. None: they are too few to matter, or the system does not have
    as many free."""
    size = _size_of_huge_page()
    if not size or num_bytes < MIN_PAGES * size or _free_bytes(size) < num_bytes + size:
        return None
    try:
        memory = mmap.mmap(-1, num_bytes + size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # too much, as torch will say
        return None
    with suppress(OSError):  # the system has none after all: small pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    found = torch.frombuffer(memory, dtype=torch.uint8)
    start = -found.data_ptr() % size
    return found[start : start + num_bytes]


def _size_of_huge_page() -> int:
    """In bytes; 0: there are none."""
    try:
        return int(HUGE_PAGE_SIZE.read_text())
    except (OSError, ValueError):
        return 0


def _free_bytes(size: int) -> int:
    """Bytes in free blocks of memory of at least this size; 0 where that is not known."""
    found = 0
    try:
        for line in FREE_BLOCKS.read_text().splitlines():
            blocks = enumerate(map(int, line.split()[4:]))  # "Node 0, zone Normal" before
            found += sum(count * (mmap.PAGESIZE << order) for order, count in blocks if mmap.PAGESIZE << order >= size)
    except (OSError, ValueError):
        return 0
    return found


@dataclass
class Loader:
    """Fills parameters from tensors on disk.

    Args:
        path: of the checkpoint, for errors.
        shapes: of the parameters, by name.
        layouts: gives the layouts of a parameter by its name.
        dtype, device: of the parameters, where nothing else is said.
        quantized: parameters `[..., out, in]` that are quantized, each as soon as it is complete, and in what form.
        may_keep: whether a parameter `[..., out, in]` may have the form that its tensors on disk have; else their
            numbers are restored to floats.
        bfloat16: names of parameters that stay bfloat16 where all tensors that make them up are: no bit is lost.
        exact: names of parameters that are fp32 in a model of any type.

    Attributes:
        parameters: by name.
        scales: `[out]` fp32 by the name of an int8 parameter: the value of 1 in each of its rows; of one of four bits
            its scales and minimums.
        kept: parameters that have the form of their tensors on disk.
    """

    path: Path
    shapes: Mapping[str, torch.Size]
    layouts: Callable[[str], Layouts]
    dtype: torch.dtype
    device: torch.device
    quantized: Mapping[str, Quantization] = field(default_factory=dict)
    bfloat16: frozenset[str] = frozenset()
    exact: frozenset[str] = frozenset()
    may_keep: Callable[[str, Quantization], bool] = lambda name, form: False
    parameters: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    kept: dict[str, Quantization] = field(default_factory=dict)
    _memory: WeightMemory = field(init=False)
    _buffer: Tensor = field(init=False)  # of a slice

    def load(self, tensors: Mapping[str, Stored], on_read: Callable[[int], object]) -> dict[str, Tensor]:
        """Make the parameters.

        Args:
            tensors: the tensors on disk, by their name in the layouts. All of them must be used.
            on_read: called with the number of bytes just read.

        Raises:
            CheckpointError: tensors are missing, unexpected, of another shape or not floating point. Then no tensor
                was read.
        """
        uses: defaultdict[str, list[tuple[str, Source]]] = defaultdict(list)
        forms: defaultdict[str, set[Quantization | None]] = defaultdict(set)
        missing: list[str] = []
        for parameter in self.shapes:
            # of several layouts the one with the most tensors on disk
            layout = max(self.layouts(parameter), key=lambda sources: sum(s.name in tensors for s in sources))
            missing += [source.name for source in layout if source.name not in tensors]
            for source in layout:
                uses[source.name].append((parameter, source))
        unexpected = [name for name in tensors if name not in uses]
        if missing or unexpected:
            raise CheckpointError(
                f"{self.path} does not fit its config.json: missing {_named(missing)}, unexpected {_named(unexpected)}"
            )
        turned = {parameter for pairs in uses.values() for parameter, source in pairs if source.transposed}
        on_disk: defaultdict[str, set[torch.dtype]] = defaultdict(set)
        for name, stored in tensors.items():
            self._check(stored, uses[name])
            for parameter, _ in uses[name]:
                on_disk[parameter].add(stored.dtype)
                forms[parameter].add(stored.form)
        for parameter, (form, *others) in forms.items():
            if form is not None and not others and parameter not in turned and self.may_keep(parameter, form):
                self.kept[parameter] = form
        types = {parameter: self._type(parameter, on_disk[parameter]) for parameter in self.shapes}
        self._memory = self._memory_for(types)
        self._buffer = torch.empty(SLICE_BYTES, dtype=torch.uint8)
        missing_parts = Counter(parameter for pairs in uses.values() for parameter, _ in pairs)
        for name, on_file in tensors.items():  # in their order on disk
            stored = on_file.opened()
            for parameter, source in uses[name]:
                if parameter in self.kept:
                    assert isinstance(stored, RestoredTensor)
                    self._keep(parameter, source, stored, on_read)
                    continue
                self._fill(self._parameter(parameter, types[parameter]), source, stored, on_read)
                missing_parts[parameter] -= 1
                if parameter in self.quantized and not missing_parts[parameter]:
                    self._quantize(parameter)
        return self.parameters

    def _quantize(self, name: str) -> None:
        """Replace a parameter that is complete by its quantized form, one matrix after another."""
        whole, form = self.parameters[name], self.quantized[name]
        self.parameters[name], self.scales[name] = form.empty(self.shapes[name], self._memory)
        for own, weight, scales in _matrices(whole, self.parameters[name], self.scales[name]):
            quantized = form.quantized(own)
            weight.copy_(quantized[0])
            scales.copy_(quantized[1])

    def _keep(self, name: str, source: Source, stored: RestoredTensor, on_read: Callable[[int], object]) -> None:
        """Fill a parameter, or a part of its rows, in the form that its tensor on disk has."""
        if name not in self.parameters:
            self.parameters[name], self.scales[name] = self.kept[name].empty(self.shapes[name], self._memory)
        own = self.parameters[name][source.at], self.scales[name][source.at]
        step, before = max(1, SLICE_BYTES // (stored.width * torch.float32.itemsize)), 0
        for weight, scales in _matrices(*own):
            done = 0
            for first, count in _runs(range(len(weight)) if source.rows is None else source.rows.tolist()):
                for begin in range(first, first + count, step):
                    end = min(begin + step, first + count)
                    target = slice(done, done + end - begin)
                    weight[target], scales[target] = stored.packed(before + begin, before + end)
                    done += end - begin
            before += done
        on_read(before * stored.width * stored.dtype.itemsize)

    def _type(self, name: str, on_disk: set[torch.dtype]) -> torch.dtype:
        """The type of a parameter, before it is quantized. `on_disk`: those of the tensors that make it up."""
        if name in self.exact:
            return torch.float32
        return torch.bfloat16 if name in self.bfloat16 and on_disk == {torch.bfloat16} else self.dtype

    def _memory_for(self, types: Mapping[str, torch.dtype]) -> WeightMemory:
        """Memory for all parameters, as they are in the end."""
        size = 0
        for name, dtype in types.items():
            form = self.kept.get(name) or self.quantized.get(name)
            elements = prod(self.shapes[name])
            size += aligned(elements * dtype.itemsize) if form is None else form.num_bytes(self.shapes[name])
        return WeightMemory(size, self.device)

    def _check(self, stored: Stored, uses: list[tuple[str, Source]]) -> None:
        parameter, source = uses[0]
        shape = tuple(self.shapes[parameter])
        if source.rows is None:
            shape = tuple(torch.empty(shape, device="meta")[source.at].shape)
            if source.transposed:
                shape = (*shape[:-2], shape[-1], shape[-2])
        else:  # its rows are distributed over several parameters
            shape = (sum(len(use.rows) for _, use in uses if use.rows is not None), *shape[1:])
        if stored.shape != shape:
            raise CheckpointError(f"{self.path}: {stored.name} has shape {stored.shape}, expected {shape}")
        if stored.dtype not in FLOATS:
            raise CheckpointError(
                f"{self.path}: {stored.name} is {stored.dtype}; of quantized weights those that a quantization_config "
                f"describes are supported, 8-bit floats with their factors ({stored.name}{SCALE}). Else {WAY_OUT}"
            )

    def _parameter(self, name: str, dtype: torch.dtype) -> Tensor:
        """The parameter, made when it is first asked for."""
        if name not in self.parameters:
            shape = self.shapes[name]
            if name in self.quantized:  # it is freed when it is complete
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                tensor = self._memory.empty(shape, dtype)
            self.parameters[name] = tensor
        return self.parameters[name]

    def _fill(self, parameter: Tensor, source: Source, stored: Stored, on_read: Callable[[int], object]) -> None:
        target = parameter[source.at]
        if source.transposed:
            shape = stored.shape[-2:]
            buffer = torch.empty(prod(shape) * stored.dtype.itemsize, dtype=torch.uint8)
            for index, matrix in enumerate(target.view(-1, *target.shape[-2:])):
                matrix.copy_(stored.part(index * prod(shape), shape, buffer).t())
            on_read(stored.num_bytes)
        elif source.rows is None:
            self._copy(target, stored, 0, on_read)
        else:
            row, done = prod(stored.shape[1:]), 0
            for first, count in _runs(source.rows.tolist()):
                self._copy(target[done : done + count], stored, first * row, on_read)
                done += count

    def _copy(self, target: Tensor, stored: Stored, first: int, on_read: Callable[[int], object]) -> None:
        """Copy consecutive elements from `first` on, in slices."""
        num_bytes = target.numel() * stored.dtype.itemsize
        if num_bytes <= SLICE_BYTES:
            target.copy_(stored.part(first, target.shape, self._buffer))
            on_read(num_bytes)
            return
        step, row = SLICE_BYTES * len(target) // num_bytes, target[0].numel()
        for start in range(0, len(target), max(1, step)):
            rows = slice(start, start + step) if step else start
            self._copy(target[rows], stored, first + start * row, on_read)


def _matrices(*parameter: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """What belongs to each matrix of a parameter, the first tensor of which has one or several of them."""
    if parameter[0].dim() == 2:
        yield parameter
    else:
        yield from zip(*parameter, strict=True)


def _runs(rows: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Runs of consecutive rows: the first of each, and how many."""
    start = 0
    for at in range(1, len(rows) + 1):
        if at == len(rows) or rows[at] != rows[at - 1] + 1:
            yield rows[start], at - start
            start = at


def _named(names: list[str]) -> str:
    """Names of tensors for an error."""
    found = sorted({name[:200] for name in names})
    more = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
    return f"{found[:MAX_NAMED] or 'nothing'}{more}"
