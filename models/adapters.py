"""LoRA adapters: from a folder of PEFT to low-rank matrices for the matrix products of a model.

An adapter adds `scale * B @ A` to the weight of some matrix products. Its tensors have the names of the model's
modules; where a family stores a weight in another order than the checkpoint (`layouts`), the rows of B are put in that
order too. Merged weights would serve one adapter; applied apart, several serve the rows of one batch.
"""

import hashlib
import math
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import regex
import torch
from torch import Tensor, nn

from hybrid.batch import LowRank
from hybrid.checks import is_file
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.models.causal_lm import CausalLM
from hybrid.models.json_files import MAX_CONFIG_BYTES, parse_config, read_bytes
from hybrid.models.layers import Linear
from hybrid.models.moe import ExpertRouter
from hybrid.models.weights import FLOATS, Stored, tensors_of
from hybrid.tensor_file import FileBytes, HeldBytes
from hybrid.units import format_bytes

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix of all tensors of an adapter."""

SPARE_BYTES = 64 * 2**20
"""Of a file of tensors, beside those of matrices: its header, and what a small model's adapters have too much."""

PATTERN_SECONDS = 0.5
"""Seconds for which the patterns of an adapter may be matched: it is loaded while requests run."""

MAX_PATTERN_CHARACTERS = 1000
"""The maximum length of a pattern."""

UNSUPPORTED = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "target_parameters",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
)
"""Settings of an adapter that change what is computed in a way that is not done here."""


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter on the device of its model.

    Attributes:
        path: its folder.
        weights: its matrices, by the module of the model that they belong to.
        digest: of its files. Adapters with equal digests compute the same.
    """

    path: Path
    weights: Mapping[nn.Module, LowRank]
    digest: str
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        tensors = [tensor for weights in self.weights.values() for tensor in weights]
        object.__setattr__(self, "num_bytes", sum(tensor.numel() * tensor.element_size() for tensor in tensors))


def load_adapter(path: Path, model: CausalLM) -> Adapter:
    """Load a LoRA adapter, as PEFT's `save_pretrained` writes it.

    Raises:
        CheckpointError: there is none, its files cannot be read, or it does not fit the model.
        UnsupportedModelError: it is an adapter of another kind, or transformers' layers compute.
    """
    if not model.takes_adapters:
        raise UnsupportedModelError(
            f"{path}: adapters need a family of this package, and this model runs by transformers' layers; merge the "
            "adapter into its weights (PEFT's merge_and_unload)"
        )
    layers = [module for module in model.modules() if isinstance(module, Linear)]
    most = SPARE_BYTES + sum(2 * 4 * math.prod(layer.shape) for layer in layers)  # of matrices of the full rank
    text, contents, digest = _files(path, most)
    config = parse_config(text, path / CONFIG)
    _refuse_unsupported(config, path)
    stored = {_name_in_model(name): tensor for name, tensor in tensors_of(contents, path / WEIGHTS).items()}
    scales = Scales(path, config)
    weights: dict[nn.Module, LowRank] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module is not model.lm_head and not isinstance(module, ExpertRouter):
            found = _low_rank(path, scales, name, module, model, stored)
            if found is not None:
                weights[module], names = found
                used.update(names)
    unused = sorted(stored.keys() - used)
    if unused or not weights:
        raise CheckpointError(
            f"{path}: these tensors belong to no matrix product that adapters change here: "
            f"{[name[:200] for name in unused[:8]]}; supported are the projections of attention, linear-attention and "
            "dense feed-forward layers"
        )
    return Adapter(path, weights, digest)


def name_adapter(path: Path) -> Adapter:
    """Read of an adapter what names what is cached with it, for one that is computed elsewhere: it has no matrices.

    Raises:
        CheckpointError: there is none, or its files cannot be read.
    """
    return Adapter(path, {}, _files(path)[2])


def _files(path: Path, most: int = sys.maxsize) -> tuple[bytes, HeldBytes, str]:
    """The configuration and the tensors of an adapter, and the digest of both; the tensors have up to `most` bytes."""
    for name in (CONFIG, WEIGHTS):
        if not is_file(path / name):
            raise CheckpointError(f"{path} is not an adapter: it has no {name}; save it with PEFT's save_pretrained")
    text, contents = read_bytes(path / CONFIG, MAX_CONFIG_BYTES), _read(path / WEIGHTS, most)
    digest = hashlib.blake2b(text, digest_size=16)  # of what is parsed: others may write to the files meanwhile
    digest.update(contents.contents)
    return text, contents, digest.hexdigest()


def _low_rank(
    path: Path, scales: "Scales", name: str, module: Linear, model: CausalLM, stored: Mapping[str, Stored]
) -> tuple[LowRank, tuple[str, str]] | None:
    """The matrices of a module and the names of their tensors; None: the adapter does not change it."""
    (layout, *_) = model.layouts(f"{name}.weight", model.config)
    (source,) = layout
    on_disk = source.name.removesuffix(".weight")
    names = f"{on_disk}.lora_A.weight", f"{on_disk}.lora_B.weight"
    known = [stored[tensor] for tensor in names if tensor in stored]
    if not known:
        return None
    if len(known) != 2:
        raise CheckpointError(f"{path}: {on_disk} has only one of lora_A and lora_B")
    weight = module.weight
    a, b = (_tensor(path, tensor) for tensor in known)
    if source.rows is not None and b.shape[0] > int(source.rows.max()):
        b = b[source.rows]
    rank = a.shape[0]
    if not rank:
        raise CheckpointError(f"{path}: {on_disk} has matrices of rank 0, which change nothing; leave them out")
    if a.shape != (rank, module.shape[1]) or b.shape != (module.shape[0], rank):
        raise CheckpointError(
            f"{path}: {on_disk} has lora_A {list(known[0].shape)} and lora_B {list(known[1].shape)}, which do not fit "
            f"a weight of {list(module.shape)}"
        )
    scale = scales.of(on_disk, rank)
    own = weight.device, model.dtype
    scaled = (b.float() * scale).to(*own).contiguous()
    if not scaled.isfinite().all():
        raise CheckpointError(
            f"{path}: {on_disk}: lora_B times {scale:.3g} (lora_alpha over the rank) is beyond {model.dtype}; make "
            "lora_alpha smaller"
        )
    low_rank = LowRank(a.to(*own).contiguous(), scaled)
    return low_rank, names


def _tensor(path: Path, stored: Stored) -> Tensor:
    if stored.dtype not in FLOATS or len(stored.shape) != 2:
        raise CheckpointError(
            f"{path}: {stored.name} is {stored.dtype} {list(stored.shape)}; expected a matrix of floats"
        )
    tensor = stored.tensor()
    if not torch.isfinite(tensor).all():
        raise CheckpointError(f"{path}: {stored.name} holds NaN or infinity")
    return tensor


class Scales:
    """The factors of the matrices of an adapter.

    Args:
        path: of the adapter, for errors.
        config: its settings; the keys of `alpha_pattern` are regular expressions for the ends of names of modules, as
            in PEFT. All of them together are given `PATTERN_SECONDS`.

    Raises:
        CheckpointError: a pattern is none.
    """

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self._path = path
        self._alpha = config.get("lora_alpha", 8)
        self._by_root = bool(config.get("use_rslora"))
        self._seconds = PATTERN_SECONDS
        self._patterns: list[tuple[regex.Pattern[str], float]] = []
        for pattern, alpha in (config.get("alpha_pattern") or {}).items():
            try:
                if len(pattern) > MAX_PATTERN_CHARACTERS:
                    raise regex.error(f"it has {len(pattern)} characters; at most {MAX_PATTERN_CHARACTERS} are read")
                self._patterns.append((regex.compile(rf"(.*\.)?({pattern})$"), alpha))
            except (regex.error, RecursionError, OverflowError) as error:
                raise CheckpointError(
                    f"{path / CONFIG}: alpha_pattern: {pattern!r:.100} is not a regular expression: {error!s:.200}"
                ) from error

    def of(self, module: str, rank: int) -> float:
        """The factor of a module's matrices.

        Raises:
            CheckpointError: matching the patterns takes too long.
        """
        alpha = float(next((alpha for pattern, alpha in self._patterns if self._matches(pattern, module)), self._alpha))
        return alpha / math.sqrt(rank) if self._by_root else alpha / rank

    def _matches(self, pattern: "regex.Pattern[str]", module: str) -> bool:
        began = time.perf_counter()
        try:
            return pattern.match(module, timeout=max(self._seconds, 1e-3)) is not None
        except TimeoutError as error:
            raise CheckpointError(
                f"{self._path / CONFIG}: matching alpha_pattern takes more than {PATTERN_SECONDS} s; write plain names "
                "of modules instead of patterns that can match in many ways"
            ) from error
        finally:
            self._seconds -= time.perf_counter() - began


def _read(path: Path, most: int) -> HeldBytes:
    """Read a file once, and keep a copy."""
    try:
        file = FileBytes(path)
        if file.num_bytes <= most:
            return HeldBytes(file.read(0, file.num_bytes))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy it again") from error
    except MemoryError as error:
        raise CheckpointError(f"{path} cannot be read: there is no memory for all of it; free some") from error
    raise CheckpointError(
        f"{path} has {format_bytes(file.num_bytes)}; adapters of this model have {format_bytes(most)} at most"
    )


def _name_in_model(name: str) -> str:
    return name.removeprefix(PREFIX).replace("model.language_model.", "model.", 1)


def _refuse_unsupported(config: Any, path: Path) -> None:
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else type(config).__name__
        raise UnsupportedModelError(f"{path} is an adapter of type {kind!r:.50}; supported is LORA")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias={config['bias']!r:.50} is not supported; train it with bias='none'")
    wanted = next((name for name in UNSUPPORTED if config.get(name)), None)
    if wanted is not None:
        raise UnsupportedModelError(f"{path}: {wanted}={config[wanted]!r:.100} is not supported")
    patterns = config.get("alpha_pattern") or {}
    numbers = [config.get("lora_alpha", 8), *(patterns.values() if isinstance(patterns, dict) else [None])]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        raise CheckpointError(f"{path / CONFIG}: lora_alpha and alpha_pattern must be numbers; got {numbers!r:.100}")
