"""The engine: prompts in, text out, the prefix cache in between."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsIndex

import torch
from tqdm import tqdm

from hybrid.cache.archives import Only
from hybrid.cache.cache import HybridCache, refuse_copy
from hybrid.cache.config import CacheConfig
from hybrid.cache.explain import Explanation, explain_now
from hybrid.cache.fingerprints import fingerprint_of
from hybrid.cache.pins import Pin
from hybrid.checks import known_keywords
from hybrid.engine.adapters import Adapters
from hybrid.engine.base_loop import Loop
from hybrid.engine.build import (
    LoadedModel,
    build_cache,
    check_settings,
    is_captured,
    is_deterministic,
    load,
    model_runner,
)
from hybrid.engine.config import EngineConfig
from hybrid.engine.drafting import make_drafting
from hybrid.engine.loops import OverlapLoop, PlainLoop
from hybrid.engine.model_runner import Runner
from hybrid.engine.output import Outputs, RequestOutput
from hybrid.engine.request import Request
from hybrid.engine.request_builder import RequestBuilder, check_request_id, params_of_each
from hybrid.engine.requests import Requests
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.scheduler import Scheduler
from hybrid.engine.scoring import Choice, Score, choices_of, joined, score_of
from hybrid.engine.stats import EngineStats
from hybrid.errors import ArgumentError, ClosedError, OwnershipError, PromptError, RequestError
from hybrid.hints import Hints
from hybrid.prompts.encode import Message, Prompt, as_prompts, chat_prompt
from hybrid.speculation.config import SpeculationConfig
from hybrid.tiers.archive import Archive, read_archive
from hybrid.tiers.fingerprint import Fingerprint
from hybrid.tiers.store import Store
from hybrid.tiers.transfer import Transfer


class TextStream(Iterator[str]):
    """Pieces of an answer, in order. Closing it, leaving its `with`, or dropping it early aborts the request, from any
    thread: one that does not own the engine has the next step do it.

    Args:
        request: not queued yet: the first piece that is asked for does that.
        loop: of the engine.
        claim: checks that the engine is open, and that the calling thread owns it or may own it.
        check_owner: raises in another thread than the owner.
    """

    def __init__(
        self, request: Request, loop: Loop, claim: Callable[[], None], check_owner: Callable[[], None]
    ) -> None:
        self._request = request
        self._loop = loop
        self._check_owner = check_owner
        self._pieces = _pieces(request, loop, claim)

    def __next__(self) -> str:
        """The next piece.

        Raises:
            RequestError: the request failed; raised after the text that it had.
            OwnershipError: another thread owns the engine. Nothing was changed.
        """
        self._check_owner()
        return next(self._pieces)

    @property
    def output(self) -> RequestOutput:
        """The output of the request up to now: the whole answer, its usage, its hit."""
        return self._request.source.output()

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort the request, if it has not ended."""
        try:
            self._check_owner()
        except OwnershipError:
            self._loop.requests.abort_later(self._request)
        else:
            self._pieces.close()


def _pieces(request: Request, loop: Loop, claim: Callable[[], None]) -> Generator[str, None, None]:
    ended = False
    with loop.requests.aborting([request]):
        claim()
        loop.requests.enter([request])
        while not ended:
            if not request.outputs:
                loop.work()
            for output in request.outputs.take():
                ended = output.finish_reason is not None
                if output.delta:
                    yield output.delta
        loop.replay_while_idle()
    if request.error is not None:
        raise RequestError(f"{request.request_id} failed: {request.error}")


PROGRESS_SECONDS = 0.2
"""The progress bar of `generate` shows tokens per second anew after this time."""

OTHER_THREAD = (
    "An engine is used by one thread: with asyncio, or for requests from several threads "
    "(asyncio.to_thread(engine.generate, ...)), use hybrid.AsyncEngine, which runs the engine in a thread of its own"
)


class Engine:
    """A hybrid model with its prefix cache.

    Use `from_pretrained`, and `with` or `close`. One thread owns an engine: the one that owns its cache. For asyncio,
    or requests from several threads, use `hybrid.AsyncEngine`.

    Args:
        loaded: the model and what belongs to it.
        cache: an empty cache for the model.
        config: limits of requests and steps.
        runner: computes the steps; None: a `ModelRunner` with the model.
        speculation: how tokens are drafted, as in `from_pretrained`.

    Attributes:
        loaded: the model, its tokenizer, and its defaults.
        cache: `stats()`, `audit()`, `clear()`.
        config: as given.
        deterministic: the outputs of hits are bitwise those of cold runs.
        scheduler: the requests that wait and run.
        speculation: how tokens are drafted; None: they are not.
        adapters: LoRA adapters by name; `load` and `unload` them at any time.
    """

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_copy(self)

    def __repr__(self) -> str:
        """Name the model, its device and type, and what its cache has."""
        return f"Engine({self.loaded!r}, {'closed' if self._is_closed else repr(self.cache)})"

    def __init__(
        self,
        loaded: LoadedModel,
        cache: HybridCache,
        config: EngineConfig | None = None,
        *,
        runner: Runner | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> None:
        self.loaded = loaded
        self.cache = cache
        self.config: EngineConfig = config or EngineConfig()
        self.config.require_chunk(cache.config.chunk_size)
        cache.limit_tenants(self.config.memory_shares)
        self.deterministic: bool = is_deterministic(cache.config, loaded)
        self.speculation: SpeculationConfig | None = SpeculationConfig.of(speculation)
        captures = runner is None and loaded.device.type == "cpu" and is_captured(loaded, self.config)
        drafting = make_drafting(self.speculation, loaded, cache, self.config, self.deterministic, captures)
        self.scheduler: Scheduler = Scheduler(cache, self.config, self.deterministic, drafting)
        if runner is None:
            runner = model_runner(loaded, cache, self.config, self.deterministic, self.speculation)
        requests = Requests(cache, self.scheduler, self.config, loaded.end_tokens)
        common = (cache, self.scheduler, requests, runner, self.config)
        always = self.config.overlap is True or loaded.device.type == "cuda"
        self._loop: Loop = PlainLoop(*common) if self.config.overlap is False else OverlapLoop(*common, always=always)
        self._requests = requests
        self.adapters: Adapters = Adapters(
            loaded.model,
            self.config.adapter_bytes,
            lambda: [request.adapter for request in requests.by_id.values()],  # without a circle: `del engine` frees it
            cache.check_owner,
        )
        self._request_builder = RequestBuilder(
            loaded, cache, self.adapters, self.config.max_model_len, self.config.prompt_templates
        )
        self._fingerprint: Fingerprint | None = cache.tiers.fingerprint if cache.tiers is not None else None
        self._outputs = Outputs()
        self._numbers = count()
        self._is_closed = False

    @classmethod
    @known_keywords(cache=CacheConfig, config=EngineConfig)
    def from_pretrained(
        cls,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        load_dtype: str | None = None,
        cache: CacheConfig | None = None,
        config: EngineConfig | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> Engine:
        """Load a checkpoint with its tokenizer, and allocate its cache.

        Args:
            model: a folder, a hub id, or "tiny" for the small model inside the package.
            device: "cuda", "cpu", ...; None: a GPU if there is one.
            dtype: "float32", "bfloat16" or "float16". None: the checkpoint's on a GPU, and on a CPU with AVX-512 and
                compiled operations where it is bfloat16; else float32. It is logged.
            load_dtype: "int8": on a CPU with compiled operations, weights of matrix products are quantized per row,
                experts aside; answers differ from the checkpoint's, hits and cold runs alike. "int4": in four bits, in
                groups of 64 ("int4:32", "int4:128"), those of experts too, the head aside. None: they have `dtype`.
            cache: settings of the cache.
            config: settings of the engine.
            speculation: draft tokens; the answers are the same. "cache" (what came next in the cache), "mtp" (the
                checkpoint's predictor), "cache+mtp", or a `SpeculationConfig`; None: nothing is drafted.

        Raises:
            CheckpointError: there is no usable checkpoint.
            MemoryBudgetError: the cache's memory does not suffice.
            ArgumentError: another argument is wrong.
        """
        settings = cache if cache is not None else CacheConfig()
        check_settings(settings, config)
        mtp = (drafts := SpeculationConfig.of(speculation)) is not None and drafts.uses_predictor
        loaded = load(model, device, dtype, settings.chunk_size, load_dtype, mtp)
        return cls(loaded, build_cache(loaded, settings), config, speculation=drafts)

    def with_cache(
        self,
        cache: CacheConfig,
        size: tuple[int, int] | None = None,
        *,
        config: EngineConfig | None = None,
        speculation: SpeculationConfig | str | None = None,
    ) -> Engine:
        """Another engine on the same weights, with a cache of its own.

        Args:
            cache: its settings. `chunk_size` must be this engine's: the model was loaded with it.
            size: numbers of pages and of state slots of the cache, instead of `cache.memory`.
            config: settings of the engine; None: this engine's.
            speculation: as in `from_pretrained`; "mtp" if this engine was loaded for it.

        Raises:
            ArgumentError: another chunk size, or no predictor.
            MemoryBudgetError: the memory does not suffice.
        """
        check_settings(cache, config)
        if cache.chunk_size != self.cache.config.chunk_size:
            former = self.cache.config.chunk_size
            raise ArgumentError(f"with_cache: chunk_size must stay {former}, got {cache.chunk_size}")
        made = build_cache(self.loaded, cache, size)
        return Engine(self.loaded, made, config or self.config, speculation=speculation)

    @property
    def runner(self) -> Runner:
        """Computes the steps."""
        return self._loop.runner

    @property
    def model(self) -> Any:
        """The model."""
        return self.loaded.model

    @property
    def tokenizer(self) -> Any | None:
        """The checkpoint's tokenizer, of transformers; None: prompts are token ids."""
        return self.loaded.tokenizer

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return self.loaded.device

    @property
    def default_params(self) -> SamplingParams:
        """From `generation_config.json`; used where a call gives no `SamplingParams`."""
        return self.loaded.default_params

    # Answers

    @known_keywords(params=SamplingParams)
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together.

        Args:
            prompts: one or more of: a text, a list of token ids, a list of chat messages `{"role": ..., "content":
                ...}` (or `{"messages": [...]}`), whose contents may hold images, an `ImagePrompt`.
            params: for all of them, or one for each; None: `default_params`.
            namespace: prompts share what is cached only within a namespace.
            progress: show a progress bar; None: when there is a terminal.

        Returns:
            One result per prompt, in order. A request that failed has `finish_reason="error"`; the others are not
            affected.

        Raises:
            PromptError: a prompt cannot be run. None was started.
            MemoryBudgetError: a prompt and its answer do not fit into the cache's memory.
            QueueFullError: more prompts than may wait.
        """
        self._claim()
        many = as_prompts(prompts)
        each = params_of_each(params, len(many))
        outputs = Outputs()
        requests = [self._request(prompt, p, namespace, outputs) for prompt, p in zip(many, each, strict=True)]
        done: dict[str, RequestOutput] = {}
        hidden = not (sys.stderr is not None and sys.stderr.isatty() if progress is None else progress)
        bar = tqdm(total=len(many), desc="generate", unit="prompt", disable=hidden)
        meter, started = self._requests.meter, time.perf_counter()
        before, shown = meter.completion_tokens, started
        with self._requests.aborting(requests), bar:
            self._requests.enter(requests)
            while len(done) < len(requests):
                ended = outputs.take_ended()
                done.update({output.request_id: output for output in ended})
                bar.update(len(ended))
                now = time.perf_counter()
                if not hidden and now - shown > PROGRESS_SECONDS:
                    bar.set_postfix_str(f"{(meter.completion_tokens - before) / (now - started):.0f} tokens/s")
                    shown = now
                if not ended:
                    self._loop.work()
            self._loop.replay_while_idle()
        return [done[request.request_id] for request in requests]

    @known_keywords(params=SamplingParams)
    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, namespace: str = "") -> TextStream:
        """Answer one prompt, piece by piece. `output` of the stream is the whole answer up to now. Closing the stream
        early, or leaving its `with`, aborts the request.

        Other requests may be run between two pieces; nothing of the stream is lost.

        Raises:
            PromptError: there is no tokenizer, or the prompt cannot be run.
            RequestError: the request failed; raised after the text that it had.
        """
        self._claim()
        if self.tokenizer is None:
            raise PromptError("this checkpoint has no tokenizer; use add_request and step for token ids")
        request = self._request(prompt, params, namespace, Outputs())
        return TextStream(request, self._loop, self._claim, self._check_owner)

    @known_keywords(params=SamplingParams)
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
    ) -> RequestOutput:
        """Answer a chat. The answer is taken apart: `reasoning`, `content`, `tool_calls`, and `message()`, which is the
        next of the messages. `hybrid.Conversation` keeps the tokens of a chat, and hits in full.

        Args:
            messages: `{"role": ..., "content": ...}`.
            params: None: `default_params`.
            tools: descriptions of the tools that the answer may call; see `SamplingParams.tool_choice`.
            chat_template_kwargs: variables of the template, such as `{"enable_thinking": False}`.
            namespace: of the cache.

        Raises:
            HybridError: all that `generate` raises.
        """
        prompt = chat_prompt(messages, tools, chat_template_kwargs)
        params = replace(params or self.default_params, parse_response=True)
        return self.generate(prompt, params, namespace=namespace, progress=False)[0]

    def score(
        self,
        prompts: Prompt | Sequence[Prompt],
        choices: Sequence[Choice] | Sequence[Sequence[Choice]],
        *,
        namespace: str = "",
        adapter: str | None = None,
    ) -> list[list[Score]]:
        """Score choices as continuations of prompts: each prompt is computed once, and each choice after it.

        Args:
            prompts: as for `generate`, without images.
            choices: texts or lists of token ids: the same for all prompts, or for each prompt a list of its own. A text
                after a text is tokenized together with it.
            namespace, adapter: as for `generate`.

        Returns:
            For each prompt a score of each of its choices, the same as those of a cold run, bit by bit in deterministic
            mode.

        Raises:
            PromptError: a prompt or a choice cannot be run.
            RequestError: one failed.
        """
        many = as_prompts(prompts)
        each = choices_of(choices, len(many))
        wholes: list[tuple[list[int], int]] = []
        for prompt, own in zip(many, each, strict=True):
            ids = self.encode(prompt)
            wholes += [joined(self.tokenizer, prompt, ids, choice) for choice in own]
        params = [
            SamplingParams(
                max_new_tokens=0,
                prompt_logprobs=1,
                logprob_start_len=start,
                checkpoint_at=(start - 1,),
                adapter=adapter,
            )
            for _, start in wholes
        ]
        outputs = self.generate([ids for ids, _ in wholes], params, namespace=namespace, progress=False)
        scores = iter([score_of(output, start) for output, (_, start) in zip(outputs, wholes, strict=True)])
        return [[next(scores) for _ in own] for own in each]

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt. In any thread.

        Raises:
            PromptError: the prompt has an unsupported form, is too large, or holds images, which ids cannot.
        """
        encoded = self._request_builder.encode(prompt)
        if encoded.media is not None:
            raise PromptError("a prompt with images has more than token ids: give the prompt itself")
        return encoded.ids

    def encode_turn(self, prompt: dict[str, Any]) -> list[int]:
        """The token ids of what follows an answer in a chat: the end of its message, then the messages of
        `{"messages": [...]}`, in the form of the chat template. In any thread. See `hybrid.Conversation`.

        Raises:
            PromptError: as for `encode`, or the template does not show an answer as it is.
        """
        return self._request_builder.encode_turn(prompt)

    # Step by step

    @property
    def has_work(self) -> bool:
        """Tell whether `step` has anything to do: a request waits or runs, or an output was not returned yet."""
        return self.scheduler.has_work or bool(self._outputs)

    @known_keywords(params=SamplingParams)
    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, and return its id. `step` runs it.

        Args:
            prompt: as for `generate`.
            params: None: `default_params`.
            namespace: of the cache.
            request_id: an id of your own, of up to 256 characters, which no request has that waits, runs, or has an
                output that `step` did not return yet. None: the engine gives one.

        Raises:
            ArgumentError: the id is in use, or no text.
            PromptError: the prompt cannot be run.
            MemoryBudgetError: prompt and answer do not fit into the cache's memory.
            QueueFullError: `EngineConfig.max_waiting` requests wait already.
            OwnershipError: another thread owns the engine.
        """
        self._claim()
        request = self.prepare(prompt, params, namespace, self.new_id(request_id))
        self._requests.enter([request])
        return request.request_id

    def new_id(self, request_id: str | None, taken: Container[str] = ()) -> str:
        """The id of a request that is made with `prepare`.

        Args:
            request_id: the caller's own; None: there is none.
            taken: ids that were given, to requests that were not entered yet.

        Raises:
            ArgumentError: the id is in use, or no text.
        """
        if request_id is not None:
            check_request_id(request_id, lambda name: name in taken or self._is_used(name))
            return request_id
        while self._is_used(name := f"request-{next(self._numbers)}") or name in taken:
            pass
        return name

    def prepare(self, prompt: Prompt, params: SamplingParams | None, namespace: str, request_id: str) -> Request:
        """Encode a prompt for `enter`, in any thread, while another one uses the engine. Arguments and errors are those
        of `add_request`; the id is one of `new_id`."""
        return self._request_builder.request(request_id, prompt, params, namespace, self._outputs)

    def enter(self, request: Request, *, has_room: bool = False) -> None:
        """Queue a request that was prepared.

        Args:
            has_room: the limits of what waits were looked at when it was asked.

        Raises:
            ArgumentError: its adapter was dropped meanwhile.
            QueueFullError: `EngineConfig.max_waiting` requests wait already.
            OwnershipError: another thread owns the engine.
        """
        self._claim()
        adapter = request.params.adapter
        if adapter is not None and self.adapters.named(adapter) is not request.adapter:
            raise ArgumentError(f"the adapter {adapter!r} was replaced while the prompt was encoded; send it again")
        self._requests.enter([request], has_room=has_room)

    def predict(self, request: Request) -> Explanation:
        """The hit that a request which was entered would have if it started now, copies in tiers aside. Changes
        nothing."""
        return explain_now(self.cache.tree, request.key(), self.scheduler.cacheable(request))

    def step(self) -> list[RequestOutput]:
        """Run one step: a token for every request that decodes, and a share of the prompts.

        Returns:
            Outputs of requests of `add_request`: those that have a new token, or ended. `RequestOutput.delta` is what
            is new. Nothing is lost when a step raises: outputs are returned by the next one.

        Raises:
            RequestError: there is no work.
            Exception: the pass failed. If `is_retrying`, its requests are computed again by the next step; one that
                makes steps fail again and again ends with `finish_reason="error"`.
        """
        self._check_owner()
        if not self.has_work:
            raise RequestError("there is nothing to do: add_request first, and step while has_work")
        if self.scheduler.has_work:
            self._loop.advance()
        return self._outputs.take()

    @property
    def is_retrying(self) -> bool:
        """Tell whether the latest step failed, and its requests are computed again by the next one."""
        return self._loop.is_retrying

    def abort(self, request_id: str) -> None:
        """Stop a request. Its last output has `finish_reason="abort"`. What it has committed stays cached.

        Raises:
            RequestError: there is no such request, or it has ended.
            OwnershipError: another thread owns the engine.
        """
        self._check_owner()
        self._requests.abort(request_id)

    def _request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        namespace: str,
        outputs: Outputs,
    ) -> Request:
        """A request that can run."""
        return self._request_builder.request(self.new_id(None), prompt, params, namespace, outputs)

    def num_requests_of(self, tenant: str) -> int:
        """The number of requests of a tenant that wait and run."""
        return self._requests.num_of[tenant]

    def _is_used(self, request_id: str) -> bool:
        return request_id in self._requests.by_id or request_id in self._outputs

    # The whole

    def stats(self) -> EngineStats:
        """Return the counts of the engine since it was made, and its present state. May be called from any thread at
        any time: each of the figures was right at some moment during the call."""
        return self._requests.stats()

    def close(self) -> None:
        """Abort all requests, and free the memory of the cache. What is worth it goes to `CacheConfig.disk` before, if
        there is one. Another `close` does nothing.

        Outputs can still be taken with `step`, and `stats` can be read. The model's weights are freed when no engine
        refers to them any more. A signal handler that runs while a step computes closes the engine at the end of the
        step.

        Raises:
            OwnershipError: another thread owns the engine.
        """
        self._check_owner()
        if not self._is_closed:
            self._is_closed = True
            self._loop.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _claim(self) -> None:
        """The calling thread is about to change something: it becomes the owner of an engine that has none."""
        self._check_owner()
        if self._is_closed:
            raise ClosedError("this engine was closed; make another one with from_pretrained or with_cache")
        self.cache.claim()

    def _check_owner(self) -> None:
        try:
            self.cache.check_owner()
        except OwnershipError as error:
            raise OwnershipError(f"{error}. {OTHER_THREAD}") from None

    def prewarm(
        self, prompt: Prompt, ttl: float | None = None, *, namespace: str = "", adapter: str | None = None
    ) -> RequestOutput:
        """Compute a prompt, and keep it for those that begin with it: there is no answer. The same as
        `SamplingParams(max_new_tokens=0, pin_for=ttl)`.

        Args:
            ttl: seconds for which it is not evicted; None: it is kept as any other prefix is.
            namespace, adapter: of the prompts to come.

        Returns:
            Its output: `usage`, `explain`, `pin`.

        Raises:
            HybridError: all that `generate` raises.
            RequestError: it could not be computed.
        """
        params = SamplingParams(max_new_tokens=0, pin_for=ttl, adapter=adapter)
        return prewarmed(self.generate([prompt], params, namespace=namespace, progress=False)[0])

    # Pins

    def pin(self, prompt: Prompt, ttl: float = math.inf, *, namespace: str = "", adapter: str | None = None) -> Pin:
        """Keep what is cached of a prompt from eviction.

        Args:
            ttl: seconds until the pin expires.
            namespace: of the cache.
            adapter: name of the LoRA adapter that it was computed with; None: it was computed without one.

        Raises:
            ArgumentError: `ttl` is not a positive number, or there is no such adapter.
            PromptError: nothing of the prompt is cached.
            MemoryBudgetError: more than half of the memory would be pinned.
        """
        self._claim()
        key = self._request_builder.key(prompt, namespace, adapter)
        pin = self.cache.pin(key, ttl)
        if pin is None:
            raise PromptError("nothing of this prompt is cached; generate with it first, or give pin_for with it")
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release a pin. One that was released before stays so. What is not a `Pin` is an `ArgumentError`."""
        self.cache.unpin(pin)

    def hint(
        self, session: str, hints: Hints, *, namespace: str = "", adapter: str | None = None, tenant: str | None = None
    ) -> bool:
        """Say what is known of a session between its requests: when it continues, or that it has ended.

            engine.hint("s1", hybrid.Hints(expect_resume=30.0))  # its tool takes half a minute
            engine.hint("s1", hybrid.Hints(end_session=True))

        Args:
            session: as in the `SamplingParams` of its requests, with their namespace, adapter and tenant.

        Returns:
            Whether the session is known.

        Raises:
            ArgumentError: these are no hints.
        """
        self._claim()
        namespace = self._request_builder.namespace_of(namespace, adapter)
        return self.cache.hint_session(session, hints, namespace=namespace, tenant=tenant)

    # Files

    def explain(self, prompt: Prompt, *, namespace: str = "", adapter: str | None = None) -> Explanation:
        """The hit that a prompt would have now, and why it would not be longer. Changes nothing."""
        self._claim()
        key = self._request_builder.key(prompt, namespace or "", adapter)
        return explain_now(self.cache.tree, key, len(key) - 1)

    def save(
        self,
        path: str | Path,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        namespace: str | None = None,
        adapter: str | None = None,
        only: Only | None = None,
        store: Store | None = None,
    ) -> Transfer:
        """Write what is cached of prompts to a file, which `load` of an engine with the same model reads. The file
        holds their token ids, and only its owner may read it. The first call reads all weights.

        Args:
            prompts: None: everything, or everything of `namespace` and `adapter`.
            namespace, adapter: of the prompts.
            only: "deepest": the last checkpoint of each prompt, or of each path where there are no prompts, without
                those before it. None: all.
            store: where `path` is a name, such as a `hybrid.tiers.remote.RedisStore`; None: it is a path.

        Raises:
            PromptError: nothing is cached of one of the prompts, or in the namespace.
            CacheFileError: the file cannot be written.
        """
        self._claim()
        archive = self._archive(prompts, namespace, adapter, only=only)
        archive.write(path, store)
        return archive.transfer

    def dump(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        *,
        namespace: str | None = None,
        adapter: str | None = None,
        after: int = 0,
        only: Only | None = None,
    ) -> bytes:
        """Return what `save` writes, as bytes: to hand prompts that were computed here to another engine.

        Args:
            after: leave out the pages of the first `after` tokens, which the other engine has: the `page_hit` of its
                `explain`. States are whole.
            only: as for `save`.
        """
        self._claim()
        return self._archive(prompts, namespace, adapter, after, only).to_bytes()

    def load(self, source: str | Path | bytes | Archive, *, store: Store | None = None) -> Transfer:
        """Bring what `save` or `dump` has written into the cache, each checkpoint with all before it or not at all.
        What the device has no memory for goes to host memory or disk, if there is one.

        Raises:
            CacheFileError: it is damaged, or of another model, other settings or another version. Nothing was changed.
        """
        self._claim()
        archive = source if isinstance(source, Archive) else read_archive(source, store)
        model = self._fingerprint_of_cache()
        return self.cache.load(archive, model=model, vocab_size=self.model.config.vocab_size)

    def _archive(
        self,
        prompts: Prompt | Sequence[Prompt] | None,
        namespace: str | None,
        adapter: str | None,
        after: int = 0,
        only: Only | None = None,
    ) -> Archive:
        """Return an archive of what is cached of prompts; None: of all of a namespace, or of all."""
        if prompts is not None:
            keys = [self._request_builder.key(prompt, namespace or "", adapter) for prompt in as_prompts(prompts)]
            return self.cache.archive(keys, model=self._fingerprint_of_cache(), after=after, only=only)
        is_all = namespace is None and adapter is None
        space = None if is_all else self._request_builder.namespace_of(namespace or "", adapter)
        return self.cache.archive(namespace=space, model=self._fingerprint_of_cache(), after=after, only=only)

    def _fingerprint_of_cache(self) -> Fingerprint:
        """Return the fingerprint of the contents of the cache. The first call reads all weights, where there is no
        directory on disk, for which they have been read."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(
                self.cache.memory, self.cache.config, self.loaded.digest(), self.deterministic
            )
        return self._fingerprint


def prewarmed(output: RequestOutput) -> RequestOutput:
    """The output of a prompt that was to be kept.

    Raises:
        RequestError: it could not be computed.
    """
    if output.error is not None:
        raise RequestError(f"{output.request_id} failed: {output.error}")
    return output
