"""The server: an engine, who may call it, and the way of a request through both."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from secrets import token_bytes
from typing import Any, NamedTuple, Protocol, TypeVar
from uuid import uuid4
from weakref import WeakValueDictionary

from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ClosedError, SamplingError
from hybrid.prompts.answer_parser import template_of
from hybrid.prompts.encode import BYTES_PER_TOKEN, Prompt
from hybrid.prompts.thinking import Thinking
from hybrid.serve.async_engine import AsyncEngine, OutputStream
from hybrid.serve.inbox import OutputCallback
from hybrid.server.adapter_folder import AdapterFolder
from hybrid.server.body import MAX_VALUES, TooManyValuesError
from hybrid.server.call import Call
from hybrid.server.errors import HttpError, failure_of
from hybrid.server.fields import Fields
from hybrid.server.records import Digests, Records, RequestRecord
from hybrid.server.tenants import Tenants
from hybrid.units import BYTES

log: logging.Logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """The limits of a server, beside those of its engine (`EngineConfig`: of requests, and of each tenant's).

    Attributes:
        body: bytes of a body; None: what a prompt may have that the model takes.
        body_seconds: that a body may take to come.
        seconds: that a request may take; None: any.
        tokens: of an answer whose request does not say it.
    """

    body: int | str | None = None
    body_seconds: float = 60.0
    seconds: float | None = None
    tokens: int = 1024

    @property
    def body_bytes(self) -> int | None:
        """`body` as a number of bytes."""
        return None if self.body is None else BYTES.check("--max-body", self.body)


WITH_IMAGES = 64 * 2**20
"""Bytes of a body with images, unless `ServerLimits.body` is given."""

ONE_TEXT, ESCAPED = 8 * 2**20, 6
"""Bytes of a body without images: at least `ONE_TEXT`, which takes no longer to parse than a step, and `ESCAPED` for
each byte of the longest text."""


TURNS = 3
"""Threads in which calls of one tenant are read at once: half of those of an event loop where there are two cores."""

MAX_LOGPROBS = 2**20
"""Log-probabilities of one call, of about 100 bytes each."""

Found = TypeVar("Found")


class Writer(Protocol):
    """Turns the outputs of one call into an API's JSON.

    Attributes:
        id: of the response.
        parts: digests of the parts of the prompt; None: the API says nothing of what changed between prompts.
    """

    id: str
    parts: Digests | None

    def begin(self, streams: Sequence[OutputStream]) -> bytes:
        """The events before any token."""
        ...

    def piece(self, at: int, output: RequestOutput) -> bytes:
        """The events for what is new in an output of the call's prompt number `at`."""
        ...

    def end(self, outputs: Sequence[RequestOutput]) -> bytes:
        """The events after the last outputs of all prompts."""
        ...

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """The response of a call that is no stream."""
        ...

    def failed(self, failure: HttpError) -> bytes:
        """The events that end a stream which fails."""
        ...


class Asked(NamedTuple):
    """What a call asks.

    Attributes:
        prompts: that it has.
        params: of all of them.
        writer: of its API.
        is_stream: the response is a stream of events.
        salt: prompts share what is cached only with others that have the same.
    """

    prompts: Sequence[Prompt]
    params: SamplingParams
    writer: Writer
    is_stream: bool
    salt: str = ""


class Server:
    """An engine behind HTTP.

    Args:
        engine: runs the requests, and refuses those that are too many (`when_full="refuse"`).
        name: of the model, in responses.
        tenants: who may call.
        limits: of requests.
        adapter_folder: below which adapters may be loaded at run time; None: none may.

    Attributes:
        engine, name, tenants, limits, adapter_folder: as given.
        records: what runs and ran.
        created: when the server began, in seconds since the epoch.
        secret: what is shown of salts is keyed by it.
        max_body, max_text: bytes that a body may have, with the data of images and without.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        name: str,
        tenants: Tenants,
        limits: ServerLimits,
        adapter_folder: AdapterFolder | None = None,
    ) -> None:
        self.adapter_folder = adapter_folder
        self.engine = engine
        self.name = name
        self.tenants = tenants
        self.limits = limits
        self.records = Records()
        self.created = int(time.time())
        self.secret: bytes = token_bytes(32)
        self.max_text: int = limits.body_bytes or self._longest_text()
        takes_images = engine.engine.loaded.image_encoder is not None
        self._max_values: int = max(MAX_VALUES, 2 * self.max_model_len)
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self.max_body: int = limits.body_bytes or (WITH_IMAGES if takes_images else self.max_text)

    def _longest_text(self) -> int:
        return min(WITH_IMAGES, max(ONE_TEXT, ESCAPED * BYTES_PER_TOKEN * self.max_model_len))

    @property
    def defaults(self) -> SamplingParams:
        """The model's own parameters."""
        return self.engine.engine.default_params

    @property
    def max_tokens(self) -> int:
        """Tokens of an answer whose request does not say it."""
        return self.limits.tokens

    @property
    def template(self) -> str:
        """The source of the model's chat template; empty: it has none."""
        found = getattr(self.tokenizer, "chat_template", None) or ""
        return "".join(found.values()) if isinstance(found, dict) else found

    @property
    def takes_apart(self) -> bool:
        """Tell whether answers have parts: reasoning, or calls of tools."""
        return bool(self.template) and template_of(self.tokenizer) is not None

    @cached_property
    def thinking(self) -> Thinking:
        """What the model's chat template does about thinking."""
        return Thinking.of(self.tokenizer)

    def with_adapter(self, params: SamplingParams, name: str | None) -> SamplingParams:
        """Parameters for a request that names an adapter as its model."""
        return params if name in (None, self.name) else replace(params, adapter=name)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.engine.engine.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of a prompt and its answer."""
        own: int = self.engine.engine.model.config.max_position_embeddings
        return self.engine.engine.config.max_model_len or own

    async def encode(self, call: Call, prompt: Prompt) -> list[int]:
        """The token ids of a prompt.

        Raises:
            HybridError: it cannot be run.
        """

        def prepare() -> list[int]:
            namespace = call.tenant.namespace
            request = self.engine.engine.prepare(prompt, SamplingParams(max_new_tokens=1), namespace, "encoded")
            return list(request.ids[: request.prompt_len])

        return await self.beside(call, prepare)

    async def beside(self, call: Call, function: Callable[[], Found]) -> Found:
        """Call a function beside the event loop, whatever it takes: a tenant's calls have `TURNS` threads."""
        name = call.tenant.name
        turn = self._turns.get(name)
        if turn is None:
            turn = self._turns[name] = asyncio.Semaphore(TURNS)
        async with turn:
            return await asyncio.to_thread(function)

    async def read(self, call: Call, read: Callable[[Fields, str | None], Found]) -> Found:
        """Read a call's body, within the limits: beside the event loop, unless it is small.

        Args:
            read: reads the fields of the body, and gets the model that it names.

        Raises:
            HttpError: the body cannot be used, or it names another model.
        """
        body = await call.body(self.max_body, self.max_text, self._max_values, self.limits.body_seconds)

        def read_whole() -> Found:
            try:
                values = body.json()
            except TooManyValuesError:
                text = (
                    f"the body has more than {self._max_values} values, where a list, an object or a name counts as "
                    "four; send less"
                )
                raise HttpError(413, text, code="body_too_large") from None
            except ValueError as error:
                text = f"the body cannot be read as JSON: {error!s:.200}"
                raise HttpError(400, text, code="invalid_json") from None
            fields = Fields(values)
            model = fields.text("model")
            self.check_model(model)
            return read(fields, model)

        return await self.beside(call, read_whole) if call.is_large else read_whole()

    def check_model(self, name: str | None) -> None:
        """Refuse a request to another model.

        Raises:
            HttpError: there is no such model.
        """
        if name is not None and name not in (self.name, *self.engine.engine.adapters):
            text = f"the model {name!r:.100} is not served here; this server has {self.name!r}"
            raise HttpError(404, text, "model", "model_not_found")

    async def answer(self, call: Call, read: Callable[[Server, Call, Fields, str | None], Asked]) -> None:
        """Answer a call.

        Args:
            read: reads what the fields of the body ask, and the model that they name.

        Raises:
            HttpError: before anything of the response was sent.
        """
        tenant = call.tenant

        def read_asked(fields: Fields, model: str | None) -> Asked:
            fields.offer("session_id", call.headers.get(b"x-session-id", b"").decode("latin-1"))
            asked = read(self, call, fields, model)
            return asked._replace(params=replace(asked.params, tenant=tenant.name)) if tenant.name else asked

        prompts, params, writer, is_stream, salt = await self.read(call, read_asked)
        self._check_number(len(prompts))
        self._check_logprobs(len(prompts), params)
        namespace = tenant.namespace_of(salt)
        records = [
            RequestRecord(f"{writer.id}-{at}" if at else writer.id, tenant, call.path) for at in range(len(prompts))
        ]
        for record in records:
            record.parts = writer.parts
            self.records.add(record)
        reading = CallReader(records)
        leaving = asyncio.create_task(reading.watch(call))
        timer = None
        if self.limits.seconds is not None:
            timer = asyncio.get_running_loop().call_later(self.limits.seconds, reading.expire, self.limits.seconds)
        try:
            streams = await self.engine.submit_all(prompts, params, namespace=namespace)
            reading.begin(streams)
            if is_stream:
                await self._stream(call, streams, writer, reading)
            else:
                outputs = await asyncio.gather(*(reading.last(at, stream) for at, stream in enumerate(streams)))
                if not reading.has_left:
                    await call.respond(writer.whole(outputs), headers={"x-request-id": writer.id})
        except Exception as error:
            reading.error = error
            if not reading.has_left:
                raise
        finally:
            leaving.cancel()
            if timer is not None:
                timer.cancel()
            reading.abort()
            for record in records:
                state = (record.output.finish_reason if record.output is not None else None) or "abort"
                self.records.end(record, state, reading.reason(record) if state in ("abort", "error") else "")

    def _check_number(self, num_prompts: int) -> None:
        """Refuse calls with more prompts than the engine ever takes: to try again later would not help."""
        config = self.engine.engine.config
        if config.max_waiting is not None and num_prompts > config.max_num_seqs + config.max_waiting:
            text = f"a call may have {config.max_num_seqs + config.max_waiting} prompts here; got {num_prompts}"
            raise HttpError(400, text, "prompt", "too_many_prompts")

    def _check_logprobs(self, num_prompts: int, params: SamplingParams) -> None:
        """Refuse answers whose log-probabilities would fill the memory: an output has all of its answer's."""
        if params.logprobs is None:
            return
        length = min(params.max_new_tokens, self.max_model_len)
        wanted = num_prompts * params.n * length * (params.logprobs + 1)
        if wanted > MAX_LOGPROBS:
            text = f"a call may have {MAX_LOGPROBS} log-probabilities here, and this one asks for up to {wanted}: "
            raise HttpError(
                400, text + "send a smaller max_tokens, n or number of them", "logprobs", "too_many_logprobs"
            )

    async def _stream(self, call: Call, streams: list[OutputStream], writer: Writer, reading: CallReader) -> None:
        await call.begin_events({"x-request-id": writer.id})
        if begin := writer.begin(streams):
            await call.send(begin)

        async def pass_on(at: int, stream: OutputStream) -> RequestOutput:
            def pass_piece(output: RequestOutput) -> asyncio.Future[None] | None:
                return call.send_now(events) if (events := writer.piece(at, output)) else None

            return await reading.last(at, stream, pass_piece)

        try:
            if len(streams) == 1:
                outputs = [await pass_on(0, streams[0])]
            else:
                outputs = await asyncio.gather(*(pass_on(at, stream) for at, stream in enumerate(streams)))
        except Exception as error:
            reading.error = error
            if not reading.has_left:
                failure = failure_of(error)
                if failure.status == 500:
                    log.exception("%s failed", writer.id)
                await call.send(writer.failed(failure))
        else:
            await call.send(writer.end(outputs))
        await call.end()


class CallReader:
    """Reads the outputs of one call's prompts, until they end, its client leaves, or its time is over.

    Args:
        records: of the prompts.

    Attributes:
        streams: of the prompts that the engine has.
        has_left: the client left.
        failure: why it ends early otherwise; None: it does not.
        error: that ended the call; None: none did.
    """

    def __init__(self, records: list[RequestRecord]) -> None:
        self._records = records
        self.streams: list[OutputStream] = []
        self.has_left: bool = False
        self.failure: HttpError | None = None
        self.error: Exception | None = None

    def begin(self, streams: list[OutputStream]) -> None:
        """The engine has the prompts: read their streams, or abort them where the call has ended meanwhile."""
        self.streams = streams
        if self.has_left or self.failure is not None:
            self.abort()

    def abort(self) -> None:
        """Abort what has not ended."""
        for stream in self.streams:
            stream.abort()

    def reason(self, record: RequestRecord) -> str:
        """Why a request was aborted or failed, without any text of it: texts of errors may have some."""
        if self.has_left:
            return "the client left"
        if self.failure is not None:
            return self.failure.message
        if record.output is not None and record.output.finish_reason == "error":
            return f"an error: {record.output.error_code or 'internal'}"
        if self.error is None:
            return "the server is ending"
        failure = failure_of(self.error)
        return f"refused: {failure.code or failure.kind}" if failure.status < 500 else failure.kind

    async def watch(self, call: Call) -> None:
        """Abort everything when the client leaves."""
        await call.left()
        self.has_left = True
        self.abort()

    def expire(self, seconds: float) -> None:
        """Abort everything: its time is over."""
        self.failure = HttpError(504, f"the request took more than {seconds:g} seconds, which is this server's limit")
        self.abort()

    async def last(self, at: int, stream: OutputStream, passed: OutputCallback | None = None) -> RequestOutput:
        """The last output of a prompt.

        Args:
            at: number of the prompt.
            passed: takes each output.

        Raises:
            HttpError: the request failed, or its time is over, or the client left.
        """
        record = self._records[at]

        def take(output: RequestOutput) -> asyncio.Future[None] | None:
            record.output = output
            return passed(output) if passed is not None else None

        output = await stream.pass_on(take)
        if output is not None:
            record.output = output
            if output.finish_reason != "error" and passed is not None and (waiting := passed(output)) is not None:
                await waiting
        if self.failure is not None:
            raise self.failure
        if output is None or output.finish_reason in (None, "abort"):
            raise failure_of(ClosedError())
        if output.finish_reason == "error":
            status = 400 if output.error_code == SamplingError.code else 500  # a form that cannot be followed
            raise HttpError(status, f"the request failed: {output.error}", code=output.error_code)
        return output


def new_id(prefix: str) -> str:
    """An id that nothing else has."""
    return f"{prefix}{uuid4().hex[:24]}"
