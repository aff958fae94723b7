"""A model of transformers as a prefix cache uses it: single forward passes, its version, and what it remembers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin
from transformers.cache_utils import DynamicCache

from hybrid.checks import shown
from hybrid.errors import ArgumentError, PromptError
from hybrid.hf.installed import as_argument, refuse_unexpected
from hybrid.hf.model_version import ModelVersions
from hybrid.hf.positions import RopeDeltas, rope_limit
from hybrid.prompts.images import Media


def inner_model(model: Any) -> Any:
    """The model of transformers inside a wrapper (of PEFT, or `torch.compile`); without one, the model itself."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return next((module for module in modules if isinstance(module, GenerationMixin)), model)


class PassModel:
    """Computes forward passes with a model of transformers.

    Args:
        model: a causal language model, or a wrapper of one.

    Attributes:
        outer: the model as it was given.
        generate: its method `generate`, as it was when this object was made.
        inner: the model of transformers inside it, which computes single passes.
        versions: reports whether the model has changed.
        rope_deltas: positions that the model remembers outside of its cache.
        max_tokens: tokens up to which its rotary frequencies do not change.

    Raises:
        ArgumentError: it is not a model of transformers.
        VersionError: something in transformers is not as expected.
    """

    def __init__(self, model: Any) -> None:
        if not isinstance(inner_model(model), GenerationMixin):
            raise ArgumentError(
                "PrefixCache: model must be a loaded model of transformers that has generate, as from "
                f"AutoModelForCausalLM.from_pretrained(...); got {type(model).__name__} {shown(model)}"
            )
        refuse_unexpected(inner_model(model))
        self.outer = model
        self.generate: Callable[..., Any] = model.generate
        self.inner: Any = inner_model(model)
        self.versions: ModelVersions = ModelVersions(model)
        self.rope_deltas: RopeDeltas = RopeDeltas(self.inner)
        self.max_tokens: int = rope_limit(self.inner) or sys.maxsize
        self._parameters = inspect.signature(self.inner.forward).parameters

    @property
    def device(self) -> torch.device:
        """Device of the model's input."""
        device: torch.device = self.inner.get_input_embeddings().weight.device
        return device

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        size: int = self.inner.config.get_text_config(decoder=True).vocab_size
        return size

    def check_ids(self, ids: Sequence[int]) -> None:
        """Check token ids before the model sees them: one that it does not have ends a process on a GPU.

        Raises:
            PromptError: one is outside the vocabulary.
        """
        embeddings = self.inner.get_input_embeddings()
        count = embeddings.num_embeddings if isinstance(embeddings, nn.Embedding) else self.vocab_size
        if ids and not 0 <= min(ids) <= max(ids) < count:
            wrong = next(token for token in ids if not 0 <= token < count)
            raise PromptError(f"token id {shown(wrong)} is outside the vocabulary: ids go from 0 to {count - 1}")

    def check_prompts(self, rows: Sequence[Sequence[int]]) -> None:
        """Check prompts.

        Raises:
            PromptError: a token id is outside the vocabulary, or a prompt is too long.
        """
        for row in rows:
            self.check_ids(row)
            if len(row) > self.max_tokens:
                raise PromptError(
                    f"the prompt has {len(row)} tokens; beyond {self.max_tokens} the rotary embedding of this model "
                    "changes the frequencies of all tokens, so no prefix can be reused: call model.generate instead"
                )

    def empty_cache(self) -> DynamicCache:
        """A cache of transformers for this model, without tokens."""
        return DynamicCache(config=self.inner.config)

    def forward(self, tokens: Sequence[int], past: Any, start: int, media: Media | None = None) -> Tensor:
        """One forward pass over tokens of one sequence.

        Args:
            tokens: the token ids to compute.
            past: the cache that holds the tokens before; it is extended.
            start: number of tokens that `past` holds.
            media: the images of the sequence; None: it has none.

        Returns:
            The logits of the last token, `[vocabulary]`.
        """
        device = self.device
        options: dict[str, Any] = {}
        if "logits_to_keep" in self._parameters:
            options["logits_to_keep"] = 1
        if "position_ids" in self._parameters:
            options["position_ids"] = torch.arange(start, start + len(tokens), device=device).unsqueeze(0)
        ids = torch.tensor([tokens], device=device)
        if media is None:
            options["input_ids"] = ids
        else:
            end = start + len(tokens)
            embeddings = self.inner.get_input_embeddings()(ids)
            for offset, rows in media.embeddings(start, end):
                embeddings[0, offset : offset + len(rows)] = rows
            options["inputs_embeds"] = embeddings
            rotary = media.rotary_positions(start, end).to(device).unsqueeze(1)
            options["position_ids"] = torch.cat([options["position_ids"].unsqueeze(0), rotary])  # text, then its three
        output = self.inner(**as_argument(past), use_cache=True, return_dict=True, **options)
        logits: Tensor = output.logits[0, -1]
        return logits
