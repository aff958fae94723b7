"""Our Qwen3.5 against transformers' own, on random checkpoints: prompts in one pass, in parts, token by token, packed.

Pages and state slots are full of NaN until they are written. What is bitwise equal is so in deterministic mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import hybrid
from hybrid.batch import Batch, Group
from hybrid.memory.pool import EMPTY_STATE
from hybrid.memory.tensors import CacheTensors
from hybrid.models.loading import load_model, open_checkpoint
from hybrid.models.qwen3_5 import Qwen3_5ForCausalLM
from hybrid.models.torch_functions import use_torch_functions
from hybrid.spec import TokenTensor
from support.checkpoints import layers, random_model, text_config, write_checkpoint
from support.tensors import CPU, ints, rows_of, same_bits, starts_of

CHUNK = 64
CONFIGS: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {"tie_word_embeddings": False},
    "attention bias": {"attention_bias": True, "layer_types": layers("FL")},
    "as many value heads as key heads": {"linear_num_value_heads": 2},
    "every head its own keys": {"num_key_value_heads": 4, "layer_types": layers("LLLF")},
    "one key head for all": {"num_key_value_heads": 1, "linear_num_key_heads": 1, "layer_types": layers("FLFF")},
    "narrow convolution": {"linear_conv_kernel_dim": 2},
    "other constants": {
        "rms_norm_eps": 1e-3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
}


@cache
def pair(name: str, dtype: torch.dtype = torch.float32) -> tuple[Qwen3_5ForCausalLM, Any]:
    """Our model and transformers', of the same checkpoint."""
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), random_model(text_config(**CONFIGS[name])))
        ours = load_model(open_checkpoint(path), dtype, CPU, CHUNK)
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    use_torch_functions(theirs)
    return ours, theirs


def expected_logits(theirs: Any, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return theirs(input_ids=torch.tensor([ids])).logits[0].float()


def random_ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 320, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@dataclass
class Running:
    """A prompt and how far it is computed."""

    ids: list[int]
    pages: list[int]
    slots: tuple[int, int]
    state: int = EMPTY_STATE
    computed: int = 0
    shared: int = 0
    captures: dict[int, int] = field(default_factory=dict)


class Runner:
    """Runs a model on batches made by hand, over poisoned pools. A step reads one state slot and writes another."""

    def __init__(self, model: Qwen3_5ForCausalLM, page_size: int = 16, invariant: bool = True) -> None:
        self.model, self.page_size, self.invariant = model, page_size, invariant
        spec = model.spec(model.config, model.lm_head.weight.dtype)
        self.tensors = CacheTensors.fixed(spec, page_size, 200, 40, CPU)
        self.tensors.kv.fill_(float("nan"))
        for tensor in self.tensors.state.values():
            tensor[EMPTY_STATE + 1 :] = float("nan")
        self._free_pages = torch.randperm(200, generator=torch.Generator().manual_seed(1)).tolist()
        self._free_slots = list(range(EMPTY_STATE + 1, 40))

    def sequence(self, ids: list[int], captures: Sequence[int] = ()) -> Running:
        """A sequence with memory of its own; the state after each of `captures` tokens goes to a slot of its own."""
        pages = [self._free_pages.pop() for _ in range(-(-len(ids) // self.page_size))]
        own = {position: self._free_slots.pop() for position in captures}
        return Running(ids, pages, (self._free_slots.pop(), self._free_slots.pop()), captures=own)

    def step(self, prompts: Sequence[tuple[Running, int]], decoding: Sequence[Running] = ()) -> list[Tensor]:
        """One pass: so many tokens of each prompt, one of each that decodes. Returns the logits of all tokens."""
        parts = [*prompts, *((sequence, 1) for sequence in decoding)]
        lengths = [count for _, count in parts]
        starts = [0, *accumulate(lengths)]
        ids, positions, slots, captures = [], [], [], []
        for row, (sequence, count) in enumerate(parts):
            end = sequence.computed + count
            ids += sequence.ids[sequence.computed : end]
            for at in range(sequence.computed, end):
                positions.append(at)
                place = sequence.pages[at // self.page_size] * self.page_size + at % self.page_size
                slots.append(-1 if at < sequence.shared else place)
            for position, slot in sequence.captures.items():
                if sequence.computed < position <= end:
                    captures.append((row, position - sequence.computed, slot))
        writes = [s.slots[0] if s.state != s.slots[0] else s.slots[1] for s, _ in parts]
        longest = max(len(sequence.pages) for sequence, _ in parts)
        num_prompts, reads = len(prompts), [sequence.state for sequence, _ in parts]
        tables = [s.pages + [0] * (longest - len(s.pages)) for s, _ in parts]

        def group(rows: slice) -> Group | None:
            if not parts[rows]:
                return None
            return Group(
                slice(starts[rows.start], starts[rows.stop]),
                starts_of(lengths[rows]),
                ints([sequence.computed + count for sequence, count in parts[rows]]),
                ints(tables[rows]),
                ints(reads[rows]),
                ints(writes[rows]),
                None,
            )

        batch = Batch(
            token_ids=ints(ids),
            positions=ints(positions),
            slot_mapping=ints(slots),
            checkpoints=rows_of(captures),
            sample_rows=torch.arange(len(ids)),
            prefills=group(slice(0, num_prompts)),
            decodes=group(slice(num_prompts, len(parts))),
            decode_start=starts[num_prompts] if self.invariant else None,
        )
        logits = self.model(batch, self.tensors.kv, self.tensors.state)
        for (sequence, count), slot in zip(parts, writes, strict=True):
            sequence.computed, sequence.state = sequence.computed + count, slot
        return list(logits.split(lengths))

    def run(self, sequence: Running, shares: Sequence[int]) -> Tensor:
        """Logits of a sequence alone: prompt parts of these sizes, then token by token to its end."""
        logits = [self.step([(sequence, share)])[0] for share in shares]
        while sequence.computed < len(sequence.ids):
            logits += self.step([], [sequence])
        return torch.cat(logits)


def assert_equal_logits(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == torch.float32
    bound = 1e-4 * float(theirs.max() - theirs.min())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)


# Against transformers


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers_however_the_tokens_come(name: str) -> None:
    ours, theirs = pair(name)
    ids = random_ids(3 * CHUNK + 21)
    expected = expected_logits(theirs, ids)
    last = len(ids) - 6  # the six tokens behind come one by one
    for shares in ([len(ids)], [CHUNK, 2 * CHUNK, 21], [CHUNK, last - CHUNK]):
        runner = Runner(ours)
        assert_equal_logits(runner.run(runner.sequence(ids), shares), expected)
    for first in (0, 1, 7):
        runner = Runner(ours, invariant=False)
        assert_equal_logits(runner.run(runner.sequence(ids[:10]), [first] if first else []), expected[:10])


@pytest.mark.parametrize("page_size", [1, 64])
def test_logits_do_not_depend_on_the_page_size(page_size: int) -> None:
    ours, theirs = pair("tied")
    ids = random_ids(CHUNK + 40)
    runner = Runner(ours, page_size)
    assert_equal_logits(runner.run(runner.sequence(ids), [CHUNK, 30]), expected_logits(theirs, ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_half_precision_is_as_close_to_fp32_as_that_of_transformers(dtype: torch.dtype) -> None:
    exact, (ours, theirs) = pair("untied")[1], pair("untied", dtype)
    error, their_error = 0.0, 0.0  # squared, over several prompts: that of a single one may be half as large again
    for seed in range(4):
        ids, runner = random_ids(2 * CHUNK + 9, seed), Runner(ours)
        expected = expected_logits(exact, ids)
        error += float((runner.run(runner.sequence(ids), [CHUNK, CHUNK + 3]) - expected).square().mean())
        their_error += float((expected_logits(theirs, ids) - expected).square().mean())
    assert error**0.5 <= 1.5 * their_error**0.5


# What is bitwise equal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tied", "one key head for all"])
def test_a_request_gives_the_same_bits_alone_and_in_a_packed_batch(name: str, dtype: torch.dtype) -> None:
    ours, _ = pair(name, dtype)
    prompts = [random_ids(length, seed=length) for length in (CHUNK + 5, 1, 3 * CHUNK + 17, 2 * CHUNK, 30)]
    together = Runner(ours)
    sequences = [together.sequence(ids) for ids in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    first, second = sequences[:3], sequences[3:]
    for row, output in enumerate(together.step([(first[0], CHUNK), (first[1], 1), (first[2], 2 * CHUNK)])):
        logits[row].append(output)
    outputs = together.step([(first[2], CHUNK), (second[0], CHUNK), (second[1], 25)], [first[0]])
    for row, output in zip((2, 3, 4, 0), outputs, strict=True):
        logits[row].append(output)
    outputs = together.step([(first[2], 10), (second[0], CHUNK)], [first[0], second[1]])
    for row, output in zip((2, 3, 0, 4), outputs, strict=True):
        logits[row].append(output)
    while behind := [row for row, sequence in enumerate(sequences) if sequence.computed < len(sequence.ids)]:
        for row, output in zip(behind, together.step([], [sequences[row] for row in behind]), strict=True):
            logits[row].append(output)
    shares = [[CHUNK], [1], [3 * CHUNK + 10], [2 * CHUNK], [25]]
    for row, ids in enumerate(prompts):
        alone = Runner(ours, page_size=64)
        assert same_bits(alone.run(alone.sequence(ids), shares[row]), torch.cat(logits[row]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["tied", "attention bias"])
def test_a_resumed_prompt_gives_the_bits_of_the_whole_one_and_writes_nothing_shared(
    name: str, dtype: torch.dtype
) -> None:
    ours, _ = pair(name, dtype)
    ids, runner = random_ids(5 * CHUNK + 11), Runner(ours)
    owner = runner.sequence(ids, captures=[CHUNK, 3 * CHUNK, 5 * CHUNK])
    whole = runner.run(owner, [len(ids)])
    kv, states = runner.tensors.kv.clone(), {name: tensor.clone() for name, tensor in runner.tensors.state.items()}
    for start, slot in owner.captures.items():
        reader = runner.sequence(ids)
        shared = (
            4 * CHUNK
        )  # the pages up to here are the owner's: tokens from `start` on are computed again, not stored
        reader.pages[: shared // runner.page_size] = owner.pages[: shared // runner.page_size]
        reader.computed, reader.state, reader.shared = start, slot, max(shared, start)
        if start > shared:
            reader.pages = owner.pages[: start // runner.page_size] + reader.pages[start // runner.page_size :]
        assert same_bits(runner.run(reader, [len(ids) - start]), whole[start:])
        assert same_bits(runner.tensors.kv[owner.pages], kv[owner.pages])
        for name, tensor in states.items():
            kept = [*owner.captures.values(), EMPTY_STATE]
            assert same_bits(runner.tensors.state[name][kept], tensor[kept])


# The whole way


def test_greedy_answers_are_those_of_transformers_cold_and_on_a_hit(checkpoint: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    use_torch_functions(theirs)
    config = hybrid.CacheConfig(memory="16MiB", page_size=16)
    engine = hybrid.Engine.from_pretrained(checkpoint, device="cpu", dtype="float32", cache=config)
    prompts = [random_ids(length, seed=length) for length in (2 * CHUNK + 30, 5, CHUNK)]
    params = hybrid.SamplingParams(max_new_tokens=12, ignore_eos=True, logprobs=0)
    for hits in ([0, 0, 0], [2 * CHUNK, 0, 0]):
        outputs = engine.generate(prompts, params)
        assert [output.usage.cached_tokens for output in outputs] == hits
        for prompt, output in zip(prompts, outputs, strict=True):
            with torch.inference_mode():
                answer = theirs.generate(
                    torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
                )[0, len(prompt) :].tolist()
            assert output.token_ids == answer
            assert len(set(answer)) > 3
            logprobs = expected_logits(theirs, prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
            ours = torch.tensor([chosen[token] for chosen, token in zip(output.logprobs or [], answer, strict=True)])
            torch.testing.assert_close(ours, logprobs[torch.arange(12), answer], rtol=0, atol=1e-3)


# What a model keeps


def test_the_spec_of_the_published_sizes_is_as_they_are_known() -> None:
    spec = Qwen3_5ForCausalLM.spec(Qwen3_5TextConfig(), torch.bfloat16)  # the 9B model
    assert spec.tokens == (TokenTensor.kv(8, 4, 256, torch.bfloat16),)
    assert spec.page_bytes(page_size=64) == 64 * 32 * 2**10
    recurrent, conv = spec.state
    assert recurrent.shape == (24, 32, 128, 128)
    assert recurrent.dtype == torch.float32
    assert recurrent.num_bytes == 48 * 2**20
    assert conv.shape == (24, 3, 8192)
    assert conv.dtype == torch.bfloat16
    assert conv.num_bytes == 24 * 3 * 8192 * 2
    assert spec.state_bytes == recurrent.num_bytes + conv.num_bytes
    assert [place.start for place in spec.state_places] == [0, recurrent.num_bytes]


def test_tensors_of_a_state_begin_at_multiples_of_64_bytes() -> None:
    spec = Qwen3_5ForCausalLM.spec(
        text_config(linear_num_value_heads=2, linear_key_head_dim=3, linear_value_head_dim=5), torch.bfloat16
    )
    recurrent, conv = spec.state
    assert (recurrent.num_bytes, conv.num_bytes) == (2 * 2 * 3 * 5 * 4, 2 * 3 * (2 * 2 * 3 + 2 * 5) * 2)
    assert [place.start for place in spec.state_places] == [0, 256]
    assert spec.state_bytes == 256 + 320
