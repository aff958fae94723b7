"""Calls of every public function of ./kernels at the sizes of Qwen3.5-9B in bfloat16, on CPU tensors.

For `kernel_resources.py`: the kernels are compiled for what these calls would launch. Tensors hold nothing that means
anything, and lie as the engine's do: one layer of a pool, a part of a projection. Kernels are imported when their cases
are asked for, since importing them imports triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

HIDDEN, INTERMEDIATE, VOCAB = 4096, 12288, 248320
HEADS, KV_HEADS, HEAD_DIM, ROTARY_DIM, FULL_LAYERS = 16, 4, 256, 64, 8
KEY_HEADS, VALUE_HEADS, LINEAR_DIM, WIDTH, LINEAR_LAYERS = 16, 32, 128, 4, 24
CHANNELS = (2 * KEY_HEADS + VALUE_HEADS) * LINEAR_DIM
EXPERTS, EXPERTS_PER_TOKEN, EXPERT_SIZE, EXPERT_HIDDEN = 256, 8, 512, 2048
"""Mixtures of experts are of the size of Qwen3.5-35B-A3B."""

EPS, PAGE, CHUNK = 1e-6, 64, 64
PROMPT, PROMPTS, DECODED = 2048, 2, 64
"""Tokens and requests of a step of prompts, requests of a decode step."""


@dataclass(frozen=True)
class Case:
    """A call of a public function.

    Attributes:
        operation: `module.function`.
        what: for what it is called.
        call: calls it on CPU tensors.
        brief: whether it is one of the few that reach every kernel.
    """

    operation: str
    what: str
    call: Callable[[], object]
    brief: bool = False


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def floats(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32)


def starts(tokens: int, requests: int) -> Tensor:
    return torch.arange(0, tokens + 1, tokens // requests)


def indices(count: int, first: int = 1) -> Tensor:
    return torch.arange(first, first + count)


def pages() -> Tensor:
    """One layer of a pool of pages."""
    return numbers(256, FULL_LAYERS, 2, PAGE, KV_HEADS, HEAD_DIM)[:, 1]


def states() -> tuple[Tensor, Tensor]:
    """One layer of a pool of states: (windows, recurrent)."""
    windows = numbers(3 * DECODED, LINEAR_LAYERS, WIDTH - 1, CHANNELS)
    recurrent = floats(3 * DECODED, LINEAR_LAYERS, VALUE_HEADS, LINEAR_DIM, LINEAR_DIM)
    return windows[:, 1], recurrent[:, 1]


def memory_cases() -> Iterator[Case]:
    from hybrid.kernels.triton import memory

    heads = numbers(DECODED, 2 * KV_HEADS, HEAD_DIM).chunk(2, dim=1)
    rows = torch.empty(16, 51_511_296, dtype=torch.uint8)  # states of a model of 4B parameters
    yield Case("memory.store_kv", "", lambda: memory.store_kv(*heads, pages(), indices(DECODED)), True)
    yield Case("memory.copy_states", "", lambda: memory.copy_states(rows, indices(4), indices(4, 8)), True)


def elementwise_cases() -> Iterator[Case]:
    from hybrid.kernels.triton import elementwise

    x, scale, head_scale, norm_weight = numbers(DECODED, HIDDEN), floats(HIDDEN), floats(HEAD_DIM), numbers(LINEAR_DIM)
    mixed, z = numbers(DECODED, VALUE_HEADS, LINEAR_DIM), numbers(DECODED, VALUE_HEADS, LINEAR_DIM)
    gate, up = numbers(DECODED, 2 * INTERMEDIATE).chunk(2, dim=-1)
    q, q_gate = numbers(DECODED, HEADS, 2 * HEAD_DIM).chunk(2, dim=-1)
    k, v = numbers(DECODED, 2 * KV_HEADS, HEAD_DIM).chunk(2, dim=1)
    y, angles, places = numbers(DECODED, HEADS, HEAD_DIM), numbers(DECODED, ROTARY_DIM), (pages(), indices(DECODED))
    calls: dict[str, Callable[[], object]] = {
        "rms_norm": lambda: elementwise.rms_norm(x, scale, EPS),
        "add_rms_norm": lambda: elementwise.add_rms_norm(x, x, scale, EPS),
        "gated_rms_norm": lambda: elementwise.gated_rms_norm(mixed, z, norm_weight, EPS),
        "silu_and_mul": lambda: elementwise.silu_and_mul(gate, up),
        "sigmoid_and_mul": lambda: elementwise.sigmoid_and_mul(y, q_gate),
        "norm_rotate_store": lambda: elementwise.norm_rotate_store(
            q, k, v, head_scale, head_scale, EPS, angles, angles, *places
        ),
    }
    for name, call in calls.items():
        yield Case(f"elementwise.{name}", "", call, True)


def matmul_cases() -> Iterator[Case]:
    from hybrid.kernels.triton import matmul

    def case(what: str, rows: int, inner: int, columns: int, prompt: bool, brief: bool = False) -> Case:
        def call() -> Tensor:
            weight = numbers(columns, inner)
            return matmul.batch_invariant_linear(numbers(rows, inner), weight, rows if prompt else 0)

        return Case("matmul.batch_invariant_linear", f"{what}, {rows} row{'s' if rows > 1 else ''}", call, brief)

    yield case("prompt, gate_proj", PROMPT, HIDDEN, INTERMEDIATE, True, True)
    yield case("prompt, down_proj", PROMPT, INTERMEDIATE, HIDDEN, True, True)
    for rows in (1, 32, DECODED):
        yield case("decode, gate_proj", rows, HIDDEN, INTERMEDIATE, False, rows != 32)
        yield case("decode, k_proj", rows, HIDDEN, KV_HEADS * HEAD_DIM, False)
    yield case("decode, down_proj", 1, INTERMEDIATE, HIDDEN, False)
    yield case("decode, lm_head", DECODED, HIDDEN, VOCAB, False)
    yield case("decode, few outputs", 1, INTERMEDIATE, 256, False, True)


def expert_cases() -> Iterator[Case]:
    from hybrid.kernels.triton import experts

    def case(what: str, rows: int, inner: int, columns: int, top_k: int, prompt: bool, brief: bool = False) -> Case:
        def call() -> Tensor:
            pairs = rows * EXPERTS_PER_TOKEN
            x = numbers(rows if top_k else pairs, inner)
            ends = torch.zeros(2, EXPERTS, dtype=torch.int64)
            where = indices(pairs, 0), ends, top_k, pairs if prompt else 0
            return experts.expert_linear(x, numbers(EXPERTS, columns, inner), *where, ())

        return Case("experts.expert_linear", f"{what}, {rows} row{'s' if rows > 1 else ''}", call, brief)

    pairs = torch.zeros(DECODED, EXPERTS_PER_TOKEN, dtype=torch.int64)
    yield Case(
        "experts.route_experts",
        "",
        lambda: experts.route_experts(floats(DECODED, EXPERTS), EXPERTS_PER_TOKEN, True),
        True,
    )
    yield Case("experts.sort_by_expert", "", lambda: experts.sort_by_expert(pairs, EXPERTS, 0), True)
    for rows, prompt in ((PROMPT, True), (1, False), (DECODED, False), (8 * DECODED, False)):
        what = "prompt" if prompt else "decode"
        yield case(f"{what}, gate and up", rows, EXPERT_HIDDEN, 2 * EXPERT_SIZE, EXPERTS_PER_TOKEN, prompt, rows != 1)
        yield case(f"{what}, down", rows, EXPERT_SIZE, EXPERT_HIDDEN, 0, prompt, rows == DECODED)
    yield Case(
        "experts.combine_experts",
        "",
        lambda: experts.combine_experts(
            numbers(DECODED * EXPERTS_PER_TOKEN, EXPERT_HIDDEN), pairs, floats(DECODED, EXPERTS_PER_TOKEN)
        ),
        True,
    )


def attention_cases() -> Iterator[Case]:
    from hybrid.kernels.triton.attention import paged_attention

    def case(what: str, tokens: int, requests: int, splits: int | None, drafts: int = 0, brief: bool = False) -> Case:
        def call() -> Tensor:
            visible = torch.ones(tokens, drafts, dtype=torch.bool) if drafts else None
            table = torch.zeros(requests, 512, dtype=torch.int64)
            lengths = torch.full((requests,), 4096)
            where = pages(), table, starts(tokens, requests), lengths
            return paged_attention(
                numbers(tokens, HEADS, HEAD_DIM), *where, HEAD_DIM**-0.5, CHUNK, num_splits=splits, visible=visible
            )

        return Case("attention.paged_attention", what, call, brief)

    yield case("decode, 1 request", 1, 1, None)
    yield case(f"decode, {DECODED} requests", DECODED, DECODED, None)
    yield case("decode, 16 pieces whatever the batch", DECODED, DECODED, 16, brief=True)
    yield case("drafts, a tree of 8 tokens", 8 * 8, 8, None, 8)
    yield case(f"prompts, {PROMPT} tokens", PROMPT, PROMPTS, None)
    yield case(f"prompts, {PROMPT} tokens, in one piece", PROMPT, PROMPTS, 1, brief=True)


def of_prompts() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Where the tokens of each prompt begin, the slots read and written, one capture."""
    return starts(PROMPT, PROMPTS), indices(PROMPTS), indices(PROMPTS, 4), torch.tensor([[0, 512, 9]])


def convolution_cases() -> Iterator[Case]:
    from hybrid.kernels.triton.convolution import causal_conv1d

    def prompts() -> Tensor:
        return causal_conv1d(numbers(PROMPT, CHANNELS), numbers(CHANNELS, WIDTH), states()[0], *of_prompts())

    yield Case("convolution.causal_conv1d", f"prompts, {PROMPT} tokens", prompts, True)


def delta_rule_cases() -> Iterator[Case]:
    from hybrid.kernels.triton.delta_rule import chunk_gated_delta_rule
    from hybrid.kernels.triton.delta_rule_step import gated_delta_step

    def prompts() -> Tensor:
        keys = KEY_HEADS * LINEAR_DIM
        parts = numbers(PROMPT, CHANNELS).split((keys, keys, VALUE_HEADS * LINEAR_DIM), dim=-1)
        gates = floats(PROMPT, VALUE_HEADS), numbers(PROMPT, VALUE_HEADS)
        heads = (part.unflatten(-1, (-1, LINEAR_DIM)) for part in parts)
        return chunk_gated_delta_rule(*heads, *gates, states()[1], *of_prompts(), CHUNK)

    def step(requests: int, tokens_each: int) -> Callable[[], Tensor]:
        def call() -> Tensor:
            tokens = requests * tokens_each
            gates = numbers(tokens, VALUE_HEADS), numbers(tokens, VALUE_HEADS)
            constants = numbers(CHANNELS, WIDTH), floats(VALUE_HEADS), numbers(VALUE_HEADS)
            slots = indices(tokens), indices(tokens, 1 + tokens)
            return gated_delta_step(
                numbers(tokens, CHANNELS), *gates, *constants, *states(), starts(tokens, requests), *slots
            )

        return call

    yield Case("delta_rule.chunk_gated_delta_rule", f"prompts, {PROMPT} tokens", prompts, True)
    yield Case("delta_rule_step.gated_delta_step", "decode, 1 request", step(1, 1))
    yield Case("delta_rule_step.gated_delta_step", f"decode, {DECODED} requests", step(DECODED, 1), True)
    yield Case("delta_rule_step.gated_delta_step", "drafts, 8 requests of 8 tokens", step(8, 8), True)


def all_cases() -> list[Case]:
    families = (
        memory_cases,
        elementwise_cases,
        matmul_cases,
        expert_cases,
        attention_cases,
        convolution_cases,
        delta_rule_cases,
    )
    return [case for family in families for case in family()]
