"""The program of the processes that compile forms and follow answers; see `hybrid.engine.forms`, which starts it.

The first process reads the tokenizer. It forks one for each form, with bounds of memory and time: what a form does to
the library's native code ends that process alone. Nothing of this package is imported, so that it starts at once.
"""

import gc
import json
import os
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

SIZE = struct.Struct("<I")
ASK = struct.Struct("<III")
"""What is asked (`ACCEPT`, `MASK` or `DROP`), the number of the answer, and a token, or how many follow."""

ACCEPT, MASK, DROP = range(3)

ANSWER = struct.Struct("<II")
"""One of the numbers below, and the bytes of a text after the mask."""

OPEN, COMPLETE, FAILED = range(3)

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": r",[ ]?", "key_separator": r":[ ]?"}
"""JSON is compact: white space costs tokens. A blank may follow commas and colons, as models write it."""

UNFORCED = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @form'}
"""The grammar around every other. Where only one text can follow, llguidance would allow only the token that the
tokenizer begins it with: for the name of a control token that is the control token, which is not the text."""


def _choice(texts: list[str]) -> dict[str, Any]:
    return {"lark_grammar": f"start: {' | '.join(json.dumps(text, ensure_ascii=False) for text in texts)}"}


def _first(grammars: str) -> dict[str, Any]:
    """The grammar that llguidance has made of something else."""
    found: dict[str, Any] = json.loads(grammars)["grammars"][0]
    return found


USUAL = {"json_schema": {"properties": {"a": {"type": "string"}, "b": {"items": {"type": "integer"}}}}}
"""A form like many others."""

COMPILERS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "json_schema": lambda matcher, schema: _first(matcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)),
    "json_object": lambda matcher, _: _first(
        matcher.grammar_from_json_schema({"type": "object"}, overrides=JSON_OPTIONS)
    ),
    "regex": lambda matcher, regex: _first(matcher.grammar_from_regex(regex)),
    "grammar": lambda _, lark: {"lark_grammar": lark},
    "choice": lambda _, texts: _choice(texts),
}
"""For each key of `SamplingParams.structured`: from its value to a grammar of llguidance."""


def read(link: socket.socket, size: int) -> bytes:
    """Read a number of bytes; the process ends where the other side has closed."""
    found = bytearray()
    while len(found) < size:
        piece = link.recv(size - len(found), socket.MSG_WAITALL)
        if not piece:
            os._exit(0)
        found += piece
    return bytes(found)


def read_text(link: socket.socket) -> str:
    """Read a text, after its size."""
    return read(link, *SIZE.unpack(read(link, SIZE.size))).decode()


class FormProcess:
    """One form in a process of its own.

    Args:
        library: llguidance.
        tokenizer: of llguidance.
        link: to who asks.
    """

    def __init__(self, library: Any, tokenizer: Any, link: socket.socket) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._link = link
        self._no_mask = bytes((tokenizer.vocab_size + 31) // 32 * 4)
        self._answers: dict[int, Any] = {}  # matchers by the number of the answer

    def compile(self, structured: dict[str, Any]) -> Any:
        """The matcher of a form.

        Raises:
            ValueError: it cannot be used.
        """
        ((kind, value),) = structured.items()
        form = COMPILERS[kind](self._library.LLMatcher, value) | {"name": "form"}
        limits = self._library.LLParserLimits(verbose_errors=False)
        grammars = json.dumps({"grammars": [UNFORCED, form]})
        matcher = self._library.LLMatcher(self._tokenizer, grammars, log_level=0, limits=limits)
        if matcher.is_error():
            raise ValueError(" ".join(str(matcher.get_error()).split()))
        return matcher

    def begin(self, structured: dict[str, Any], seconds: float) -> Any:
        """Compile the form in so much of the processor's time, and say what an answer can begin with, or why it cannot
        be used. Returns its matcher; None: it cannot."""
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            compiled = self.compile(structured)
        except (ValueError, RecursionError, MemoryError) as error:
            self._say(FAILED, self._no_mask, f"{error!s:.500}")
            return None
        self._say_state(compiled.deep_copy())
        return compiled

    def serve(self, compiled: Any, seconds: float) -> None:
        """Answer what is asked, until the other side closes.

        Args:
            compiled: the matcher of an answer that has not begun.
            seconds: of the processor's time, for each token.
        """
        while True:
            what, number, count = ASK.unpack(read(self._link, ASK.size))
            if what == DROP:
                self._answers.pop(number, None)
                continue
            signal.setitimer(signal.ITIMER_PROF, seconds)
            matcher = self._answers.get(number)
            if matcher is None:
                matcher = self._answers[number] = compiled.deep_copy()
            if what == ACCEPT:
                matcher.consume_token(count)
                self._say_state(matcher)
            else:
                drafts = struct.unpack(f"<{count}I", read(self._link, 4 * count))
                num_allowed = matcher.try_consume_tokens(list(drafts))
                self._say_state(matcher, num_allowed)

    def _say_state(self, matcher: Any, num_drafts: int = 0) -> None:
        """Say what may follow an answer, or that nothing can. Its last `num_drafts` tokens are taken back then."""
        if matcher.is_stopped() and not matcher.is_error():
            if num_drafts:
                matcher.rollback(num_drafts)
            self._say(COMPLETE, self._no_mask)
            return
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            self._say(FAILED, self._no_mask, " ".join(str(matcher.get_error()).split())[:300])
            return
        if num_drafts:
            matcher.rollback(num_drafts)
        self._say(OPEN, mask[: len(self._no_mask)])  # it may have room for one token more

    def _say(self, state: int, mask: bytes, text: str = "") -> None:
        raw = text.encode()
        self._link.sendall(ANSWER.pack(state, len(raw)) + mask + raw)


def main() -> None:
    """Read the tokenizer, then fork a process for each socket that comes."""
    control = socket.socket(fileno=0)
    given = json.loads(read_text(control))
    sys.path[:] = given["path"]
    for ignored in (signal.SIGINT, signal.SIGCHLD):  # keys that end the program; processes that have ended
        signal.signal(ignored, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_STACK)
    stack = given["stack"] if most == resource.RLIM_INFINITY else min(most, given["stack"])
    resource.setrlimit(resource.RLIMIT_STACK, (stack, most))  # the library recurses: the main thread's stack grows
    try:
        import llguidance

        tokenizer = llguidance.LLTokenizer(given["tokenizer"], n_vocab=given["vocab"], eos_token=given["ends"] or None)
    except BaseException as error:  # a panic of the library is no Exception
        text = f"{error!s:.300}".encode()
        control.sendall(SIZE.pack(0) + SIZE.pack(len(text)) + text)
        return
    control.sendall(SIZE.pack(tokenizer.vocab_size))
    memory = given["memory"]
    del given
    gc.disable()
    gc.freeze()  # what is shared with the processes of forms stays so
    while (came := socket.recv_fds(control, 1, 1))[0]:
        (link,) = came[1]
        if os.fork():
            os.close(link)
            continue
        try:
            control.close()
            own = socket.socket(fileno=link)
            _serve_form(FormProcess(llguidance, tokenizer, own), own, memory)
        finally:
            os._exit(1)


def _serve_form(process: FormProcess, link: socket.socket, memory: int) -> None:
    """Compile the form that comes, and follow its answers."""
    with open("/proc/self/oom_score_adj", "w") as file:  # where memory is short this process ends first
        file.write("1000")
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[5]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_DATA, (used + memory,) * 2)
    process.compile(USUAL).deep_copy().compute_bitmask()  # pages are copied that the first form writes
    link.sendall(SIZE.pack(os.getpid()))
    given = json.loads(read_text(link))
    compiled = process.begin(given["form"], given["seconds"])
    if compiled is not None:
        process.serve(compiled, given["token_seconds"])


if __name__ == "__main__":
    main()
