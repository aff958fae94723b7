"""Why a hit was what it was."""

from dataclasses import dataclass

from hybrid.key import Key
from hybrid.tree.node import Match
from hybrid.tree.tree import Tree


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a request did not have to compute so many tokens, and why not more.

    Attributes:
        asked: tokens of the prompt.
        page_hit: tokens whose pages were there.
        usable_hit: tokens that need not be computed: a checkpoint was there.
        reason: why not more, in one sentence.
    """

    asked: int
    page_hit: int
    usable_hit: int
    reason: str

    def __str__(self) -> str:
        return f"{self.asked} tokens asked, pages to {self.page_hit}, usable to {self.usable_hit}: {self.reason}"


def explain(tree: Tree, key: Key, limit: int, match: Match) -> Explanation:
    """Explain a match right after it was made.

    Args:
        limit: how many tokens of the key the match could have used.
    """
    return Explanation(len(key), match.num_page_tokens, match.num_tokens, _reason(tree, key, limit, match))


def cache_off(key: Key) -> Explanation:
    """The explanation of a cache that keeps nothing."""
    return Explanation(len(key), 0, 0, "the cache is off")


def _reason(tree: Tree, key: Key, limit: int, match: Match) -> str:
    pages, usable, grid = match.num_page_tokens, match.num_tokens, tree.grid
    if not tree.knows(key.namespace) and not tree.was_evicted(key, match):
        return "nothing is kept in this namespace" if tree.num_pages else "the cache is empty"
    if match.branching_len is not None:
        lost = tree.lost_checkpoint(match)
        if lost is None:
            why = "pages but no checkpoint there"
        elif lost.created:
            why = "the checkpoint there was evicted"
        else:
            why = "a checkpoint there was not worth its room"
        return f"{why}, between {usable} and {pages}; one is put at {match.branching_len} now"
    if pages < limit // tree.page_size * tree.page_size:
        if tree.was_evicted(key, match):
            return f"what follows {pages} was here and has been evicted"
        return f"first sight of what follows {pages}" if pages else "first sight of this prompt"
    if len(key) % grid == 0 and usable == len(key) - grid:
        return f"capped at {usable}, the last multiple of {grid} that leaves one token to compute"
    return f"all of it but what follows the last multiple of {grid}"
