"""vLLM's scheduler, whose cache is mirrored by a tree of this project."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.envs import VLLM_LOG_STATS_INTERVAL
from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

from hybrid.vllm.installed import refuse_unknown_version
from hybrid.vllm.mirror import Mirror, logger
from hybrid.vllm.options import VllmOptions, refuse_unsupported
from hybrid.vllm.report import StatsReporter


class Scheduler(AsyncScheduler):
    """vLLM's own scheduler, and so for all of vLLM an instance of it; but what is evicted, and which states are kept,
    is decided by a tree.

    Attributes:
        mirror: the tree and what it has done; None: prefix caching is off, and nothing is changed.

    Raises:
        VersionError: the version of vLLM is not known.
        UnsupportedModelError: the model or an option is not supported; the message names all that is not.
        ArgumentError: an option is unknown, or of the wrong type.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        refuse_unknown_version()
        super().__init__(*args, **kwargs)
        self.mirror: Mirror | None = mirror_of(self.kv_cache_manager, self.vllm_config, lambda: self.waiting)
        self._report: StatsReporter | None = None
        if self.mirror is not None and self.log_stats:
            model = self.vllm_config.model_config.served_model_name
            engine = self.vllm_config.parallel_config.data_parallel_index
            self._report = StatsReporter(self.mirror.stats, logger.info, str(model), engine, VLLM_LOG_STATS_INTERVAL)

    def add_request(self, request: Any) -> None:
        """Take a request, and keep what is cached of it while it waits, where it asks for that."""
        super().add_request(request)
        if self.mirror is not None:
            self.mirror.came(request)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and publish what it takes and evicts: vLLM says so when it is computed, and a router that
        chooses meanwhile counts on what is gone."""
        scheduled = super().schedule(*args, **kwargs)
        if self.mirror is not None and (events := self.kv_cache_manager.take_events()):
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
        return scheduled

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Show what the mirror has done, when vLLM shows what it has done itself."""
        if self._report is not None:
            try:
                self._report.tick(is_idle=not self.running)
            except Exception as error:
                self._report = None
                logger.warning("hybrid: its metrics and lines of log end here; all else continues", exc_info=error)
        return super().make_stats(*args, **kwargs)


def mirror_of(manager: Any, config: Any, waiting: Callable[[], Iterable[Any]]) -> Mirror | None:
    """Put a tree beside the cache of a scheduler that has just been built.

    Args:
        manager: its `KVCacheManager`.
        config: its `VllmConfig`.
        waiting: the requests that wait.

    Returns:
        The mirror; None: prefix caching is off.

    Raises:
        UnsupportedModelError: the model or an option is not supported.
        ArgumentError: an option is unknown, or of the wrong type.
    """
    options = VllmOptions.of(getattr(config, "additional_config", None))
    if not manager.enable_caching:
        logger.warning("hybrid: prefix caching is off, so there is nothing to do: set --enable-prefix-caching")
        return None
    groups = manager.coordinator.single_type_managers
    pages = [group for group in groups if type(group) is FullAttentionManager]
    states = [group for group in groups if type(group) is MambaManager]
    others = sorted({type(group.kv_cache_spec).__name__ for group in groups if group not in (*pages, *states)})
    sizes = {group.block_size for group in groups} | {manager.block_pool.hash_block_size}
    refuse_unsupported(config, len(pages), len(states), others, sizes)
    logger.info("hybrid: evicting by %s, %d blocks", options.policy, manager.block_pool.num_gpu_blocks)
    return Mirror(manager, pages, states, FreeKVCacheBlockQueue, options, waiting)
