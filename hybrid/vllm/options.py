"""Options of this plugin, from vLLM's `--additional-config`, and what of vLLM is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hybrid.errors import ArgumentError, UnsupportedModelError
from hybrid.mirror.options import MirrorOptions
from hybrid.tree.policies import policy_of

WHERE = "--additional-config: hybrid"


@dataclass(frozen=True, slots=True)
class VllmOptions(MirrorOptions):
    """Options that `--additional-config '{"hybrid": {...}}'` may have.

    Attributes:
        policy: of eviction, one of `hybrid.tree.policies.POLICIES`, with options as in "flop_aware:alpha=0.5" or
            without.
        ghost_branches: on, since it has found far more than its passes cost.
        siblings: a prompt's state is also made where requests that wait part from it.
        answers: the state at the last block of an answer is kept.
    """

    ghost_branches: bool = True
    policy: str = "lhd"
    siblings: bool = True
    answers: bool = True

    @classmethod
    def of(cls, additional_config: Any) -> VllmOptions:
        """The options in vLLM's additional configuration.

        Raises:
            ArgumentError: there is no such option or policy, or a value is of another type.
        """
        given = additional_config.get("hybrid") if isinstance(additional_config, Mapping) else None
        options = cls.read(WHERE, given)
        try:
            policy_of(options.policy)
        except ArgumentError as error:
            raise ArgumentError(f"{WHERE}: {error}") from None
        return options


def refuse_unsupported(config: Any, num_pages: int, num_states: int, others: list[str], sizes: set[int]) -> None:
    """Refuse what this scheduler does not do before anything is served.

    Args:
        config: vLLM's `VllmConfig`.
        num_pages, num_states: groups of layers with full attention, and with states.
        others: names of the caches of other groups of layers.
        sizes: tokens per block of all groups, and per hash.

    Raises:
        UnsupportedModelError: something is asked for that is not supported; all of it is named, each with what to do.
    """
    found, parallel = [], config.parallel_config
    if not num_states:
        found.append("a model without linear-attention states: vLLM's own scheduler serves it, leave the flag out")
    elif config.cache_config.mamba_cache_mode != "align":
        found.append(f"mamba_cache_mode {config.cache_config.mamba_cache_mode!r}: set --mamba-cache-mode align")
    if num_states and not num_pages:
        found.append("a model without full attention: vLLM's own scheduler serves it, leave the flag out")
    if others:
        found.append(f"layers with {', '.join(others)} beside full attention and states: leave the flag out")
    if len(sizes) > 1:
        found.append("a hash unit below the block (--prefix-match-unit): leave it out, so that both are the same")
    if config.speculative_config is not None:
        found.append("speculative decoding (EAGLE, MTP and others): leave --speculative-config out")
    if getattr(parallel, "decode_context_parallel_size", 1) > 1:
        found.append("decode context parallelism: set --decode-context-parallel-size 1")
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        found.append("prefill context parallelism: set --prefill-context-parallel-size 1")
    if config.kv_transfer_config is not None:
        found.append("KV connectors, which keep blocks of their own: leave --kv-transfer-config out")
    if found:
        raise UnsupportedModelError("--scheduler-cls hybrid.vllm.Scheduler does not support " + "; nor ".join(found))
