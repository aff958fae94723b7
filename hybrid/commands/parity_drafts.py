"""The lines of `hybrid parity` on drafts: right, wrong or absurd, they change no token and no bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product

from hybrid.commands.judge import ANSWER, Check, Judge
from hybrid.commands.liar import Liar
from hybrid.engine.output import RequestOutput
from hybrid.engine.sampling_params import SamplingParams
from hybrid.speculation.config import SpeculationConfig
from hybrid.speculation.drafter import Drafter, History

SAMPLED = replace(ANSWER, temperature=1.2, top_p=0.9, seed=3)

MODES = {"greedy": ANSWER, "sampled": SAMPLED}
"""How answers with drafts are chosen."""


class Known(Drafter):
    """Drafts the known answers to prompts, every n-th token of them replaced by another.

    Args:
        answers: by prompt.
        wrong_every: n; 0: none is wrong.
        stride: of three calls it drafts in this many.
        as_tree: a wrong token comes before each token of the answer, and one follows it.
    """

    def __init__(
        self,
        answers: dict[tuple[int, ...], list[int]],
        wrong_every: int = 0,
        stride: int = 3,
        as_tree: bool = False,
    ) -> None:
        self._as_tree = as_tree
        self._answers = answers
        self._wrong_every = wrong_every
        self._stride = stride
        self._calls = 0

    def propose(self, history: History, limit: int) -> tuple[Sequence[int], Sequence[int]]:
        """What comes next, as far as it is known."""
        self._calls += 1
        tokens = self.following(history, limit) if self._calls % 3 < self._stride else []
        if self._wrong_every:
            start = len(history)
            tokens = [token ^ ((start + at) % self._wrong_every == 0) for at, token in enumerate(tokens)]
        if self._as_tree:
            return self._tree(tokens, limit)
        return tokens, range(-1, len(tokens) - 1)

    @staticmethod
    def _tree(tokens: list[int], limit: int) -> tuple[list[int], list[int]]:
        """Tokens each of which has a wrong one before and after it with the same parent, in order."""
        drafts: list[int] = []
        parents: list[int] = []
        last = -1
        for token in tokens[: limit // 3]:
            drafts += [token ^ 1, token, token ^ 2]
            parents += [last, last, last]
            last = len(drafts) - 2
        return drafts, parents

    def following(self, history: History, limit: int) -> list[int]:
        """The next tokens of the answer."""
        done = len(history) - history.prompt_len
        return self._answers.get(tuple(history[: history.prompt_len]), [])[done : done + limit]


@dataclass(frozen=True)
class Drafted:
    """Outputs that were computed with drafts, to be compared.

    Attributes:
        name: of the check.
        outputs: of the requests.
        params: of all of them.
        conditions: (message, holds) of each further condition.
    """

    name: str
    outputs: list[RequestOutput]
    params: SamplingParams
    conditions: tuple[tuple[str, bool], ...] = ()

    def check(self, judge: Judge) -> Check:
        """Outputs must be those without drafts and without a cache, and drafts must have been computed."""
        drafted = sum(output.usage.drafted_tokens for output in self.outputs)
        accepted = sum(output.usage.accepted_tokens for output in self.outputs)
        wrong = judge.differences(self.outputs, self.params)
        wrong += [message for message, holds in self.conditions if not holds]
        if not drafted:
            wrong.append("nothing was drafted")
        equal = f"{len(self.outputs)} requests, bitwise equal; {accepted} of {drafted} drafts accepted"
        hits = sum(output.usage.cached_tokens for output in self.outputs)
        return Check(self.name, not wrong, hits, "; ".join(wrong) or equal)


def drafts(judge: Judge) -> list[Drafted]:
    """Drafts of every kind, greedy and sampled, each cold and as a hit, with retraction and aborts in between."""
    answers = _answers(judge)
    right = Known(answers)
    drafters: dict[str, Drafter] = {
        "right": right,
        "half right": Known(answers, wrong_every=3),
        "wrong": Known(answers, wrong_every=1),
        "right ones in every third pass": Known(answers, stride=1),
        "trees": Known(answers, as_tree=True),
        "half right trees": Known(answers, wrong_every=3, as_tree=True),
        "lies": Liar(0, judge.engine.model.config.vocab_size, right.following),
    }
    found = [each for name, drafter in drafters.items() for each in _drafted(judge, f"drafts: {name}", drafter)]
    return [*found, regenerated(judge), *under_pressure(judge)]


def predictor(judge: Judge) -> list[Drafted]:
    """Drafts of the checkpoint's own predictor, alone and with others, where the judge's engine was loaded with it."""
    tree = Known(_answers(judge), wrong_every=2, stride=2, as_tree=True)
    found = _drafted(judge, "drafts of the predictor", "mtp")
    found += _drafted(judge, "drafts of the predictor and trees", tree, "mtp")
    return [*found, _next_turns(judge), *under_pressure(judge, "mtp")]


def _next_turns(judge: Judge) -> Drafted:
    """Turns that continue answers, whose drafts are predicted from what a hit brings."""
    warm = judge.warm(speculation=SpeculationConfig(drafters=("cache", "mtp"), adaptive=False))
    prompts = [judge.ids(2 * judge.grid + judge.grid // 2), judge.ids(4 * judge.grid)]
    outputs = warm.generate(prompts, ANSWER, progress=False)
    for _ in range(2):
        outputs += warm.generate([judge.next_turn(turn) for turn in outputs[-2:]], ANSWER, progress=False)
    is_hit = all(output.usage.cached_tokens > 0 for output in outputs[2:])
    return Drafted("drafts of the predictor in later turns", outputs, ANSWER, (("a turn was not a hit", is_hit),))


def _requests(judge: Judge) -> list[tuple[list[int], SamplingParams]]:
    """Prompts, and how each is answered."""
    lengths = 2 * judge.grid + 9, judge.grid // 2
    return [(judge.ids(length + at), params) for at, params in enumerate(MODES.values()) for length in lengths]


def _answers(judge: Judge) -> dict[tuple[int, ...], list[int]]:
    """The answers to `_requests`, by their prompts."""
    return {tuple(prompt): judge.cold(prompt, params).token_ids for prompt, params in _requests(judge)}


def _drafted(judge: Judge, name: str, drafter: Drafter | str, *others: str) -> list[Drafted]:
    """The same requests twice, the second time as hits. Those of all modes run together; each mode has its check."""
    warm = judge.warm(speculation=SpeculationConfig(drafters=(drafter, *others), adaptive=False))
    requests = _requests(judge)
    prompts, asked = [prompt for prompt, _ in requests], [params for _, params in requests]
    outputs = [output for _ in range(2) for output in warm.generate(prompts, asked, progress=False)]
    return _by_mode(name, [*zip(outputs, asked * 2, strict=True)])


def regenerated(judge: Judge) -> Drafted:
    """Answers that are generated again, with drafts from the cache. One answer crosses two multiples of the grid."""
    warm = judge.warm(speculation=SpeculationConfig(adaptive=False))
    params = replace(ANSWER, max_new_tokens=judge.grid + judge.grid // 2)
    prompts = [judge.ids(4 * judge.grid - 9), judge.ids(2 * judge.grid)]
    warm.generate(prompts, params, progress=False)
    outputs = warm.generate(prompts, params, progress=False)
    share = sum(output.usage.accepted_tokens for output in outputs) > sum(len(o.token_ids) for o in outputs) / 2
    return Drafted("answers again, drafts from the cache", outputs, params, (("few were accepted", share),))


def under_pressure(judge: Judge, *others: str) -> list[Drafted]:
    """Chains, trees and lies in a memory that is too small: requests are retracted, and some aborted in the middle.

    Sizes and lies are tried until one is retracted. The first, which hold little more than one request, suffice for all
    families in float32; where pages are half as large the memory of a state holds more of them, and one less does.
    """
    page_size = judge.engine.cache.config.page_size
    shared = judge.ids(4 * judge.grid)
    prompts = [shared + judge.ids(judge.grid - missing) for missing in (2, 5, 9, 14, 20)]
    asked = {tuple(prompt): params for prompt, params in zip(prompts, cycle(MODES.values()), strict=False)}
    right = Known({prompt: judge.cold(list(prompt), params).token_ids for prompt, params in asked.items()})
    longest = -(-(6 * judge.grid + ANSWER.max_new_tokens) // page_size)
    outputs: list[RequestOutput] = []
    retracted = False
    for percent, states, seed in product((110, 125, 150, 175, 200, 225, 250, 300), (5, 4), range(3)):
        liar = Liar(seed, judge.engine.model.config.vocab_size, right.following)
        own = SpeculationConfig(drafters=(liar, *others), adaptive=False)
        warm = judge.warm(longest * percent // 100, states, own, longest)
        aborted = warm.add_request(judge.ids(judge.grid), ANSWER)
        names = [warm.add_request(list(prompt), params) for prompt, params in asked.items()]
        outputs = []
        for step in range(10_000):
            outputs += [output for output in warm.step() if output.finish_reason == "length"]
            if step == 2:
                warm.abort(aborted)
            if not warm.has_work:
                break
        warm.cache.audit()
        outputs = [output for output in outputs if output.request_id in names]
        retracted = warm.scheduler.num_retractions > 0
        if retracted:
            break
    complete = len(outputs) == len(prompts)
    conditions = (("no request was retracted", retracted), ("an answer is missing", complete))
    name = " and ".join(("drafts under memory pressure", *others))
    return _by_mode(name, [(output, asked[tuple(output.prompt_token_ids)]) for output in outputs], conditions)


def _by_mode(
    name: str, outputs: Sequence[tuple[RequestOutput, SamplingParams]], conditions: tuple[tuple[str, bool], ...] = ()
) -> list[Drafted]:
    """Outputs, each with how it was chosen: a check for each mode."""
    return [
        Drafted(f"{name}, {mode}", [output for output, given in outputs if given is params], params, conditions)
        for mode, params in MODES.items()
    ]
