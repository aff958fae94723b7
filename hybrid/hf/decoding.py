"""Decoding with drafts: several tokens per pass of the model, the same answer.

transformers accepts a function in the place of its own loop (`custom_generate`). This one computes drafts together with
the tokens before them, and takes one token after the other as transformers would: its logits are processed, and it is
drawn, after all tokens before it are known. So the random numbers, the stopping criteria and the processors see what
they see without drafts; a draft saves a pass if it is the token that was drawn.

A pass cannot keep a state after each draft. Where drafts were wrong, the past goes back to what it was before the pass,
and the next pass computes the accepted tokens again, together with its own drafts.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput

from hybrid.hf.installed import as_argument
from hybrid.hf.past import Past
from hybrid.speculation.drafter import History
from hybrid.speculation.drafts import Drafts
from hybrid.speculation.pace import clock_of

MAX_PENDING = 16
"""When this many tokens would have to be computed again, a pass without drafts computes them for good."""

NONE = Drafts((), (), ())
"""No drafts."""


class DraftSource(Protocol):
    """Who has drafts: see `hybrid.speculation.speculator.Speculator`."""

    def propose(self, history: History, limit: int, rows: int) -> Drafts | None:
        """Drafts for a history, at most `limit`, in a pass that has `rows` tokens without them."""
        ...

    def verified(self, history: History, drafts: Drafts, path: Sequence[int]) -> None:
        """Those of `path` were accepted."""
        ...

    def timed(self, rows: int, seconds: float, drafts: int) -> None:
        """A pass took so long; some of its rows were drafts."""
        ...

    def end(self, history: History) -> None:
        """Nothing more is asked for this history."""
        ...


class Answer:
    """What has been decoded.

    Args:
        input_ids: `[1, tokens]`, the prompt.
        config: of transformers' `generate`.
        streamer: receives each token; None: there is none.
    """

    def __init__(self, input_ids: Tensor, config: Any, streamer: BaseStreamer | None) -> None:
        self.ids: Tensor = input_ids
        self._config = config
        self._streamer = streamer
        self._scores: tuple[Tensor, ...] = ()
        self._logits: tuple[Tensor, ...] = ()

    def draw(self, logits: Tensor, processors: LogitsProcessorList) -> int:
        """Draw the next token as transformers' own loop does.

        Args:
            logits: `[1, vocabulary]`, fp32.
        """
        scores = processors(self.ids, logits)
        if self._config.output_scores:
            self._scores += (scores,)
        if self._config.output_logits:
            self._logits += (logits,)
        if self._config.do_sample:
            token = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
        else:
            token = scores.argmax(-1, keepdim=True)
        self.ids = torch.cat([self.ids, token], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        return int(token)

    def is_finished(self, criteria: StoppingCriteriaList) -> bool:
        """Whether nothing follows."""
        return bool(criteria(self.ids, self._scores or None).all())

    def output(self, past: Past) -> Any:
        """The return value of `generate`."""
        if self._streamer is not None:
            self._streamer.end()
        if not self._config.return_dict_in_generate:
            return self.ids
        return GenerateDecoderOnlyOutput(
            sequences=self.ids,
            scores=self._scores if self._config.output_scores else None,
            logits=self._logits if self._config.output_logits else None,
            **as_argument(past),
        )


class DraftedDecoding:
    """The decoding of one sequence with drafts.

    Args:
        past: holds some or all tokens of the prompt but its last one.
        source: has drafts.
        history: makes the history of the answer from the prompt's tokens, which it then shares.
        grid: where the past may be committed: no pass with drafts goes beyond the next multiple.
        streamer: of the call of `generate`.

    Attributes:
        was_called: whether transformers has called it.
    """

    def __init__(
        self,
        past: Past,
        source: DraftSource,
        history: Callable[[array[int]], History],
        grid: int,
        streamer: BaseStreamer | None,
    ) -> None:
        self.was_called = False
        self._past = past
        self._source = source
        self._make_history = history
        self._grid = grid
        self._streamer = streamer

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """Decode: `generate` calls it with what it gives to its own loop."""
        self.was_called = True
        answer = Answer(input_ids, generation_config, self._streamer)
        tokens = array("i", input_ids[0, self._past.pads[0] :].tolist())
        history = self._make_history(tokens)
        drafts, is_first, is_finished = NONE, True, False
        clock = clock_of(input_ids.device.type)
        try:
            while not is_finished:
                saved = self._past.save() if len(drafts) else None
                start, num_rows = clock(), len(tokens) + len(drafts) - self._past.num_seen(0)
                logits = self._pass(model, answer.ids, drafts, model_kwargs, is_first)
                num_drawn = 0
                while num_drawn <= len(drafts):
                    tokens.append(answer.draw(logits[:, num_drawn], logits_processor))
                    num_drawn += 1
                    is_finished = answer.is_finished(stopping_criteria)
                    if is_finished or num_drawn > len(drafts) or tokens[-1] != drafts.tokens[num_drawn - 1]:
                        break
                if not is_first:
                    self._source.timed(num_rows, clock() - start, len(drafts))
                if saved is not None:
                    is_right = num_drawn <= len(drafts) and tokens[-1] == drafts.tokens[num_drawn - 1]  # and ends it
                    self._source.verified(history, drafts, range(num_drawn - 1 + is_right))
                    self._past.take_back(saved, len(drafts) + 1 - num_drawn)
                model_kwargs, is_first = _extended(model, model_kwargs, num_drawn), False
                drafts = self._propose(history, generation_config.max_length - answer.ids.shape[1] - 1)
        finally:
            self._source.end(history)
        self._compute_rest(model, answer.ids, model_kwargs)
        return answer.output(self._past)

    def _propose(self, history: History, limit: int) -> Drafts:
        """Drafts for the next pass, which computes the tokens that the past does not hold as well."""
        pending = len(history) - self._past.num_seen(0)
        if self._grid > 1:
            limit = min(limit, -len(history) % self._grid)
        if limit < 1 or pending > MAX_PENDING:
            return NONE
        drafts = self._source.propose(history, limit, pending)
        return NONE if drafts is None else drafts.first_path()  # the layers of transformers know chains alone

    def _pass(self, model: Any, ids: Tensor, drafts: Drafts, kwargs: dict[str, Any], is_first: bool) -> Tensor:
        """One pass over what the past does not hold, and drafts.

        Returns:
            `[1, drafts + 1, vocabulary]` fp32 logits of the last known token and of the drafts.
        """
        if len(drafts):
            ids = torch.cat([ids, torch.tensor([drafts.tokens], dtype=ids.dtype, device=ids.device)], dim=-1)
            kwargs = _extended(model, dict(kwargs), len(drafts))
        inputs = self._inputs(model, ids, kwargs, is_first)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = len(drafts) + 1
        logits: Tensor = model(**inputs, return_dict=True).logits[:, -len(drafts) - 1 :]
        return logits.to(copy=True, dtype=torch.float32, device=ids.device)

    def _compute_rest(self, model: Any, ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Compute what the past does not hold of the answer but its last token: `generate` leaves a past like that."""
        pad, end = self._past.pads[0], ids.shape[1] - 1
        for stop in ((end - pad) // self._grid * self._grid + pad, end):
            if stop > self._past.get_seq_length():
                model(**self._inputs(model, ids[:, :stop], _shortened(kwargs, stop), False), return_dict=True)

    def _inputs(self, model: Any, ids: Tensor, kwargs: dict[str, Any], is_first: bool) -> dict[str, Any]:
        """The arguments of a pass over what the past does not hold of `ids`."""
        count = ids.shape[1] - self._past.get_seq_length()
        inputs: dict[str, Any] = model.prepare_inputs_for_generation(
            ids, next_sequence_length=count, is_first_iteration=is_first, **kwargs
        )
        return inputs


def _extended(model: Any, kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """The arguments for a sequence that is `count` tokens longer: mask and positions. Models with other arguments of
    this kind override the method."""
    extended: dict[str, Any] = model._update_model_kwargs_for_generation({}, kwargs, num_new_tokens=count)
    return extended


def _shortened(kwargs: dict[str, Any], length: int) -> dict[str, Any]:
    """The arguments for the first `length` positions."""
    names = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
    cut = {name: kwargs[name][..., :length] for name in names if kwargs.get(name) is not None}
    return {**kwargs, **cut}
