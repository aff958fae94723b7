"""A random life of `hybrid.hf.PrefixCache`, call by call against the same model without it.

    HYBRID_FUZZ=1000-1400 python -m pytest -q tests/hf/test_fuzz.py

runs the lives of these seeds instead of those of the suite. A failure names its seed, and what was called before it.
"""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig

from hybrid import MemoryBudgetError
from hybrid.hf.prefix_cache import PrefixCache
from support.hf import SUPPORTED, VOCAB, WITHOUT_ANSWERS, assert_nothing_held, tiny_model

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

FIRST, LAST = map(int, os.environ.get("HYBRID_FUZZ", "0-10").split("-"))
"""Seeds of the lives: from the first to before the last."""

CALLS = 8
"""Steps of a life, at most."""

TOLERANCE = 1e-3
"""Largest difference of logits, as part of their range."""

ADAPTED = {"qwen3_5_text": ["up_proj", "q_proj", "in_proj_qkv"], "llama": ["up_proj", "q_proj"]}
"""Model types that are tried with adapters too, and the modules that have some."""


class Life:
    """A model, a cache on it, and the sequences that it has seen.

    Args:
        seed: of everything.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.name = self.rng.choice([*SUPPORTED])
        self.model = tiny_model(self.name, seed)
        self.deterministic = self.rng.random() < 0.5
        self.has_adapters = self.name in ADAPTED and self.rng.random() < 0.5
        if self.has_adapters:
            peft = pytest.importorskip("peft")
            config = peft.LoraConfig(target_modules=ADAPTED[self.name], init_lora_weights=False)
            self.model = peft.get_peft_model(self.model, config)
            self.model.add_adapter("other", config)
            self.model.eval()
        chunk = self.rng.choice([8, 16, 16, 32] if self.deterministic else [1, 1, 4, 16])
        host = self.rng.choice([None, "1MiB"])
        self.options: dict[str, Any] = {"deterministic": self.deterministic, "chunk_size": chunk, "host": host}
        self.cache = self._make_cache(self.rng.choice([40_000, 200_000, 4 << 20, 4 << 20]))
        self.seen: list[list[int]] = []
        self.pasts: list[tuple[list[int], Any]] = []
        self.log: list[str] = [f"{self.name}, {self.options}, adapters: {self.has_adapters}"]

    def _make_cache(self, memory: int) -> PrefixCache:
        while True:
            try:
                return PrefixCache(self.model, memory, **self.options)
            except MemoryBudgetError:
                memory *= 2

    # Prompts

    def tokens(self, most: int) -> list[int]:
        """New ones, some of which end turns."""
        return [self.rng.choice([2, *range(3, VOCAB)] + [2] * 4) for _ in range(self.rng.randint(1, most - 1))] + [9]

    def prompt(self) -> list[int]:
        """A new one, or one that continues, repeats or leaves what was seen."""
        if not self.seen or self.rng.random() < 0.2:
            repeated = self.tokens(30)
            return repeated * self.rng.randint(1, 4) if self.rng.random() < 0.3 else self.tokens(90)
        before = self.rng.choice(self.seen[-6:])
        kind = self.rng.choice(["continue", "continue", "repeat", "leave"])
        if kind == "repeat":
            return list(before)
        if kind == "leave":
            before = before[: self.rng.randint(1, len(before))]
        return [*before, *self.tokens(30)]

    def batch(self) -> tuple[Tensor, Tensor]:
        """Prompts padded on the left, and their mask."""
        rows = [self.prompt()[-160:] for _ in range(self.rng.choice([1, 1, 1, 2, 3]))]
        width = max(map(len, rows)) + self.rng.choice([0, 0, 0, 2])
        ids = torch.tensor([[2] * (width - len(row)) + row for row in rows])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        return ids, mask

    # Options of `generate`

    def generate_options(self, is_single: bool) -> dict[str, Any]:
        rng = self.rng
        options: dict[str, Any] = {"max_new_tokens": rng.choice([1, 2, 5, 9, 20])}
        if rng.random() < 0.4:
            options |= {"do_sample": True, "temperature": rng.choice([0.7, 1.0, 3.0]), "top_k": rng.choice([0, 5, 50])}
        else:
            options["do_sample"] = False
        for name, values, chance in (
            ("repetition_penalty", [1.2], 0.1),
            ("no_repeat_ngram_size", [3], 0.1),
            ("min_new_tokens", [2, 4], 0.2),
            ("eos_token_id", [[2, *range(5, 40)]], 0.2),
            ("num_return_sequences", [2], 0.1 if options["do_sample"] else 0),
            ("logits_to_keep", [1], 0.1),
        ):
            if rng.random() < chance:
                options[name] = rng.choice(values)
        if rng.random() < 0.15:
            options |= {"num_beams": rng.choice([2, 3]), "num_return_sequences": rng.choice([1, 2])}
        if rng.random() < 0.1:
            options |= {"stop_strings": ["a", "e", "1"], "tokenizer": tokenizer()}
        if rng.random() < 0.1:
            keys = [name for name in options if name in ("max_new_tokens", "do_sample", "temperature", "top_k")]
            options["generation_config"] = GenerationConfig(pad_token_id=2, **{key: options.pop(key) for key in keys})
        if is_single and not options.get("num_return_sequences") and rng.random() < 0.3:
            options["drafts"] = rng.choice(["prompt_lookup", "assistant", "cache"])
        return options

    # What happens

    def step(self) -> None:
        """One thing, and then everything must still be right."""
        happens = self.rng.choices(
            [self.generate, self.give_back, self.open_a_session, self.change, self.between], [12, 2, 2, 1, 2]
        )[0]
        happens()
        assert_nothing_held(self.cache)

    def generate(self) -> None:
        ids, mask = self.batch()
        options = self.generate_options(len(ids) == 1)
        drafts = options.pop("drafts", None)
        if drafts == "cache" and self.deterministic:
            drafts = None
        shown = {name: "..." if name == "tokenizer" else value for name, value in options.items()}
        self.log.append(f"generate {[*ids.shape]} pads {(1 - mask).sum(1).tolist()} {shown} drafts: {drafts}")
        expected = self.seeded(self.model.generate, ids, mask, options)
        found = self.seeded(self.cache.generate, ids, mask, {**options, **self.drafted_by(drafts)})
        self.compare(found, expected, options)
        if self.deterministic and drafts is None and self.rng.random() < 0.3:
            cold = PrefixCache(self.model, "4MiB", placement=WITHOUT_ANSWERS, **self.options)
            self.same_bits(found, self.seeded(cold.generate, ids, mask, options))
        pads = (1 - mask).sum(1).tolist()
        if len(found.sequences) == len(ids):
            self.seen += [row[pad:] for row, pad in zip(found.sequences.tolist(), pads, strict=True)]
            if len(ids) == 1 and options.get("num_beams", 1) == 1 and not pads[0]:
                self.pasts.append((found.sequences[0].tolist(), found.past_key_values))

    def give_back(self) -> None:
        """The past of an earlier call is continued."""
        if not self.pasts:
            return
        tokens, past = self.pasts.pop(self.rng.randrange(len(self.pasts)))
        if past.known_rows() is None:
            return
        prompt = torch.tensor([[*tokens, *self.tokens(20)]])
        self.log.append(f"give back {len(tokens)} of {prompt.shape[1]}")
        options = {"max_new_tokens": 4, "do_sample": False}
        mask = torch.ones_like(prompt)
        found = self.seeded(self.cache.generate, prompt, mask, {**options, **past.as_argument})
        self.compare(found, self.seeded(self.model.generate, prompt, mask, options), options)
        self.seen.append(found.sequences[0].tolist())

    def open_a_session(self) -> None:
        prompt = torch.tensor([self.prompt()[-160:]])
        self.log.append(f"session {prompt.shape[1]}")
        options: dict[str, Any] = {"max_new_tokens": self.rng.choice([1, 6, 20]), "do_sample": False}
        mask = torch.ones_like(prompt)
        with self.cache.session(prompt) as past:
            if self.rng.random() < 0.3:
                between = torch.tensor([self.prompt()[-100:]])  # another prompt in between
                self.cache.generate(between, max_new_tokens=3, do_sample=False)
            found = self.seeded(self.model.generate, prompt, mask, {**options, **past.as_argument})
            self.compare(found, self.seeded(self.model.generate, prompt, mask, options), options)
            tokens = found.sequences[0].tolist()
            if self.rng.random() < 0.6:
                branch = past.fork()
                removed = self.rng.randint(0, min(30, len(tokens) - 2))
                self.log.append(f"  rewind {removed} of {len(tokens)}")
                past.rewind(removed)
                kept = tokens[: len(tokens) - 1 - removed]
                for member, begun in ((past, kept), (branch, tokens)):
                    turn = torch.tensor([[*begun, *self.tokens(12)]])
                    ones, few = torch.ones_like(turn), {"max_new_tokens": 3, "do_sample": False}
                    found = self.seeded(self.model.generate, turn, ones, {**few, **member.as_argument})
                    self.compare(found, self.seeded(self.model.generate, turn, ones, few), few)
                    self.seen.append(found.sequences[0].tolist())
        self.seen.append(tokens)

    def change(self) -> None:
        """The model is another one from now on; pasts of the former one are not given back."""
        ways: list[Callable[[], object]] = [self.load_other_weights, self.scale_a_weight]
        if self.has_adapters:
            ways += [lambda: self.model.set_adapter("other"), lambda: self.model.set_adapter("default")]
        else:
            ways.append(lambda: self.model.set_attn_implementation(self.rng.choice(["eager", "sdpa"])))
        try:
            self.rng.choice(ways)()
        except ValueError:  # not every model has every implementation
            return
        self.log.append("the model changes")
        self.pasts.clear()

    def load_other_weights(self) -> None:
        with torch.no_grad():
            self.model.load_state_dict({name: 0.9 * weight for name, weight in self.model.state_dict().items()})

    def scale_a_weight(self) -> None:
        weight = self.rng.choice([weight for weight in self.model.parameters() if weight.is_floating_point()])
        weight.data = weight.data * 1.1

    def between(self) -> None:
        if not self.seen:
            return
        ids = torch.tensor([self.rng.choice(self.seen)])
        ways: list[Callable[[], object]] = [
            self.cache.clear,
            lambda: self.cache.keep(ids[0].tolist()),
            lambda: self.pin(ids),
            lambda: self.cache.explain(ids).usable_hit and self.cache.load(self.cache.dump(ids)),
            lambda: self.cache.generate(ids, max_new_tokens=2, do_sample=False, namespace="another"),
        ]
        at = self.rng.randrange(len(ways))
        self.log.append(f"between: way {at}")
        ways[at]()

    def pin(self, ids: Tensor) -> None:
        with suppress(MemoryBudgetError):  # a pin of most of a small memory is refused
            self.cache.pin(ids, ttl=3.0)

    # What must be right

    def seeded(self, generate: Callable[..., Any], ids: Tensor, mask: Tensor, options: dict[str, Any]) -> Any:
        torch.manual_seed(len(self.log))
        return generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)

    def drafted_by(self, who: str | None) -> dict[str, Any]:
        if who == "prompt_lookup":
            return {"prompt_lookup_num_tokens": self.rng.choice([2, 7])}
        if who == "assistant":
            return {"assistant_model": tiny_model("llama", 1)}
        return {"speculation": "cache"} if who == "cache" else {}

    def compare(self, found: Any, expected: Any, options: dict[str, Any]) -> None:
        """The same answer within rounding. Where a token differs, what it was drawn from must not."""
        if options.get("num_beams", 1) > 1:
            if not torch.equal(found.sequences, expected.sequences):
                gap = (found.sequences_scores - expected.sequences_scores).abs().max()
                assert float(gap) < 1e-2, f"scores of beams differ by {float(gap)}"
            return
        start = found.sequences.shape[1] - len(found.logits)
        for row, (own, other) in enumerate(zip(found.sequences.tolist(), expected.sequences.tolist(), strict=True)):
            for at, (a, b) in enumerate(zip(found.logits, expected.logits, strict=False)):
                gap = float((a[row] - b[row]).abs().max() / b[row].abs().max())
                assert gap < TOLERANCE, f"row {row}, token {at}: the logits differ by {gap} of their range"
                if own[start + at] != other[start + at]:
                    break
            else:
                assert own == other, f"row {row}: {own} and not {other}"

    def same_bits(self, found: Any, cold: Any) -> None:
        assert torch.equal(found.sequences, cold.sequences)
        assert all(torch.equal(a, b) for a, b in zip(found.logits, cold.logits, strict=True)), "not bitwise a cold run"


def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(__file__).parents[2] / "models" / "tiny")


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_life_answers_as_the_model_without_the_cache(seed: int) -> None:
    life = Life(seed)
    try:
        for _ in range(CALLS):
            life.step()
    except Exception as error:
        error.add_note(f"seed {seed}: " + "\n  ".join(life.log))
        raise
