"""Several answers to one prompt (`SamplingParams(n=...)`).

The first one computes the prompt. The token after it is sampled for each answer, from the same logits, and the state
after the prompt is copied for each. An answer for which there is no memory at that moment waits, and starts as a
request that was retracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

from hybrid.engine.output import Completion, RequestOutput
from hybrid.engine.request import Request
from hybrid.engine.sampling_params import SamplingParams


def params_of(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`: it has random numbers of its own, and only the first one is pinned."""
    if index == 0:
        return params
    seed = params.seed
    if seed is not None:
        seed = int.from_bytes(blake2b(b"%d/%d" % (seed, index), digest_size=8).digest(), "little") >> 1
    return replace(params, seed=seed, n=1, pin_for=None, prompt_logprobs=None)


class Completions:
    """The answers of one request.

    Args:
        requests: one for each answer. The first one is queued, and has the id of all.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests: tuple[Request, ...] = tuple(requests)

    @property
    def request_id(self) -> str:
        """Of the request."""
        return self.requests[0].request_id

    @property
    def has_ended(self) -> bool:
        """Whether all answers have."""
        return all(request.has_ended for request in self.requests)

    def output(self, previous: RequestOutput | None = None) -> RequestOutput:
        """The answers up to now. The fields beside `outputs` are those of the first, but its usage counts the tokens
        of all answers; it has a finish reason when all answers have one."""
        outputs = [request.output() for request in self.requests]
        first = self.requests[0].output(previous)
        each = [output.usage for output in outputs]
        usage = replace(
            first.usage,
            completion_tokens=sum(usage.completion_tokens for usage in each),
            drafted_tokens=sum(usage.drafted_tokens for usage in each),
            accepted_tokens=sum(usage.accepted_tokens for usage in each),
        )
        completions = tuple(
            Completion(index, output.text, output.token_ids, output.logprobs, output.finish_reason, output.error)
            for index, output in enumerate(outputs)
        )
        finish_reason = first.finish_reason if self.has_ended else None
        return replace(first, usage=usage, completions=completions, finish_reason=finish_reason)
