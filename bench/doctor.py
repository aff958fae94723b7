#!/usr/bin/env python
"""vLLM's own scheduler and cache manager on a trace, without a model: hits next to those of `hybrid doctor`'s model.

    python bench/doctor.py --hits hits.json --trace DIR/lmsys.jsonl --gb 3     # in an environment with vLLM 0.33
    python bench/doctor.py --check hits.json --trace DIR/lmsys.jsonl --gb 3    # in this package's: compares them

The first writes the cached tokens of each request; the second replays the trace and exits with status 1 where the hit
rates are more than half a point apart. Blocks of 528 tokens, and layers as those of a Qwen3.5-4B.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

BLOCK, BUDGET = 528, 8192

CONFIG: dict[str, Any] = {
    "scheduler_config": {
        "max_num_seqs": 64,
        "max_num_active_seqs": None,
        "max_num_scheduled_tokens": None,
        "max_num_batched_tokens": BUDGET,
        "long_prefill_token_threshold_adaptive": False,
        "long_prefill_token_threshold": 0,
        "policy": "fcfs",
        "watermark": 0.0,
        "prefill_schedule_interval": 1,
        "scheduler_reserve_full_isl": True,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "max_num_partial_prefills": 1,
        "max_long_partial_prefills": 1,
        "disable_chunked_mm_input": False,
        "max_num_encoder_input_tokens": 0,
        "encoder_cache_size": 0,
        "disable_hybrid_kv_cache_manager": False,
        "scheduler_cls": None,
    },
    "model_config": {
        "uses_mrope": False,
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "runner_type": "generate",
        "max_model_len": 65536,
        "supports_multimodal_inputs": False,
        "return_sampling_mask": False,
        "enable_return_routed_experts": False,
        "multimodal_config": None,
        "is_multimodal_model": False,
    },
    "parallel_config": {
        "data_parallel_index": 0,
        "data_parallel_rank": 0,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "tensor_parallel_size": 1,
        "world_size": 1,
    },
    "observability_config": {
        "per_request_spec_decode_metrics": None,
        "kv_cache_metrics": False,
        "enable_mfu_metrics": False,
        "enable_logging_iteration_details": False,
    },
    "ec_manager_config": {"get_encoder_cache_manager_obj": lambda: None},
    "aux_output_config": {"enabled": False},
}
"""What the scheduler reads of vLLM's configuration, by its names there."""

ABSENT = ("lora_config", "kv_events_config", "kv_transfer_config", "ec_transfer_config", "speculative_config")
ZEROS = ("num_speculative_tokens", "num_lookahead_tokens", "num_prefill_lookahead_tokens", "num_hash_lookahead_tokens")


def scheduler_of(memory: int) -> tuple[Any, Any]:
    """vLLM's scheduler over this many bytes, and what hashes its requests' blocks."""
    import torch
    from vllm.utils import hashing
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec

    attention = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
    states = MambaSpec(
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=BLOCK,
        page_size_padded=attention.page_size_bytes,
        mamba_cache_mode="align",
    )
    groups = [KVCacheGroupSpec([f"attention {n}" for n in range(8)], attention)]
    groups += [KVCacheGroupSpec([f"states {group} {n}" for n in range(8)], states) for group in range(3)]
    num_blocks = memory // (8 * attention.page_size_bytes)
    kv_cache_utils.init_none_hash(hashing.sha256)
    config = SimpleNamespace(**{name: SimpleNamespace(**values) for name, values in CONFIG.items()})
    vars(config).update(dict.fromkeys(ABSENT), **dict.fromkeys(ZEROS, 0))
    config.is_mm_encoder_only, config.use_v2_model_runner = False, True
    config.max_in_flight_tokens, config.max_concurrent_batches = BUDGET, 1
    config.diffusion_config = config.watermark_config = None
    config.cache_config = SimpleNamespace(
        enable_prefix_caching=True,
        num_gpu_blocks=num_blocks,
        block_size=BLOCK,
        mamba_cache_mode="align",
        enable_mamba_shared_prefix_checkpoint=False,
        enable_mamba_fine_grained_prefix_cache=False,
        prefix_cache_retention_interval=0,
    )
    nothing = SimpleNamespace(
        accept_tokens=lambda *args: True, should_advance=lambda *args: False, grammar_bitmask=lambda *args: None
    )
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=0,
        ),
        structured_output_manager=nothing,
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )
    return scheduler, kv_cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)


def serve(scheduler: Any, hasher: Any, name: str, prompt: list[int], answer: list[int]) -> int:
    """One request to its last token, a token a step; returns the tokens of its prompt that were cached."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    params = SamplingParams(max_tokens=max(1, len(answer)), ignore_eos=True, temperature=0.0)
    request = Request(name, prompt, params, None, block_hasher=hasher)
    statistics, tokens = request.prefill_stats, iter(answer or [7])
    scheduler.add_request(request)
    while not request.is_finished():
        step = scheduler.schedule()
        if not step.num_scheduled_tokens:
            sys.exit(f"{name}: {len(prompt)} tokens do not fit")
        sampled = [[next(tokens)] if request.num_computed_tokens >= request.num_tokens else []]
        output = ModelRunnerOutput(req_ids=[name], req_id_to_index={name: 0}, sampled_token_ids=sampled)
        scheduler.update_from_output(step, output)
    return int(statistics.num_cached_tokens)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a file of bench/traces.py")
    parser.add_argument("--gb", type=float, required=True, help="memory, 1 GB = 1e9 bytes")
    parser.add_argument("--hits", type=Path, help="write the hits of vLLM's scheduler")
    parser.add_argument("--check", type=Path, help="compare with these hits")
    args = parser.parse_args()
    if args.hits is not None:
        scheduler, hasher = scheduler_of(int(args.gb * 1e9))
        hits = []
        with args.trace.open(encoding="utf-8") as file:
            for number, line in enumerate(file):
                fields = json.loads(line)
                hits.append(serve(scheduler, hasher, str(number), fields["input_tokens"], fields["output_tokens"]))
        args.hits.write_text(json.dumps(hits))
        return 0
    from hybrid.doctor import Sizes, Traffic
    from hybrid.doctor.vllm import VllmScheduler

    theirs = json.loads(args.check.read_text())
    traffic = Traffic.read(args.trace)
    engine = VllmScheduler(Sizes(32768, 51511296), int(args.gb * 1e9))
    ours = [engine.serve(request).num_tokens for request, _ in traffic]
    rates = [100 * sum(hits) / traffic.num_prompt_tokens for hits in (theirs, ours)]
    different = sum(a != b for a, b in zip(theirs, ours, strict=True))
    print(f"vLLM {rates[0]:.2f} %, the model {rates[1]:.2f} %; {different} of {len(ours)} requests differ")
    return int(abs(rates[0] - rates[1]) > 0.5)


if __name__ == "__main__":
    sys.exit(main())
