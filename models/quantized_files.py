"""Checkpoints whose weights other programs have quantized, as their `quantization_config` says.

Read are 8-bit floats with a factor for each block (`fp8`), 4-bit floats with an exponent for each 32 (`mxfp4`), GPTQ,
AWQ, and compressed-tensors with integers or 8-bit floats. Several tensors on disk make up a weight: integers, packed
into numbers of 32 bits, scales, zero points, places of columns. What they stand for is read as one tensor with the name
of the weight: `(q - zero) * scale`, without rounding where scales have 16 bits. Integers of four bits and fewer, and
rows of 8-bit integers with one scale each, have a form in which they stay as they are (`Stored.form`); everything else
is restored to floats while it is read.

Activations are not quantized, whatever the configuration says of them.

Sources: https://github.com/vllm-project/compressed-tensors (compressors), https://github.com/ModelCloud/GPTQModel
and https://github.com/casper-hansen/AutoAWQ (`qweight`, `qzeros`, `scales`, `g_idx`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.kernels.packed_weights import BLOCK, GROUPS, from_groups
from hybrid.models.weights import FLOATS, SCALE, WAY_OUT, Quantization, RestoredTensor, Stored

log: logging.Logger = logging.getLogger(__name__)

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Floats that need factors."""

INT32 = 32
"""Bits of a number that integers are packed into."""

INTEGER_BITS = (2, 4, 8)
"""Bits of integers that are read."""

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of eight columns its place in a number of 32 bits."""

OF_ACTIVATIONS = (
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "output_scale",
    "output_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
)
"""Last parts of names of tensors that only quantized activations, keys and values need."""


def restored_tensors(path: Path, tensors: Mapping[str, Stored], quantization: Any) -> dict[str, Stored]:
    """The tensors of a checkpoint, those that make up a weight replaced by what they stand for.

    Args:
        path: of the checkpoint, for errors.
        tensors: by name.
        quantization: its `quantization_config`, or None.

    Raises:
        UnsupportedModelError: weights are quantized otherwise than is read here; the error names every setting that
            stands against it, and the way out.
        CheckpointError: tensors do not fit each other.
    """
    settings = _as_dict(quantization)
    method = settings.get("quant_method")
    method = getattr(method, "value", method)
    _check(path, method, settings)
    try:
        if method == "gptq":
            return _of_gptq(tensors, settings)
        if method == "awq":
            return _of_awq(tensors, settings)
        if method == "compressed-tensors":
            return _of_compressed_tensors(tensors, settings)
        if method == "mxfp4":
            return _of_mxfp4(tensors)
        return _of_blocks(tensors, settings)
    except KeyError as error:
        raise CheckpointError(
            f"{path}: {error.args[0]!r:.200} is missing, which weights quantized by {method} need; copy it again"
        ) from error


def _as_dict(quantization: Any) -> dict[str, Any]:
    if quantization is None or isinstance(quantization, dict):
        return quantization or {}
    return dict(getattr(quantization, "__dict__", {}))


def _check(path: Path, method: Any, settings: Mapping[str, Any]) -> None:
    """Refuse what is not read."""
    if not settings:
        return
    reasons: list[str] = []
    name = str(method)
    if method == "gptq":
        reasons = _against_gptq(settings)
    elif method == "awq":
        reasons = _against_awq(settings)
    elif method == "compressed-tensors":
        reasons = _against_compressed_tensors(settings)
    elif method == "fp8":
        if settings.get("weight_block_size") is None:
            reasons = ["fp8 with one factor per tensor"]
    elif method == "mxfp4":
        reasons = []
    elif method is None and "group_size" in settings:  # MLX names its settings alone
        name = "MLX"
        reasons = [f"MLX, {settings.get('bits', '?')} bits"]
    else:
        bits = settings.get("bits") or settings.get("w_bit")
        reasons = [f"{method or 'an unknown method'}{f', {bits} bits' if bits else ''}"]
    if reasons:
        raise UnsupportedModelError(
            f"{path}: its weights are quantized by {name:.50} in a way that is not supported: "
            f"{'; '.join(f'{reason:.200}' for reason in reasons)}. Read are fp8 with a weight_block_size, GPTQ, AWQ, "
            f"MXFP4, and compressed-tensors with integers or 8-bit floats. Else {WAY_OUT}"
        )


@dataclass(frozen=True)
class ScaledFloats(RestoredTensor):
    """8-bit floats times the factors of their blocks. Of a tensor of three dimensions each matrix has blocks of its
    own.

    Attributes:
        values: the floats.
        scale: `[..., rows of blocks, columns of blocks]` fp32.
        block: its rows and columns.
    """

    values: Stored
    scale: Tensor
    block: tuple[int, int]

    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`."""
        count, width, height = end - begin, self.width, self.shape[-2]
        buffer = torch.empty(count * width, dtype=torch.uint8)
        values = self.values.part(begin * width, (count, width), buffer).float()
        at = torch.arange(begin, end)
        matrix, row = at // height, at % height
        of_row = self.scale.reshape(-1, *self.scale.shape[-2:])[matrix, row // self.block[0]]
        return values * of_row.repeat_interleave(self.block[1], 1)[:, :width]


@dataclass(frozen=True)
class Integers(RestoredTensor):
    """`(q - zero) * scale`, where scale and zero are those of a number's group.

    Attributes:
        read: the q of rows from a first to a last one, `[rows, in]` uint8.
        scale: `[out, groups]`, of 16 or 32 bits.
        zero: `[out, groups]` uint8.
        size: columns of a group.
        places: for each column its group, where they do not follow each other; None: they do.
        kept: the form that keeps them.
    """

    read: Callable[[int, int], Tensor]
    scale: Tensor
    zero: Tensor
    size: int
    places: Tensor | None
    kept: Quantization | None

    @property
    def form(self) -> Quantization | None:
        """The form that keeps its numbers."""
        return self.kept

    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`."""
        places = torch.arange(self.width) // self.size if self.places is None else self.places
        scale, zero = (each[begin:end].float()[:, places] for each in (self.scale, self.zero))
        return (self.read(begin, end).float() - zero) * scale

    def packed(self, begin: int, end: int) -> tuple[Tensor, Tensor]:
        """The rows from `begin` to `end` in the form that keeps them, and their scales."""
        assert self.kept is not None
        q, scale = self.read(begin, end), self.scale[begin:end].float()
        if self.kept.group is None:
            return (q.int() - 128).to(torch.int8), scale.squeeze(1)
        minimum = -self.zero[begin:end].float() * scale
        scales = torch.stack((scale, minimum)).to(self.kept.scales)
        if scale.shape[1] == 1:
            scales = scales.expand(-1, -1, -(-self.width // BLOCK))
        elif self.size > self.kept.group:
            scales = scales.repeat_interleave(self.size // self.kept.group, 2)
        return from_groups(q, scales[0], scales[1], self.kept.group)


@dataclass(frozen=True)
class UnreadIntegers(RestoredTensor):
    """Integers that can be read in parts when what belongs to all of them is in memory.

    Attributes:
        open_: reads that.
        kept: the form that keeps them.
    """

    open_: Callable[[], Integers]
    kept: Quantization | None

    @property
    def form(self) -> Quantization | None:
        """The form that keeps its numbers."""
        return self.kept

    def opened(self) -> Integers:
        """The integers, ready to be read in parts."""
        return self.open_()

    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`."""
        return self.opened().rows(begin, end)


def _form(
    bits: int, size: int, groups: int, inputs: int, scale: torch.dtype, is_symmetric: bool, in_order: bool
) -> Quantization | None:
    """The form that keeps integers of some bits exactly, `size` columns of which share a scale."""
    if bits == 8:
        return Quantization() if is_symmetric and groups == 1 else None
    if not in_order or scale not in (torch.float16, torch.bfloat16):  # a product with more bits is rounded
        return None
    # of bfloat16 scales, with 8 as the zero, minimums are bfloat16 numbers, too
    scales = torch.bfloat16 if is_symmetric and bits == 4 and scale == torch.bfloat16 else torch.float32
    if groups == 1 and size >= inputs:
        return Quantization(BLOCK, scales)
    group = next((group for group in reversed(GROUPS) if size % group == 0), None)
    return None if group is None else Quantization(group, scales)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """Integers in numbers of 32 bits, `[..., n, 32 / bits]` uint8, those of the lowest bits first."""
    shifts = torch.arange(0, INT32, bits, dtype=torch.int32)
    return (packed.unsqueeze(-1) >> shifts & (1 << bits) - 1).to(torch.uint8)


def _fits(found: bool, stored: Stored, message: str) -> None:
    if not found:
        raise CheckpointError(
            f"{stored.path}: {stored.name:.200} is {stored.dtype} {list(stored.shape)}; expected {message}"
        )


def _bases(tensors: Mapping[str, Stored], end: str) -> list[str]:
    """The modules that have a tensor of a name."""
    return [name.removesuffix(end) for name in tensors if name.endswith(end)]


# GPTQ and AWQ: integers of one column after another


def _gptq_format(settings: Mapping[str, Any]) -> Any:
    return settings.get("checkpoint_format") or settings.get("format") or "gptq"


def _against_gptq(settings: Mapping[str, Any]) -> list[str]:
    """The settings of GPTQ that are not read."""
    reasons = []
    overrides = settings.get("dynamic")
    each = [settings, *(overrides.values() if isinstance(overrides, dict) else ())]
    odd = sorted({str(one["bits"]) for one in each if isinstance(one, dict) and one.get("bits", 4) not in INTEGER_BITS})
    if odd:
        reasons.append(f"gptq, {', '.join(odd)} bits (2, 4 and 8 are read)")
    kind = _gptq_format(settings)
    if kind not in ("gptq", "gptq_v2"):
        reasons.append(f"checkpoint_format {kind!r} (gptq and gptq_v2 are read)")
    if settings.get("is_marlin_format"):
        reasons.append("is_marlin_format")
    if settings.get("pack_dtype") not in (None, "int32", torch.int32):
        reasons.append(f"pack_dtype {settings['pack_dtype']!r} (int32 is read)")
    return reasons


def _of_gptq(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored]:
    kind = _gptq_format(settings)
    found = dict(tensors)
    for base in _bases(tensors, ".qweight"):
        packed, zeros, scale = (found.pop(f"{base}.{end}") for end in ("qweight", "qzeros", "scales"))
        groups, outputs = scale.shape
        columns = tensors.get(f"{base}.g_idx")
        found.pop(f"{base}.g_idx", None)
        inputs = columns.shape[0] if columns is not None else None
        stated = settings.get("bits", 4)
        bits = stated if inputs is None else packed.shape[0] * INT32 // max(inputs, 1)
        _fits(bits in INTEGER_BITS, packed, f"{stated} bits for each of {inputs} columns")
        inputs = packed.shape[0] * INT32 // bits
        _fits(packed.shape[1] == outputs, packed, f"{outputs} columns, as its scales")
        _fits(zeros.shape == (groups, outputs * bits // INT32), zeros, f"{[groups, outputs * bits // INT32]}")
        size = settings.get("group_size", -1)
        size = inputs if size is None or size <= 0 else size
        if -(-inputs // size) != groups:  # of a module with settings of its own
            size = -(-inputs // groups)
        places, in_order = None, True
        if columns is not None:
            _fits(columns.shape == (inputs,), columns, f"{[inputs]}")
            places = columns.tensor().long()
            _fits(bool(((places >= 0) & (places < groups)).all()), columns, f"groups below {groups}")
            in_order = torch.equal(places, torch.arange(inputs) // size)
        form = _form(bits, size, groups, inputs, scale.dtype, False, in_order)
        opened = partial(
            _open_by_columns, f"{base}.weight", packed, zeros, scale, bits, size, None if in_order else places, form
        )
        found[f"{base}.weight"] = UnreadIntegers(
            packed.path,
            f"{base}.weight",
            torch.float32,
            (outputs, inputs),
            partial(opened, is_awq=False, added=1 if kind == "gptq" else 0),
            form,
        )
    return found


def _against_awq(settings: Mapping[str, Any]) -> list[str]:
    """The settings of AWQ that are not read."""
    reasons = []
    bits = settings.get("bits", settings.get("w_bit", 4))
    if bits != 4:
        reasons.append(f"awq, {bits} bits (4 are read)")
    version = str(settings.get("version", "gemm")).lower()
    if version not in ("gemm", "exllama", "ipex"):
        reasons.append(f"version {version!r} (gemm is read)")
    if not settings.get("zero_point", True):
        reasons.append("zero_point is false (true is read)")
    if settings.get("backend") not in (None, "autoawq"):
        reasons.append(f"backend {settings['backend']!r} (autoawq is read)")
    return reasons


def _of_awq(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored]:
    found = dict(tensors)
    for base in _bases(tensors, ".qweight"):
        packed, zeros, scale = (found.pop(f"{base}.{end}") for end in ("qweight", "qzeros", "scales"))
        groups, outputs = scale.shape
        inputs = packed.shape[0]
        _fits(packed.shape == (inputs, outputs // 8), packed, f"{[inputs, outputs // 8]}")
        _fits(zeros.shape == (groups, outputs // 8), zeros, f"{[groups, outputs // 8]}")
        size = settings.get("group_size", settings.get("q_group_size", -1))
        size = inputs if size is None or size <= 0 else size
        _fits(-(-inputs // size) == groups, scale, f"a row for each {size} of {inputs} columns")
        form = _form(4, size, groups, inputs, scale.dtype, False, True)
        opened = partial(
            _open_by_columns, f"{base}.weight", packed, zeros, scale, 4, size, None, form, is_awq=True, added=0
        )
        found[f"{base}.weight"] = UnreadIntegers(
            packed.path, f"{base}.weight", torch.float32, (outputs, inputs), opened, form
        )
    return found


def _open_by_columns(
    name: str,
    packed: Stored,
    zeros: Stored,
    scale: Stored,
    bits: int,
    size: int,
    places: Tensor | None,
    form: Quantization | None,
    *,
    is_awq: bool,
    added: int,
) -> Integers:
    """Read integers that lie by columns: a few of their rows are spread over the whole tensor.

    Args:
        added: what zero points lack on disk.
        is_awq: numbers of 32 bits hold integers of several rows, in the order of AWQ; else those of several columns.
    """
    words, of_zeros = packed.tensor(), _unpacked(zeros.tensor(), bits)
    if is_awq:
        of_zeros = of_zeros[..., AWQ_PLACES]
    zero = (of_zeros.flatten(1) + added & (1 << bits) - 1).t().contiguous()
    outputs, inputs = zero.shape[0], words.shape[0] if is_awq else words.shape[0] * INT32 // bits

    def by_rows(begin: int, end: int) -> Tensor:
        first = begin // 8
        own = _unpacked(words[:, first : -(-end // 8)], bits)[..., AWQ_PLACES].flatten(1)
        return own[:, begin - 8 * first : end - 8 * first].t().contiguous()

    def by_columns(begin: int, end: int) -> Tensor:
        return _unpacked(words[:, begin:end].t(), bits).flatten(1)

    return Integers(
        packed.path,
        name,
        torch.float32,
        (outputs, inputs),
        by_rows if is_awq else by_columns,
        scale.tensor().t().contiguous(),
        zero,
        size,
        places,
        form,
    )


# compressed-tensors


def _against_compressed_tensors(settings: Mapping[str, Any]) -> list[str]:
    """The settings of compressed-tensors that are not read."""
    reasons = []
    kinds = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense", "mixed-precision")
    groups = settings.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = _as_dict(group.get("weights")) if isinstance(group, dict) else {}
        if not weights:
            continue
        kind = _plain(group.get("format")) or _plain(settings.get("format")) or "dense"
        bits, number = weights.get("num_bits", 8), _plain(weights.get("type")) or "int"
        strategy = _plain(weights.get("strategy")) or "tensor"
        if kind not in kinds:
            reasons.append(f"{name}: format {kind!r} (read are {', '.join(kinds[:4])})")
        elif number == "float" and bits != 8:
            reasons.append(f"{name}: floats of {bits} bits (8 are read)")
        elif number == "int" and bits not in INTEGER_BITS:
            reasons.append(f"{name}: integers of {bits} bits (2, 4 and 8 are read)")
        if strategy not in ("tensor", "channel", "group", "block"):
            reasons.append(f"{name}: strategy {strategy!r} (tensor, channel, group and block are read)")
    sparsity = _as_dict(settings.get("sparsity_config")).get("format", "dense")
    if sparsity != "dense":
        reasons.append(f"sparsity_config: format {sparsity!r} (dense is read)")
    if _as_dict(settings.get("transform_config")).get("config_groups"):
        reasons.append("transform_config: activations would have to be rotated")
    return reasons


def _plain(value: Any) -> Any:
    """A value of a setting that may be an enumeration."""
    return getattr(value, "value", value)


def _of_compressed_tensors(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored]:
    found = {name: stored for name, stored in tensors.items() if name.rpartition(".")[2] not in OF_ACTIVATIONS}
    groups = [_as_dict(each.get("weights")) for each in (settings.get("config_groups") or {}).values()]
    sizes = [int(each["group_size"]) for each in groups if (each.get("group_size") or 0) > 0]
    blocks = [
        (int(each["block_structure"][0]), int(each["block_structure"][1]))
        for each in groups
        if each.get("block_structure")
    ]
    bits_of = sorted({int(each.get("num_bits", 8)) for each in groups if each}) or [4]
    for base in _bases(tensors, ".weight_scale"):
        scale = found.pop(f"{base}.weight_scale")
        zero = found.pop(f"{base}.weight_zero_point", None)
        columns = found.pop(f"{base}.weight_g_idx", None)
        found.pop(f"{base}.weight_shape", None)
        name = f"{base}.weight"
        if name in found and found[name].dtype in EIGHT_BITS:
            found[name] = _scaled(found[name], scale, blocks)
            continue
        if name in found:
            values, bits = found[name], 8
            _fits(values.dtype == torch.int8 and len(values.shape) == 2, values, "a matrix of int8 or 8-bit floats")
            outputs, inputs = values.shape
        else:
            values = found.pop(f"{base}.weight_packed")
            shape = tensors[f"{base}.weight_shape"].tensor().tolist()
            _fits(values.dtype == torch.int32 and len(values.shape) == 2, values, "a matrix of int32")
            _fits(len(shape) == 2, tensors[f"{base}.weight_shape"], "rows and columns")
            outputs, inputs = (int(size) for size in shape)
            fitting = [bits for bits in bits_of if values.shape == (outputs, -(-inputs * bits // INT32))]
            _fits(bool(fitting), values, f"{outputs} rows of {inputs} integers of {bits_of} bits")
            bits = fitting[0]
        scales = scale.shape if len(scale.shape) == 2 else (1, 1)
        _fits(scales[0] in (1, outputs) and prod(scale.shape) == prod(scales), scale, f"a scale for each of {outputs}")
        number = scales[1]
        size = inputs if number == 1 else next((n for n in sizes if -(-inputs // n) == number), -(-inputs // number))
        places, in_order = None, True
        if columns is not None:
            at = columns.tensor().long()
            if not bool((at < 0).all()):
                _fits(bool(((at >= 0) & (at < number)).all()), columns, f"groups below {number}")
                in_order = torch.equal(at, torch.arange(inputs) // size)
                places = None if in_order else at
        form = _form(bits, size, number, inputs, scale.dtype, zero is None, in_order)
        shape_ = (outputs, inputs)
        opened = partial(_open_by_rows, name, shape_, values, scale, zero, bits, size, places, form)
        found[name] = UnreadIntegers(values.path, name, torch.float32, shape_, opened, form)
    return found


def _scaled(values: Stored, scale: Stored, blocks: list[tuple[int, int]]) -> ScaledFloats:
    """8-bit floats with one factor, one for each row, or one for each block of sizes that are among `blocks`."""
    outputs, inputs = values.shape if len(values.shape) == 2 else (0, 0)
    rows, columns = scale.shape if len(scale.shape) == 2 else (1, 1)
    sizes = [(max(outputs, 1), max(inputs, 1)), (1, max(inputs, 1)), *blocks]
    fitting = [size for size in sizes if (-(-outputs // size[0]), -(-inputs // size[1])) == (rows, columns)]
    fits = bool(fitting) and prod(scale.shape) == rows * columns and scale.dtype in FLOATS
    _fits(fits, scale, f"one factor of {values.name:.200}, or one for each row or block of its {list(values.shape)}")
    factors = scale.tensor().float().view(rows, columns)
    return ScaledFloats(values.path, values.name, torch.float32, values.shape, values, factors, fitting[0])


def _open_by_rows(
    name: str,
    shape: tuple[int, int],
    values: Stored,
    scale: Stored,
    zero: Stored | None,
    bits: int,
    size: int,
    places: Tensor | None,
    form: Quantization | None,
) -> Integers:
    """Read the scales and zero points of integers that lie by rows; they themselves stay in the file."""
    outputs, inputs = shape
    middle = 1 << bits - 1
    scales = scale.tensor()
    scales = scales.view(-1, scales.shape[-1] if scales.dim() == 2 else 1).expand(outputs, -1)
    if zero is None:
        zeros = torch.full_like(scales, middle, dtype=torch.uint8)
    elif zero.dtype == torch.int32:
        _fits(zero.shape == (-(-outputs * bits // INT32), scales.shape[1]), zero, "packed zero points of its scales")
        zeros = _unpacked(zero.tensor().t(), bits).flatten(1)[:, :outputs].t().contiguous()
    else:
        own = zero.tensor().int()
        zeros = (own.view(-1, own.shape[-1] if own.dim() == 2 else 1) + middle).to(torch.uint8).expand(outputs, -1)

    def read(begin: int, end: int) -> Tensor:
        width = values.shape[1]
        buffer = torch.empty((end - begin) * width * values.dtype.itemsize, dtype=torch.uint8)
        own = values.part(begin * width, (end - begin, width), buffer)
        if values.dtype == torch.int8:
            return (own.int() + middle).to(torch.uint8)
        return _unpacked(own, bits).flatten(1)[:, :inputs]

    return Integers(values.path, name, torch.float32, shape, read, scales, zeros, size, places, form)


# 8-bit floats with a factor for each block


def _of_blocks(tensors: Mapping[str, Stored], settings: Mapping[str, Any]) -> dict[str, Stored]:
    scales = {base: tensors[base + SCALE] for base in _bases(tensors, SCALE)}
    block = settings.get("weight_block_size") or (128, 128)
    if scales and not (
        isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise CheckpointError(f"quantization_config: weight_block_size must be two numbers, got {block!r:.100}")
    found: dict[str, Stored] = {}
    for name, stored in tensors.items():
        if name in scales:
            factors = _factors(stored, scales[name], tuple(block))
            found[name] = ScaledFloats(
                stored.path, name, torch.float32, stored.shape, stored, factors, (block[0], block[1])
            )
        elif not name.endswith(SCALE) or name.removesuffix(SCALE) not in tensors:
            found[name] = stored
    return found


def _factors(stored: Stored, scale: Stored, block: tuple[int, ...]) -> Tensor:
    *outer, rows, columns = stored.shape if len(stored.shape) >= 2 else (0, 0)
    expected = (*outer, -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != expected or scale.dtype not in FLOATS or stored.dtype not in EIGHT_BITS:
        raise CheckpointError(
            f"{stored.path}: {stored.name} is {stored.dtype} {list(stored.shape)} with factors {scale.dtype} "
            f"{list(scale.shape)}; expected 8-bit floats with factors {list(expected)}, one for each block of "
            f"{block[0]} x {block[1]}"
        )
    return scale.tensor().float()


# 4-bit floats with an exponent for each 32 of them (OCP Microscaling Formats, MXFP4), as experts of gpt-oss have

FOUR_BIT_FLOATS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of the codes from 0 to 7; those from 8 on are these with a minus sign."""

BLOCKS, EXPONENTS = "_blocks", "_scales"
"""Ends of the names of tensors with codes, and of those with exponents."""

EXPONENT_BIAS = 127
"""Is subtracted from an exponent."""


@dataclass(frozen=True)
class FourBitFloats(RestoredTensor):
    """4-bit floats with exponents. bfloat16 has their numbers without rounding.

    Attributes:
        codes: `[..., rows, blocks, 16]` uint8: two codes each, the low one first.
        exponents: `[..., rows, blocks]` uint8.
    """

    codes: Stored
    exponents: Stored

    def rows(self, begin: int, end: int) -> Tensor:
        """The numbers of rows from `begin` to `end`."""
        count, blocks = end - begin, self.codes.shape[-2]
        codes = self._bytes(self.codes, begin, (count, blocks, self.codes.shape[-1]))
        exponents = self._bytes(self.exponents, begin, (count, blocks))
        both_signs = [*FOUR_BIT_FLOATS, *(-number for number in FOUR_BIT_FLOATS)]
        numbers = torch.tensor(both_signs, dtype=torch.float32)
        both = numbers[torch.stack((codes & 15, codes >> 4), -1).long()].flatten(-2)
        return torch.ldexp(both, exponents.int().unsqueeze(-1) - EXPONENT_BIAS).flatten(-2)

    @staticmethod
    def _bytes(stored: Stored, begin: int, shape: tuple[int, ...]) -> Tensor:
        size = prod(shape)
        return stored.part(begin * (size // shape[0]), shape, torch.empty(size, dtype=torch.uint8))


def _of_mxfp4(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Restored tensors keep the names of those with codes: their matrices are the other way round than those of a
    checkpoint that is not quantized."""
    bases = _bases(tensors, BLOCKS)
    found = {name: stored for name, stored in tensors.items() if name.removesuffix(EXPONENTS) not in bases}
    for base in bases:
        codes, exponents = tensors[base + BLOCKS], tensors[base + EXPONENTS]
        fits = codes.dtype == exponents.dtype == torch.uint8 and codes.shape[:-1] == exponents.shape
        _fits(fits, codes, "codes of 8 bits, and an exponent of 8 bits for each block of them")
        *outer, blocks, size = codes.shape
        shape = (*outer, 2 * blocks * size)
        found[base + BLOCKS] = FourBitFloats(codes.path, base + BLOCKS, torch.bfloat16, shape, codes, exponents)
    return found
