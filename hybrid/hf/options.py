"""The arguments of `generate`: reading the prompts, and refusing options that cannot work with a prefix cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from operator import index
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin

from hybrid.checks import integer, shown
from hybrid.errors import ArgumentError, PromptError
from hybrid.hf.images import ImageInputs
from hybrid.hf.installed import CACHE_NAMES
from hybrid.hf.pass_model import inner_model
from hybrid.hf.past import Past

REFUSED = {
    "inputs_embeds": "prefixes are matched by token ids, and embeddings have none; give input_ids",
    **dict.fromkeys(
        CACHE_NAMES, "the cache makes it, or takes one that it has returned; to bring your own call model.generate"
    ),
    "cache_implementation": "only transformers' dynamic cache can be saved and restored; leave it out",
    "cache_config": "only transformers' dynamic cache can be saved and restored; leave it out",
    "position_ids": "positions are those of the tokens; leave it out",
    "token_type_ids": "prefixes are matched by token ids alone; leave it out",
    "prefill_chunk_size": "the cache cuts the prefill itself: PrefixCache(model, chunk_size=...)",
    "token_healing": "it changes the prompt after the lookup; heal the tokens first",
    "output_attentions": "cached tokens are not computed, so there are none for them; call model.generate instead",
    "output_hidden_states": "cached tokens are not computed, so there are none for them; call model.generate instead",
    "custom_generate": "its use of the cache is unknown; use session() and call it yourself",
}
"""Options that are refused when they are set, with the reason."""

PLAIN = ("dynamic", "hybrid")
"""Kinds of caches that are as none: "hybrid" stands in the configurations of older models, and transformers ignores
it."""

PASSED_ON = ("attention_mask", "tokenizer", "logits_to_keep")
"""Arguments that are not in transformers' generation config, and that `model.generate` gets as they are."""

ASSISTED = ("assistant_early_exit", "use_mtp", "assistant_tokenizer", "speculation_type")
"""Options of assisted decoding that cannot work: they need more of the model than its tokens and logits."""

LOOKUP_NGRAM, ASSISTANT_TOKENS, ASSISTANT_CONFIDENCE = 2, 20, 0.4
"""transformers' defaults of `max_matching_ngram_size`, `num_assistant_tokens`, `assistant_confidence_threshold`."""


@dataclass(frozen=True)
class Assistance:
    """The options of assisted decoding of a call.

    Attributes:
        lookup_tokens: drafts of a pass by prompt lookup; None: none is asked for.
        lookup_ngram: up to this many last tokens are looked for.
        assistant: a model that drafts; None: none is given.
        assistant_tokens: its drafts of a pass.
        min_confidence: its drafts end after one of less probability.
    """

    lookup_tokens: int | None
    lookup_ngram: int
    assistant: Any
    assistant_tokens: int
    min_confidence: float

    @classmethod
    def taken(cls, model: Any, options: dict[str, Any]) -> Assistance | None:
        """Take the options of assisted decoding out of those of a call; None: there are none.

        Raises:
            ArgumentError: one of them cannot be.
        """
        assistant = options.pop("assistant_model", None)
        if assistant is not None and not isinstance(inner_model(assistant), GenerationMixin):
            raise ArgumentError(
                f"generate: assistant_model must be a model of transformers, got {_describe(assistant)}"
            )
        own = None if assistant is None else assistant.generation_config
        lookup = option(model, options, "prompt_lookup_num_tokens")
        if lookup is not None:
            lookup = integer("generate: prompt_lookup_num_tokens", lookup, 1)

        def of_assistant(name: str, default: float) -> float:
            value = option(model, options, name)
            if value is None and own is not None:
                value = getattr(own, name)
            return default if value is None else value

        if assistant is None and lookup is None:
            return None
        options["prompt_lookup_num_tokens"] = None
        ngram = option(model, options, "max_matching_ngram_size")
        count = of_assistant("num_assistant_tokens", ASSISTANT_TOKENS)
        if isinstance(count, float) and count.is_integer():  # as transformers' own schedules leave it
            count = int(count)
        return cls(
            lookup,
            LOOKUP_NGRAM if ngram is None else integer("generate: max_matching_ngram_size", ngram, 1),
            assistant,
            integer("generate: num_assistant_tokens", count, 1),
            of_assistant("assistant_confidence_threshold", ASSISTANT_CONFIDENCE),
        )


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    Attributes:
        rows: per sequence its token ids, without padding.
        pads: per sequence, the number of padding positions before its tokens.
    """

    rows: list[list[int]]
    pads: list[int]

    @property
    def is_padded(self) -> bool:
        """Tell whether any sequence has padding."""
        return any(self.pads)

    @property
    def width(self) -> int:
        """Positions of the batch: tokens and padding."""
        return self.pads[0] + len(self.rows[0])


def parse_prompts(input_ids: Any, attention_mask: Any, pad_token: int | None, end_tokens: frozenset[int]) -> Prompts:
    """Read the prompts of a call.

    Args:
        input_ids: `[batch, tokens]`, an integer tensor.
        attention_mask: `[batch, tokens]`, 0 for padding; None: see `pad_token`.
        pad_token: without a mask, tokens equal to it are padding unless it is an end token, as in `generate`.
        end_tokens: the end-of-sequence tokens.

    Raises:
        PromptError: an argument is not a tensor of this kind, or the padding is not on the left.
    """
    if not isinstance(input_ids, Tensor) or input_ids.ndim != 2 or input_ids.dtype not in (torch.long, torch.int):
        remedy = "; give tokenizer(text, return_tensors='pt').input_ids" if not isinstance(input_ids, Tensor) else ""
        raise PromptError(f"input_ids must be an integer tensor [batch, tokens], got {_describe(input_ids)}{remedy}")
    if not input_ids.numel():
        raise PromptError("input_ids holds no token; a prompt needs at least one")
    rows = input_ids.tolist()
    if attention_mask is None:
        if pad_token is None or pad_token in end_tokens or not any(pad_token in row for row in rows):
            return Prompts(rows, [0] * len(rows))
        attention_mask = input_ids.ne(pad_token).long()
    if not isinstance(attention_mask, Tensor) or attention_mask.shape != input_ids.shape:
        raise PromptError(f"attention_mask must have the shape of input_ids, got {_describe(attention_mask)}")
    pads = []
    for row, mask in zip(rows, attention_mask.tolist(), strict=True):
        pad = mask.index(1) if 1 in mask else len(mask)
        if pad == len(mask):
            raise PromptError("attention_mask masks a whole sequence; a prompt needs at least one token")
        if not all(mask[pad:]):
            raise PromptError(
                "attention_mask (or, without one, the padding token) masks a position after the first token: padding "
                "on the right would become part of a linear layer's state. Pad on the left (tokenizer.padding_side = "
                "'left'); if there is no padding, give attention_mask=torch.ones_like(input_ids)"
            )
        pads.append(pad)
        del row[:pad]
    return Prompts(rows, pads)


@dataclass(frozen=True)
class GenerateCall:
    """A call of `generate`, after its options were checked.

    Attributes:
        input_ids: `[batch, tokens]`, with padding.
        prompts: the prompts in it.
        options: the options for `model.generate`.
        pad_tokens, end_tokens: ids of padding and end-of-sequence tokens.
        repeats: sequences that are computed per prompt: beams, or several answers.
        num_returned: answers per prompt.
        max_new_tokens: tokens of an answer, at most; None: not given so.
        max_seconds: time limit of the call, its prefill included; None: no limit.
        past: a past that an earlier call returned, to be resumed from; None: prefixes are looked up.
        assistance: the options of assisted decoding; None: there are none.
        other_search: the option that asks for decoding which is neither greedy nor sampled, nor a search with beams;
            None: there is none.
        images: of the prompts; None: there are none.
    """

    input_ids: Tensor
    prompts: Prompts
    options: dict[str, Any]
    pad_tokens: frozenset[int]
    end_tokens: frozenset[int]
    repeats: int
    num_returned: int
    max_new_tokens: int | None
    max_seconds: float | None
    past: Past | None
    assistance: Assistance | None
    other_search: str | None
    images: ImageInputs | None

    @property
    def is_single(self) -> bool:
        """Tell whether one sequence is computed."""
        return len(self.prompts.rows) == 1 and self.repeats == 1

    @classmethod
    def of(cls, model: Any, inputs: Any, options: Mapping[str, Any]) -> GenerateCall:
        """Read the arguments of a call.

        Raises:
            ArgumentError: an option is unknown or cannot work; the message says why.
            PromptError: there is no prompt, or it is padded on the right.
        """
        given = dict(options)
        input_ids = given.pop("input_ids", None)
        if inputs is not None and input_ids is not None:
            raise ArgumentError("generate: the prompts are given twice, as first argument and as input_ids")
        input_ids = inputs if input_ids is None else input_ids
        for name in (*CACHE_NAMES, "use_cache"):
            if name in given and given[name] in (None, True):
                del given[name]
        pasts = [given.pop(name) for name in CACHE_NAMES if isinstance(given.get(name), Past)]
        if len(pasts) > 1:
            raise ArgumentError(f"generate: {' and '.join(CACHE_NAMES)} are names of one option; give one of them")
        images = ImageInputs.taken(given)
        _refuse_options(model, given)
        assistance = Assistance.taken(model, given)
        if option(model, given, "cache_implementation") is not None:
            given["cache_implementation"] = None  # "dynamic": transformers refuses it together with a past
        pad_tokens, end_tokens = (token_option(model, given, name) for name in ("pad_token_id", "eos_token_id"))
        num_beams, num_returned = (option(model, given, name) or 1 for name in ("num_beams", "num_return_sequences"))
        call = cls(
            input_ids,
            parse_prompts(input_ids, given.get("attention_mask"), next(iter(pad_tokens), None), end_tokens),
            given,
            pad_tokens,
            end_tokens,
            max(num_beams, num_returned),
            num_returned,
            option(model, given, "max_new_tokens"),
            option(model, given, "max_time"),
            pasts[0] if pasts else None,
            assistance,
            _other_search(model, given),
            images,
        )
        if assistance is not None and not call.is_single:
            raise ArgumentError(
                f"generate: assisted decoding is for one sequence, got {len(call.prompts.rows)} prompts and "
                f"{call.repeats} sequences of each; leave assistant_model and prompt_lookup_num_tokens out"
            )
        if assistance is not None and call.other_search is not None:
            raise ArgumentError(
                f"generate: assisted decoding is greedy or sampled, and {call.other_search} asks for another search; "
                "leave one of them out"
            )
        return call

    def turns(self, sequences: Tensor) -> Iterator[list[int]]:
        """Per prompt its tokens and those of its answer, without the padding after it: the beginning of a next turn.

        Args:
            sequences: `[batch, tokens]`, as returned by `model.generate`, with one answer per prompt.
        """
        for row, answer in zip(self.prompts.rows, sequences[:, self.prompts.width :].tolist(), strict=True):
            end = next((at + 1 for at, token in enumerate(answer) if token in self.end_tokens), len(answer))
            while end and answer[end - 1] in self.pad_tokens - self.end_tokens:
                end -= 1
            yield [*row, *answer[:end]]


def _refuse_options(model: Any, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if name not in _known_options() and name not in (*PASSED_ON, *REFUSED, *ASSISTED):
            raise ArgumentError(
                f"generate: {name!r} is not an option of transformers' generate; other inputs (audio, video) are "
                "not part of what prefixes are matched by"
            )
        if value is not None and name in ("inputs_embeds", *CACHE_NAMES, "position_ids", "token_type_ids"):
            raise ArgumentError(f"generate: {name}: {REFUSED[name]}")
    for name, reason in REFUSED.items():
        value = option(model, options, name)
        is_ignored = name == "cache_implementation" and value in PLAIN
        if value is not None and value is not False and not is_ignored:
            raise ArgumentError(f"generate: {name}: {reason}")
    if option(model, options, "use_cache") is False:
        raise ArgumentError("generate: use_cache=False leaves nothing to reuse; call model.generate instead")
    for name in ASSISTED:
        if option(model, options, name):
            raise ArgumentError(
                f"generate: {name}: this kind of assisted decoding does not work with a prefix cache; "
                "prompt_lookup_num_tokens and an assistant_model with the same tokenizer do"
            )


def _other_search(model: Any, options: Mapping[str, Any]) -> str | None:
    """The option that asks for a search of another kind, as `GenerationConfig.get_generation_mode` finds it."""
    for name in ("constraints", "force_words_ids", "dola_layers"):
        if option(model, options, name) is not None:
            return name
    if option(model, options, "penalty_alpha") and not option(model, options, "do_sample"):
        return "penalty_alpha"  # contrastive
    return None


def option(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """The value of a generation option: from `options`, else from the given config, else from the model's."""
    if options.get(name) is not None:
        return options[name]
    for config in (options.get("generation_config"), model.generation_config):
        value = getattr(config, name, None)
        if value is not None:
            return value
    return None


def token_option(model: Any, options: Mapping[str, Any], name: str) -> frozenset[int]:
    """The token ids of an option such as "eos_token_id", which may be one id, several, or None."""
    value = option(model, options, name)
    if value is None:
        return frozenset()
    if isinstance(value, Tensor):
        value = value.tolist()
    tokens = value if isinstance(value, list | tuple | set | frozenset) else [value]
    if not all(isinstance(token, Integral) for token in tokens):
        raise ArgumentError(f"generate: {name} must be a token id, or a list of them; got {shown(value)}")
    return frozenset(map(int, tokens))


def ids_of(token_ids: Any) -> list[int]:
    """The token ids of one sequence, which may be a tensor `[tokens]`.

    Raises:
        PromptError: they are something else.
    """
    given = token_ids.tolist() if isinstance(token_ids, Tensor) else token_ids
    try:
        return [index(token) for token in given]
    except TypeError:
        raise PromptError(
            f"token_ids must be a list of token ids, or an integer tensor [tokens]; got {shown(token_ids)}"
        ) from None


@cache
def _known_options() -> frozenset[str]:
    names = {*vars(GenerationConfig()), *inspect.signature(GenerationMixin.generate).parameters}
    return frozenset(names - {"self", "kwargs", "inputs"})


def device_named(device: str | torch.device) -> torch.device:
    """A device of PyTorch.

    Raises:
        ArgumentError: it is not one.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"PrefixCache: device must be such as 'cpu' or 'cuda:0'; got {shown(device)}") from error


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return type(value).__name__
