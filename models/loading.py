"""From a checkpoint in Hugging Face form to a model, parameter by parameter."""

import logging
import sys
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hybrid.checks import is_file
from hybrid.errors import CheckpointError, UnsupportedModelError
from hybrid.kernels.ops import compiled_module, is_compiled, uses_triton
from hybrid.kernels.packed_weights import GROUPS
from hybrid.models import gguf_file
from hybrid.models.bailing_hybrid import BailingHybridForCausalLM
from hybrid.models.bamba import BambaForCausalLM
from hybrid.models.causal_lm import CausalLM
from hybrid.models.falcon_h1 import FalconH1ForCausalLM
from hybrid.models.gemma3 import Gemma3ForCausalLM
from hybrid.models.gpt_oss import GptOssForCausalLM
from hybrid.models.granitemoehybrid import GraniteMoeHybridForCausalLM
from hybrid.models.jamba import JambaForCausalLM
from hybrid.models.json_files import read_config
from hybrid.models.kimi_linear import KimiLinearForCausalLM
from hybrid.models.layers import Linear
from hybrid.models.lfm2 import Lfm2ForCausalLM, Lfm2MoeForCausalLM
from hybrid.models.llama import LlamaForCausalLM, Qwen3ForCausalLM
from hybrid.models.minimax import MiniMaxForCausalLM
from hybrid.models.moe import ExpertRouter, Experts
from hybrid.models.nemotron_h import NemotronHForCausalLM
from hybrid.models.olmo_hybrid import OlmoHybridForCausalLM
from hybrid.models.quantized_files import restored_tensors
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM
from hybrid.models.qwen3_next import Qwen3NextForCausalLM
from hybrid.models.recurrent_gemma import RecurrentGemmaForCausalLM
from hybrid.models.transformers_model import TransformersModel, load_transformers_model
from hybrid.models.transformers_types import NEEDED, is_in_transformers, is_new_enough
from hybrid.models.weights import Layouts, Loader, Quantization, RestoredTensor, Stored, stored_tensors

log: logging.Logger = logging.getLogger(__name__)

ARCHITECTURES: dict[str, type[Any]] = {
    "bailing_hybrid": BailingHybridForCausalLM,
    "bamba": BambaForCausalLM,
    "falcon_h1": FalconH1ForCausalLM,
    "gemma3_text": Gemma3ForCausalLM,
    "gpt_oss": GptOssForCausalLM,
    "granitemoehybrid": GraniteMoeHybridForCausalLM,
    "jamba": JambaForCausalLM,
    "kimi_linear": KimiLinearForCausalLM,
    "lfm2": Lfm2ForCausalLM,
    "lfm2_moe": Lfm2MoeForCausalLM,
    "llama": LlamaForCausalLM,
    "minimax": MiniMaxForCausalLM,
    "nemotron_h": NemotronHForCausalLM,
    "olmo_hybrid": OlmoHybridForCausalLM,
    "qwen3": Qwen3ForCausalLM,
    "qwen3_5": Qwen3_5ForCausalLM,
    "qwen3_5_moe": Qwen3_5MoeForCausalLM,
    "qwen3_5_moe_text": Qwen3_5MoeForCausalLM,
    "qwen3_5_text": Qwen3_5ForCausalLM,
    "qwen3_next": Qwen3NextForCausalLM,
    "recurrent_gemma": RecurrentGemmaForCausalLM,
}
"""Model types of config.json that run here. `qwen3_5` and `qwen3_5_moe` are vision-language layouts, of which the
language part is loaded."""

TINY = Path(__file__).parent / "tiny"
"""The checkpoint inside the package."""

IGNORED_PREFIXES = ("model.visual.", "visual.")
"""Tensors that the text model does not use."""

MTP = "mtp."
"""Prefix of the layers for multi-token prediction."""

HEAD = "lm_head.weight"
"""The parameter that may be tied to the embedding."""

EMBEDDING = "model.embed_tokens.weight"
"""The parameter of which rows are looked up."""

FILES = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "vocab.json"]
"""The files of a repository that are downloaded."""


MIN_OUTPUTS = 64
"""Outputs of a product from which on it is stored in four bits."""


QUANTIZATIONS: dict[str, Quantization] = {
    "int8": Quantization(),
    "int4": Quantization(group=64),
    **{f"int4:{group}": Quantization(group) for group in GROUPS},
}
"""The values of `load_dtype`."""


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder of a checkpoint, and its configuration.

    Attributes:
        path: its folder.
        model_type: the `model_type` of config.json.
        config: the text configuration, a `PretrainedConfig` of transformers.
        whole: the whole configuration, of which the text configuration is a part in vision-language checkpoints.
        unsupported: what of the configuration the family of this type does not compute; empty: nothing, or there is
            no family of this type.
    """

    path: Path
    model_type: str
    config: Any
    whole: Any
    unsupported: str = ""

    @property
    def family(self) -> type[Any] | None:
        """The class that computes it; None: transformers' layers do."""
        return None if self.unsupported else ARCHITECTURES.get(self.model_type)


def open_checkpoint(name: str | Path) -> CheckpointFolder:
    """Find a checkpoint and read its configuration.

    Args:
        name: a folder, a GGUF file, the id of a repository on the Hugging Face hub, or "tiny" for the one inside the
            package. A folder or a repository of several GGUF files is followed by which one is meant, its name or what
            it is quantized to: "owner/model:Q4_K_M".

    Raises:
        CheckpointError: there is no checkpoint, or its configuration cannot be read.
        UnsupportedModelError: its architecture is not supported.
    """
    path = _locate(name)
    if gguf_file.is_gguf(path):
        config = gguf_file.read_config(path)
        message = ARCHITECTURES[config.model_type].unsupported(config)
        if message is not None:
            raise UnsupportedModelError(f"{name}: {message}")
        return CheckpointFolder(path, config.model_type, config, config)
    raw = read_config(path / "config.json")
    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if isinstance(model_type, str) and not is_new_enough(model_type):
        raise UnsupportedModelError(
            f"{path} is a {model_type!r} model, which transformers has from version {NEEDED[model_type]} on; installed "
            f'is {version("transformers")}: pip install -U "transformers>={NEEDED[model_type]}"'
        )
    if not isinstance(model_type, str) or (model_type not in ARCHITECTURES and not is_in_transformers(model_type)):
        raise UnsupportedModelError(
            f"{path} is a {model_type!r} model, which the installed transformers does not have; supported are: "
            f"{', '.join(sorted(ARCHITECTURES))}, and most other causal language models of transformers"
        )
    from transformers import AutoConfig

    try:
        whole = AutoConfig.from_pretrained(path)
        config = whole.get_text_config()
        # the vision-language layout has it outside of the text configuration, inside, or both
        config.tie_word_embeddings = bool(config.tie_word_embeddings or raw.get("tie_word_embeddings"))
        family = ARCHITECTURES.get(model_type)
        message = family.unsupported(config) if family is not None else None
    except Exception as error:  # transformers raises many kinds for a malformed configuration
        raise CheckpointError(f"{path / 'config.json'} cannot be read: {error}") from error
    return CheckpointFolder(path, model_type, config, whole, message or "")


def load_model(
    checkpoint: CheckpointFolder,
    dtype: torch.dtype,
    device: torch.device,
    chunk_size: int,
    *,
    mtp: bool = False,
    quantize: Quantization | None = None,
    progress: bool | None = None,
) -> CausalLM | TransformersModel:
    """Build the model and load its weights, slice by slice from the mapped files: no second copy is made in memory.
    transformers loads and computes a type that no family here has.

    Matrices that are bfloat16 in the file stay so in a model of fp32, where compiled code multiplies them with its
    rows: they give the same bits and take half of the memory.

    Args:
        dtype, device: of activations and parameters, these matrices aside; `running_dtype` of it is taken.
        chunk_size: chunk of the linear layers, in tokens.
        mtp: also load the predictor, where the checkpoint has one, as `model.mtp`: it drafts tokens.
        quantize: store the weights of matrix products, routers aside, in fewer bits (`can_quantize`). As int8 experts
            stay as they are, in four bits the head does, and so do products with few outputs, of which gates and decays
            are made.
        progress: show a progress bar; None: only on a terminal.

    Raises:
        CheckpointError: weights are missing, unexpected, truncated or of another shape.
        UnsupportedModelError: it has several layers for multi-token prediction, and they are to be loaded.
    """
    dtype = running_dtype(dtype, device)
    show = sys.stderr is not None and sys.stderr.isatty() if progress is None else progress
    family = checkpoint.family
    if family is None:
        return _load_by_transformers(checkpoint, dtype, device, chunk_size, quantize is not None, show)
    tensors: dict[str, Stored] = {}
    for stored in _stored(checkpoint, family).values():
        name = stored.name.replace("model.language_model.", "model.", 1)
        ignored = name.startswith(IGNORED_PREFIXES if mtp else (*IGNORED_PREFIXES, MTP))
        if not ignored and not family.ignores(name, checkpoint.config):
            tensors[name] = stored
    tensors = restored_tensors(checkpoint.path, tensors, getattr(checkpoint.whole, "quantization_config", None))
    tied = _is_tied(checkpoint, tensors, family)
    if tied:
        tensors.pop(HEAD, None)
    predictors = {name.split(".")[2] for name in tensors if name.startswith(f"{MTP}layers.")}
    if len(predictors) > 1:
        raise UnsupportedModelError(
            f"{checkpoint.path} has {len(predictors)} layers for multi-token prediction, of which "
            "one is supported: leave mtp out"
        )
    try:
        with torch.device("meta"):
            model = family(checkpoint.config, chunk_size, bool(predictors))
    except Exception as error:  # sizes that do not fit each other, or no tensor can have
        raise CheckpointError(f"{checkpoint.path / 'config.json'} does not describe a model: {error}") from error
    shapes = {name: tensor.shape for name, tensor in model.named_parameters() if not (tied and name == HEAD)}
    bfloat16 = {EMBEDDING, *_products(model)} if is_compiled(device) else set()
    routers = (name for name, module in model.named_modules() if isinstance(module, ExpertRouter))
    exact = frozenset(f"{name}.choice_bias" for name in routers)
    quantized = {} if quantize is None else dict.fromkeys({*_quantized(model, quantize)} & shapes.keys(), quantize)
    forms = {form for stored in tensors.values() if (form := stored.form) is not None}
    as_on_disk = {form: {*_quantized(model, form)} for form in forms}
    loader = Loader(
        checkpoint.path,
        shapes,
        lambda parameter: _layouts(checkpoint, family, parameter),
        dtype,
        device,
        quantized,
        frozenset(bfloat16),
        exact,
        lambda parameter, form: quantize is None and can_quantize(device) and parameter in as_on_disk[form],
    )
    compile_operations(dtype, device, {form.group for form in (*forms, *quantized.values())}, show)
    total = sum(stored.num_bytes for stored in tensors.values())
    with tqdm(total=total, desc="load", unit="B", unit_scale=True, disable=not show) as bar:
        parameters = loader.load(tensors, bar.update)
    _log_forms(checkpoint.path, loader, tensors, quantize is not None)
    for name, scales in loader.scales.items():  # of parameters whose shapes may be other ones
        module, _, own = name.rpartition(".")
        model.get_submodule(module).set_quantized(own, parameters.pop(name), scales)
    model.load_state_dict(parameters, strict=False, assign=True)  # without a tied head
    if tied:
        model.tie_head()
    if uses_triton(device):
        model.fuse_projections()
    return model.eval()


def _log_forms(path: Path, loader: Loader, tensors: Mapping[str, Stored], quantize: bool) -> None:
    """Say what became of the weights that are quantized on disk."""
    restored = sum(isinstance(stored, RestoredTensor) and stored.is_quantized for stored in tensors.values())
    if not restored:
        return
    if not can_quantize(loader.device):
        reason = "products with quantized weights are compiled for a CPU alone"
    elif quantize:
        reason = "load_dtype quantizes them again"
    else:
        reason = "embedding, head, routers, small products, and what has no form of four bits or of int8 rows"
    log.info(
        "%s: %d tensors are quantized; %d weights stay in four bits or int8, the others are restored to %s while they "
        "are read (%s)",
        path,
        restored,
        len(loader.kept),
        loader.dtype,
        reason,
    )


def _stored(checkpoint: CheckpointFolder, family: type[Any]) -> Mapping[str, Stored]:
    """The tensors of a checkpoint by name."""
    if not gguf_file.is_gguf(checkpoint.path):
        return stored_tensors(checkpoint.path)
    with torch.device("meta"):
        model: CausalLM = family(checkpoint.config, 64)
    layouts = (_layouts(checkpoint, family, name) for name, _ in model.named_parameters())
    names = {source.name for ways in layouts for sources in ways for source in sources}
    return gguf_file.read_tensors(checkpoint.path, checkpoint.config, names)


def _layouts(checkpoint: CheckpointFolder, family: type[Any], parameter: str) -> Layouts:
    """The tensors on disk that make up a parameter."""
    if gguf_file.is_gguf(checkpoint.path):
        return gguf_file.layouts(parameter, checkpoint.config, family.layouts)
    found: Layouts = family.layouts(parameter, checkpoint.config)
    return found


def _load_by_transformers(
    checkpoint: CheckpointFolder, dtype: torch.dtype, device: torch.device, chunk_size: int, quantize: bool, show: bool
) -> TransformersModel:
    """Load a checkpoint that no family of this package computes.

    Raises:
        CheckpointError: it cannot be loaded.
        UnsupportedModelError: transformers' layers do not compute it either, or it is to be quantized.
    """
    if quantize:
        raise UnsupportedModelError(
            f"{checkpoint.path} is a {checkpoint.model_type!r} model that transformers' layers compute: its weights "
            "cannot be quantized while they are loaded; leave load_dtype out"
        )
    try:
        return load_transformers_model(checkpoint.path, dtype, device, chunk_size, show)
    except CheckpointError as error:
        if not checkpoint.unsupported:
            raise
        raise UnsupportedModelError(
            f"{checkpoint.path}: {checkpoint.unsupported}; nor can transformers' own layers compute it here: {error}"
        ) from error


def _is_tied(checkpoint: CheckpointFolder, tensors: Mapping[str, Stored], family: type[CausalLM]) -> bool:
    """Tell whether the head is the embedding: as the configuration says, unless both are stored and differ. Then the
    head is what is stored, as in transformers."""
    if not checkpoint.config.tie_word_embeddings:
        return False
    names = (layout[0].name for layout in family.layouts(EMBEDDING, checkpoint.config))
    embedding = next((tensors[name] for name in names if name in tensors), None)
    if HEAD not in tensors or embedding is None or tensors[HEAD].has_values_of(embedding):
        return True
    log.warning(
        "%s: tie_word_embeddings is true, but a head is stored that differs from the embedding: it is used, as by "
        "transformers. If that is not meant, remove %s from the weights",
        checkpoint.path,
        HEAD,
    )
    checkpoint.config.tie_word_embeddings = False
    return False


def compile_operations(dtype: torch.dtype, device: torch.device, groups: Set[int | None], show: bool) -> None:
    """Load the compiled operations of models of a type, whatever their sizes. What Numba's cache does not have is
    compiled.

    Args:
        groups: of the forms in which weights are kept (`Quantization.group`).
    """
    if is_compiled(device):
        kinds: Any = compiled_module("tasks").KINDS
        wanted = compiled_module("functions").functions(kinds[dtype], None in groups, bool(groups - {None}))
        compiled_module("prepare").prepare(wanted, show)


def has_predictor(checkpoint: CheckpointFolder) -> bool:
    """Tell whether a checkpoint has the predictor that `load_model` loads with `mtp`.

    Raises:
        CheckpointError: its weights cannot be read.
    """
    if gguf_file.is_gguf(checkpoint.path):
        return False
    return any(stored.name.startswith(MTP) for stored in stored_tensors(checkpoint.path).values())


def running_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type that a model runs in that is asked for in another: float16 is widened to float32 on a CPU, which holds
    the same numbers, since no compiled operation has it."""
    if dtype == torch.float16 and is_compiled(device):
        log.info("weights in float16 are widened to float32: operations on a CPU have float32 and bfloat16")
        return torch.float32
    return dtype


def can_quantize(device: torch.device) -> bool:
    """Tell whether weights can be quantized on a device: their products are compiled."""
    return is_compiled(device)


def _quantized(model: CausalLM, quantize: Quantization) -> Iterator[str]:
    """Names of the weights that are quantized. Routers multiply in fp32."""
    has_four_bits = quantize.group is not None
    for name, module in model.named_modules():
        if isinstance(module, Linear) and not isinstance(module, ExpertRouter):
            if not (has_four_bits and (module is model.lm_head or module.shape[0] < MIN_OUTPUTS)):
                yield f"{name}.weight"
        elif isinstance(module, Experts) and has_four_bits:
            yield from (f"{name}.{own}" for own in module.sizes)


def _products(model: CausalLM) -> Iterator[str]:
    """Names of the weights of matrix products."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            yield f"{name}.weight"
        elif isinstance(module, Experts):
            yield from (f"{name}.{own}" for own, _ in module.named_parameters())


def _locate(name: str | Path) -> Path:
    if not isinstance(name, str | Path) or not str(name) or "\0" in str(name):
        raise CheckpointError(
            f"{name!r} is not a checkpoint: give a folder with config.json and *.safetensors, a hub id as "
            "'Qwen/Qwen3.5-0.8B', or 'tiny'"
        )
    path = Path(name)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:  # its name is too long, or a folder above it is closed to this user
        raise CheckpointError(f"{str(name)!r:.200} cannot be opened: {error.strerror}; give another folder") from error
    if name == "tiny" and not exists:
        path, is_folder = TINY, True
    base, _, choice = str(name).rpartition(":")
    if is_folder:
        return _in_folder(path, None)
    if base and Path(base).is_dir():
        return _in_folder(Path(base), choice)
    if gguf_file.is_gguf(path):
        return path
    hub_id = base or str(name)
    if exists or path.is_absolute() or hub_id.count("/") != 1 or hub_id.startswith("."):
        raise CheckpointError(
            f"{name} is not a checkpoint: give a folder with config.json and *.safetensors, a GGUF file, "
            "or a hub id as 'Qwen/Qwen3.5-0.8B'"
        )
    try:
        return _download(hub_id, choice if base else None)
    except CheckpointError:
        raise
    except Exception as error:  # the hub's client raises many kinds: no network, no such repository, no access
        raise CheckpointError(
            f"there is no folder {name} here, and it cannot be downloaded from the hub: give a folder with config.json "
            f"and *.safetensors, a hub id as 'Qwen/Qwen3.5-0.8B', or 'tiny' ({type(error).__name__}: {error})"
        ) from error


def _in_folder(folder: Path, choice: str | None) -> Path:
    """The folder itself, or the GGUF file in it that is meant.

    Raises:
        CheckpointError: it has no checkpoint, or several GGUF files fit.
    """
    try:
        files = [each.name for each in folder.iterdir()]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}; check its permissions") from error
    has_weights = any(name.endswith(".safetensors") for name in files)
    if choice is not None or (gguf_file.whole_files(files) and not ("config.json" in files and has_weights)):
        return folder / gguf_file.chosen_file(files, choice, folder)
    if not is_file(folder / "config.json"):
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no config.json; give the folder that has it and *.safetensors, or a "
            "GGUF file"
        )
    return folder


def _download(hub_id: str, choice: str | None) -> Path:
    """Download a repository, or the GGUF file of it that is meant; returns its place.

    Raises:
        CheckpointError: several GGUF files fit, or none does. Other errors are those of the hub's client.
    """
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    if choice is None:
        folder = Path(snapshot_download(hub_id, allow_patterns=FILES))
        if any(folder.glob("*.safetensors")):
            return folder
    names = HfApi().list_repo_files(hub_id)
    if choice is None and not gguf_file.whole_files(names):
        return _in_folder(folder, None)
    file = gguf_file.chosen_file(names, choice, hub_id)
    first, *_ = (Path(hf_hub_download(hub_id, part)) for part in gguf_file.parts_of(file))
    return first
