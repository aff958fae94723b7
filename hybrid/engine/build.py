"""From a checkpoint to the parts of an engine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.disabled import make_cache
from hybrid.cache.fingerprints import fingerprint_of
from hybrid.checks import DTYPE_NAMES, integer, is_file, shown
from hybrid.engine.captured_passes import CapturedPasses
from hybrid.engine.config import EngineConfig
from hybrid.engine.forms import FormProcesses
from hybrid.engine.model_runner import ModelRunner
from hybrid.engine.padding import MAX_PROMPT_TOKENS
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.warm_up import warm_up
from hybrid.errors import ArgumentError, CheckpointError
from hybrid.kernels.ops import check_kernels, compiled_module, is_compiled, prefers_bfloat16, setting
from hybrid.memory.device import free_memory
from hybrid.memory.memory import MIN_STATE_SLOTS, CacheMemory
from hybrid.models.gguf_file import is_gguf, read_tokenizer
from hybrid.models.json_files import read_config
from hybrid.models.layers import Linear
from hybrid.models.loading import QUANTIZATIONS, CheckpointFolder, can_quantize, load_model, open_checkpoint
from hybrid.models.moe import Experts
from hybrid.models.vision import vision_tower
from hybrid.prompts.encode import ImageEncoder, load_tokenizer
from hybrid.speculation.config import SpeculationConfig
from hybrid.tiers.fingerprint import Fingerprint, digest_of_model

log: logging.Logger = logging.getLogger(__name__)

IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")
"""Fields of a configuration that change no result: the weights have their own types."""

MAX_UNITS = 2**31 - 1
"""Pages of a cache, at most, and state slots."""

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model on its device, and what else its checkpoint holds.

    Attributes:
        model: computes a batch; its `config` has `vocab_size`, `max_position_embeddings` and `hidden_size`.
        device: where it is.
        tokenizer: of transformers; None: prompts are token ids.
        image_encoder: embeds the images of prompts; None: the checkpoint has none.
        end_tokens: tokens that end an answer.
        default_params: of requests without `SamplingParams`.
        name: the folder or hub id that it was loaded from; empty: it was not.
    """

    model: Any
    device: torch.device
    tokenizer: Any | None = None
    image_encoder: ImageEncoder | None = None
    end_tokens: frozenset[int] = frozenset()
    default_params: SamplingParams = field(default_factory=SamplingParams)
    name: str = ""

    def __repr__(self) -> str:
        """Name the model, its device and its type."""
        named, dtype = self.name or type(self.model).__name__, self.model.dtype
        return f"{named}, {self.device}" + (f", {dtype}".replace("torch.", "") if dtype is not None else "")

    @cached_property
    def forms(self) -> FormProcesses:
        """The processes in which the forms of structured answers are compiled."""
        return FormProcesses(self.tokenizer, self.model.config.vocab_size, self.end_tokens)

    def digest(self) -> str:
        """The digest of configuration and weights as they are now: all of them are read, at about 1 GB per second and
        thread."""
        model = self.model
        config = {name: value for name, value in model.config.to_dict().items() if name not in IGNORED}
        weights: dict[str, torch.Tensor] = dict(model.state_dict())
        for name, module in model.named_modules():
            if isinstance(module, Linear | Experts):  # of quantized weights
                weights |= {f"{name}.{own}.scale": scales for own, scales in module.scales.items()}
        return digest_of_model(config, weights.items())


def load(
    model: str | Path,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    chunk_size: int,
    load_dtype: str | None = None,
    mtp: bool = False,
) -> LoadedModel:
    """Load a checkpoint. The device and the type it runs in are logged.

    Args:
        model: a folder, a hub id, or "tiny".
        device: None: a GPU if there is one.
        dtype: None: `default_dtype`. On a CPU weights in float16 are widened to float32.
        chunk_size: of the linear layers.
        load_dtype: "int8": weights of matrix products are quantized, per row; "int4": in four bits, in groups of 64, or
            of N with "int4:N" (32, 64, 128); None: they have the type of the model.
        mtp: also load the checkpoint's predictor, if it has one.

    Raises:
        CheckpointError: there is no usable checkpoint.
        ArgumentError: `device`, `dtype` or `load_dtype` is not supported here, or the packages that a GPU needs are not
            installed.
    """
    if load_dtype is not None and load_dtype not in QUANTIZATIONS:
        raise ArgumentError(f"load_dtype must be one of {', '.join(QUANTIZATIONS)}, or None; got {load_dtype!r:.50}")
    place, asked = resolve_device(device), check_dtype(dtype)
    quantize = None if load_dtype is None else QUANTIZATIONS[load_dtype]
    try:
        check_kernels(place)
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(str(error)) from error
    checkpoint = open_checkpoint(model)
    is_one_file = is_gguf(checkpoint.path)
    tokenizer = read_tokenizer(checkpoint.path) if is_one_file else load_tokenizer(checkpoint.path)
    resolved, reason = (asked, "as asked for") if asked is not None else default_dtype(checkpoint, place)
    log.info("%s runs on %s in %s: %s%s", checkpoint.path, place, resolved, reason, _level(place))
    if quantize is not None and not can_quantize(place):
        raise ArgumentError(
            f"load_dtype={load_dtype!r} needs a CPU and its compiled operations; got {place} and "
            f"HYBRID_KERNELS={setting()}: leave load_dtype out"
        )
    loaded = load_model(checkpoint, resolved, place, chunk_size, mtp=mtp, quantize=quantize)
    end_tokens, default_params = generation_defaults(checkpoint.path, checkpoint.config, tokenizer)
    return LoadedModel(
        model=loaded,
        device=place,
        tokenizer=tokenizer,
        image_encoder=vision_tower(checkpoint, loaded.dtype, place) if loaded.takes_images else None,
        end_tokens=end_tokens,
        default_params=default_params,
        name=str(model),
    )


def resolve_device(device: str | torch.device | None) -> torch.device:
    """The device to run on. None: a GPU if there is one.

    Raises:
        ArgumentError: it is not a device, or there is none of that number.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    expected = f"device must be 'cpu', or 'cuda' or 'cuda:0' where there is a GPU, or None; got {shown(device)}"
    if not isinstance(device, str | torch.device):
        raise ArgumentError(expected)
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(expected) from error
    if place.type not in ("cpu", "cuda"):
        raise ArgumentError(f"{expected}: no other kinds of devices are supported")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(f"{expected}: PyTorch finds {torch.cuda.device_count()} GPUs here")
    return place


def check_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A type to run in, by name or as it is; None stays None.

    Raises:
        ArgumentError: the type is not supported.
    """
    if dtype is None or (isinstance(dtype, torch.dtype) and dtype in DTYPES.values()):
        return dtype
    if isinstance(dtype, str) and dtype in DTYPES:
        return DTYPES[dtype]
    raise ArgumentError(
        f"dtype must be one of {', '.join(DTYPES)}, or None (the checkpoint's on a GPU, and on a CPU where it is "
        f"bfloat16 and the CPU multiplies that faster, else float32); got {shown(dtype)}"
    )


def default_dtype(checkpoint: CheckpointFolder, device: torch.device) -> tuple[torch.dtype, str]:
    """The type to run in where none is asked for, and why: the checkpoint's on a GPU, and on a CPU where it is bfloat16
    and compiled products multiply that faster than float32; else float32.

    float16 is float32 on a CPU: nothing is compiled for it, and as bfloat16 its weights would be rounded.
    """
    configs = checkpoint.config, checkpoint.whole  # vision-language checkpoints state it in either
    stored = next((found for each in configs if isinstance(found := each.dtype, torch.dtype)), None)
    if stored is None:
        return torch.float32, "the checkpoint states no type"
    if device.type != "cpu" or stored == torch.float32:
        return stored, "the checkpoint's type"
    if stored != torch.bfloat16:
        return torch.float32, f"products of the checkpoint's {stored} are not compiled for a CPU"
    if not prefers_bfloat16():
        return torch.float32, f"products of the checkpoint's {stored} are no faster on this CPU"
    return stored, "the checkpoint's type, whose products are faster on this CPU"


def _level(device: torch.device) -> str:
    """What operations are compiled for, in words."""
    return f"; compiled for {compiled_module('target').LEVEL}" if is_compiled(device) else ""


def generation_defaults(path: Path, config: Any, tokenizer: Any | None = None) -> tuple[frozenset[int], SamplingParams]:
    """End tokens and default sampling of a checkpoint.

    End tokens are those of generation_config.json, of config.json and of the tokenizer together: files that name one
    alone leave out the one that ends a turn. The default sampling is that of generation_config.json.
    """
    from transformers import GenerationConfig

    file = path / "generation_config.json"
    try:
        if is_file(file):
            content = read_config(file)  # within limits
            if not isinstance(content, dict):
                raise CheckpointError(f"{file} must hold one JSON object; it holds a {type(content).__name__}")
            generation = GenerationConfig.from_pretrained(path)
        else:
            generation = GenerationConfig(eos_token_id=config.eos_token_id)
        stated = {
            file.name: generation.eos_token_id,
            "config.json": config.eos_token_id,
            "the tokenizer": getattr(tokenizer, "eos_token_id", None),
        }
        end_tokens = _end_tokens(path, stated)
        common = {
            "max_new_tokens": generation.max_new_tokens,
            "min_tokens": generation.min_new_tokens,
            "repetition_penalty": generation.repetition_penalty,
        }
        sampled = {
            "temperature": 1.0 if generation.temperature is None else generation.temperature,
            "top_k": 0 if generation.top_k == -1 else generation.top_k,  # vLLM's -1 is transformers' 0: all
            "top_p": generation.top_p,
            "min_p": generation.min_p,
        }
        given = common | (sampled if generation.do_sample else {})
        return end_tokens, SamplingParams(**{name: value for name, value in given.items() if value is not None})
    except CheckpointError:
        raise
    except Exception as error:  # transformers raises many kinds for malformed values; ours are SamplingErrors
        raise CheckpointError(f"{file} cannot be used: {error}") from error


def _end_tokens(path: Path, stated: Mapping[str, Any]) -> frozenset[int]:
    """The union of the end tokens that the files of a checkpoint state, by the file: one, several, or None.

    Raises:
        CheckpointError: one is not a token id.
    """
    found: dict[int, list[str]] = {}
    for place, end in stated.items():
        tokens = [end] if isinstance(end, int) else end or ()
        if not isinstance(tokens, list | tuple) or not all(isinstance(token, int) for token in tokens):
            raise CheckpointError(
                f"{path / place}: eos_token_id must be a token id or a list of them; got {shown(end)}"
            )
        for token in tokens:
            found.setdefault(token, []).append(place)
    if found:
        log.info(
            "%s: answers end with %s", path, "; ".join(f"{token} ({', '.join(at)})" for token, at in found.items())
        )
    else:
        log.warning(
            "%s names no end token, neither in generation_config.json and config.json nor by its tokenizer: answers "
            "end at max_new_tokens, or with SamplingParams(stop_token_ids=...)",
            path,
        )
    return frozenset(found)


def build_cache(loaded: LoadedModel, config: CacheConfig, size: tuple[int, int] | None = None) -> HybridCache:
    """An empty cache for a model.

    Args:
        loaded: the model whose pages and states it holds.
        config: its settings.
        size: numbers of pages and of state slots, instead of `config.memory`.

    Raises:
        MemoryBudgetError: the memory does not suffice for one request.
        ArgumentError: `size` is something else, or too small for one request.
    """
    model, device = loaded.model, loaded.device
    spec = model.own_spec().with_kv_dtype(config.kv_dtype)
    if size is not None:
        memory = CacheMemory.fixed(spec, config.page_size, *_numbers(size), device)
        return make_cache(memory, config, _fingerprint(loaded, memory, config))
    memory = CacheMemory.for_spec(
        spec,
        config.memory_bytes(free_memory(device), device.type == "cuda"),
        device,
        page_size=config.page_size,
        state_share=config.state_share,
        state_dtype=config.state_dtype,
    )
    return make_cache(memory, config, _fingerprint(loaded, memory, config))


def _numbers(size: object) -> tuple[int, int]:
    if not isinstance(size, tuple | list) or len(size) != 2:
        raise ArgumentError(f"size must be numbers of pages and of state slots, as (128, 32); got {shown(size)}")
    pages, states = size
    return (
        integer("size: the number of pages", pages, 1, MAX_UNITS),
        integer("size: the number of state slots", states, MIN_STATE_SLOTS, MAX_UNITS),
    )


def _fingerprint(loaded: LoadedModel, memory: CacheMemory, config: CacheConfig) -> Fingerprint | None:
    """Return the fingerprint that copies on disk are made with; None: there are none, and no weights are read."""
    if config.disk is None or not config.enabled:
        return None
    return fingerprint_of(memory, config, loaded.digest(), is_deterministic(config, loaded))


def is_captured(loaded: LoadedModel, config: EngineConfig) -> bool:
    """Tell whether decode steps are captured."""
    return not config.enforce_eager and loaded.model.decode_can_be_recorded


def model_runner(
    loaded: LoadedModel,
    cache: HybridCache,
    config: EngineConfig,
    deterministic: bool,
    speculation: SpeculationConfig | None = None,
) -> ModelRunner:
    """Make the runner that computes the steps of an engine on its model."""
    model, device = loaded.model, loaded.device
    if device.type == "cuda" and model.is_warmed_up:
        warm_up(model, cache, config, deterministic, speculation)
    graphs = None
    if is_captured(loaded, config):
        longest = MAX_PROMPT_TOKENS if model.prompts_can_be_recorded else 0
        graphs = CapturedPasses(model, cache.kv, cache.state_tensors, device, max_prompt_tokens=longest)
    is_compiled = device.type == "cpu" and model.decode_can_be_recorded
    posts = is_compiled and config.overlap is not False
    return ModelRunner(model, cache, device, deterministic, graphs, loaded.end_tokens, is_compiled, posts)


def check_settings(cache: object, config: object) -> None:
    """Check the types of the settings of an engine.

    Raises:
        ArgumentError: one is of another type.
    """
    if not isinstance(cache, CacheConfig):
        raise ArgumentError(f"cache must be a CacheConfig, such as CacheConfig(memory='4GiB'); got {shown(cache)}")
    if config is not None and not isinstance(config, EngineConfig):
        raise ArgumentError(f"config must be an EngineConfig, or None; got {shown(config)}")


def is_deterministic(config: CacheConfig, loaded: LoadedModel) -> bool:
    """Tell whether hits must be bitwise equal to cold runs: as configured; by default on a CPU with fp32 states, where
    this package's own layers compute.

    Raises:
        ArgumentError: they must be, and transformers' layers compute, whose bits depend on the batch.
    """
    if not loaded.model.keeps_bits:
        if config.deterministic:
            raise ArgumentError(
                f"deterministic=True needs a family of this package, and {loaded.name} runs by transformers' layers: "
                "leave deterministic out, or use hybrid.hf.PrefixCache, which has such a mode for all models"
            )
        return False
    if config.deterministic is not None:
        return config.deterministic
    return loaded.device.type == "cpu" and config.state_dtype == "float32"
