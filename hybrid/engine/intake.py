"""From a prompt and its parameters to a request, or to the error that says why it cannot run."""

from __future__ import annotations

from hybrid.cache.cache import HybridCache
from hybrid.engine.build import LoadedModel
from hybrid.engine.output import Outputs
from hybrid.engine.request import Request
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import MemoryBudgetError, PromptError
from hybrid.key import check_namespace
from hybrid.memory.memory import smallest_memory
from hybrid.prompts.detokenizer import TextStream
from hybrid.prompts.encode import EncodedPrompt, Prompt, PromptEncoder, PromptLimits
from hybrid.units import ceil_div, format_bytes


class Intake:
    """Makes the requests of one engine.

    Args:
        loaded: the model that runs them.
        cache: the memory that they must fit into.
    """

    def __init__(self, loaded: LoadedModel, cache: HybridCache) -> None:
        self._loaded = loaded
        self._cache = cache
        model, config = loaded.model.config, cache.config
        limits = PromptLimits.of(
            model.max_position_embeddings, model.vocab_size, cache.largest_request * config.page_size
        )
        self._encoder = PromptEncoder(
            loaded.tokenizer,
            loaded.image_encoder,
            hidden_size=model.hidden_size,
            page_size=config.page_size,
            limits=limits,
        )

    def encode(self, prompt: Prompt) -> EncodedPrompt:
        """The token ids and images of a prompt.

        Raises:
            PromptError: the prompt has an unsupported form, or is too large.
        """
        return self._encoder.encode(prompt)

    def request(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None, namespace: str, outputs: Outputs
    ) -> Request:
        """A request that can run.

        Args:
            request_id: unique within the engine.
            prompt: a text, token ids, chat messages, or an `ImagePrompt`.
            params: None: the checkpoint's.
            namespace: of the cache.
            outputs: where its outputs go.

        Raises:
            ArgumentError: the namespace is not a string.
            PromptError: the prompt cannot be run.
            MemoryBudgetError: prompt and answer do not fit into the cache's memory.
        """
        check_namespace(namespace)
        params = params or self._loaded.default_params
        encoded = self.encode(prompt)
        num_tokens, limit = len(encoded.ids), self._loaded.model.config.max_position_embeddings
        if not encoded.ids:
            raise PromptError("the prompt is empty; give at least one token")
        tokenizer = self._loaded.tokenizer
        if params.stop and tokenizer is None:
            raise PromptError("stop texts need a tokenizer, and this checkpoint has none; use stop_token_ids")
        outside = next((at for at in params.checkpoint_at if not -num_tokens <= at <= num_tokens), None)
        if outside is not None:
            raise PromptError(f"checkpoint_at={outside} is outside the prompt of {num_tokens} tokens")
        max_len = min(limit, num_tokens + params.max_new_tokens)
        self._check_memory(num_tokens, max_len)
        text = TextStream(tokenizer, tuple(params.stop)) if tokenizer is not None else None
        return Request(request_id, encoded, params, max_len, namespace=namespace, text=text, outputs=outputs)

    def _check_memory(self, prompt_len: int, max_len: int) -> None:
        config, most = self._cache.config, self._cache.largest_request
        needed = ceil_div(max_len, config.page_size)
        if needed <= most:
            return
        page_bytes, state_bytes = self._cache.unit_bytes
        remedy = "lower max_new_tokens"
        if page_bytes:
            memory = smallest_memory(needed, page_bytes, state_bytes, config.state_share)
            smallest = f"the smallest memory that suffices is {format_bytes(memory)} (CacheConfig(memory={memory}))"
            remedy = f"{smallest}, or {remedy}"
        raise MemoryBudgetError(
            f"a prompt of {prompt_len} tokens with {max_len - prompt_len} new ones needs {needed} pages, and there are "
            f"{most}; {remedy}"
        )
