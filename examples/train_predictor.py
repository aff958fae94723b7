"""Train the predictor of the small checkpoint (`models/tiny/`): the layer `mtp` that drafts the token after the next.

    python examples/train_predictor.py --checkpoint models/tiny --minutes 60

The model itself is frozen: its tensors keep their bits. The predictor learns what the model says, rather than a text,
since a draft is right if the model says it: from the hidden state of a token and the embedding of the next one, and
again from its own output in place of the hidden state, as where drafts are chained. Drafts continue what the model has
written itself, so that is most of what it reads: beginnings from the text of `train_tiny.py`, continued greedily and
sampled. How often it names the model's most likely token, in held-out text and in greedy continuations of it, is
printed and written to the checkpoint's README.
"""

import argparse
import json
import time
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from tqdm import tqdm
from train_tiny import documents, held_out, optimizers

from hybrid import CacheConfig, Engine, SamplingParams
from hybrid.models.torch_functions import use_torch_functions

PREFIX = "mtp."
"""Of its tensors in the checkpoint."""

SHORT, LONG = 512, 2048
"""Tokens of a sequence."""

START = "Its predictor"
"""Begins the part of the README that is about it."""


class Predictor(nn.Module):
    """Norms of embedding and hidden state, their product with `fc`, a layer of full attention, a norm.

    Args:
        model: whose last layer and norm it starts from.
    """

    def __init__(self, model: Any) -> None:
        from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm

        super().__init__()
        config, size = model.config, model.config.hidden_size
        last = max(at for at, kind in enumerate(config.layer_types) if kind == "full_attention")
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, last)])
        self.norm = Qwen3_5RMSNorm(size, eps=config.rms_norm_eps)
        self.layers[0].load_state_dict(model.model.layers[last].state_dict())
        self.norm.load_state_dict(model.model.norm.state_dict())
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat((torch.eye(size), torch.eye(size)), 1))

    def forward(self, embedded: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """Its hidden states `[B, L, H]`, from embeddings of tokens and the hidden states of those before them."""
        both = torch.cat((self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)), -1)
        output: Tensor = self.norm(self.layers[0](self.fc(both), position_embeddings=angles))
        return output


class Sequences:
    """Sequences of tokens, with what the frozen model computes for them.

    Args:
        model: the model.
        ids: `[N, L]` their tokens.
    """

    def __init__(self, model: Any, ids: Tensor) -> None:
        self._model = model
        self._ids = ids
        with torch.inference_mode():
            parts = [model.model(input_ids=part).last_hidden_state.half() for part in tqdm(ids.split(8))]
            self._hidden = torch.cat(parts)  # half of the memory of fp32

    def __len__(self) -> int:
        return len(self._ids)

    def passes(self, predictor: Predictor, rows: Tensor, depth: int) -> tuple[Tensor, list[Tensor]]:
        """The model's logits `[B, L, V]` of some of them, and those of 1 to `depth` chained drafts, for their last
        tokens."""
        ids, hidden = self._ids[rows], self._hidden[rows].float()
        with torch.no_grad():
            logits = self._model.lm_head(hidden)
            embedded = self._model.model.embed_tokens(ids)
            angles = self._model.model.rotary_emb(hidden, torch.arange(ids.shape[1]).expand(3, len(ids), -1))
        drafts: list[Tensor] = []
        for ahead in range(1, depth + 1):
            count = ids.shape[1] - ahead
            cos, sin = (part[:, :count] for part in angles)
            hidden = predictor(embedded[:, ahead:], hidden[:, :count], (cos, sin))
            drafts.append(F.linear(hidden, self._model.lm_head.weight))
        return logits, drafts

    def agreement(self, predictor: Predictor, first: int = 0) -> list[float]:
        """How often the most likely tokens are the same from a token on, for the first and the second draft of a
        chain."""
        same, total = [0, 0], [0, 0]
        with torch.inference_mode():
            for rows in torch.arange(len(self)).split(8):
                logits, drafts = self.passes(predictor, rows, 2)
                for at, own in enumerate(drafts):
                    right = own.argmax(-1) == logits[:, at + 1 :].argmax(-1)
                    same[at] += int(right[:, first:].sum())
                    total[at] += right[:, first:].numel()
        return [count / of for count, of in zip(same, total, strict=True)]


def windows(text: Tensor, count: int, length: int, rng: torch.Generator) -> Tensor:
    """`[count, length]` windows of a text, at random."""
    starts = torch.randint(0, text.numel() - length, (count, 1), generator=rng)
    return text[starts + torch.arange(length)]


def continued(engine: Engine, prompts: Tensor, temperature: float) -> Tensor:
    """Sequences of which the second half is what the model says to the first."""
    half = prompts.shape[1] // 2
    params = SamplingParams(max_new_tokens=half, temperature=temperature, ignore_eos=True)
    outputs = engine.generate(prompts[:, :half].tolist(), params)
    return torch.cat((prompts[:, :half], torch.tensor([output.token_ids for output in outputs])), 1)


def train(predictor: Predictor, short: Sequences, long: Sequences, minutes: float, tokens_per_step: int = 4096) -> int:
    """Train for a span of wall time, the last fifth of it on the long sequences; returns the steps. The learning rate
    rises for 3 % of the time, and falls over the last 70 %."""
    rng = torch.Generator().manual_seed(2)
    steps = optimizers(predictor)
    base = [group["lr"] for optimizer in steps for group in optimizer.param_groups]
    start, step, mean = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        factor = min(1.0, done / 0.03 + 0.02, (1 - done) / 0.7 + 0.01)
        for optimizer, rate in zip(steps, base, strict=True):
            optimizer.param_groups[0]["lr"] = 0.5 * rate * factor
        own, length = (short, SHORT) if done < 0.8 else (long, LONG)
        rows = torch.randint(0, len(own), (tokens_per_step // length,), generator=rng)
        logits, drafts = own.passes(predictor, rows, 1 if done < 0.3 else 2)
        loss = torch.zeros(())
        for at, drafted in enumerate(drafts):
            said = logits[:, at + 1 :].softmax(-1).flatten(0, 1)
            loss = loss + (1.0, 0.5)[at] * F.cross_entropy(drafted.flatten(0, 1), said)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(predictor.parameters(), 1.0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        same = float((drafts[0].argmax(-1) == logits[:, 1:].argmax(-1)).float().mean())
        mean = same if step == 0 else 0.98 * mean + 0.02 * same
        step += 1
        if step % 25 == 0:
            print(f"step {step}  {100 * done:.0f}%  loss {loss.item():.3f}  agreement {mean:.3f}", flush=True)
    return step


def save(folder: Path, predictor: Predictor, facts: str) -> None:
    """Add the predictor to a checkpoint, in bfloat16, in place of one that it has. The others keep their bits."""
    weights = folder / "model.safetensors"
    tensors = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith(PREFIX)}
    own = {f"{PREFIX}{name}": tensor.to(torch.bfloat16) for name, tensor in predictor.state_dict().items()}
    save_file(tensors | own, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # safetensors writes 0600
    config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    readme = (folder / "README.md").read_text()
    (folder / "README.md").write_text(
        readme.partition(START)[0].rstrip("\n") + "\n\n" + fill(START + facts, 118) + "\n"
    )


def main() -> None:
    from transformers import Qwen3_5ForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, default=Path("models/tiny"), help="folder (default: models/tiny)")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time to train for (default: 60)")
    parser.add_argument("--share", type=float, default=1.0, help="of the sequences, for a trial (default: 1)")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts: dict[tuple[str, bool], list[str]] = {}
    for kind, name, text in documents():
        texts.setdefault((kind, held_out(name)), []).append(text)
    tokenizer = Tokenizer.from_file(str(args.checkpoint / "tokenizer.json"))
    ids = {key: torch.tensor(tokenizer.encode("<|endoftext|>".join(parts)).ids) for key, parts in texts.items()}
    model = Qwen3_5ForCausalLM.from_pretrained(args.checkpoint, dtype=torch.float32).eval().requires_grad_(False)
    use_torch_functions(model)
    engine = Engine.from_pretrained(args.checkpoint, dtype="float32", cache=CacheConfig(memory="1GiB"))
    rng = torch.Generator().manual_seed(3)

    def some(kind: str, is_held_out: bool, count: int, length: int = SHORT) -> Tensor:
        return windows(ids[kind, is_held_out], int(count * args.share), length, rng)

    short = [some(kind, False, count) for kind, count in (("prose", 800), ("source", 1600))]
    for kind, temperature, count in (("prose", 0.0, 600), ("source", 0.0, 2000), ("source", 1.0, 800)):
        short.append(continued(engine, some(kind, False, count), temperature))
    long = [some(kind, False, count, LONG) for kind, count in (("prose", 60), ("source", 120))]
    long += [continued(engine, some("source", False, 100, LONG), temperature) for temperature in (0.0, 1.0)]
    predictor = Predictor(model).requires_grad_(True)
    steps = train(predictor, Sequences(model, torch.cat(short)), Sequences(model, torch.cat(long)), args.minutes)
    predictor.to(torch.bfloat16).float().requires_grad_(False)  # the agreement of what is stored
    measured = {kind: Sequences(model, some(kind, True, 400)).agreement(predictor) for kind in ("prose", "source")}
    said = Sequences(model, continued(engine, some("source", True, 400), 0.0))
    measured["greedy continuations of source"] = said.agreement(predictor, SHORT // 2)
    size = sum(parameter.numel() for parameter in predictor.parameters())
    shown = "; ".join(f"{100 * one:.0f} and {100 * two:.0f} % on {kind}" for kind, (one, two) in measured.items())
    save(
        args.checkpoint,
        predictor,
        f" (`mtp`, {size:,} parameters more) drafts the token after the next one. Its first and second draft are what "
        f"the model says for {shown}, held out. Made with `python examples/train_predictor.py`: {steps} steps of 4096 "
        f"tokens, {args.minutes:.0f} minutes on {torch.get_num_threads()} CPU core(s), the model frozen.",
    )
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
