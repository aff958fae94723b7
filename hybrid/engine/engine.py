"""The engine: prompts in, text out, the prefix cache in between."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from hybrid.cache.cache import HybridCache
from hybrid.cache.config import CacheConfig
from hybrid.cache.pins import Pin
from hybrid.engine.build import furnish, generation_defaults, settle_dtype
from hybrid.engine.cuda_graphs import DecodeGraphs
from hybrid.engine.model_runner import Runner
from hybrid.engine.request import Request, RequestOutput, Status
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.scheduler import Scheduler, Step
from hybrid.errors import ArgumentError, MemoryBudgetError, PromptError, RequestError
from hybrid.interrupts import deferred_interrupts
from hybrid.key import check_namespace
from hybrid.memory.memory import smallest_memory
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.vision import vision_tower
from hybrid.prompts.detokenizer import TextStream
from hybrid.prompts.encode import EncodedPrompt, ImageEncoder, Prompt, as_prompts, encode_prompt, load_tokenizer
from hybrid.units import format_bytes


class Engine:
    """A hybrid model with its prefix cache.

    Use `from_pretrained`. One thread owns an engine.

    Attributes:
        cache: the `HybridCache`: `stats()`, `audit()`, `clear()`.
        tokenizer: the checkpoint's tokenizer (of transformers), or None.
        default_params: what `generation_config.json` asks for; used where a call gives no `SamplingParams`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any | None,
        cache: HybridCache,
        *,
        deterministic: bool,
        device: torch.device,
        end_tokens: frozenset[int] = frozenset(),
        default_params: SamplingParams | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        enforce_eager: bool = False,
        image_encoder: ImageEncoder | None = None,
    ) -> None:
        if max_num_seqs < 1:
            raise ArgumentError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        if max_num_batched_tokens < cache.config.chunk_size + max_num_seqs:
            raise ArgumentError(
                "max_num_batched_tokens must hold one chunk and a token of each request: at least "
                f"{cache.config.chunk_size + max_num_seqs} with max_num_seqs={max_num_seqs}, "
                f"got {max_num_batched_tokens}"
            )
        self.model = model
        self.tokenizer = tokenizer
        self.cache = cache
        self.device = device
        self.deterministic = deterministic
        self.default_params = default_params or SamplingParams()
        self.enforce_eager = enforce_eager
        self.scheduler = Scheduler(cache, max_num_seqs, max_num_batched_tokens, deterministic)
        self.runner = Runner(model, cache, device, deterministic, self._graphs())
        # on a GPU the next step is scheduled while this one is computed; a CPU has nobody else to do that
        self._overlap = device.type == "cuda"
        self._ahead: Step | None = None
        self._end_tokens, self._image_encoder = end_tokens, image_encoder
        self._requests: dict[str, Request] = {}
        self._undelivered: list[RequestOutput] = []
        self._ids = count()

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        cache: CacheConfig | None = None,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 2048,
        enforce_eager: bool = False,
    ) -> Engine:
        """Load a checkpoint with its tokenizer, and make room for its cache.

        Args:
            model: a folder, a hub id, or "tiny" for the small model inside the package.
            device: "cuda", "cpu", ...; None: a GPU if there is one.
            dtype: "float32", "bfloat16" or "float16"; None: the checkpoint's on a GPU, float32 on a CPU.
            cache: settings of the cache.
            max_num_seqs: at most so many requests run at once.
            max_num_batched_tokens: at most so many tokens are computed in one step.
            enforce_eager: on a GPU, launch decode steps kernel by kernel instead of as CUDA graphs.

        Raises:
            CheckpointError: no usable checkpoint is there.
            MemoryBudgetError: the memory given to the cache does not suffice.
            ArgumentError: another argument is wrong.
        """
        checkpoint = open_checkpoint(model)
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        config = cache or CacheConfig()
        tokenizer = load_tokenizer(checkpoint.path)
        loaded = load_model(checkpoint, settle_dtype(dtype, checkpoint.config, where), where, config.chunk_size)
        own, deterministic = furnish(loaded, config, where, None)
        end_tokens, default_params = generation_defaults(checkpoint.path, checkpoint.config)
        tower = vision_tower(checkpoint, loaded.lm_head.weight.dtype, where)
        return cls(
            loaded,
            tokenizer,
            own,
            deterministic=deterministic,
            device=where,
            end_tokens=end_tokens,
            default_params=default_params,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enforce_eager=enforce_eager,
            image_encoder=tower,
        )

    def with_cache(self, cache: CacheConfig, room: tuple[int, int] | None = None) -> Engine:
        """Another engine on the same weights, with a cache of its own.

        Args:
            cache: its settings. `chunk_size` must be this engine's: the model was made with it.
            room: (pages, state slots) of the cache, instead of `cache.memory`.

        Raises:
            ArgumentError: another chunk size.
            MemoryBudgetError: the memory does not suffice.
        """
        if cache.chunk_size != self.cache.config.chunk_size:
            raise ArgumentError(
                f"with_cache: chunk_size must stay {self.cache.config.chunk_size}, got {cache.chunk_size}"
            )
        own, deterministic = furnish(self.model, cache, self.device, room)
        return type(self)(
            self.model,
            self.tokenizer,
            own,
            deterministic=deterministic,
            device=self.device,
            end_tokens=self._end_tokens,
            default_params=self.default_params,
            max_num_seqs=self.scheduler.max_num_seqs,
            max_num_batched_tokens=self.scheduler.max_num_batched_tokens,
            enforce_eager=self.enforce_eager,
            image_encoder=self._image_encoder,
        )

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all at once.

        Args:
            prompts: one or more of: a text, a list of token ids, a list of chat messages `{"role": ..., "content":
                ...}` (or `{"messages": [...]}`), whose contents may hold images, an `ImagePrompt`.
            params: for all of them, or one for each; None: `default_params`.
            namespace: prompts share what is cached only within a namespace.
            progress: show a progress bar; None: when there is a terminal.

        Returns:
            One result per prompt, in order.

        Raises:
            PromptError: a prompt cannot be run. None of them was started.
            MemoryBudgetError: a prompt and its answer do not fit into the memory given.
        """
        many = as_prompts(prompts)
        each = list(params) if isinstance(params, Sequence) else [params] * len(many)
        if len(each) != len(many):
            raise ArgumentError(
                f"{len(each)} SamplingParams for {len(many)} prompts; give one for all, or one for each"
            )
        requests = [self._request(prompt, p, namespace) for prompt, p in zip(many, each, strict=True)]
        for request in requests:
            self._enter(request)
        mine = {request.request_id for request in requests}
        done: dict[str, RequestOutput] = {}
        show = sys.stderr.isatty() if progress is None else progress
        try:
            with tqdm(total=len(requests), desc="generate", unit="prompt", disable=not show) as bar:
                while len(done) < len(mine):
                    for output in self._advance():
                        if output.request_id not in mine:
                            self._undelivered.append(output)
                        elif output.finish_reason is not None:
                            done[output.request_id] = output
                            bar.update()
            self._settle()
        except BaseException:
            for request in requests:
                if request.status is not Status.FINISHED:
                    self.abort(request.request_id)
            raise
        return [done[request.request_id] for request in requests]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = "") -> Iterator[str]:
        """Answer one prompt, piece by piece. Stopping early aborts it.

        Raises:
            PromptError: there is no tokenizer, or the prompt cannot be run.
        """
        if self.tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer; use add_request and step for token ids")
        request = self._request(prompt, params, namespace)
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        self._enter(request)
        told = 0
        try:
            while request.status is not Status.FINISHED:
                for output in self._advance():
                    if output.request_id != request.request_id:
                        self._undelivered.append(output)
                    elif len(output.text) > told:
                        yield output.text[told:]
                        told = len(output.text)
            self._settle()
        finally:
            if request.status is not Status.FINISHED:
                self.abort(request.request_id)

    # Step by step

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.scheduler.waiting or self.scheduler.running or self._undelivered)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = "") -> str:
        """Queue a prompt; returns its id. `step` moves it on.

        Raises:
            PromptError: the prompt cannot be run.
            MemoryBudgetError: prompt and answer do not fit into the memory given.
        """
        request = self._request(prompt, params, namespace)
        self._enter(request)
        return request.request_id

    def step(self) -> list[RequestOutput]:
        """Schedule, plan, compute, commit: one token for every request that decodes, and a share of the prompts.

        Returns:
            The requests that moved: those with a new token, and those that ended.

        Raises:
            RequestError: there is nothing to do.
        """
        if not self.has_work:
            raise RequestError("there is nothing to do: add_request first, and step while has_work")
        outputs, self._undelivered = self._undelivered, []
        return outputs + (self._advance() if self.scheduler.waiting or self.scheduler.running else [])

    def abort(self, request_id: str) -> None:
        """Stop a request. What it has committed stays cached.

        Raises:
            RequestError: there is no such request, or it has ended.
        """
        request = self._requests.pop(request_id, None)
        if request is None:
            raise RequestError(f"no request {request_id!r} is waiting or running")
        with deferred_interrupts():
            self.scheduler.abort(request)

    # Pins

    def pin(self, prompt: Prompt, ttl: float = math.inf, *, namespace: str = "") -> Pin:
        """Keep what is cached of a prompt from eviction.

        Args:
            ttl: seconds until it is let go by itself.

        Raises:
            ArgumentError: `ttl` is no time.
            PromptError: nothing of the prompt is cached.
            MemoryBudgetError: more than half of the memory would be pinned.
        """
        pin = self.cache.pin(self._encode(prompt).key(namespace), ttl)
        if pin is None:
            raise PromptError("nothing of this prompt is cached; generate with it first, or give pin_for with it")
        return pin

    def unpin(self, pin: Pin) -> None:
        """Let go of a pin; one that has been let go of already stays so."""
        self.cache.unpin(pin)

    def _advance(self) -> list[RequestOutput]:
        step: Step | None = None
        try:
            with deferred_interrupts():
                ahead, self._ahead = self._ahead, None
                step = self.scheduler.depart(ahead or self.scheduler.schedule())
                if not step.parts and ahead is not None:  # everything that was planned ahead has ended since
                    step = self.scheduler.depart(self.scheduler.schedule())
            if not step.parts:
                return []
            sampled_parts = step.sampled()
            pending = self.runner.launch(step)
            with deferred_interrupts():
                alive = {id(part) for part in self.scheduler.commit(step)}
                if self._overlap:
                    self._ahead = self.scheduler.schedule()
            tokens = pending.wait()
        except BaseException:
            with deferred_interrupts():
                planned = [step for step in (step, self._ahead) if step is not None]
                self._ahead = None
                self.scheduler.roll_back(*planned)
            raise
        with deferred_interrupts():
            sampled = [(part, token) for part, token in zip(sampled_parts, tokens, strict=True) if id(part) in alive]
            return [self._take(part.request, *token) for part, token in sampled]

    def _take(self, request: Request, token: int, logprobs: dict[int, float] | None) -> RequestOutput:
        assert request.params is not None
        request.append(token, frozenset() if request.params.ignore_eos else self._end_tokens)
        if logprobs is not None:
            request.logprobs.append(logprobs)
        if request.finish_reason is not None:
            self.scheduler.finish(request)
            del self._requests[request.request_id]
        return request.output()

    def _settle(self) -> None:
        """Replay what was decoded, as long as nobody waits for anything else."""
        while not self._requests and (self.scheduler.waiting or self.scheduler.running):
            self._advance()

    def _graphs(self) -> DecodeGraphs | None:
        if self.device.type != "cuda" or self.enforce_eager or not self.model.decode_can_be_recorded:
            return None
        return DecodeGraphs(self.model, self.cache.kv, self.cache.state_tensors, self.device)

    # Coming in

    def _enter(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def _request(self, prompt: Prompt, params: SamplingParams | None, namespace: str) -> Request:
        check_namespace(namespace)
        params = params or self.default_params
        encoded = self._encode(prompt)
        ids, config = encoded.ids, self.model.config
        limit = config.max_position_embeddings
        if not ids:
            raise PromptError("the prompt is empty; give at least one token")
        wrong = next((token for token in ids if not 0 <= token < config.vocab_size), None)
        if wrong is not None:
            raise PromptError(f"token id {wrong} lies outside the vocabulary: ids go from 0 to {config.vocab_size - 1}")
        if len(ids) >= limit:
            raise PromptError(
                f"the prompt has {len(ids)} tokens; this model takes {limit}, the answer included: shorten the prompt"
            )
        if params.stop and self.tokenizer is None:
            raise PromptError("stop texts need a tokenizer, and this checkpoint has none; use stop_token_ids")
        outside = next((at for at in params.checkpoint_at if not -len(ids) <= at <= len(ids)), None)
        if outside is not None:
            raise PromptError(f"checkpoint_at={outside} lies outside the prompt of {len(ids)} tokens")
        max_len = min(limit, len(ids) + params.max_new_tokens)
        self._refuse_too_long(len(ids), max_len)
        text = TextStream(self.tokenizer, tuple(params.stop)) if self.tokenizer is not None else None
        own = (encoded.key_ids, params, namespace, text, max_len, encoded.media, ids)
        return Request.of(f"request-{next(self._ids)}", *own)

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        return encode_prompt(prompt, self.tokenizer, self._image_encoder, self.model.config.hidden_size)

    def _refuse_too_long(self, prompt_len: int, max_len: int) -> None:
        config, most = self.cache.config, self.cache.largest_request
        needed = -(-max_len // config.page_size)
        if needed > most:
            page_bytes, state_bytes = self.cache.unit_bytes
            memory = smallest_memory(needed, page_bytes, state_bytes, config.state_share)
            raise MemoryBudgetError(
                f"a prompt of {prompt_len} tokens with {max_len - prompt_len} new ones needs {needed} pages, and there "
                f"are {most}; the smallest memory that would do is {format_bytes(memory)} "
                f"(CacheConfig(memory={memory})), or lower max_new_tokens"
            )
