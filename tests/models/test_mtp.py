"""The predictor of checkpoints, held to a naive computation from the same tensors: plain torch over whole sequences,
without a cache, with the model's own hidden states from transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid import CacheConfig, Engine, EngineConfig, SpeculationConfig
from hybrid.commands.random_checkpoints import add_random_predictor, write_random_checkpoint
from hybrid.errors import ArgumentError, UnsupportedModelError
from hybrid.models.torch_functions import use_torch_functions, without_kernels
from support.checkpoints import WEIGHTS, edit_weights
from support.engines import greedy
from support.tensors import same_bits


class Naive:
    """The predictor of a checkpoint.

    Args:
        path: of the checkpoint.
    """

    def __init__(self, path: Path) -> None:
        with without_kernels():
            self.model = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, experts_implementation="eager"
            ).eval()
        use_torch_functions(self.model)
        self.tensors, self.config = load_file(path / WEIGHTS), self.model.config
        self.embedding = self.tensors["model.embed_tokens.weight"]

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"mtp.{name}.weight"].float()

    def norm(self, name: str, x: Tensor) -> Tensor:
        mean = x.pow(2).mean(-1, keepdim=True)
        return x / (mean + self.config.rms_norm_eps).sqrt() * (1 + self.weight(name))

    def rotated(self, x: Tensor) -> Tensor:
        """`[N, heads, head_dim]`, the first dimensions of each rotated by its place."""
        rope = self.config.rope_parameters
        half = int(x.shape[-1] * rope["partial_rotary_factor"]) // 2
        angles = torch.arange(len(x))[:, None, None] / rope["rope_theta"] ** (torch.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)

    def attention(self, x: Tensor) -> Tensor:
        config, layer = self.config, "layers.0.self_attn."
        q, gate = F.linear(x, self.weight(layer + "q_proj")).unflatten(-1, (-1, 2 * config.head_dim)).chunk(2, -1)
        k, v = (F.linear(x, self.weight(f"{layer}{part}_proj")).unflatten(-1, (-1, config.head_dim)) for part in "kv")
        q, k = self.rotated(self.norm(layer + "q_norm", q)), self.rotated(self.norm(layer + "k_norm", k))
        k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / config.head_dim**0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * gate.sigmoid()
        return F.linear(mixed.flatten(1), self.weight(layer + "o_proj"))

    def dense(self, name: str, x: Tensor) -> Tensor:
        gate, up = (F.linear(x, self.weight(f"{name}.{part}_proj")) for part in ("gate", "up"))
        return F.linear(F.silu(gate) * up, self.weight(f"{name}.down_proj"))

    def feed_forward(self, x: Tensor) -> Tensor:
        name = "layers.0.mlp"
        if f"mtp.{name}.gate.weight" not in self.tensors:
            return self.dense(name, x)
        shares, experts = F.linear(x, self.weight(f"{name}.gate")).softmax(-1).topk(self.config.num_experts_per_tok)
        shares = shares / shares.sum(-1, keepdim=True)
        y = self.dense(f"{name}.shared_expert", x) * F.linear(x, self.weight(f"{name}.shared_expert_gate")).sigmoid()
        for row, chosen in enumerate(experts.tolist()):
            for share, expert in zip(shares[row], chosen, strict=True):
                y[row] += share * self.dense(f"{name}.experts.{expert}", x[row])
        return y

    def __call__(self, tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and hidden state after the last of N tokens, from the hidden states `[N, H]` before each of them."""
        embedded = self.norm("pre_fc_norm_embedding", self.embedding[tokens].float())
        both = torch.cat((embedded, self.norm("pre_fc_norm_hidden", hidden)), -1)
        x = F.linear(both, self.weight("fc"))
        x = x + self.attention(self.norm("layers.0.input_layernorm", x))
        x = x + self.feed_forward(self.norm("layers.0.post_attention_layernorm", x))
        last = self.norm("norm", x)[-1]
        return F.linear(last, self.model.lm_head.weight), last


@pytest.mark.parametrize(
    "name", ["qwen3_5_text", "qwen3_5_text, odd sizes", "qwen3_5_moe_text", "qwen3_next, odd sizes"]
)
def test_the_predictor_is_that_of_a_naive_computation(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    path = add_random_predictor(write_random_checkpoint(tmp_path, name))
    drafts = SpeculationConfig(drafters=("mtp",), adaptive=False, max_drafts=3)
    cache = CacheConfig(memory="64MiB", page_size=16, chunk_size=16, deterministic=True)
    config = EngineConfig(enforce_eager=True)  # every pass of the predictor is seen
    engine = Engine.from_pretrained(path, dtype="float32", cache=cache, config=config, speculation=drafts)
    naive = Naive(path)
    calls: list[tuple[int, int, bool, Tensor]] = []
    computed, latest = engine.model.draft, torch.zeros(1)

    def watched(batch: Any, before: Tensor, kv: Tensor) -> Any:
        nonlocal latest
        is_chained = torch.equal(before, latest)
        logits, latest = computed(batch, before, kv)
        calls.append((int(batch.token_ids), int(batch.decodes.seq_lens), is_chained, logits[0].clone()))
        return logits, latest

    monkeypatch.setattr(engine.model, "draft", watched)
    prompt = torch.randint(3, 300, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    for _ in range(2):  # cold, and as a hit
        output = engine.generate([prompt], greedy(12), progress=False)[0]
    assert output.usage.cached_tokens == 32 and output.usage.drafted_tokens > 10
    known = [*prompt, *output.token_ids]
    with torch.inference_mode():
        hidden = naive.model.model(input_ids=torch.tensor([known])).last_hidden_state[0]
        tokens, before, after = list[int](), hidden, hidden[0]
        for token, length, is_chained, logits in calls:
            if is_chained:
                tokens, before = [*tokens, token], torch.cat((before, after[None]))
            else:
                assert known[length - 1] == token
                tokens, before = known[1:length], hidden[: length - 1]
            assert len(tokens) == length - 1
            expected, after = naive(tokens, before)
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4 * float(expected.max() - expected.min()))
    assert sum(is_chained for _, _, is_chained, _ in calls) > len(calls) / 2
    cold, hit = calls[: len(calls) // 2], calls[len(calls) // 2 :]  # what a hit brings has the bits of a cold run
    assert [each[:3] for each in cold] == [each[:3] for each in hit]
    assert all(same_bits(a[3], b[3]) for a, b in zip(cold, hit, strict=True))


def test_a_checkpoint_without_a_predictor_is_refused(tmp_path: Path) -> None:
    path = write_random_checkpoint(tmp_path, "qwen3_5_text")
    with pytest.raises(ArgumentError, match=r"this one has none \(tensors mtp\.\*\)"):
        Engine.from_pretrained(path, cache=CacheConfig(memory="64MiB"), speculation="cache+mtp")
    engine = Engine.from_pretrained(add_random_predictor(path), cache=CacheConfig(memory="64MiB"))
    with pytest.raises(ArgumentError, match="it was not loaded"):
        engine.with_cache(CacheConfig(memory="64MiB"), speculation="mtp")
    edit_weights(path, lambda tensors: tensors.update({"mtp.layers.1.x": torch.zeros(2)}))
    with pytest.raises(UnsupportedModelError, match="2 layers for multi-token prediction"):
        Engine.from_pretrained(path, cache=CacheConfig(memory="64MiB"), speculation="mtp")
