"""Where the tokens of prompts went that were not hits: every one of them has one cause."""

from __future__ import annotations

from enum import StrEnum

from hybrid.doctor.engine import Hit
from hybrid.doctor.past import STEP, Fact, Rewrite
from hybrid.doctor.request import LoggedRequest


class Cause(StrEnum):
    """Why a token was not a hit."""

    STATE_EVICTED = "the state was evicted, its pages were not"
    EVICTED = "evicted"
    TOGETHER = "launched together: another request was computing it"
    ANSWER = "an answer of which no state is kept"
    NO_STATE = "pages are there, and no state was ever put there"
    SHORT = "shorter than a block"
    NAMESPACE = "cached in another namespace, tenant or adapter"
    DATE = Rewrite.DATE.value
    TOOLS = Rewrite.TOOLS.value
    THINKING = Rewrite.THINKING.value
    BEGINNING = Rewrite.BEGINNING.value
    HISTORY = Rewrite.HISTORY.value
    NEW = "seen for the first time"


REMEDIES: dict[Cause, str] = {
    Cause.STATE_EVICTED: "more memory, or an eviction that knows what a state is worth",
    Cause.EVICTED: "more memory, or an eviction that knows what will be used again",
    Cause.TOGETHER: "send one of those that share a beginning first, and the others when it answers",
    Cause.ANSWER: "an engine that keeps a state at the end of an answer",
    Cause.NO_STATE: "an engine that puts states where prompts part",
    Cause.SHORT: "nothing, or smaller blocks: it is less than one block per request",
    Cause.NAMESPACE: "one salt for those who may know of one another's prompts",
    Cause.DATE: "write dates, times and ids at the end of the prompt, not at its beginning",
    Cause.TOOLS: "send the tools in one order: sort them by name",
    Cause.THINKING: "a template that keeps the thinking of earlier turns, or a client that sends it back",
    Cause.BEGINNING: "let auxiliary calls (titles, summaries) begin as the conversation does and ask at the end",
    Cause.HISTORY: "append to the history instead of editing it",
    Cause.NEW: "nothing: no cache could have had it",
}
"""What would help, by cause."""


def causes_of(
    request: LoggedRequest,
    fact: Fact,
    hit: Hit,
    endless: Hit,
    in_turn: Hit | None = None,
    is_endless: bool = True,
) -> dict[Cause, int]:
    """Say where the tokens of a prompt went that were not a hit.

    Args:
        fact: what the traffic says of the prompt.
        hit: of the engine.
        endless: of the same engine with a memory without end: what lies between the two was evicted.
        in_turn: of that one if each request ends before the next begins: what lies beyond `endless` was just being
            computed. None: they do.
        is_endless: False: that engine has much memory, and what it does not know any more was evicted long ago.

    Returns:
        Tokens by cause. Their sum is `request.num_prompt - hit.num_tokens`.
    """
    found: dict[Cause, int] = {}
    at = hit.num_tokens

    def up_to(end: int, cause: Cause) -> None:
        nonlocal at
        if end > at:
            found[cause] = found.get(cause, 0) + end - at
            at = end

    end = request.num_prompt
    up_to(min(hit.num_page_tokens, endless.num_tokens), Cause.STATE_EVICTED)
    up_to(endless.num_tokens, Cause.EVICTED)
    if in_turn is not None:
        up_to(in_turn.num_tokens, Cause.TOGETHER)
        endless = in_turn
    pages = min(endless.num_page_tokens, max(fact.seen, endless.num_tokens))
    up_to(min(pages, max(fact.answer_from, at)), Cause.NO_STATE)
    up_to(pages, Cause.ANSWER)
    if not is_endless:
        up_to(min(fact.seen, end) // STEP * STEP, Cause.EVICTED)
    up_to(min(fact.seen, end), Cause.SHORT)
    up_to(min(fact.elsewhere, end), Cause.NAMESPACE)
    if fact.rewrite is not Rewrite.NONE:
        up_to(min(at + fact.rewritten, end), Cause(fact.rewrite.value))
    up_to(end, Cause.NEW)
    return found
