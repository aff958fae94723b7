"""Explanations of hits: how much of a prompt was cached, and why not more."""

from dataclasses import dataclass

from hybrid.key import Key
from hybrid.tiers.tier import Restored
from hybrid.tree.node import Match, PrefixHistory
from hybrid.tree.tree import Tree

LEFT_OUT = "what was cached gave NaN or infinity, and is left out"
"""Why a request that is computed once more, without the cache, has no hit."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """An explanation of how much of a prompt was cached, and why not more.

    Attributes:
        asked: tokens of the prompt.
        page_hit: tokens whose pages are cached.
        usable_hit: tokens that are not computed: the position of the deepest checkpoint.
        reason: why not more, in a few words.
        restored: what of it came from host memory or disk, and why not more; None: nothing was there.
    """

    asked: int
    page_hit: int
    usable_hit: int
    reason: str
    restored: Restored | None = None

    def __str__(self) -> str:
        text = f"{self.usable_hit} of {self.asked} tokens cached, pages up to {self.page_hit}: {self.reason}"
        return f"{text} ({self.restored})" if self.restored is not None else text


def explain(tree: Tree, key: Key, limit: int, match: Match, past: PrefixHistory) -> Explanation:
    """Explain a match.

    Args:
        limit: how many tokens of the key the match could have used.
        past: what the tree has had of them (`Tree.recall`).
    """
    reason = _reason(tree, key, limit, match, past)
    if tree.guard is not None and tree.guard.is_on and "evicted" in reason:
        reason += "; LRU decides now, which would have found more lately than the policy"
    return Explanation(len(key), match.num_page_tokens, match.num_tokens, reason)


def explain_now(tree: Tree, key: Key, limit: int) -> Explanation:
    """Explain the hit that a request would have now. Changes nothing."""
    found = tree.peek(key, limit)
    return explain(tree, key, limit, found, tree.recall(key, found, limit))


def not_started(num_tokens: int) -> Explanation:
    """Explain a prompt that waits."""
    return Explanation(num_tokens, 0, 0, "not started yet")


def cache_off(key: Key) -> Explanation:
    """Explain a hit of a cache that keeps nothing."""
    return Explanation(len(key), 0, 0, "the cache is disabled")


def _reason(tree: Tree, key: Key, limit: int, match: Match, past: PrefixHistory) -> str:
    pages, usable, grid = match.num_page_tokens, match.num_tokens, tree.grid
    if len(key) < grid:
        return f"a hit ends at a multiple of {grid}, and the prompt is shorter"
    if not tree.knows(key.namespace) and not past.was_evicted:
        return "nothing is cached in this namespace" if tree.num_pages else "the cache is empty"
    if match.branching_len is not None:
        lost = max((position for position in past.gone if position <= pages), default=None)
        if lost is None:
            why = f"no checkpoint between {usable} and {pages}"
        elif past.gone[lost].created:
            why = f"the checkpoint between {usable} and {pages} was evicted"
        else:
            why = f"a checkpoint between {usable} and {pages} was not admitted"
        return f"{why}; one is captured at {match.branching_len}"
    if pages < limit // tree.page_size * tree.page_size:
        if past.was_evicted:
            return f"the tokens after {pages} were evicted"
        return f"the tokens after {pages} are new" if pages else "this prompt is new"
    if grid == 1:
        rest = len(key) - usable
        return f"all but the last {f'{rest} tokens' if rest > 1 else 'token'}, which every run computes"
    if len(key) % grid == 0 and usable == len(key) - grid:
        return f"capped at {usable}, the last multiple of {grid} that leaves a token to compute"
    return f"all up to the last multiple of {grid}"
