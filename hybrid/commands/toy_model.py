"""Stand-ins that only tests, stress and parity use: a model of arithmetic, and a drafter that lies.

The model's states and pages have contents that can be checked, and it computes nothing else.

The state of a sequence is the CRC-32 of its key, and a page holds its part of the key. So the state depends on
every token of the prefix, as that of linear attention does; a pass that reads a wrong page or a wrong state slot is
noticed; and the right answer to a prompt is known without running it.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

from tokenizers import Tokenizer, decoders, models

from hybrid.engine.branches import TreePart
from hybrid.engine.request import Request
from hybrid.engine.results import Result
from hybrid.engine.sampler import NO_TOKEN
from hybrid.engine.step import Part, Step
from hybrid.key import TOKEN_BYTES, Key
from hybrid.memory.copies import Contents
from hybrid.memory.pool import EMPTY_STATE
from hybrid.prompts.images import ImagePrompt, Media
from hybrid.speculation.drafter import Drafter, History
from hybrid.speculation.drafts import Drafts, accepted
from hybrid.units import ceil_div

VOCAB_SIZE = 50
TOKENS = [Key.of([token]).ids for token in range(VOCAB_SIZE)]
"""Each token as a part of a key."""

CONFIG = SimpleNamespace(vocab_size=VOCAB_SIZE, max_position_embeddings=100_000, hidden_size=1)


def text_of(token: int) -> str:
    """The text of a token: one character."""
    return chr(ord("A") + token)


def toy_tokenizer() -> Any:
    """Make as much of a tokenizer of transformers as the text of an answer needs."""
    vocab = {text_of(token): token for token in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=text_of(0)))
    tokenizer.decoder = decoders.Fuse()
    return SimpleNamespace(backend_tokenizer=tokenizer)


def answer_to(prompt: list[int] | ImagePrompt, count: int, page_size: int) -> list[int]:
    """The first `count` tokens of the right answer to a prompt."""
    if isinstance(prompt, ImagePrompt):
        media, ids = Media.of(prompt, CONFIG.hidden_size, page_size), array("i", prompt.token_ids)
        for _ in range(count):
            ids.append(zlib.crc32(media.key(ids, "").ids) % VOCAB_SIZE)
        return ids[len(prompt.token_ids) :].tolist()
    state, tokens = zlib.crc32(Key.of(prompt).ids), []
    for _ in range(count):
        token = state % VOCAB_SIZE
        tokens.append(token)
        state = zlib.crc32(TOKENS[token], state)
    return tokens


class ToyPlan(NamedTuple):
    """The work of a pass.

    Attributes:
        parts: of the step.
        chosen: the tokens of the pass before, of requests that may continue from them.
    """

    parts: list[Part]
    chosen: Mapping[Request, int]


@dataclass(frozen=True)
class ToyPass:
    """A pass whose results are known."""

    parts: list[Part]
    known: list[Result]

    @property
    def chosen(self) -> Mapping[Request, int]:
        """The token of each request that has one."""
        pairs = zip(self.parts, self.known, strict=True)
        return {part.request: result.tokens[0] for part, result in pairs if result.tokens}

    def results(self) -> list[Result]:
        """One result per part."""
        return self.known


class ToyRunner:
    """Computes steps with the toy model, and moves the contents of its memory: a `Runner`, and a `Mover` that also
    reads and writes.

    Args:
        page_size: tokens per page.
        is_broken: called for every part; True: its pass yields NaN.
        transfer: called whenever contents are read or written for a tier; it may raise.

    Attributes:
        states: the contents of the state slots that were written; None: NaN.
        wrong_contents: number of parts that read a page or a state with other contents than those of their tokens.
    """

    def __init__(
        self, page_size: int, is_broken: Callable[[], bool], transfer: Callable[[], None] = lambda: None
    ) -> None:
        self._transfer = transfer
        self.states: dict[int, int | None] = {EMPTY_STATE: 0}
        self.wrong_contents: int = 0
        self._pages: dict[int, bytes] = {}
        self._page_size = page_size
        self._page_bytes = page_size * TOKEN_BYTES
        self._is_broken = is_broken

    def plan(self, step: Step, before: ToyPass | None) -> ToyPlan:
        """The parts of the step, and the tokens that they may continue from."""
        return ToyPlan(step.parts, before.chosen if before is not None else {})

    def launch(self, plan: ToyPlan) -> ToyPass:
        """Compute a step."""
        return ToyPass(plan.parts, [self._compute(part, plan.chosen) for part in plan.parts])

    def _compute(self, part: Part, chosen: Mapping[Request, int]) -> Result:
        lease, start = part.lease, part.start * TOKEN_BYTES
        if part.num_unknown and part.request not in chosen:
            return Result(True, (NO_TOKEN,))  # there is no token that it could continue from: nothing is written
        ids = _keyed(part, [chosen[part.request]] if part.num_unknown else [])
        state = self.states.get(lease.read_slot)
        is_broken = self._is_broken()
        self._write_pages(part, ids, lease.block_table, part.start)
        if part.drafts is not None:
            for number, path in enumerate(part.paths):
                keyed = _keyed(part, [part.drafts.tokens[at] for at in path])
                if number == 0 or not isinstance(part, TreePart):
                    self._write_pages(part, keyed, lease.block_table, part.end)
                else:  # the page of the first draft is copied
                    table = part.branches.table(number, lease.block_table)
                    self._write_pages(part, keyed, table, part.end // self._page_size * self._page_size)
        is_spoiled = state is None and lease.read_slot == lease.front  # the pass before gave NaN
        is_wrong = state != zlib.crc32(ids[:start]) and not is_spoiled
        self.wrong_contents += self._read_pages(part) != ids or is_wrong
        for checkpoint in lease.captured:
            if part.start < checkpoint.num_tokens <= part.end:
                piece = ids[start : checkpoint.num_tokens * TOKEN_BYTES]
                self.states[checkpoint.slot] = None if is_broken else _advance(state, piece)
        after = None if is_broken else _advance(state, ids[start:])
        slot = lease.back if part.swaps else lease.front
        assert slot is not None
        self.states[slot] = after
        if part.drafts is not None and after is not None:
            return self._verify(part, part.drafts, after, len(ids))
        return Result(after is not None, (after % VOCAB_SIZE,) if part.samples and after is not None else ())

    def _verify(self, part: Part, drafts: Drafts, state: int, start: int) -> Result:
        """Accept drafts, and keep the states after them as `hybrid.engine.results` says. The tokens known before
        them have `start` bytes of the key."""
        states = [zlib.crc32(_keyed(part, tokens)[start:], state) for tokens in drafts.after()]
        sampled = [each % VOCAB_SIZE for each in states]
        path = accepted(drafts, sampled, lambda token: part.request.is_end(token, frozenset()))
        kept = [states[0], *(states[at + 1] for at in path)]
        front, back = (part.lease.back, part.lease.front) if part.swaps else (part.lease.front, part.lease.back)
        assert front is not None
        boundary = part.boundary_before(part.end + len(path))
        if boundary is None:
            self.states[front] = kept[-1]
        else:
            assert back is not None
            self.states[front], self.states[back] = kept[boundary - part.end], kept[-1]
        return Result(True, tuple(sampled[at + 1] for at in (-1, *path)), accepted=path)

    def _write_pages(self, part: Part, ids: bytes, table: array[int], start: int) -> None:
        """Write the tokens of a key from `start` on to those pages of a table that are the lease's own."""
        size, first = self._page_bytes, start * TOKEN_BYTES
        for at in range(max(first // size, part.lease.num_shared), ceil_div(len(ids), size)):
            begin = max(first - at * size, 0)
            self._pages[table[at]] = self._pages.get(table[at], b"")[:begin] + ids[at * size + begin : (at + 1) * size]

    def _read_pages(self, part: Part) -> bytes:
        pages = part.lease.block_table[: ceil_div(part.end * TOKEN_BYTES, self._page_bytes)]
        return b"".join([self._pages.get(page, b"") for page in pages])[: part.end * TOKEN_BYTES]

    # The mover

    def page_layout(self) -> str:
        """Describe what a page holds."""
        return "token ids"

    def checkpoint_layout(self) -> str:
        """Describe what a checkpoint holds."""
        return "a CRC of token ids"

    def read_page(self, page: int) -> bytes:
        """The contents of a page."""
        self._transfer()
        return self._pages.get(page, b"")

    def read_checkpoint(self, slot: int) -> bytes:
        """The contents of a state slot."""
        self._transfer()
        state = self.states.get(slot)
        return b"" if state is None else state.to_bytes(4, "little")

    def write_page(self, page: int, contents: Contents) -> None:
        """Write what `read_page` has read."""
        self._pages[page] = bytes(contents)
        self._transfer()

    def write_checkpoint(self, slot: int, contents: Contents) -> None:
        """Write what `read_checkpoint` has read."""
        self.states[slot] = int.from_bytes(contents, "little") if contents else None
        self._transfer()

    def move_pages(self, moves: dict[int, int]) -> None:
        """Copy each page (key) to its new place (value). No place is both."""
        for source, target in moves.items():
            self._pages[target] = self._pages.get(source, b"")

    def move_states(self, moves: dict[int, int]) -> None:
        """Copy each state slot (key) to its new place (value). No place is both."""
        for source, target in moves.items():
            self.states[target] = self.states.get(source)


def _keyed(part: Part, drafts: Sequence[int]) -> bytes:
    """The key of the tokens of a request up to the end of a part, and of drafts after them."""
    ids, media = part.request.ids[: part.end] + array("i", drafts), part.request.media
    return ids.tobytes() if media is None else media.key(ids, "").ids


def _advance(state: int | None, ids: bytes) -> int | None:
    return None if state is None else zlib.crc32(ids, state)


Proposal = tuple[Sequence[int], Sequence[int]]


def right_in_the_toy_model(history: History, limit: int) -> list[int]:
    """Compute what the toy model answers."""
    state, tokens = zlib.crc32(history.key().ids), []
    for _ in range(limit):
        tokens.append(state % VOCAB_SIZE)
        state = zlib.crc32(TOKENS[tokens[-1]], state)
    return tokens


class Liar(Drafter):
    """Right, wrong and half-right chains and trees, and what no drafter may return: too many tokens, tokens outside the
    vocabulary, brothers that are equal, circles, other types, exceptions.

    Args:
        seed: of its choices.
        vocab_size: of the model.
        right: what comes next, as far as it is known.
    """

    def __init__(self, seed: int, vocab_size: int, right: Callable[[History, int], list[int]]) -> None:
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self._right = right

    @property
    def name(self) -> str:
        """What a log says of its drafts."""
        return "that is wrong on purpose"

    def propose(self, history: History, limit: int) -> Proposal:
        """Anything."""
        rng = self._rng
        right = self._right(history, limit)
        wrong = [rng.randrange(self._vocab_size) for _ in range(limit)]
        half = [rng.choice(pair) for pair in zip(right, wrong, strict=False)]
        chosen: list[int] = rng.choice((right, right, wrong, half))
        chain = range(-1, len(chosen) - 1)
        lie = rng.randrange(15)
        if lie == 0:
            raise RuntimeError("the drafter fails")
        return {
            1: ([], []),
            2: (chosen * 9, range(-1, 9 * len(chosen) - 1)),
            3: ([*chosen, self._vocab_size], range(-1, len(chosen))),
            4: ([*chosen, *chosen], [*chain, *chain]),
            5: (chosen, range(len(chosen))),
            6: (chosen, [*chain, 5]),
            7: ([float(token) for token in chosen], chain),
            8: ([*wrong, *chosen], [*range(-1, len(wrong) - 1), *(parent + len(wrong) for parent in chain)]),
            9: self._branched(right[: limit // 2], wrong),
            10: self._branched(right[: limit // 2], wrong),
            11: (wrong, [rng.randrange(-1, at) if at else -1 for at in range(limit)]),
        }.get(lie, (chosen, chain))  # type: ignore[return-value]

    @staticmethod
    def _branched(right: list[int], wrong: list[int]) -> Proposal:
        """A tree in which a wrong token comes before each right one."""
        tokens: list[int] = []
        parents: list[int] = []
        last = -1
        for good, bad in zip(right, wrong, strict=False):
            tokens += [bad, good]
            parents += [last, last]
            last = len(tokens) - 1
        return tokens, parents
