"""The forms of structured answers: JSON schemas, regular expressions, grammars, choices.

A grammar decides which tokens may come next. `llguidance` (the extra `structured`) computes them: native code, which
recurses as deep as a form does, and whose time and memory the form decides. So every form has a process of its own
(`hybrid.engine.form_process`), with bounds of both: what it does ends the requests that have this form, and no other.

    FormProcesses   one of a model: starts the first process with the first form, and has it fork the others
    Form            one that was compiled, and its process
    Matcher         one answer that follows it

A process finds what may follow a token while the model computes. Where that is not there when it is needed, its request
waits for it, and no other (`Matcher.was_late`). It depends on the answer alone: hits and cold runs are the same.
"""

from __future__ import annotations

import json
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from copy import copy
from functools import cached_property
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from hybrid.engine.form_process import ACCEPT, ANSWER, ASK, COMPLETE, DROP, FAILED, MASK, OPEN, SIZE
from hybrid.errors import ArgumentError, QueueFullError, RequestError, SamplingError

Numbers = np.ndarray[Any, Any]

COMPILE_SECONDS = 5.0
"""Of a processor's time, to compile a form."""

TOKEN_SECONDS = 1.0
"""Of a processor's time, to find what may follow a token."""

FORM_BYTES = 512 * 2**20
"""Memory of a form, beside that of the tokenizer."""

STACK_BYTES = 64 * 2**20
"""Of a form's process: how deep a form may nest, which recurses there."""

AT_ONCE = 0.02
"""Seconds that the engine waits for what may follow a token. After them the answer's request alone waits."""

MAX_LATE = 10
"""Tokens of a form that are waited for as long as that; for what is late more often nothing is."""

LOW_PRIORITY = 10
"""Of a process that takes longer than usual: those of other forms, and the model, go before it."""

USUAL_SECONDS = 0.1
"""To compile a form."""

MAX_GRAMMARS = 64
"""The number of forms that an engine keeps compiled."""

MAX_FORMS = 96
"""Processes of forms of one model, at once."""

BOUNDS = (
    f"it took more than {COMPILE_SECONDS:g} s of CPU time to compile, {TOKEN_SECONDS:g} s for a token, or "
    f"{FORM_BYTES >> 20} MiB, or nests too deep; make it smaller"
)

aside: ContextVar[Callable[[], Any]] = ContextVar("aside", default=nullcontext)
"""Entered while a thread waits for a form that another process compiles: who has few threads starts another one."""


class LateError(Exception):
    """What may follow an answer is not known yet."""


class CompleteError(Exception):
    """Nothing can follow an answer."""


class FormProcesses:
    """Makes the processes of a model's forms. Its own one is started with the first form, which takes as long as
    llguidance needs for the tokenizer (2 s for 150,000 tokens), and again if it ends.

    Args:
        tokenizer: of transformers.
        vocab_size: of the model; tokens beyond the tokenizer's are never allowed.
        end_tokens: tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_tokens = sorted(end_tokens)
        self._lock = threading.Lock()
        self._forms: weakref.WeakSet[Form] = weakref.WeakSet()
        self._starter: Starter | None = None

    @property
    def are_full(self) -> bool:
        """Tell whether there are as many processes as may be."""
        return len(self._forms) >= MAX_FORMS

    def compile(self, structured: Mapping[str, Any]) -> Form:
        """Compile a form. Other threads may do so meanwhile.

        Args:
            structured: as `SamplingParams.structured`.

        Raises:
            SamplingError: it cannot be used.
            ArgumentError: llguidance is not installed, or cannot use the tokenizer.
            QueueFullError: answers of too many forms are under way.
            RequestError: the process that compiles forms does not start.
        """
        if self.are_full:
            raise QueueFullError(f"structured: answers of {MAX_FORMS} forms are under way; try again later")
        starter, link, pid = self._forked()
        try:
            form = Form(link, pid, structured, starter.vocab_size)
            self._forms.add(form)
            return form
        finally:
            with self._lock:
                starter.fork_ahead()

    def _forked(self) -> tuple[Starter, socket.socket, int]:
        """A process for a form, which waits for it. What ends before it has a form was ended by something else: another
        one is started, once.

        Raises:
            RequestError: that has ended too.
        """
        for num_left in (2, 1, 0):  # one that is there may have ended unseen
            link = None
            try:
                with self._lock:
                    starter = self._starter
                    link = starter.fork() if starter is not None and starter.is_ours else None
                    if starter is None or link is None:  # it is the first one, or the process has ended
                        starter = self._starter = Starter(self._settings)
                        link = starter.fork()
                if link is None:
                    raise ConnectionError("it has ended")
                (pid,) = SIZE.unpack(_read(link, SIZE.size))
                if _can_read(link, 0):  # it says no more before it has a form: it has ended since
                    raise ConnectionError("it has ended")
                return starter, link, pid
            except OSError as error:
                if link is not None:
                    link.close()
                if not num_left:
                    raise RequestError(
                        f"structured: the process that compiles forms did not start: {error}; see the system's log"
                    ) from error
        raise AssertionError

    @cached_property
    def _settings(self) -> bytes:
        """What the first process is given."""
        found = find_spec("llguidance") if sys.modules.get("llguidance", True) else None
        if found is None or found.origin is None:
            raise ArgumentError("structured output needs llguidance: install this package with its extra 'structured'")
        try:
            backend = copy(self._tokenizer.backend_tokenizer)
            backend.no_padding()
            backend.no_truncation()
            written = backend.to_str()
        except Exception as error:
            raise ArgumentError(
                f"structured: this tokenizer cannot be used, it has no tokenizer.json: {error!s:.200}"
            ) from error
        settings = {
            "path": [str(Path(found.origin).parent.parent), *map(os.path.abspath, sys.path)],
            "tokenizer": written,
            "vocab": self._vocab_size,
            "ends": self._end_tokens,
            "stack": STACK_BYTES,
            "memory": FORM_BYTES,
        }
        raw = json.dumps(settings).encode()
        return SIZE.pack(len(raw)) + raw


class Starter:
    """The process that has read the tokenizer, and forks those of forms.

    It is a program by itself, and no copy of this process: nothing that runs here is run in it again.

    Args:
        settings: what it is given.

    Attributes:
        vocab_size: tokens that its masks have.

    Raises:
        ArgumentError: the library cannot use the tokenizer.
        OSError: it cannot be started, or has ended.
    """

    def __init__(self, settings: bytes) -> None:
        control, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("form_process.py"))]
            try:
                process = subprocess.Popen(
                    command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/"
                )
            except OSError:
                control.close()
                raise
        self._control = control
        self._pid = os.getpid()
        self._next: socket.socket | None = None
        weakref.finalize(self, _end, control, process)
        control.sendall(settings)
        (self.vocab_size,) = SIZE.unpack(_read(control, SIZE.size))
        if not self.vocab_size:
            text = _read(control, *SIZE.unpack(_read(control, SIZE.size))).decode(errors="replace")
            raise ArgumentError(f"structured: this tokenizer cannot be used: {text}")
        self.fork_ahead()

    @property
    def is_ours(self) -> bool:
        """Tell whether this process has started it, and no other one, of which this is a fork."""
        return self._pid == os.getpid()

    def fork(self) -> socket.socket | None:
        """A process for a form: the socket on which it is reached. None: the process that forks has ended."""
        self.fork_ahead()
        link, self._next = self._next, None
        return link

    def fork_ahead(self) -> None:
        """Have the next one forked: a form does not wait for that."""
        if self._next is not None:
            return
        self._next, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            except OSError:
                self._next.close()
                self._next = None


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the process: it does where the other side of its socket closes."""
    control.close()
    try:
        process.wait(1)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _read(link: socket.socket, size: int) -> bytes:
    found = link.recv(size, socket.MSG_WAITALL)
    if len(found) < size:
        raise ConnectionError("it has ended")
    return found


def _can_read(link: socket.socket, seconds: float) -> bool:
    """Tell whether something comes within this time, or the other side has closed."""
    poll = select.poll()
    poll.register(link, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Form:
    """A form that was compiled, in a process of its own. After that one thread asks.

    Args:
        link: to the process.
        pid: of the process.
        structured: as `SamplingParams.structured`.
        vocab_size: tokens that a mask has.

    Attributes:
        first: what an answer can begin with.
        num_late: tokens after which it was not known at once what may follow.
        is_lost: the process has ended.

    Raises:
        SamplingError: it cannot be used.
    """

    def __init__(self, link: socket.socket, pid: int, structured: Mapping[str, Any], vocab_size: int) -> None:
        self.num_late: int = 0
        self.is_lost: bool = False
        self._link = link
        self._buffer = bytearray(ANSWER.size + (vocab_size + 31) // 32 * 4)
        self._num_read = 0
        self._asked: deque[tuple[Matcher, int]] = deque()
        self._dropped: deque[int] = deque()
        self._numbers = count(1)
        self._answers: set[int] = set()
        self._pid = pid
        weakref.finalize(self, link.close)
        (kind,) = structured
        given = {"form": structured, "seconds": COMPILE_SECONDS, "token_seconds": TOKEN_SECONDS}
        try:
            raw = json.dumps(given).encode()
        except RecursionError:
            raise SamplingError(f"structured: this {kind} cannot be used: it nests too deep") from None
        try:
            with aside.get()():
                link.sendall(SIZE.pack(len(raw)) + raw)
                if not _can_read(self._link, USUAL_SECONDS):
                    self._lower_priority()
                self.first: State = self._read_state()
        except OSError:
            raise SamplingError(f"structured: this {kind} cannot be used: {BOUNDS}") from None
        if self.first.error is not None:
            raise SamplingError(f"structured: this {kind} cannot be used: {self.first.error}")
        seconds = int(AT_ONCE)
        timeout = struct.pack("ll", seconds, int((AT_ONCE - seconds) * 1e6))
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)

    @property
    def is_used(self) -> bool:
        """Tell whether an answer follows it."""
        return bool(self._answers)

    def add(self) -> int:
        """The number of one more answer. From any thread."""
        number = next(self._numbers)
        self._answers.add(number)
        return number

    def drop(self, number: int) -> None:
        """An answer has ended. From any thread."""
        self._answers.discard(number)
        self._dropped.append(number)

    def ask(self, matcher: Matcher, what: int, value: int, more: bytes = b"") -> None:
        """Ask what may follow an answer. What was asked before is answered before."""
        dropped = b"".join(ASK.pack(DROP, self._dropped.popleft(), 0) for _ in range(len(self._dropped)))
        left = dropped + ASK.pack(what, matcher.number, value) + more
        self._asked.append((matcher, what))
        while left and not self.is_lost:
            try:
                left = left[self._link.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:  # the process may wait for its answers to be read
                self._take(wait=True)
            except OSError:
                self._lose()

    def take(self, matcher: Matcher, *, wait: bool) -> bool:
        """Take answers up to that of a matcher.

        Args:
            wait: for one that is not there, for `AT_ONCE`.

        Returns:
            Whether it is there.
        """
        while matcher.num_asked:
            if not self._take(wait):
                return False
        return True

    def wait(self, seconds: float) -> None:
        """Wait for an answer."""
        _can_read(self._link, seconds)

    def _take(self, wait: bool) -> bool:
        try:
            state = self._read_state(socket.MSG_WAITALL if wait else socket.MSG_DONTWAIT)
        except BlockingIOError:
            if wait:
                self.num_late += 1
                self._lower_priority()
            return False
        except OSError:
            self._lose()
            return True
        matcher, what = self._asked.popleft()
        matcher.answered(what, state)
        return True

    def _lose(self) -> None:
        """The process has ended, and all of its answers with it."""
        self.is_lost = True
        while self._asked:
            matcher, what = self._asked.popleft()
            matcher.answered(what, State(FAILED, None, BOUNDS))

    def _lower_priority(self) -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, self._pid, LOW_PRIORITY)
        except OSError:  # it has ended
            return

    def _read_state(self, how: int = socket.MSG_WAITALL) -> State:
        """Read an answer.

        Raises:
            BlockingIOError: it is not there.
            OSError: there is no process.
        """
        while self._num_read < len(self._buffer):
            num_bytes = self._link.recv_into(memoryview(self._buffer)[self._num_read :], 0, how)
            if not num_bytes:
                raise ConnectionError("it has ended")
            self._num_read += num_bytes
        self._num_read = 0
        kind, num_bytes = ANSWER.unpack_from(self._buffer)
        if kind == OPEN:
            return State(kind, np.frombuffer(bytes(self._buffer), np.int32, offset=ANSWER.size), None)
        text = _read(self._link, num_bytes).decode(errors="replace") if num_bytes else None
        return State(kind, None, text)


class State:
    """What may follow an answer.

    Args:
        kind: `OPEN`, `COMPLETE`: nothing, or `FAILED`.
        mask: a bit for each token, `[ceil(vocab / 32)]` int32; None: not `OPEN`.
        error: why it is not known; None: it is.

    Attributes:
        mask, error: as given.
        is_complete: nothing can follow.
    """

    __slots__ = ("error", "is_complete", "mask")

    def __init__(self, kind: int, mask: Numbers | None, error: str | None) -> None:
        self.is_complete: bool = kind == COMPLETE
        self.mask: Numbers | None = mask
        self.error: str | None = (error or "it failed") if kind == FAILED else None


class Matcher:
    """A form, and the answer up to now.

    Args:
        form: that it follows.

    Attributes:
        number: of the answer, in the form's process.
        num_asked: what was asked of the process and is not answered yet.
        was_late: it was not known at once what may follow the answer, or drafts.
    """

    def __init__(self, form: Form) -> None:
        self.number: int = form.add()
        self.num_asked: int = 0
        self.was_late: bool = False
        self._form: Form | None = form
        self._state = form.first
        self._after_drafts = form.first
        self._drop = weakref.finalize(self, form.drop, self.number)

    def end(self) -> None:
        """The answer has ended: its form's process may end."""
        self._drop()
        self._form = None

    @property
    def is_complete(self) -> bool:
        """Tell whether nothing can follow the answer, as far as that is known."""
        return self._state.is_complete

    @property
    def is_late(self) -> bool:
        """Tell whether it is not known yet what may follow the answer."""
        return self.num_asked > 0 and self._form is not None and not self._form.take(self, wait=False)

    def wait(self, seconds: float) -> None:
        """Wait until it is known what may follow the answer, up to so long."""
        if self._form is not None:
            self._form.wait(seconds)

    def answered(self, what: int, state: State) -> None:
        """What was asked is known."""
        self.num_asked -= 1
        if what == MASK:
            self._after_drafts = state
        else:
            self._state = state

    def accept(self, token: int) -> None:
        """The answer continues with this token. What may follow it is found while other things are done."""
        self._ask(ACCEPT, token)

    def mask(self, drafts: Sequence[int] = ()) -> Numbers:
        """Return which tokens may follow the answer and these drafts: `[ceil(vocab / 32)]` int32, a bit for each token.
        Where a draft is not allowed, no token after it counts, and the mask is that of its place.

        Raises:
            SamplingError: the last token was not allowed, or the form takes too long, or too much memory.
            CompleteError: none may.
            LateError: it is not known yet.
        """
        self._wait()
        own = _mask_of(self._state)
        if not drafts:
            return own
        self._ask(MASK, len(drafts), struct.pack(f"<{len(drafts)}I", *drafts))
        self._wait()
        return _mask_of(self._after_drafts)

    def _wait(self) -> None:
        """Wait for what was asked, the first time that it is late."""
        form = self._form
        if form is not None and not form.take(self, wait=not self.was_late and form.num_late < MAX_LATE):
            self.was_late = True
            raise LateError

    def _ask(self, what: int, value: int, more: bytes = b"") -> None:
        assert self._form is not None
        self.num_asked += 1
        self._form.ask(self, what, value, more)


def _mask_of(state: State) -> Numbers:
    if state.is_complete:
        raise CompleteError
    if state.mask is None:
        raise SamplingError(f"structured: the answer cannot be followed: {state.error}")
    return state.mask


class Grammars:
    """The compiled forms of one engine: the last ones are kept.

    Args:
        processes: of the model.
    """

    def __init__(self, processes: FormProcesses) -> None:
        self._processes = processes
        self._compiled: dict[tuple[str, str], Form] = {}
        self._lock = threading.Lock()  # prompts are encoded in several threads; forms are compiled outside of it

    def matcher(self, structured: Mapping[str, Any], namespace: str) -> Matcher:
        """A matcher at the beginning of an answer.

        Args:
            structured: as `SamplingParams.structured`.
            namespace: a form that is kept is used again within it alone.

        Raises:
            SamplingError: the schema, expression or grammar cannot be used.
            ArgumentError: llguidance is not installed, or cannot use the tokenizer.
            QueueFullError: answers of too many forms are under way.
            RequestError: the process that compiles forms does not start.
        """
        wanted = namespace, json.dumps(dict(structured))  # the order of properties is that of the answer
        with self._lock:
            form = self._compiled.get(wanted)
        if form is None or form.is_lost:
            if self._processes.are_full:  # those that no answer follows end
                with self._lock:
                    self._compiled = {name: own for name, own in self._compiled.items() if own.is_used}
            form = self._processes.compile(structured)
        with self._lock:
            self._compiled[wanted] = form
            while len(self._compiled) > MAX_GRAMMARS:
                del self._compiled[next(iter(self._compiled))]
        return Matcher(form)
