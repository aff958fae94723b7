"""A random life of an engine: requests of every kind, and what happens to their engine; each answer is compared with
that of a cold run."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hybrid import (
    Engine,
    Image,
    ImagePrompt,
    MemoryBudgetError,
    PromptError,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from support.combinations import LONGEST, InjectedError, Makes, Settings
from support.engines import assert_nothing_held, no_even_tokens, not_twice_in_a_row
from support.vision import chat, picture


@dataclass(frozen=True)
class Prompt:
    """Token ids, images in them by (start, count, seed of the embeddings), or a text, or a turn of a chat: pictures by
    their seeds, and a text."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, int, int], ...] = ()
    text: str | None = None
    pictures: tuple[int, ...] = ()

    def given(self, hidden_size: int) -> Any:
        if self.pictures:
            return chat(*map(picture, self.pictures), text=self.text, before="")
        if self.text is not None:
            return self.text
        if not self.images:
            return list(self.ids)
        return ImagePrompt(
            list(self.ids), [Image(start, embedded(count, hidden_size, seed)) for start, count, seed in self.images]
        )


def embedded(count: int, size: int, seed: int) -> torch.Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


TEXTS = [
    "The with statement wraps the execution of a block. ",
    "def f(x):\n    return x\n\n\n",
    "Größe, naïve, 日本語, e\u0301 and 👩‍👩‍👧‍👦 🏳️‍🌈! ",
    "<|im_end|><|endoftext|> as text ",
    " \t\n  \u200b\ufeff\u202e",
]

FORMS: list[dict[str, Any]] = [
    {"regex": "[0-9]{3}-[a-f]+;"},
    {"choice": ["yes, it is", "no", 'ünknown "quoted"']},
    {"json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
]


def fails_at_the_third(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
    if len(answer) == 2:
        raise ValueError("this one always fails here")
    return logits


class Life:
    """An engine with the settings of a seed, and one that computes the same prompts alone and keeps nothing.

    Args:
        seed: of everything.
        settings: of its engine.
    """

    def __init__(self, seed: int, settings: Settings) -> None:
        self.rng = random.Random(seed)
        self.settings = settings
        self.log: list[str] = [str(self.settings)]
        self.makes = Makes(self.settings, self.rng)
        self.chunk, self.page_size = self.makes.chunk, self.makes.page_size
        self.hidden_size: int = self.makes.base.model.config.hidden_size
        self.cold_engine = self.makes.cold()
        self.engine = self.make()
        self.cold_answers: dict[Any, RequestOutput] = {}
        self.seen: list[Prompt] = []

    def make(self) -> Engine:
        return self.makes.engine(*self.cold_engine.cache.unit_bytes)

    # Prompts

    def tokens(self, count: int) -> tuple[int, ...]:
        if self.rng.random() < 0.2:
            few = [self.rng.randrange(3, 300) for _ in range(3)]
            return tuple(few * count)[:count]
        return tuple(self.rng.randrange(3, 300) for _ in range(count))

    def length(self, most: int) -> int:
        """At the edge of a page or chunk, beside it, or anywhere."""
        unit = self.rng.choice([self.page_size, self.chunk, math.lcm(self.page_size, self.chunk)])
        edge = unit * self.rng.randint(1, max(1, most // unit)) + self.rng.choice([-1, 0, 1])
        return max(1, min(most, self.rng.choice([edge, edge, self.rng.randint(1, most)])))

    def fresh(self) -> Prompt:
        rng = self.rng
        if rng.random() < 0.2 and self.makes.base.tokenizer is not None:
            text = "".join(rng.choice(TEXTS) * rng.randint(1, 2) for _ in range(rng.randint(1, 3)))
            ids = tuple(self.makes.base.tokenizer(text).input_ids)
            if len(ids) <= LONGEST:
                return Prompt(ids, text=text)
        ids = self.tokens(self.length(LONGEST))
        return self.with_images(Prompt(ids)) if rng.random() < 0.25 else Prompt(ids)

    def with_images(self, prompt: Prompt) -> Prompt:
        images, at = [], 0
        for _ in range(self.rng.randint(1, 2)):
            start = at + self.rng.randint(0, 20)
            count = self.rng.choice([1, 5, self.chunk - 1, self.chunk, self.chunk + 3])
            if start + count < min(len(prompt.ids), LONGEST):
                images.append((start, count, self.rng.randrange(3)))
                at = start + count
        return Prompt(prompt.ids, tuple(images))

    def prompt(self) -> Prompt:
        """A new one, or one that continues, repeats or leaves what was seen."""
        rng = self.rng
        if not self.seen or rng.random() < 0.25:
            return self.fresh()
        before = rng.choice(self.seen[-6:])
        kind = rng.choice(["continue", "continue", "repeat", "leave", "leave"])
        if kind == "repeat" and len(before.ids) <= LONGEST:
            return before
        ids = before.ids
        if kind == "leave":
            ids = ids[: self.length(len(ids))]
        ids = ids[: LONGEST - 1]
        images = tuple(image for image in before.images if image[0] + image[1] <= len(ids))
        return Prompt(ids + self.tokens(rng.randint(1, LONGEST - len(ids))), images)

    # Options of requests

    def options(self, prompt: Prompt) -> Settings:
        """Return options of a request to this prompt."""
        rng, has_images = self.rng, bool(prompt.images or prompt.pictures)
        found: Settings = {"max_new_tokens": rng.choice([1, 2, 9, 20, 33]), "ignore_eos": True}
        if rng.random() < 0.5:
            found |= {"temperature": rng.choice([0.3, 0.8, 1.0, 2.5, 1e6]), "seed": rng.randrange(2**63)}
            for name, values in {"top_k": [1, 2, 50, 10**6], "top_p": [0.01, 0.5, 0.95], "min_p": [0.01, 0.3]}.items():
                if rng.random() < 0.3:
                    found[name] = rng.choice(values)
        for name, values, chance in (
            ("presence_penalty", [-1.5, 2.0], 0.08),
            ("frequency_penalty", [-0.5, 1.0], 0.08),
            ("repetition_penalty", [0.8, 1.3], 0.08),
            ("logit_bias", [{7: 5.0, 11: -100}, {5: 100.0}], 0.08),
            ("bad_words", [["e", " the", "a"]], 0.08),
            ("logits_processors", [[no_even_tokens, not_twice_in_a_row], [fails_at_the_third]], 0.1),
            ("n", [2, 3, 5], 0.25),
            ("prompt_logprobs", [0, 3], 0.1),
            ("checkpoint_at", [[len(prompt.ids) // 2, -1]], 0.1),
            ("pin_for", [0.01, 1e6], 0.1),
            ("priority", [-3, 50], 0.1),
            ("scheduling_priority", [-3, 50], 0.1),
            ("detokenize", [False], 0.1),
            ("truncate_prompt_tokens", [self.page_size, self.chunk + 1], 0 if has_images else 0.05),
        ):
            if rng.random() < chance:
                found[name] = rng.choice(values)
        if rng.random() < 0.1:
            found |= {"structured": rng.choice(FORMS), "ignore_eos": False}
        elif rng.random() < 0.2:
            found |= {"ignore_eos": False, "min_tokens": rng.choice([0, 1, min(5, found["max_new_tokens"])])}
        if "truncate_prompt_tokens" in found:
            found.pop("checkpoint_at", None)
        found["logprobs"] = rng.choice([0, 4]) if self.settings["deterministic"] and rng.random() < 0.7 else 4
        if self.makes.is_adapted and rng.random() < 0.4:
            found["adapter"] = rng.choice(["one", "two"])
        return self.with_ends(prompt, found) if rng.random() < 0.3 else found

    def with_ends(self, prompt: Prompt, options: Settings) -> Settings:
        """Options with which the answer ends before its length: found in the answer that it is without."""
        plain = self.cold(prompt, options)
        if not plain.token_ids or "structured" in options:
            return options
        if self.rng.random() < 0.5:
            return options | {"stop_token_ids": [self.rng.choice(plain.token_ids)]}
        if plain.text and options.get("detokenize", True):
            at = self.rng.randrange(len(plain.text))
            stop = plain.text[at : at + self.rng.randint(1, 4)]
            return options | {"stop": [stop, "never to be found"]}
        return options

    # Events

    def step(self) -> None:
        """Something happens."""
        events: dict[Callable[[], None], int] = {
            self.generate: 6,
            self.step_by_step: 6,
            self.stream: 2,
            self.clear: 1,
            self.pin: 1,
            self.hand_over: 1,
            self.restart: 1,
        }
        self.rng.choices([*events], [*events.values()])[0]()
        assert_nothing_held(self.engine)
        if self.settings["verify_contents"]:
            self.engine.cache.audit(contents=True)

    def requests(self) -> list[tuple[Prompt, Settings]]:
        """Requests that fit; some have a prompt in common."""
        chosen: list[tuple[Prompt, Settings]] = []
        for _ in range(self.rng.choice([1, 2, 4, 6])):
            prompt = chosen[-1][0] if chosen and self.rng.random() < 0.3 else self.prompt()
            options = self.options(prompt)
            most = self.engine.cache.largest_request * self.page_size
            if len(prompt.ids) + options["max_new_tokens"] <= most:
                chosen.append((prompt, options))
                self.cold(prompt, options)
        return chosen

    def generate(self) -> None:
        chosen = self.requests()
        if not chosen:
            return
        namespace = self.rng.choice(["", "", "other"])
        self.log.append(f"generate in {namespace!r}: {[self.shown(*one) for one in chosen]}")
        outputs = self.engine.generate(
            [self.given(prompt) for prompt, _ in chosen],
            [SamplingParams(**options) for _, options in chosen],
            namespace=namespace,
            progress=False,
        )
        for (prompt, options), output in zip(chosen, outputs, strict=True):
            self.compare(prompt, options, output)

    def step_by_step(self) -> None:
        """Requests come between steps, and some are aborted."""
        chosen = self.requests()
        self.log.append(f"step by step: {[self.shown(*one) for one in chosen]}")
        texts: dict[str, list[Any]] = {}
        live: dict[str, tuple[Prompt, Settings]] = {}
        while chosen or self.engine.has_work:
            if chosen and (not self.engine.has_work or self.rng.random() < 0.4):
                prompt, options = chosen.pop()
                name = self.engine.add_request(
                    self.given(prompt), SamplingParams(**options), namespace=self.rng.choice(["", "", "b"])
                )
                live[name], texts[name] = (prompt, options), ["", []]
            if live and self.rng.random() < 0.02:
                name = self.rng.choice([*live])
                self.log.append(f"abort {name}")
                try:
                    self.engine.abort(name)
                except RequestError:
                    assert self.engine.has_work
            try:
                outputs = self.engine.step()
            except InjectedError:
                assert self.engine.is_retrying
                continue
            for output in outputs:
                texts[output.request_id][0] += output.delta
                texts[output.request_id][1] += output.delta_token_ids
                if output.finish_reason is not None:
                    assert texts[output.request_id] == [output.text, output.token_ids]
                    self.compare(*live.pop(output.request_id), output)
        assert not live

    def stream(self) -> None:
        """A stream, to its end or dropped before."""
        chosen = self.requests()[:1]
        if not chosen:
            return
        ((prompt, options),) = chosen
        options.pop("n", None)
        expected = self.cold(prompt, options)
        self.log.append(f"stream {self.shown(prompt, options)}")
        stream, text, count = self.engine.stream(self.given(prompt), SamplingParams(**options)), "", 0
        try:
            for piece in stream:
                text += piece
                count += 1
                if self.rng.random() < 0.1:
                    break
            else:
                if self.settings["deterministic"]:
                    assert text == expected.text
        except RequestError:
            assert expected.finish_reason == "error" or self.settings["fails"]
        if self.settings["deterministic"]:
            assert expected.text.startswith(text)
        stream.close()  # type: ignore[attr-defined]
        while self.engine.has_work:  # replays
            try:
                self.engine.step()
            except InjectedError:
                assert self.engine.is_retrying

    def clear(self) -> None:
        self.log.append("clear")
        self.engine.cache.clear()

    def pin(self) -> None:
        if not self.seen:
            return
        prompt = self.rng.choice(self.seen)
        self.log.append(f"pin {len(prompt.ids)}")
        try:
            pin = self.engine.pin(self.given(prompt), ttl=self.rng.choice([0.001, 1e6]))
            if self.rng.random() < 0.5:
                self.engine.unpin(pin)
        except (PromptError, MemoryBudgetError):
            pass

    def hand_over(self) -> None:
        """Hand what is cached to another engine, which takes the place of this one."""
        data = self.engine.dump()
        self.log.append(f"hand over {len(data)} bytes")
        self.engine.close()
        self.engine = self.make()
        self.engine.load(data)
        self.engine.load(data)

    def restart(self) -> None:
        self.log.append("restart")
        if self.rng.random() < 0.7:
            self.engine.close()
        self.engine = self.make()

    # Answers

    def given(self, prompt: Prompt) -> Any:
        return prompt.given(self.hidden_size)

    def shown(self, prompt: Prompt, options: Settings) -> str:
        return f"{len(prompt.ids)} tokens, images {prompt.images}, text {prompt.text!r}, {options}"

    def cold(self, prompt: Prompt, options: Settings) -> RequestOutput:
        """The answer of the engine that keeps nothing."""
        key = prompt, repr(sorted(options.items()))
        if key not in self.cold_answers:
            without = {name: value for name, value in options.items() if name != "pin_for"}
            output = self.cold_engine.generate([self.given(prompt)], SamplingParams(**without), progress=False)[0]
            self.cold_answers[key] = output
            for answer in output.outputs:
                self.makes.known.sequences.append([*output.prompt_token_ids, *answer.token_ids])
        return self.cold_answers[key]

    def compare(self, prompt: Prompt, options: Settings, output: RequestOutput) -> None:
        expected = self.cold(prompt, options)
        usage = output.usage
        assert usage.cached_tokens <= usage.page_tokens
        assert usage.cached_tokens < usage.prompt_tokens == len(output.prompt_token_ids)
        assert usage.accepted_tokens <= usage.drafted_tokens
        for own, other in zip(output.outputs, expected.outputs, strict=True):
            self.compare_one(own, other)
        self.compare_logprobs(output.prompt_logprobs, expected.prompt_logprobs, [None])
        if output.finish_reason in ("length", "stop") and not prompt.text:
            self.seen.append(Prompt((*output.prompt_token_ids, *output.token_ids), prompt.images))

    def compare_one(self, own: Any, other: Any) -> None:
        """An answer and that of the cold run."""
        if own.finish_reason == "error" and "InjectedError" in own.error:  # its passes failed again and again
            assert self.settings["fails"]
            return
        if self.settings["deterministic"]:
            count = len(own.token_ids)
            if own.finish_reason == "abort":
                assert other.text.startswith(own.text)
                assert own.token_ids == other.token_ids[:count]
                assert own.logprobs == other.logprobs[:count]
            else:
                mine = own.token_ids, own.text, own.finish_reason, own.error, own.logprobs
                assert mine == (other.token_ids, other.text, other.finish_reason, other.error, other.logprobs)
            return
        self.compare_logprobs(own.logprobs, other.logprobs, [own.token_ids, other.token_ids])

    def compare_logprobs(self, own: Any, other: Any, tokens: Sequence[Any]) -> None:
        """Up to the first token that differs, and there."""
        if own is None and other is None:
            return
        if self.settings["deterministic"] and tokens == [None]:
            assert own == other[: len(own)]
            return
        tolerance = self.tolerance()
        pairs = zip(*tokens, strict=False) if tokens != [None] else [(0, 0)] * len(own)
        for at, (mine, theirs, (a, b)) in enumerate(zip(own, other, pairs, strict=False)):
            if mine is None or theirs is None:
                assert mine is theirs
                continue
            worst = max((abs(mine[token] - theirs[token]) for token in mine.keys() & theirs.keys()), default=0.0)
            assert worst < tolerance, f"token {at}: log-probabilities differ by {worst}"
            if a != b:
                return

    def tolerance(self) -> float:
        """Largest difference of log-probabilities without determinism."""
        is_rounded = self.settings["state_dtype"] != "float32" or self.settings["kv_dtype"] != "auto"
        if is_rounded and self.settings["model"] == "experts":
            return 1.0  # another expert may be chosen, which is a leap
        if "bfloat16" in self.settings["model"]:
            return 0.5
        return 0.1 if is_rounded else 1e-3
