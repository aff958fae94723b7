"""Builds requests from prompts and parameters, or raises the error that says why one cannot run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import Any

from hybrid.cache.cache import HybridCache
from hybrid.checks import shown
from hybrid.engine.adapters import Adapters, namespace_of
from hybrid.engine.build import LoadedModel
from hybrid.engine.constraints import Constraints, ThinkingGate, are_needed
from hybrid.engine.forms import Grammars
from hybrid.engine.output import Outputs
from hybrid.engine.request import Completions, Request
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError, MemoryBudgetError, PromptError, SamplingError
from hybrid.key import Key
from hybrid.memory.memory import smallest_memory
from hybrid.prompts.answer_parser import (
    PLAIN,
    THINKING,
    TOOL_CALL,
    AnswerParser,
    Template,
    Tool,
    prefix_of,
    template_of,
    tools_of,
)
from hybrid.prompts.detokenizer import Detokenizer, control_tokens
from hybrid.prompts.encode import EncodedPrompt, Prompt, PromptEncoder, PromptLimits, spellings
from hybrid.prompts.tool_grammar import call_grammar
from hybrid.prompts.vocabulary import Vocabulary
from hybrid.units import ceil_div, format_bytes


def params_of(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of answer `index`: it has random numbers of its own, and only the first one is pinned."""
    if index == 0:
        return params
    seed = params.seed
    if seed is not None:
        seed = int.from_bytes(blake2b(b"%d/%d" % (seed, index), digest_size=8).digest(), "little") >> 1
    return replace(params, seed=seed, n=1, pin_for=None, prompt_logprobs=None)


MAX_ID_CHARACTERS = 256
"""The maximum length of a request id."""


class RequestBuilder:
    """Makes the requests of one engine.

    Args:
        loaded: the model that runs them.
        cache: the memory that they must fit into.
        adapters: that requests may name.
        max_model_len: tokens of prompt and answer, at most; None: what the model takes.
        prompt_templates: whether prompts may bring chat templates.

    Raises:
        ArgumentError: `max_model_len` is more than the model takes.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        cache: HybridCache,
        adapters: Adapters,
        max_model_len: int | None = None,
        prompt_templates: bool = False,
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._adapters = adapters
        model, config = loaded.model.config, cache.config
        if max_model_len is not None and max_model_len > model.max_position_embeddings:
            raise ArgumentError(
                f"EngineConfig: max_model_len={max_model_len} is more than this model takes, which is "
                f"{model.max_position_embeddings} tokens"
            )
        self._max_len: int = max_model_len or model.max_position_embeddings
        limits = PromptLimits.of(
            self._max_len, model.vocab_size, cache.largest_request * config.page_size, prompt_templates
        )
        self._grammars: Grammars | None = None
        self._control: dict[int, str] = {}
        self._vocabulary: Vocabulary | None = None
        if loaded.tokenizer is not None:
            self._vocabulary = Vocabulary(loaded.tokenizer)
            self._control = control_tokens(loaded.tokenizer)
            self._grammars = Grammars(loaded.forms)
        self._encoder = PromptEncoder(
            loaded.tokenizer,
            loaded.image_encoder,
            hidden_size=model.hidden_size,
            page_size=config.page_size,
            limits=limits,
        )

    def encode(self, prompt: Prompt, truncate: int | None = None, namespace: str = "") -> EncodedPrompt:
        """The token ids and images of a prompt.

        Args:
            truncate: keep this many of the last tokens; -1: as many as the model takes; None: all.
            namespace: of the cache.

        Raises:
            PromptError: the prompt has an unsupported form, or is too large.
        """
        return self._encoder.encode(prompt, self._max_len - 1 if truncate == -1 else truncate, namespace)

    def encode_turn(self, prompt: dict[str, Any]) -> list[int]:
        """The token ids of what follows an answer in a chat; see `hybrid.prompts.encode.encode_turn`."""
        return self._encoder.encode_turn(prompt)

    def key(self, prompt: Prompt, namespace: str, adapter: str | None) -> Key:
        """The key under which a prompt is cached.

        Args:
            adapter: the name of one; None: none.

        Raises:
            ArgumentError: the namespace is not a string, or there is no adapter of that name.
            PromptError: the prompt has an unsupported form, or is too large.
        """
        space = self.namespace_of(namespace, adapter)
        return self.encode(prompt, namespace=space).key(space)

    def namespace_of(self, namespace: str, adapter: str | None) -> str:
        """The cache's namespace of a caller's, with an adapter.

        Args:
            adapter: the name of one; None: none.

        Raises:
            ArgumentError: the namespace is not a string, or there is no adapter of that name.
        """
        return namespace_of(self._adapters.named(adapter) if adapter is not None else None, namespace)

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
            ArgumentError: the namespace is not a string, or there is no adapter of that name.
            PromptError: the prompt cannot be run.
            MemoryBudgetError: prompt and answer do not fit into the cache's memory.
        """
        params = params if params is not None else self._loaded.default_params
        if not isinstance(params, SamplingParams):
            raise SamplingError(
                f"params must be SamplingParams, such as SamplingParams(max_new_tokens=64); got "
                f"{type(params).__name__} {shown(params)}"
            )
        tools = params.tools or tools_of(prompt)
        params = self._with_tool_choice(params, tools)
        namespace = self.namespace_of(namespace, params.adapter)
        adapter = self._adapters.named(params.adapter) if params.adapter is not None else None
        encoded = self.encode(prompt, params.truncate_prompt_tokens, namespace)
        num_tokens = len(encoded.ids)
        if not encoded.ids:
            raise PromptError("the prompt is empty; give at least one token")
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        tokenizer = self._loaded.tokenizer
        if params.stop and tokenizer is None:
            raise PromptError("stop texts need a tokenizer, and this checkpoint has none; use stop_token_ids")
        if params.logprob_start_len >= num_tokens:
            raise PromptError(
                f"logprob_start_len={params.logprob_start_len} is outside the prompt of {num_tokens} tokens"
            )
        outside = next((at for at in params.checkpoint_at if not -num_tokens <= at <= num_tokens), None)
        if outside is not None:
            raise PromptError(f"checkpoint_at={outside} is outside the prompt of {num_tokens} tokens")
        max_len = min(self._max_len, num_tokens + params.max_new_tokens)
        self._check_memory(num_tokens, max_len)
        requests = []
        for index in range(params.n):
            own, name = params_of(params, index), f"{request_id}/{index}" if index else request_id
            text, parser = self._decoding(own, encoded.ids, tools)
            constraints = None
            if are_needed(own):
                is_thinking = parser is not None and parser.is_thinking
                constraints = self._constraints(own, encoded.ids, namespace, is_thinking)
            requests.append(
                Request(
                    name,
                    encoded,
                    own,
                    max_len,
                    namespace=namespace,
                    outputs=outputs,
                    text=text,
                    constraints=constraints,
                    adapter=adapter,
                    vocabulary=self._vocabulary,
                    parser=parser if own.parse_response else None,
                )
            )
        if len(requests) > 1:
            completions = Completions(requests)
            for request in requests:
                request.completions, request.is_fork, request.is_plain = completions, request is not requests[0], False
        return requests[0]

    def _with_tool_choice(self, params: SamplingParams, tools: Sequence[Tool]) -> SamplingParams:
        """Parameters by which the answer calls the tools that it must, or none.

        Raises:
            SamplingError: there is no such tool, or this checkpoint's calls have no known form.
        """
        if params.tool_choice == "auto":
            return params
        if params.tool_choice == "none":
            return replace(params, bad_words=(*params.bad_words, TOOL_CALL)) if tools else params
        name = None if params.tool_choice == "required" else params.tool_choice
        grammar = call_grammar(self._response_template or {}, tools, name)
        return replace(params, tool_choice="auto", structured={"grammar": grammar})

    @cached_property
    def _response_template(self) -> Template | None:
        tokenizer = self._loaded.tokenizer
        return template_of(tokenizer) if tokenizer is not None and tokenizer.chat_template else None

    def _parser(self, prompt: list[int], tools: Sequence[Tool]) -> AnswerParser:
        """Return what takes the answer to a prompt apart: all is content where nothing is known of its form."""
        template, prefix = self._response_template, None
        if template is not None:
            prefix = prefix_of(self._loaded.tokenizer, prompt, template)
        return AnswerParser(template, prefix, tools) if template and prefix is not None else AnswerParser(PLAIN, "")

    def _decoding(
        self, params: SamplingParams, prompt: list[int], tools: Sequence[Tool]
    ) -> tuple[Detokenizer | None, AnswerParser | None]:
        """Return what decodes the tokens of an answer, and what takes it apart."""
        tokenizer = self._loaded.tokenizer
        if params.parse_response and tokenizer is None:
            raise PromptError("parse_response needs a tokenizer, and this checkpoint has none; leave it out")
        is_parsed = params.parse_response or params.structured is not None
        parser = self._parser(prompt, tools) if is_parsed and tokenizer is not None else None
        text = None
        if tokenizer is not None and params.detokenize:
            text = Detokenizer(
                tokenizer,
                tuple(params.stop),
                params.min_tokens,
                skip_special_tokens=params.skip_special_tokens,
                control=self._control,
            )
        return text, parser

    def _constraints(self, params: SamplingParams, prompt: list[int], namespace: str, is_thinking: bool) -> Constraints:
        """Return the constraints on the logits of an answer.

        Args:
            is_thinking: the prompt ends within reasoning.

        Raises:
            PromptError: a token id is outside the vocabulary, or texts are given and there is no tokenizer.
            SamplingError: the grammar of a structured answer cannot be used.
        """
        vocab_size, tokenizer = self._loaded.model.config.vocab_size, self._loaded.tokenizer
        if params.bad_words and tokenizer is None:
            raise PromptError("bad_words need a tokenizer, and this checkpoint has none; use logit_bias")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._loaded.end_tokens)}
        try:
            words = [ids for word in params.bad_words for ids in spellings(tokenizer, word)]
        except PromptError as error:
            raise PromptError(f"bad_words: {error}") from None
        for word in words:
            self._check_ids("bad_words", word)
        matcher = None
        if params.structured is not None:
            if self._grammars is None:
                raise PromptError("structured output needs a tokenizer, and this checkpoint has none")
            matcher = self._grammars.matcher(params.structured, namespace)
        gate = None
        if is_thinking and self._vocabulary is not None and matcher is not None:
            gate = ThinkingGate(THINKING[1].encode(), self._vocabulary.bytes_of)
        ends = {token for token in ends if token < vocab_size}
        return Constraints(params, prompt, frozenset(ends), words, matcher, gate)

    def _check_ids(self, name: str, tokens: Iterable[int]) -> None:
        """Refuse token ids beyond the logits, which a pass would look up: those of a parameter, or of its words."""
        vocab_size = self._loaded.model.config.vocab_size
        outside = next((token for token in tokens if token >= vocab_size), None)
        if outside is not None:
            raise PromptError(
                f"{name}: token {outside} is outside the vocabulary: ids go from 0 to {vocab_size - 1}; leave it out"
            )

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


def check_request_id(request_id: object, is_used: Callable[[str], bool]) -> None:
    """Check an id that a caller gives a request.

    Raises:
        ArgumentError: it is not a text, or in use.
    """
    if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_ID_CHARACTERS:
        raise ArgumentError(
            f"request_id must be a text of 1 to {MAX_ID_CHARACTERS} characters, or None; got {request_id!r:.100}"
        )
    if is_used(request_id):
        raise ArgumentError(
            f"request_id={request_id!r} is in use: its request waits, runs, or has an output that step() did not "
            "return yet; give another id"
        )


def params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> list[SamplingParams | None]:
    """The parameters of each of several prompts.

    Raises:
        ArgumentError: there are parameters for another number of prompts.
    """
    if not isinstance(params, list | tuple):
        return [params] * num_prompts  # type: ignore[list-item]  # another type is refused with its prompt
    if len(params) != num_prompts:
        raise ArgumentError(
            f"{len(params)} SamplingParams for {num_prompts} prompts; give one for all, or one for each"
        )
    return list(params)
