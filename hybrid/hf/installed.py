"""The version of transformers that is installed: what it names the cache, and that what is relied on is there.

Everything of transformers that would fail without a word if it had another name is looked at when a `PrefixCache` is
made, and again when it is used first: a hook that does not fire is an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

import transformers
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from hybrid.errors import VersionError

TESTED = "5.16.1 to 5.24"
"""The versions that are known to work."""

CACHE_NAMES = ("cache", "past_key_values")
"""Names of the argument with the cache: from 5.24 on, and before."""

OVERRIDDEN = (
    "activate_past_recording",
    "batch_repeat_interleave",
    "batch_select_indices",
    "crop",
    "get_seq_length",
    "reorder_cache",
)
"""Methods of transformers' cache that a `Past` replaces, or asks for its length."""

LOOP_ARGUMENTS = {
    "generate": ("custom_generate", "streamer"),
    "prepare_inputs_for_generation": ("next_sequence_length", "is_first_iteration"),
    "_update_model_kwargs_for_generation": ("num_new_tokens",),
}
"""Methods of transformers' models that decoding with drafts calls, and their arguments that it gives."""


def unexpected(what: str) -> VersionError:
    """The error for something in transformers that is not as expected.

    Args:
        what: a sentence without its full stop.
    """
    return VersionError(
        f"transformers {transformers.__version__}: {what}. Versions {TESTED} are known to work: install one of them "
        '(pip install "transformers>=5.16.1,<5.25"), or call model.generate without the cache'
    )


@cache
def cache_name() -> str:
    """Name the cache among the arguments of `generate` and of a pass, as this version does.

    Raises:
        VersionError: as nothing that is known.
    """
    return _name_in(GenerationMixin.prepare_inputs_for_generation, "GenerationMixin.prepare_inputs_for_generation")


def as_argument(past: DynamicCache | None) -> dict[str, Any]:
    """A cache as the argument of `generate` or of a pass."""
    return {cache_name(): past}


def cache_in(args: Iterable[Any], kwargs: Mapping[str, Any]) -> DynamicCache | None:
    """The cache among the arguments of a pass, whatever its name."""
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, DynamicCache)), None)


def refuse_unexpected(model: Any) -> None:
    """Look at what `hybrid.hf` relies on in transformers and in one of its models.

    Raises:
        VersionError: something is not there, or has another name.
    """
    missing = [name for name in OVERRIDDEN if not callable(getattr(DynamicCache, name, None))]
    if missing:
        raise unexpected(f"DynamicCache has no {' and no '.join(missing)}, so a past could not follow its tokens")
    for method, arguments in LOOP_ARGUMENTS.items():
        function = getattr(GenerationMixin, method, None)
        known = () if function is None else inspect.signature(function).parameters
        if absent := [name for name in arguments if name not in known]:
            raise unexpected(
                f"GenerationMixin.{method} takes no {' and no '.join(absent)}, so no drafts can be decoded"
            )
    name, kind = cache_name(), type(model).__name__
    forward = inspect.signature(model.forward).parameters
    takes_others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in forward.values())
    if name not in forward and not takes_others:
        raise unexpected(f"{kind}.forward takes no {name}, so the cache cannot be given to it")
    for setting in ("_attn_implementation", "_experts_implementation"):
        if not hasattr(model.config, setting):
            raise unexpected(f"the configuration of {kind} has no {setting}, so a change of it would not be seen")
    _refuse_unknown_positions(model)


def _refuse_unknown_positions(model: Any) -> None:
    """Look at what `hybrid.hf.pass_model` relies on.

    Raises:
        VersionError: it is not there.
    """
    modules = list(model.modules())
    indexed = [type(module).__name__ for module in modules if hasattr(type(module), "get_rope_index")]
    if indexed and not any("rope_deltas" in vars(module) for module in modules):
        raise unexpected(
            f"{indexed[0]} has no rope_deltas, so the positions of one prompt's images would be those of the next"
        )
    frequencies = str(getattr(model.config.get_text_config(decoder=True), "rope_parameters", None))
    changes = "dynamic" in frequencies or "longrope" in frequencies
    if changes and not any("rope_type" in vars(module) for module in modules):
        raise unexpected("no module has a rope_type, so the position where rotary frequencies change is not known")


def _name_in(function: Any, what: str) -> str:
    parameters = inspect.signature(function).parameters
    found = next((name for name in CACHE_NAMES if name in parameters), None)
    if found is None:
        raise unexpected(
            f"{what} takes no {' and no '.join(CACHE_NAMES)}, so the cache of a pass cannot be given or seen"
        )
    return found
