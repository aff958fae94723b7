"""A small imitation of what `hybrid.vllm.mirror` touches of vLLM: its pool of blocks, the manager and its groups.

Pages are cached block by block, states where vLLM keeps them: at the last block of a prompt, and where pages go on
without a state. vLLM itself is tried by `make vllm` and `bench/in_vllm.py`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass(eq=False)
class Block:
    block_id: int
    ref_cnt: int = 0
    block_hash: tuple[bytes, int] | None = None
    is_null: bool = False


class PlainQueue:
    """vLLM's queue of free blocks: the first is used next."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        assert len({block.block_id for block in blocks}) == len(blocks), "a block is free twice"
        self._blocks = OrderedDict((block.block_id, block) for block in blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks)

    def popleft_n(self, n: int) -> list[Block]:
        return [self._blocks.popitem(last=False)[1] for _ in range(n)]

    def popleft(self) -> Block:
        return self.popleft_n(1)[0]

    def remove(self, block: Block) -> None:
        del self._blocks[block.block_id]

    def append_n(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            assert block.block_id not in self._blocks
            self._blocks[block.block_id] = block

    def prepend_n(self, blocks: Sequence[Block]) -> None:
        self.append_n(blocks)
        for block in reversed(blocks):
            self._blocks.move_to_end(block.block_id, last=False)

    def get_all_free_blocks(self) -> list[Block]:
        return [*self._blocks.values()]


class Pool:
    def __init__(self, num_blocks: int) -> None:
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(number) for number in range(num_blocks)]
        self.free_block_queue: Any = PlainQueue(self.blocks)
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.cached: dict[tuple[bytes, int], dict[int, Block]] = {}

    def find(self, block_hash: bytes, group: int) -> Block | None:
        return next(iter(self.cached.get((block_hash, group), {}).values()), None)

    def cache(self, block: Block, block_hash: bytes, group: int) -> None:
        block.block_hash = block_hash, group
        self.cached.setdefault(block.block_hash, {})[block.block_id] = block

    def get_new_blocks(self, n: int) -> list[Block]:
        taken: list[Block] = self.free_block_queue.popleft_n(n)
        for block in taken:
            self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return taken

    def touch(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            if not block.ref_cnt:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.ref_cnt -= 1
        gone = [block for block in blocks if not block.ref_cnt]
        self.free_block_queue.prepend_n([block for block in gone if block.block_hash is None])
        self.free_block_queue.append_n([block for block in gone if block.block_hash is not None])

    def _maybe_evict_cached_block(self, block: Block) -> bool:
        if block.block_hash is None:
            return False
        same = self.cached[block.block_hash]
        del same[block.block_id]
        if not same:
            del self.cached[block.block_hash]
        block.block_hash = None
        return True


class Group:
    """The manager of one group of layers."""

    def __init__(self, pool: Pool, number: int, block_size: int, is_state: bool) -> None:
        self.pool, self.number, self.block_size, self.is_state = pool, number, block_size, is_state
        self.num_cached_block: dict[str, int] = {}
        self.req_to_blocks: dict[str, list[Block]] = {}

    def cache_blocks(
        self, request: Request, num_tokens: int, retention_interval: int | None = 0, *, replay_boundaries: Sequence[int]
    ) -> None:
        first = self.num_cached_block.get(request.request_id, 0)
        end = min(num_tokens // self.block_size, len(request.block_hashes))
        ends = [at // self.block_size for at in (*replay_boundaries, request.shared_prefix_boundary)]
        blocks = self.req_to_blocks[request.request_id]
        for place in range(first, end):
            if not blocks[place].is_null and (not self.is_state or place + 1 in ends):
                self.pool.cache(blocks[place], request.block_hashes[place], self.number)
        self.num_cached_block[request.request_id] = max(first, end)
        # As vLLM: as long as it is held, the state at the prompt's last block gets its hash (again) at every call.
        last = (request.num_prompt_tokens - 1) // self.block_size
        if self.is_state and end == last > 0 and not blocks[last - 1].is_null and blocks[last - 1].block_hash is None:
            self.pool.cache(blocks[last - 1], request.block_hashes[last - 1], self.number)


class Coordinator:
    def __init__(self, groups: list[Group]) -> None:
        self.single_type_managers, self.retention_interval = groups, 0

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        for group in self.single_type_managers:
            group.cache_blocks(request, num_tokens, replay_boundaries=(request.num_prompt_tokens - 1,))


@dataclass(eq=False)
class Request:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    block_size: int
    salt: str = ""
    shared_prefix_boundary: int = 0
    finished: bool = False
    arrival_time: float = 0.0
    sampling_params: Any = None
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.append([])

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.finished

    def append(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        while (end := (len(self.block_hashes) + 1) * self.block_size) <= len(self.tokens):
            before = self.block_hashes[-1] if self.block_hashes else self.salt.encode()
            text = repr(self.tokens[end - self.block_size : end]).encode()
            self.block_hashes.append(hashlib.sha256(before + text).digest())


class Manager:
    """vLLM's manager of a model with `num_pages` groups with full attention and `num_states` with states."""

    def __init__(self, num_blocks: int, block_size: int = 4, num_pages: int = 1, num_states: int = 3) -> None:
        self.block_pool, self.block_size = Pool(num_blocks), block_size
        self.groups = [
            Group(self.block_pool, number, block_size, number >= num_pages) for number in range(num_pages + num_states)
        ]
        self.pages, self.states = self.groups[:num_pages], self.groups[num_pages:]
        self.coordinator = Coordinator(self.groups)

    def prefix_cache_lookup_enabled(self, request: Request) -> bool:
        return True

    def _found(self, request: Request, groups: list[Group], place: int) -> list[Block] | None:
        blocks = [self.block_pool.find(request.block_hashes[place], group.number) for group in groups]
        return [block for block in blocks if block is not None] if all(blocks) else None

    def get_computed_blocks(self, request: Request) -> tuple[list[list[Block]], int, int]:
        limit = min((request.num_tokens - 1) // self.block_size, len(request.block_hashes))
        pages = []
        for place in range(limit):
            found = self._found(request, self.pages, place)
            if found is None:
                break
            pages.append(found)
        for end in range(len(pages), 0, -1):
            found = self._found(request, self.states, end - 1)
            if found is not None:
                nulls = [self.block_pool.null_block] * (end - 1)
                tables = [[page[at] for page in pages[:end]] for at in range(len(self.pages))]
                tables += [[*nulls, block] for block in found]
                return tables, end * self.block_size, len(pages) * self.block_size if end < len(pages) else 0
        return [[] for _ in self.groups], 0, len(pages) * self.block_size

    def allocate_slots(self, request: Request, end: int, computed: list[list[Block]] | None = None) -> bool | None:
        """Give a request blocks up to a token, and cache what is full. A state moves to the chunk's last block; the one
        that the chunk starts from is given back before the next."""
        rid = request.request_id
        if computed is None:
            for group in self.states:
                table = group.req_to_blocks[rid]
                self.block_pool.free_blocks([block for block in table[:-1] if not block.is_null])
                table[:-1] = [self.block_pool.null_block] * (len(table) - 1)
        num_blocks = -(-end // self.block_size)
        has = len(self.pages[0].req_to_blocks.get(rid, ())) or (len(computed[0]) if computed else 0)
        free = self.block_pool.free_block_queue.num_free_blocks
        touched = [block for table in computed or [] for block in table if not block.is_null]
        needed = (num_blocks - has) * len(self.pages) + (num_blocks > has) * len(self.states)
        if needed + sum(not block.ref_cnt for block in touched) > free:
            return None
        if computed is not None:
            self.block_pool.touch(touched)
            for group, table in zip(self.groups, computed, strict=True):
                group.req_to_blocks[rid], group.num_cached_block[rid] = [*table], len(table)
        if num_blocks > has:
            for group in self.pages:
                group.req_to_blocks[rid] += self.block_pool.get_new_blocks(num_blocks - has)
            for group in self.states:
                nulls = [self.block_pool.null_block] * (num_blocks - has - 1)
                group.req_to_blocks[rid] += nulls + self.block_pool.get_new_blocks(1)
        self.coordinator.cache_blocks(request, end)
        request.num_computed_tokens = end
        return True

    def pop_blocks_for_free(self, request: Request) -> list[Block]:
        popped = []
        for group in self.groups:
            popped += [block for block in group.req_to_blocks.pop(request.request_id, []) if not block.is_null]
            group.num_cached_block.pop(request.request_id, None)
        return popped

    def free(self, request: Request) -> None:
        for group in self.groups:
            table = group.req_to_blocks.pop(request.request_id, [])
            group.num_cached_block.pop(request.request_id, None)
            self.block_pool.free_blocks([block for block in reversed(table) if not block.is_null])

    def reset_prefix_cache(self) -> bool:
        if self.num_free != self.block_pool.num_gpu_blocks - 1:
            return False
        self.block_pool.cached.clear()
        for block in self.block_pool.blocks:
            block.block_hash = None
        return True

    @property
    def num_free(self) -> int:
        return int(self.block_pool.free_block_queue.num_free_blocks)


class Service:
    """Serves requests with a manager as vLLM's scheduler does: chunks that end at blocks, then an answer."""

    def __init__(self, manager: Manager, chunk: int = 24) -> None:
        self.manager, self.chunk, self.count = manager, chunk, 0

    def request(self, prompt: Sequence[int], salt: str = "", **options: Any) -> Request:
        self.count += 1
        params = SimpleNamespace(extra_args=options)
        return Request(str(self.count), [*prompt], len(prompt), self.manager.block_size, salt, sampling_params=params)

    def start(self, request: Request) -> int | None:
        """Prefill. Returns the hit; None: there is no room, and the request has no blocks."""
        tables, hit, request.shared_prefix_boundary = self.manager.get_computed_blocks(request)
        at, size = hit, self.manager.block_size
        computed: list[list[Block]] | None = tables
        last = (request.num_prompt_tokens - 1) // size * size
        while at < request.num_prompt_tokens:
            stops = [at + self.chunk, request.shared_prefix_boundary, last, request.num_prompt_tokens]
            end = min(stop for stop in stops if stop > at)
            if self.manager.allocate_slots(request, end, computed) is None:
                self.manager.free(request)
                return None
            at, computed = end, None
        return hit

    def answer(self, request: Request, tokens: Sequence[int]) -> bool:
        """Decode. Returns whether there was room."""
        for token in tokens:
            request.append([token])
            if self.manager.allocate_slots(request, request.num_tokens) is None:
                return False
        return True

    def end(self, request: Request) -> None:
        request.finished = True
        self.manager.free(request)

    def serve(self, prompt: Sequence[int], answer: Sequence[int] = (), salt: str = "", **options: Any) -> int | None:
        request = self.request(prompt, salt, **options)
        hit = self.start(request)
        if hit is not None:
            self.answer(request, answer)
        self.end(request)
        return hit
