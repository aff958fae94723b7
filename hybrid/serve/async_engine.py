"""The engine for asyncio."""

from __future__ import annotations

import asyncio
import dataclasses
import weakref
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar

import torch

from hybrid.cache.config import CacheConfig
from hybrid.checks import known_keywords
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine, prewarmed
from hybrid.engine.output import Accepted, RequestOutput
from hybrid.engine.request_builder import params_of_each
from hybrid.engine.sampling_params import SamplingParams
from hybrid.engine.stats import EngineStats
from hybrid.errors import ArgumentError
from hybrid.hints import Hints
from hybrid.key import MAX_NAMESPACE_CHARACTERS, check_namespace
from hybrid.prompts.encode import Message, Prompt, as_prompts, chat_prompt, num_bytes
from hybrid.serve.encoding import PendingPrompt
from hybrid.serve.engine_thread import EngineThread
from hybrid.serve.inbox import Inbox, OutputCallback
from hybrid.speculation.config import SpeculationConfig


class OutputStream(AsyncIterator[RequestOutput]):
    """The outputs of one request, for one task at a time. Made by `AsyncEngine.stream` and `AsyncEngine.submit`.

    Args:
        asked: the prompt.
        thread: runs it.
        keeps: an object that lives as long as this one: the engine.
        only_ends: there is one output, the last.

    Raises:
        ArgumentError: the namespace is not a string.

    Attributes:
        accepted: what the engine said when it took the request; None where `AsyncEngine.stream` made this.
    """

    _inbox: Inbox | None = None  # in a stream that was not made wholly

    def __init__(self, asked: PendingPrompt, thread: EngineThread, *, keeps: object, only_ends: bool = False) -> None:
        self._asked = asked
        self._thread = thread
        self._keeps = keeps
        self._only_ends = only_ends
        self.accepted: Accepted | None = None
        self._has_ended = False
        self._task: asyncio.Task[Any] | None = None
        # a task that was cancelled between two outputs may keep the stream alive; it is watched, without the reverse
        self._watch: Callable[[asyncio.Task[Any]], None] = _watcher(weakref.ref(self))
        check_namespace(asked.namespace, MAX_NAMESPACE_CHARACTERS)

    def begin(self, *, awaits_acceptance: bool = False) -> tuple[Inbox, PendingPrompt]:
        """Return where the outputs go, and what is asked. From now on the request is aborted with this stream."""
        self._inbox = Inbox(only_ends=self._only_ends, awaits_acceptance=awaits_acceptance)
        return self._inbox, self._asked

    async def accept(self) -> None:
        """Wait until the engine has queued the request, which has begun.

        Raises:
            HybridError: the prompt cannot be run, or there is no room, or the engine was closed.
        """
        assert self._inbox is not None
        self.accepted = await self._inbox.accepted()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """The next output. When the task is cancelled meanwhile, the request is aborted.

        Raises:
            RequestError: another task is waiting for it, or this is another event loop.
            HybridError: the prompt cannot be run, or the engine was closed.
        """
        if self._has_ended:
            raise StopAsyncIteration
        if self._inbox is not None:
            self._inbox.check_reader()
        self._follow(asyncio.current_task())
        try:
            if self._inbox is None:
                self._thread.ask([self.begin()])
            assert self._inbox is not None
            output = await self._inbox.take()
        except BaseException:
            self.abort()
            raise
        if output is None:  # it was aborted meanwhile
            raise StopAsyncIteration
        if output.finish_reason is not None:
            self._end()
        return output

    async def pass_on(self, function: OutputCallback) -> RequestOutput | None:
        """Wait for the last output, and have a function take all others as they come. It is called in the event loop,
        and not in this task, so that none is woken for each token. Where it returns something to wait for, outputs that
        come meanwhile are one.

        Returns:
            The last output, which the function was not called with. None if the stream was closed before.

        Raises:
            Exception: that of the function, or of what it returned. The request is aborted.
            HybridError: as for reading.
        """
        if self._inbox is None:
            self._thread.ask([self.begin()])
            assert self._inbox is not None
        self._inbox.callback = function
        try:
            async for output in self:
                if output.finish_reason is not None:
                    return output
                if (waiting := function(output)) is not None:  # it had come before
                    await waiting
            return None
        except BaseException:
            self.abort()
            raise
        finally:
            self._inbox.callback = None

    async def aclose(self) -> None:
        """Abort the request, if it has not ended."""
        self.abort()

    def abort(self) -> None:
        """Abort the request as `aclose` does, for callers that cannot wait."""
        if not self._has_ended and self._inbox is not None:
            self._thread.forget(self._inbox)
            self._inbox.close()
        self._end()

    def _end(self) -> None:
        self._has_ended = True
        self._follow(None)

    def _follow(self, task: asyncio.Task[Any] | None) -> None:
        """Have the request aborted when this task, which reads it now, ends because it was cancelled."""
        if task is self._task:
            return
        if self._task is not None:
            self._task.remove_done_callback(self._watch)
        if task is not None:
            task.add_done_callback(self._watch)
        self._task = task

    def __del__(self) -> None:
        """Any thread may collect the stream: nothing but the abort is done here."""
        if self._inbox is not None and not self._has_ended:
            self._thread.forget(self._inbox)


def _watcher(stream: weakref.ref[OutputStream]) -> Callable[[asyncio.Task[Any]], None]:
    def watch(task: asyncio.Task[Any]) -> None:
        watched = stream()
        if watched is not None and task.cancelled():
            watched.abort()

    return watch


Result = TypeVar("Result")


class AsyncEngine:
    """An engine that any number of tasks use at once, in one or in several event loops.

    A thread of its own owns the engine, and waits while there is no work. Use `async with`, or `close`.

        async with hybrid.AsyncEngine.from_pretrained("tiny") as engine:
            async for output in engine.stream("The with statement"):
                print(output.delta, end="", flush=True)

    Args:
        engine: that nothing else uses from now on.
        when_full: what a prompt does that finds `EngineConfig.max_waiting` requests waiting, and as many running as
            can: "wait" with them, however many they are, by turns between tenants; or "refuse": `QueueFullError`.

    Raises:
        ArgumentError: `when_full` is neither.

    Attributes:
        engine: for what never changes (`tokenizer`, `default_params`, `config`) and what any thread may read
            (`cache.stats()`). Everything else through `call`.
    """

    def __init__(self, engine: Engine, *, when_full: Literal["wait", "refuse"] = "wait") -> None:
        if when_full not in ("wait", "refuse"):
            raise ArgumentError(f"AsyncEngine: when_full must be 'wait' or 'refuse', got {when_full!r:.100}")
        if not isinstance(engine, Engine):
            raise ArgumentError(f"AsyncEngine: an Engine is needed, or use from_pretrained; got {engine!r:.100}")
        self.engine = engine
        self._thread = EngineThread(engine, refuses=when_full == "refuse")
        self._finalizer = weakref.finalize(self, self._thread.close)

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
        when_full: Literal["wait", "refuse"] = "wait",
    ) -> AsyncEngine:
        """Load an engine, as `Engine.from_pretrained` does. It blocks while the checkpoint is loaded; `await
        asyncio.to_thread(AsyncEngine.from_pretrained, ...)` does not.

        Raises:
            CheckpointError: there is no usable checkpoint.
            MemoryBudgetError: the cache's memory does not suffice.
            ArgumentError: another argument is wrong.
        """
        engine = Engine.from_pretrained(
            model,
            device=device,
            dtype=dtype,
            load_dtype=load_dtype,
            cache=cache,
            config=config,
            speculation=speculation,
        )
        return cls(engine, when_full=when_full)

    @known_keywords(params=SamplingParams)
    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str | None = None,
    ) -> OutputStream:
        """Answer one prompt; its outputs as they come, each with what is new (`delta`, `delta_token_ids`).

        The request starts when the first output is awaited. It is aborted when the task that reads it is cancelled,
        and when the stream is closed or dropped. A reader that is slow gets longer deltas, and holds up nothing. The
        last output has a `finish_reason`; that of a request that failed is "error", and `error` says why.

        Args:
            prompt, params, namespace, request_id: as for `Engine.add_request`.

        Raises:
            HybridError: by the first output: all that `Engine.add_request` raises, `EncodingLimitError`, and
                `ClosedError`.
        """
        return OutputStream(self._asked(prompt, params, namespace, request_id), self._thread, keeps=self)

    @known_keywords(params=SamplingParams)
    async def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str | None = None,
    ) -> OutputStream:
        """Queue one prompt, and return its stream before any token: `accepted` has its id, the prompt length, the
        predicted hit and the tokens that end the answer. So a server can answer with headers before the prefill, or
        with an error. From then on the stream is that of `stream`.

        Args:
            prompt, params, namespace, request_id: as for `Engine.add_request`.

        Raises:
            HybridError: all that `Engine.add_request` raises, `EncodingLimitError`, and `ClosedError`.
        """
        return (await self._submit([self._asked(prompt, params, namespace, request_id)]))[0]

    @known_keywords(params=SamplingParams)
    async def submit_all(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
    ) -> list[OutputStream]:
        """Queue prompts, all of them or none, and return their streams before any token, in order: as `submit`.

        Raises:
            HybridError: all that `submit` raises, for any of them.
        """
        many = as_prompts(prompts)
        each = params_of_each(params, len(many))
        return await self._submit([self._asked(*one, namespace, None) for one in zip(many, each, strict=True)])

    async def _submit(self, asked: list[PendingPrompt]) -> list[OutputStream]:
        """Where one is refused, or this task is cancelled meanwhile, all are aborted."""
        streams = [OutputStream(one, self._thread, keeps=self) for one in asked]
        try:
            self._thread.ask([stream.begin(awaits_acceptance=True) for stream in streams])
            for stream in streams:
                await stream.accept()
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _asked(
        self, prompt: Prompt, params: SamplingParams | None, namespace: str, request_id: str | None
    ) -> PendingPrompt:
        limit = self.engine.config.encoding_bytes
        return PendingPrompt(prompt, params, namespace, request_id, num_bytes(prompt, limit) if limit else 0)

    @known_keywords(params=SamplingParams)
    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        namespace: str = "",
    ) -> list[RequestOutput]:
        """Answer prompts together: one result per prompt, in order. A request that failed has
        `finish_reason="error"`. When the task is cancelled, all of them are aborted.

        Raises:
            HybridError: all that `Engine.generate` raises, `EncodingLimitError`, and `ClosedError`. The other prompts
                are aborted.
        """
        many = as_prompts(prompts)
        each = params_of_each(params, len(many))
        asked = [self._asked(prompt, own, namespace, None) for prompt, own in zip(many, each, strict=True)]
        streams = [OutputStream(one, self._thread, keeps=self, only_ends=True) for one in asked]
        try:
            self._thread.ask([stream.begin() for stream in streams])
            return [[output async for output in stream][-1] for stream in streams]
        finally:
            for stream in streams:
                stream.abort()

    @known_keywords(params=SamplingParams)
    async def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
    ) -> RequestOutput:
        """Answer a chat, as `Engine.chat` does.

        Raises:
            HybridError: all that `generate` raises.
        """
        prompt = chat_prompt(messages, tools, chat_template_kwargs)
        params = dataclasses.replace(params or self.engine.default_params, parse_response=True)
        return (await self.generate(prompt, params, namespace=namespace))[0]

    async def prewarm(
        self, prompt: Prompt, ttl: float | None = None, *, namespace: str = "", adapter: str | None = None
    ) -> RequestOutput:
        """Compute a prompt, and keep it for those that begin with it, as `Engine.prewarm` does.

        Raises:
            HybridError: all that `generate` raises.
            RequestError: it could not be computed.
        """
        params = SamplingParams(max_new_tokens=0, pin_for=ttl, adapter=adapter)
        return prewarmed((await self.generate([prompt], params, namespace=namespace))[0])

    async def hint(
        self, session: str, hints: Hints, *, namespace: str = "", adapter: str | None = None, tenant: str | None = None
    ) -> bool:
        """Say what is known of a session between its requests, as `Engine.hint` does.

        Raises:
            ArgumentError: these are no hints. ClosedError: the engine was closed.
        """
        call = partial(Engine.hint, session=session, hints=hints, namespace=namespace, adapter=adapter, tenant=tenant)
        return await self.call(call)

    async def abort(self, request_id: str) -> None:
        """Stop a request. Its reader gets a last output with `finish_reason="abort"`.

        Raises:
            RequestError: there is no such request, or it has ended.
        """
        await self._thread.call(lambda engine: self._thread.abort(request_id))

    async def call(self, function: Callable[[Engine], Result]) -> Result:
        """Run a function with the engine in its thread, between two steps: to pin, to audit, to clear. It is not run
        if the task is cancelled before.

            pin = await engine.call(lambda own: own.pin(prompt, ttl=60.0))

        Raises:
            ClosedError: the engine was closed.
            Exception: that of the function.
        """
        result: Result = await self._thread.call(function)
        return result

    def stats(self) -> EngineStats:
        """Return the stats of the engine; prompts that are being encoded count as waiting."""
        return self._thread.stats()

    @property
    def is_running(self) -> bool:
        """Tell whether prompts are taken: the engine was not closed, does not drain, and its thread did not end with an
        error."""
        return self._thread.is_running

    @property
    def has_ended(self) -> bool:
        """Tell whether the engine was closed, or its thread has ended with an error."""
        return self._thread.has_ended

    async def drain(self, timeout: float | None = None) -> bool:
        """Take no prompt from now on (`ClosedError`), and wait until those that were taken have ended. Outputs can be
        read, and `call` and `abort` be used, until `close`.

        Args:
            timeout: seconds to wait, at most; None: as long as it takes.

        Returns:
            Whether all have ended; False: the time is over, and some still run.

        Raises:
            ClosedError: the engine was closed meanwhile.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._thread.drain()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Abort all requests, free the memory of the cache, and wait until the thread has ended.

        Readers get a last output with `finish_reason="abort"`; prompts that the engine did not take yet, and all calls
        from now on, get a `ClosedError`.
        """
        self._thread.close()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()
