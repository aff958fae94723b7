"""Detecting that a model has changed: its weights, its adapters, or settings that change its results."""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from hybrid.tiers.fingerprint import digest_of_model

PROCESS: str = token_hex(8)
"""Names this process: in another one, the numbers of weights and settings mean others. Copies on disk are shared."""


class ModelVersion(NamedTuple):
    """A version of a model. Equal versions compute equal results.

    Attributes:
        weights: counts changes of the weights. An earlier number never returns.
        settings: number of the combination of settings (active adapters, attention implementation, configuration). An
            earlier combination has its number again.
    """

    weights: int = 0
    settings: int = 0

    def key_space(self, namespace: str) -> str:
        """The namespace of the tree that holds this version's prefixes of a user's namespace."""
        is_plain = self == ModelVersion() and not namespace.startswith("\0")
        return namespace if is_plain else f"{self._prefix}{namespace}"

    def namespace(self, key_space: str) -> str:
        """The user's namespace that `key_space` was made of."""
        return key_space.removeprefix(self._prefix)

    def owns(self, key_space: str) -> bool:
        """Tell whether prefixes in this namespace of the tree were computed by this version."""
        if not key_space.startswith("\0"):
            return self == ModelVersion()
        return key_space.startswith(self._prefix)

    @property
    def _prefix(self) -> str:
        return f"\0{PROCESS}.{os.getpid()}.{self.weights}.{self.settings}\0"


class ModelVersions:
    """Finds out which version of itself a model is.

    Weights are compared by identity, form and torch's counters of changes in place. Nothing of a model is referred to
    between two looks: a weight or a module that is replaced is freed at once. A look takes about 0.1 ms for 130
    modules with 110 weights.

    Args:
        model: the model; a wrapper of PEFT or `torch.compile` as well.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._num_changes = -1
        self._look: tuple[list[Any], ...] = ()
        self._storages: list[StorageWeakRef] = []
        self._settings: dict[Hashable, int] = {}
        self._has_settings: dict[type, bool] = {}
        self.current()

    def current(self) -> ModelVersion:
        """The version that the model is now."""
        modules, weights = _contents(self._model)
        look = _look(weights)
        if look != self._look:
            self._look = look
            # Weak references keep the identity of a storage that is freed from being used again.
            self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in weights]
            self._num_changes += 1
        known = self._has_settings
        settings: list[Hashable] = []
        for module in modules:
            if known.get(type(module), True) and self._may_have_settings(type(module)):
                settings.extend(_settings(module))
        return ModelVersion(self._num_changes, self._settings.setdefault(tuple(settings), len(self._settings)))

    def _may_have_settings(self, kind: type) -> bool:
        found = self._has_settings.get(kind)
        if found is None:
            found = self._has_settings[kind] = issubclass(kind, _kinds_with_settings())
        return found


def digest_of(model: nn.Module, config: Mapping[str, Any]) -> str:
    """The digest of what a model computes: of its weights, its configuration and its settings.

    Args:
        config: of the model.
    """
    settings = [setting for module in _contents(model)[0] for setting in _settings(module)]
    ignored = ("_name_or_path", "transformers_version")
    content = {name: value for name, value in config.items() if name not in ignored}
    return digest_of_model({**content, " settings": repr(settings)}, model.state_dict().items())


def _contents(model: nn.Module) -> tuple[list[nn.Module], list[Tensor]]:
    """Every module, and all weights: parameters and persistent buffers. Other buffers (rotary frequencies) are
    computed. A module that is used in several places is listed as often. `nn.Module.modules` takes five times as long.
    """
    modules, weights = [model], list[Tensor | None]()
    for module in modules:  # it grows meanwhile
        fields = module.__dict__
        if children := fields["_modules"]:
            modules += [child for child in children.values() if child is not None]
        if parameters := fields["_parameters"]:
            weights += parameters.values()
        if buffers := fields["_buffers"]:
            computed = fields["_non_persistent_buffers_set"]
            weights += [tensor for name, tensor in buffers.items() if name not in computed]
    return modules, [tensor for tensor in weights if tensor is not None]


def _look(weights: Sequence[Tensor]) -> tuple[list[Any], ...]:
    """List what differs where a weight was changed or replaced: column by column, since that is fastest."""
    return (
        list(map(id, weights)),
        [tensor.untyped_storage()._cdata for tensor in weights],
        _change_counts(weights),
        list(map(Tensor.stride, weights)),  # a view of the same memory, assigned to `.data`
        list(map(Tensor.numel, weights)),
        [tensor.dtype for tensor in weights],
    )


def _change_counts(weights: Sequence[Tensor]) -> list[int]:
    """Count how often each was changed in place, as torch does; it does not for tensors of inference mode."""
    try:
        return [tensor._version for tensor in weights]
    except RuntimeError:
        return [0 if tensor.is_inference() else tensor._version for tensor in weights]


def _kinds_with_settings() -> tuple[type, ...]:
    """Classes of the modules that have settings, of the packages that are loaded."""
    peft = sys.modules.get("peft.tuners.tuners_utils")
    return (PreTrainedModel,) if peft is None else (PreTrainedModel, peft.BaseTunerLayer)


def _settings(module: nn.Module) -> Iterator[Hashable]:
    """Settings of one module that change its results."""
    if isinstance(module, PreTrainedModel):
        config = module.config
        yield config._attn_implementation, config._experts_implementation
    peft = sys.modules.get("peft.tuners.tuners_utils")
    if peft is not None and isinstance(module, peft.BaseTunerLayer):
        scaling = vars(module).get("scaling", {})  # of LoRA
        adapters = tuple(module.active_adapters), tuple(module.merged_adapters)
        yield module.disable_adapters, adapters, tuple(scaling.items())
