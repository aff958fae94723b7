"""The drafters behind transformers' options of assisted decoding: prompt lookup, and an assistant model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from hybrid.errors import ArgumentError
from hybrid.hf.layers import fork_layer, refuse_unsupported
from hybrid.hf.pass_model import PassModel
from hybrid.hf.torch_functions import use_torch_functions_on_cpu
from hybrid.speculation.drafter import Drafter, History

Chain = tuple[Sequence[int], Sequence[int]]


class LookupDrafter(Drafter):
    """Drafts what followed the last tokens where they first occurred in the same sequence, as transformers finds it.

    Args:
        num_tokens: drafts of a pass, at most.
        max_ngram: up to this many last tokens are looked for.
    """

    def __init__(self, num_tokens: int, max_ngram: int) -> None:
        self._num_tokens = num_tokens
        self._max_ngram = max_ngram

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "prompt_lookup"

    def propose(self, history: History, limit: int) -> Chain:
        """What followed the last tokens."""
        generator = PromptLookupCandidateGenerator(
            num_output_tokens=min(limit, self._num_tokens),
            max_matching_ngram_size=self._max_ngram,
            max_length=len(history) + limit + 1,
        )
        found, _ = generator.get_candidates(torch.tensor([history[:].tolist()]))
        tokens = found[0, len(history) :].tolist()
        return tokens, range(-1, len(tokens) - 1)


class AssistantDrafter(Drafter):
    """Drafts what another, smaller model says.

    Its cache holds the known tokens and nothing else: drafts are computed on a copy of it, so that no model needs to
    forget any, whatever its layers are.

    Args:
        assistant: a causal language model of transformers with the same vocabulary, in evaluation mode.
        vocab_size: of the model for which it drafts.
        min_confidence: no draft follows one of less than this probability.

    Raises:
        ArgumentError: the vocabularies differ.
        UnsupportedModelError: its cache cannot be copied.
    """

    def __init__(self, assistant: PassModel, vocab_size: int, min_confidence: float) -> None:
        if assistant.vocab_size != vocab_size:
            raise ArgumentError(
                f"generate: assistant_model: its vocabulary has {assistant.vocab_size} tokens, and the model's "
                f"{vocab_size}; give an assistant with the same tokenizer"
            )
        if assistant.device.type == "cpu":
            use_torch_functions_on_cpu(assistant.inner)
        self._model = assistant
        self._past = assistant.empty_cache()
        self._num_tokens = 0
        self._min_confidence = min_confidence
        refuse_unsupported(self._past.layers, type(assistant.inner).__name__)

    @property
    def name(self) -> str:
        """Of the drafter."""
        return "assistant"

    @torch.no_grad()
    def propose(self, history: History, limit: int) -> Chain:
        """The assistant's own continuation, greedily."""
        logits = self._model.forward(history[self._num_tokens :].tolist(), self._past, self._num_tokens)
        self._num_tokens = len(history)
        past, tokens = self._model.empty_cache(), [int(logits.argmax())]
        past.layers = [fork_layer(layer) for layer in self._past.layers]
        while len(tokens) < limit and float(logits.float().softmax(-1).max()) >= self._min_confidence:
            logits = self._model.forward(tokens[-1:], past, self._num_tokens + len(tokens) - 1)
            tokens.append(int(logits.argmax()))
        return tokens, range(-1, len(tokens) - 1)
