"""The harness's model: its three questions, answered by an engine with its cache.

Few-shot examples, instructions, and the choices of one question share prefixes: each is computed once. Requests run in
the order of their tokens, so that those that share a prefix follow each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from hybrid.cache.config import CacheConfig
from hybrid.engine.config import EngineConfig
from hybrid.engine.engine import Engine
from hybrid.engine.sampling_params import SamplingParams
from hybrid.errors import ArgumentError, RequestError

SCORED_AT_ONCE = 1024
"""Continuations that are handed to the engine together."""

Scored = tuple[tuple[str, str] | None, list[int], list[int]]
"""Texts of a context and a continuation, where they are known, and the token ids of both."""


@register_model("hybrid")
class HybridLM(TemplateLM):
    """A model of the harness.

        results = lm_eval.simple_evaluate(model=HybridLM("tiny"), tasks=["..."])

    Args:
        pretrained: a checkpoint as `Engine.from_pretrained` takes it, or an engine.
        device, dtype, load_dtype: as for `Engine.from_pretrained`.
        memory: of the cache, as for `CacheConfig`.
        deterministic: as for `CacheConfig`.
        max_length: tokens of a context and all but the last token of what follows it, at most; longer contexts lose
            their first tokens. None: what the model takes.
        max_gen_toks: tokens of an answer whose task does not say it.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None: as the tokenizer has it.
        batch_size, max_batch_size: which the harness passes to every model; the engine's scheduler makes its batches.

    Raises:
        HybridError: there is no such checkpoint, or an argument is wrong, or the checkpoint has no tokenizer.

    Attributes:
        engine: with its cache: `engine.cache.stats()` has the hit rate.
    """

    def __init__(
        self,
        pretrained: str | Path | Engine,
        *,
        device: str | None = None,
        dtype: str | None = None,
        load_dtype: str | None = None,
        memory: int | float | str | None = None,
        deterministic: bool | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(pretrained, Engine):
            cache = CacheConfig(memory=memory, deterministic=deterministic)
            pretrained = Engine.from_pretrained(
                pretrained, device=device, dtype=dtype, load_dtype=load_dtype, cache=cache, config=EngineConfig()
            )
        self.engine: Engine = pretrained
        self.tokenizer: Any = self.engine.tokenizer
        if self.tokenizer is None:
            raise ArgumentError("HybridLM: this checkpoint has no tokenizer, which the harness's texts need")
        most = (self.engine.config.max_model_len or self.engine.model.config.max_position_embeddings) - 1
        if max_length is not None and not 1 < max_length <= most:
            raise ArgumentError(f"HybridLM: max_length must be from 2 to {most}, which this model takes")
        self.max_length: int = max_length or most
        self.max_gen_toks: int = max_gen_toks
        self.add_bos_token: bool | None = add_bos_token

    # What the harness asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        found: int = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        own = self.tokenizer.bos_token_id
        return self.eot_token_id if own is None else int(own)

    @property
    def tokenizer_name(self) -> str:
        """A name for the tokenizer, which the harness's own cache of requests goes by."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The token ids of a text."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            special = False
        ids: list[int] = self.tokenizer.encode(string, **({} if special is None else {"add_special_tokens": special}))
        return ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, in the form of the checkpoint's chat template."""
        text: str = self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    # Its three questions; `loglikelihood` of the base class encodes texts, and asks the first

    def _loglikelihood_tokens(
        self, requests: Sequence[Scored], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        wholes = [(context + answer)[-self.max_length - 1 :] for _, context, answer in requests]
        order = sorted(range(len(requests)), key=wholes.__getitem__)
        found: dict[int, tuple[float, bool]] = {}
        with tqdm(total=len(order), desc="Running loglikelihood requests", disable=disable_tqdm) as bar:
            for first in range(0, len(order), SCORED_AT_ONCE):
                chosen = order[first : first + SCORED_AT_ONCE]
                starts = [len(wholes[at]) - len(requests[at][2]) for at in chosen]
                contexts = [wholes[at][:start] for at, start in zip(chosen, starts, strict=True)]
                for at, (score,) in zip(
                    chosen, self.engine.score(contexts, [[requests[at][2]] for at in chosen]), strict=True
                ):
                    found[at] = score.logprob, score.is_greedy
                    if (texts := requests[at][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, found[at])
                bar.update(len(chosen))
        return [found[at] for at in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probabilities of whole texts, in windows as long as the model takes."""
        windows: list[Scored] = []
        ends = []
        for request in requests:
            parts = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(None, *make_disjoint_window(part)) for part in parts]
            ends.append(len(windows))
        values = [value for value, _ in self._loglikelihood_tokens(windows, disable_tqdm)]
        sums = [sum(values[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers of the engine, up to a stop text.

        Raises:
            ArgumentError: a task has an option that `SamplingParams` does not have.
            RequestError: a request failed.
        """
        params = [self._params(options) for _, options in (request.args for request in requests)]
        prompts = [
            self.tok_encode(request.args[0])[-(self.max_length + 1 - own.max_new_tokens) :]
            for request, own in zip(requests, params, strict=True)
        ]
        order = sorted(range(len(requests)), key=prompts.__getitem__)
        outputs = self.engine.generate(
            [prompts[at] for at in order], [params[at] for at in order], progress=not disable_tqdm
        )
        texts = [""] * len(requests)
        for at, output in zip(order, outputs, strict=True):
            if output.error is not None:
                raise RequestError(f"{output.request_id} failed: {output.error}")
            texts[at] = output.text
            self.cache_hook.add_partial("generate_until", requests[at].args, output.text)
        return texts

    def _params(self, options: dict[str, Any]) -> SamplingParams:
        given = dict(normalize_gen_kwargs(options, self.max_gen_toks))
        given.pop("do_sample", None)  # the harness has set the temperature by it
        length = given.pop("max_gen_toks")
        if length > self.max_length:
            raise ArgumentError(f"HybridLM: a task asks for {length} tokens, and the model takes {self.max_length}")
        stop = tuple(text for text in given.pop("until", ()) if text)
        return SamplingParams(max_new_tokens=length, stop=stop, **given)
