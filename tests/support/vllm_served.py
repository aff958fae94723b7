"""vLLM's own scheduler, manager and pool on a CPU, with the geometry of Qwen3.5-4B: the answers of the model alone are
made up. Needs vLLM, if only its wheel and what its scheduler imports."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import repeat
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("PYTHONHASHSEED", "0")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils import hashing
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as PlainScheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from hybrid.doctor import installed_vllm
from hybrid.doctor.request import LoggedRequest
from hybrid.vllm.mirror import Mirror
from hybrid.vllm.scheduler import Scheduler, mirror_of

BLOCK = 528
CHUNK = 8192
AHEAD = 256  # requests among which those of other conversations are looked for
LAYERS = 8  # of each group, which share a block


def groups(states_within: bool) -> tuple[list[KVCacheGroupSpec], int]:
    """One group of layers with full attention and three with states, and the bytes of a block."""
    pages = FullAttentionSpec(block_size=BLOCK, num_kv_heads=4, head_size=256, dtype=torch.bfloat16)
    states = MambaSpec(
        shapes=((3, 8192), (32, 128, 128)),
        dtypes=(torch.bfloat16, torch.float32),
        block_size=BLOCK,
        page_size_padded=pages.page_size_bytes,
        mamba_cache_mode="align",
        **({"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1} if states_within else {}),
    )
    made = [KVCacheGroupSpec([f"attention.{layer}" for layer in range(LAYERS)], pages)]
    made += [KVCacheGroupSpec([f"state.{at}.{layer}" for layer in range(LAYERS)], states) for at in range(3)]
    return made, pages.page_size_bytes * LAYERS


def configuration(num_blocks: int, chunk: int, max_running: int, options: dict[str, Any]) -> SimpleNamespace:
    """The part of vLLM's configuration that its scheduler reads."""
    found = installed_vllm.configuration(
        num_blocks, BLOCK, chunk, max_running, installed_vllm.MAX_MODEL_LEN, {"hybrid": options}
    )
    assert isinstance(found, SimpleNamespace)
    return found


class Served:
    """Requests served by vLLM's scheduler.

    Args:
        memory: bytes of the pool.
        options: of the plugin; None: vLLM as it is.
        at_once: several requests run at a time, one token of each a step, under vLLM's `AsyncScheduler`, or ours.
            Otherwise its plain scheduler runs, and ours is put beside it.
        token_by_token: a step gives one token of an answer; otherwise, where requests run one by one, whole blocks of
            it, which is faster.
        states_within: a pass gives the state at the prompt's last block too, as kernels for Mamba-2 do on a GPU.
        settings: changes vLLM's configuration.
    """

    def __init__(
        self,
        memory: float,
        options: dict[str, Any] | None,
        *,
        at_once: bool = False,
        token_by_token: bool = False,
        chunk: int = CHUNK,
        states_within: bool = False,
        settings: Callable[[SimpleNamespace], None] = lambda config: None,
    ) -> None:
        specs, block_bytes = groups(states_within)
        self.num_blocks = int(memory) // block_bytes
        self._token_by_token = at_once or token_by_token
        kv_cache_utils.init_none_hash(hashing.sha256)
        layout = KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=specs,
            prefix_cache_retention_interval=0,
        )
        config = configuration(self.num_blocks, chunk, 64, options or {})
        settings(config)
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hashing.sha256)
        made: Any = PlainScheduler
        if at_once:
            made = AsyncScheduler if options is None else Scheduler
        self.scheduler: Any = made(
            vllm_config=config,
            kv_cache_config=layout,
            structured_output_manager=installed_vllm.NoGrammars(),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=False,
        )
        manager = self.scheduler.kv_cache_manager
        self.mirror: Mirror | None = None
        if options is not None:
            mirror = self.scheduler.mirror if at_once else mirror_of(manager, config, lambda: self.scheduler.waiting)
            self.mirror = mirror
        self._answers: dict[str, list[int]] = {}
        self.passes = self.prompt_tokens = self.hit_tokens = self.preemptions = 0

    @property
    def num_leaked(self) -> int:
        """Blocks that are not free, when nothing runs."""
        return self.num_blocks - 1 - int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def add(
        self,
        prompt: Sequence[int],
        answer: Sequence[int],
        priority: int = 0,
        options: dict[str, Any] | None = None,
        **more: Any,
    ) -> Request:
        """A request that waits. `options`: of the plugin; `more`: of vLLM's request."""
        params = SamplingParams(max_tokens=max(1, len(answer)), ignore_eos=True, temperature=0.0, extra_args=options)
        name = str(len(self._answers))
        request = Request(name, [*prompt], params, None, block_hasher=self._hasher, priority=priority, **more)
        self._answers[request.request_id] = [*answer] or [7]
        self.scheduler.add_request(request)
        return request

    def add_logged(self, given: LoggedRequest, options: dict[str, Any] | None = None) -> Request:
        """A request of traffic that waits: blocks are named by its hashes, and its tokens are all alike."""
        hashes = [2 * number.to_bytes(8, "little") for number in given.blocks(BLOCK, given.num_tokens)]
        answer = [1] * max(1, given.num_tokens - given.num_prompt)
        params = SamplingParams(max_tokens=len(answer), ignore_eos=True, temperature=0.0, extra_args=options)
        request = Request(
            str(len(self._answers)),
            [*repeat(1, given.num_prompt)],
            params,
            None,
            arrival_time=given.time,
            block_hasher=lambda request: hashes[len(request.block_hashes) : request.num_tokens // BLOCK],
        )
        self._answers[request.request_id] = answer
        self.scheduler.add_request(request)
        return request

    def serve_sessions(
        self,
        requests: Sequence[LoggedRequest],
        width: int = 1,
        options_of: Callable[[LoggedRequest], dict[str, Any] | None] = lambda given: None,
    ) -> None:
        """Serve recorded sessions in order of arrival, as many requests at a time: of a conversation one, since the
        next one continues its answer. `options_of`: the plugin's options of a request."""
        waiting, running = [*requests], dict[Request, tuple[Any, int]]()
        while waiting or running:
            busy = {conversation for _, conversation in running.values()}
            for given in [one for one in waiting[:AHEAD] if one.turn is not None]:
                assert given.turn is not None
                if len(running) < width and given.turn.conversation not in busy:
                    busy.add(given.turn.conversation)
                    waiting.remove(given)
                    self.prompt_tokens += given.num_prompt
                    request = self.add_logged(given, options_of(given))
                    running[request] = request.prefill_stats, given.turn.conversation
            for _ in range(50):
                if self.step():
                    break
            else:
                raise RuntimeError(f"{len(running)} requests do not run: {self.num_blocks} blocks are too few")
            for request in [one for one in running if one.is_finished()]:
                self.hit_tokens += running.pop(request)[0].num_cached_tokens
                self.preemptions += request.num_preemptions

    def step(self) -> bool:
        """One step of all that run. Returns whether any did."""
        planned = self.scheduler.schedule()
        ids = [*planned.num_scheduled_tokens]
        if not ids:
            return False
        self.passes += 1
        tokens = [self._next(self.scheduler.requests[rid]) for rid in ids]
        places = {rid: place for place, rid in enumerate(ids)}
        out = ModelRunnerOutput(req_ids=ids, req_id_to_index=places, sampled_token_ids=tokens)
        self.scheduler.update_from_output(planned, out)
        return True

    def _next(self, request: Request) -> list[int]:
        """What the model answers in this step: nothing before the prompt's last token."""
        if request.num_computed_tokens < request.num_tokens:
            return []
        answer = self._answers[request.request_id]
        at, room = request.num_output_tokens, BLOCK - request.num_tokens % BLOCK - 3
        return answer[at : at + (1 if self._token_by_token else max(1, room))]

    def serve(self, requests: Sequence[tuple[Sequence[int], Sequence[int]]], width: int = 1) -> None:
        """Serve prompts with their answers, as many at a time."""
        rest, running = iter(requests), list[tuple[Request, Any]]()
        while True:
            while len(running) < width and (given := next(rest, None)) is not None:
                self.prompt_tokens += len(given[0])
                request = self.add(*given)
                running.append((request, request.prefill_stats))
            if not running:
                return
            for _ in range(50):
                if self.step():
                    break
            else:
                raise RuntimeError(f"{len(running)} requests do not run: {self.num_blocks} blocks are too few")
            for request, stats in [one for one in running if one[0].is_finished()]:
                running.remove((request, stats))
                self.hit_tokens += stats.num_cached_tokens
                self.preemptions += request.num_preemptions

    def abort(self, request: Request) -> None:
        """End a request before its answer has ended."""
        self.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
