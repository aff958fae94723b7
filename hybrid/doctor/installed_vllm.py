"""vLLM's own scheduler, where it is installed: its manager and pool on a CPU, without a model. Blocks are named by the
hashes of traffic in place of those of token ids, and the answers are made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from types import SimpleNamespace
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from hybrid.doctor.arrivals import Arrivals, ArrivedRequest
from hybrid.doctor.batch import BUDGET, MAX_WAITING, Begun
from hybrid.doctor.engine import MAX_RUNNING, MISS, EngineModel, Hit
from hybrid.doctor.sizes import Sizes
from hybrid.units import ceil_div

MAX_MODEL_LEN = 1 << 20

MAX_IDLE = 50
"""Steps without a token, after which what waits is taken to have no room."""


@dataclass(slots=True, eq=False)
class Served:
    """A request inside vLLM.

    Attributes:
        arrival, request, stats: what it is, in traffic and in vLLM, and what vLLM notes of its prompt.
        has_begun: it was given a first step; has_answer: and has the first token of its answer.
        twin: on the engine with endless memory, if there is one.
    """

    arrival: ArrivedRequest
    request: Any
    stats: Any
    has_begun: bool = False
    has_answer: bool = False
    twin: Any = None


class InstalledVllm:
    """vLLM's scheduler, as it is installed.

    Args:
        sizes: of the model.
        memory: bytes of its blocks.
        arrivals: the requests as they come.
        endless: the model of it with endless memory, which follows step by step.
    """

    def __init__(self, sizes: Sizes, memory: int, arrivals: Arrivals, endless: EngineModel | None = None) -> None:
        self._arrivals, self._endless = arrivals, endless
        self._size = size = sizes.vllm_block_size
        groups, block_bytes = groups_of(sizes, size)
        num_blocks = memory // block_bytes
        layout = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, prefix_cache_retention_interval=0
        )
        self._scheduler: Any = Scheduler(
            vllm_config=configuration(num_blocks, size),
            kv_cache_config=layout,
            structured_output_manager=NoGrammars(),
            block_size=size,
            hash_block_size=size,
            log_stats=False,
        )
        self._served: dict[str, Served] = {}

    def run(self) -> Iterator[Begun]:
        """Serve all requests; each is given when it begins."""
        idle = 0
        while True:
            while len(self._served) < MAX_WAITING + MAX_RUNNING and self._arrivals.peek() is not None:
                self._add(self._arrivals.take())
            if not self._served:
                if not self._arrivals.wait():
                    return
                continue
            begun = self._step()
            idle = 0 if begun is not None else idle + 1
            if idle > MAX_IDLE:
                begun = [self._give_up()]
            yield from begun or ()

    def _add(self, arrival: ArrivedRequest) -> None:
        given = arrival.request
        hashes = [number.to_bytes(8, "little") for number in given.blocks(self._size, given.num_tokens)]

        def hasher(request: Any) -> list[Any]:
            return hashes[len(request.block_hashes) : request.num_tokens // self._size]

        params = SamplingParams(
            max_tokens=max(1, given.num_tokens - given.num_prompt), ignore_eos=True, temperature=0.0
        )
        request = Request(str(arrival.number), [*repeat(1, given.num_prompt)], params, None, block_hasher=hasher)
        self._scheduler.add_request(request)
        self._served[request.request_id] = Served(arrival, request, request.prefill_stats)

    def _step(self) -> list[Begun] | None:
        """One step of all that run. None: nothing has been computed."""
        planned = self._scheduler.schedule()
        ids, begun, prefill, decode = [*planned.num_scheduled_tokens], [], 0, 0
        if not ids:
            return None
        for rid in ids:
            served = self._served[rid]
            if not served.has_begun:
                begun.append(self._begin(served))
            end = served.request.num_computed_tokens
            if served.twin is not None and self._endless is not None and end > served.twin.computed:
                self._endless.advance(served.twin, end)
            if end <= served.arrival.request.num_prompt:
                prefill += planned.num_scheduled_tokens[rid]
            else:
                decode = max(decode, planned.num_scheduled_tokens[rid])
        answers = [self._answer(self._served[rid].request) for rid in ids]
        places = {rid: place for place, rid in enumerate(ids)}
        out = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=answers)
        self._scheduler.update_from_output(planned, out)
        self._arrivals.passed(prefill, decode)
        for rid in ids:
            served = self._served[rid]
            if not served.has_answer and served.request.num_computed_tokens >= served.arrival.request.num_prompt:
                served.has_answer = True
                self._arrivals.answers(served.arrival)
            if self._served[rid].request.is_finished():
                self._end(rid)
        return begun

    def _begin(self, served: Served) -> Begun:
        served.has_begun = True
        num_tokens = served.stats.num_cached_tokens
        hit = Hit(num_tokens, max(num_tokens, getattr(served.request, "shared_prefix_boundary", 0)))
        if self._endless is not None:
            served.twin = self._endless.begin(served.arrival.request)
        return Begun(served.arrival, hit, served.twin.hit if served.twin is not None else hit)

    def _end(self, rid: str) -> None:
        served = self._served.pop(rid)
        if served.twin is not None and self._endless is not None:
            self._endless.end(served.twin)
        self._arrivals.ended(served.arrival)

    def _give_up(self) -> Begun:
        """The request that came first has no room even alone."""
        rid, served = next(iter(self._served.items()))
        self._scheduler.finish_requests(rid, RequestStatus.FINISHED_ABORTED)
        self._end(rid)
        return Begun(served.arrival, MISS, MISS)

    def _answer(self, request: Any) -> list[int]:
        """What the model answers in a step: nothing before the prompt's last token; to a request that comes alone all
        up to the end of a block, which is where blocks and states change, as if it were computed token by token."""
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [1] * (self._size - request.num_tokens % self._size if self._arrivals.are_single else 1)


def groups_of(sizes: Sizes, block_size: int) -> tuple[list[Any], int]:
    """The groups of layers of a model as vLLM has them, and the bytes of a block."""
    attention, states, block_bytes = sizes.vllm_groups(block_size)
    per_layer = ceil_div(sizes.token_bytes, sizes.attention_layers)
    size = block_bytes // (block_size * per_layer)
    pages = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=ceil_div(per_layer, 4), dtype=torch.bfloat16
    )
    made = [KVCacheGroupSpec([f"attention.{at}.{layer}" for layer in range(size)], pages) for at in range(attention)]
    if states:
        state = MambaSpec(
            shapes=((ceil_div(sizes.state_bytes, sizes.state_layers),),),
            dtypes=(torch.uint8,),
            block_size=block_size,
            page_size_padded=pages.page_size_bytes,
            mamba_cache_mode="align",
        )
        made += [KVCacheGroupSpec([f"state.{at}.{layer}" for layer in range(size)], state) for at in range(states)]
    return made, pages.page_size_bytes * size


def configuration(
    num_blocks: int,
    block_size: int,
    budget: int = BUDGET,
    max_running: int = MAX_RUNNING,
    max_model_len: int = MAX_MODEL_LEN,
    additional: dict[str, Any] | None = None,
) -> Any:
    """The part of vLLM's configuration that its scheduler reads.

    Args:
        budget: tokens of a step.
        additional: what plugins read, vLLM's `additional_config`.
    """
    cache: dict[str, Any] = {"enable_prefix_caching": True, "num_gpu_blocks": num_blocks, "block_size": block_size}
    cache |= {"mamba_cache_mode": "align", "prefix_cache_retention_interval": 0}
    cache |= dict.fromkeys(("enable_mamba_shared_prefix_checkpoint", "enable_mamba_fine_grained_prefix_cache"), False)
    scheduler: dict[str, Any] = {
        "max_num_seqs": max_running,
        "max_num_batched_tokens": budget,
        "policy": "fcfs",
        "watermark": 0.0,
    }
    scheduler |= dict.fromkeys(("max_num_active_seqs", "max_num_scheduled_tokens", "scheduler_cls"))
    scheduler |= dict.fromkeys(
        ("prefill_schedule_interval", "max_num_partial_prefills", "max_long_partial_prefills"), 1
    )
    scheduler |= dict.fromkeys(("scheduler_reserve_full_isl", "enable_chunked_prefill"), True)
    scheduler |= dict.fromkeys(
        ("long_prefill_token_threshold", "max_num_encoder_input_tokens", "encoder_cache_size"), 0
    )
    scheduler |= dict.fromkeys(("long_prefill_token_threshold_adaptive", "async_scheduling"), False)
    scheduler |= dict.fromkeys(("disable_chunked_mm_input", "disable_hybrid_kv_cache_manager"), False)
    model: dict[str, Any] = {"runner_type": "generate", "max_model_len": max_model_len, "multimodal_config": None}
    model |= dict.fromkeys(("uses_mrope", "is_encoder_decoder", "is_diffusion", "supports_multimodal_inputs"), False)
    model |= dict.fromkeys(("return_sampling_mask", "enable_return_routed_experts", "is_multimodal_model"), False)
    parallel = dict.fromkeys(("data_parallel_index", "data_parallel_rank"), 0)
    kinds = ("decode_context", "prefill_context", "pipeline", "data", "tensor")
    parallel |= dict.fromkeys([*(f"{name}_parallel_size" for name in kinds), "world_size"], 1)
    seen = dict.fromkeys(("kv_cache_metrics", "enable_mfu_metrics", "enable_logging_iteration_details"), False)
    nothing = ("lora", "kv_events", "kv_transfer", "ec_transfer", "speculative", "diffusion", "watermark")
    zero = ("num_speculative", "num_lookahead", "num_prefill_lookahead", "num_hash_lookahead")
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(**scheduler),
        cache_config=SimpleNamespace(**cache),
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(**parallel),
        observability_config=SimpleNamespace(per_request_spec_decode_metrics=None, **seen),
        ec_manager_config=SimpleNamespace(get_encoder_cache_manager_obj=lambda: None),
        aux_output_config=SimpleNamespace(enabled=False),
        additional_config=additional or {},
        is_mm_encoder_only=False,
        max_in_flight_tokens=budget,
        max_concurrent_batches=1,
        use_v2_model_runner=hasattr(Request, "next_decode_eligible_step"),
        **dict.fromkeys(f"{name}_config" for name in nothing),
        **dict.fromkeys((f"{name}_tokens" for name in zero), 0),
    )


class NoGrammars:
    """Stands in for vLLM's manager of structured output: there is none."""

    def accept_tokens(self, *given: Any) -> bool:
        """All are."""
        return True

    def should_advance(self, *given: Any) -> bool:
        """Nothing is."""
        return False

    def grammar_bitmask(self, *given: Any) -> None:
        """There is none."""
