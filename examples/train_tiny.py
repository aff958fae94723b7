"""Train the small Qwen3.5 checkpoint inside the package (`models/tiny/`).

    python examples/train_tiny.py --out models/tiny --minutes 60
    python examples/train_tiny.py --out models/tiny --minutes 30 --resume models/tiny --rate 0.5

The text is distributed with Python (PSF license): the language reference (`pydoc_data.topics`), the docstrings of the
standard library, partly written as chats that ask for a docstring, and its source. Whole topics and modules are held
out; the loss on them, in nats per token, is printed at the end and written to the checkpoint's README. The model is
that of transformers, so that any program that reads its checkpoints reads this one.
"""

import argparse
import ast
import hashlib
import json
import math
import platform
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model as load_safetensors
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.models.torch_functions import use_torch_functions

VOCAB = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['reasoning_content'] %}<think>\n{{ message['reasoning_content'] }}\n</think>\n\n{% endif %}"
    "{{ message['content'] or '' }}{% for call in message['tool_calls'] or [] %}<tool_call>\n"
    "{\"name\": \"{{ call['function']['name'] }}\", \"arguments\": {{ call['function']['arguments'] | tojson }}}"
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
"""Roles and contents, of which the model was trained with those of a user and of an assistant; tools, their calls and
thinking, of which it knows nothing: grammars make its calls."""


def documents() -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text): every topic of the language reference, every standard module's docstrings and
    source."""
    import pydoc_data.topics

    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield "prose", f"topic:{name}", text.strip()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if module.parts[0] in ("site-packages", "dist-packages", "lib2to3"):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # test data with deliberate errors
        entries = list(docstrings(tree, ".".join(module.with_suffix("").parts).removesuffix(".__init__")))
        if entries:
            yield "prose", f"module:{module}", render(entries, seed=str(module))
        yield "source", f"module:{module}", source


def docstrings(tree: ast.Module, name: str) -> Iterator[tuple[str, str, str]]:
    """Yield (qualified name, signature, docstring) of a module and of everything documented in it."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, str, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                qualified = f"{prefix}.{child.name}"
                signature = (
                    f"class {child.name}"
                    if isinstance(child, ast.ClassDef)
                    else f"def {child.name}({ast.unparse(child.args)})"
                )
                text = ast.get_docstring(child)
                if text and len(text) > 20:
                    yield qualified, signature, text
                yield from walk(child, qualified)

    text = ast.get_docstring(tree)
    if text:
        yield name, f"module {name}", text
    yield from walk(tree, name)


def render(entries: list[tuple[str, str, str]], seed: str) -> str:
    """Write a module's docstrings as source code, and some of them as chats about them."""
    rng = random.Random(seed)
    parts = [f'{signature}:\n    """{text}"""' for _, signature, text in entries]
    short = [(name, text.split("\n\n")[0]) for name, _, text in entries if len(text.split("\n\n")[0]) < 600]
    rng.shuffle(short)
    for start in range(0, len(short) // 2, 3):
        turns = [
            f"<|im_start|>user\n{rng.choice(['What is', 'What does', 'Explain', 'Describe'])} {name}?<|im_end|>\n"
            f"<|im_start|>assistant\n{text}<|im_end|>\n"
            for name, text in short[start : start + 3]
        ]
        parts.append("".join(turns) + "<|endoftext|>")
    return "\n\n".join(parts)


def held_out(name: str) -> bool:
    """Whether a topic or a module is not trained on: 5 % of them. A module's docstrings and source stay together."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def train_tokenizer(texts: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def build_model() -> torch.nn.Module:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=0,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3_5ForCausalLM(config)
    use_torch_functions(model)
    return model


def loss_on(model: torch.nn.Module, ids: torch.Tensor, length: int = 1024) -> float:
    """Mean nats per token over `ids`, cut into rows of `length`."""
    rows = ids[: ids.numel() // length * length].view(-1, length)
    losses = []
    with torch.inference_mode():
        for batch in rows.split(8):
            logits = model(input_ids=batch).logits[:, :-1].float()
            losses.append(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="none")
            )
    return torch.cat(losses).mean().item()


def optimizers(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def train(
    model: torch.nn.Module, ids: dict[str, torch.Tensor], minutes: float, rate: float, tokens_per_step: int = 4096
) -> int:
    """Train for a span of wall time; returns the steps. Every other row is prose. The learning rate, `rate` times that
    of a fresh model, rises for 2 % of the time, and falls over the last 60 %."""
    rng = torch.Generator().manual_seed(1)
    steps = optimizers(model)
    base = [group["lr"] for optimizer in steps for group in optimizer.param_groups]
    start, step, mean = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        factor = min(1.0, done / 0.02 + 0.02, (1 - done) / 0.6 + 0.01)
        for optimizer, base_rate in zip(steps, base, strict=True):
            optimizer.param_groups[0]["lr"] = base_rate * rate * factor
        length = 512 if done < 0.7 else 2048  # long rows at the end: the documents people ask about are long
        rows = []
        for row in range(tokens_per_step // length):
            part = ids["source" if row % 2 else "prose"]
            start_at = int(torch.randint(0, part.numel() - length - 1, (1,), generator=rng))
            rows.append(part[start_at : start_at + length + 1])
        batch = torch.stack(rows)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in steps:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        mean = loss.item() if step == 0 else 0.95 * mean + 0.05 * loss.item()
        step += 1
        if step % 50 == 0:
            print(f"step {step}  {100 * done:.0f}%  loss {mean:.3f}  lr x {factor:.2f}", flush=True)
    return step


def save(model: Any, tokenizer: Tokenizer, out: Path, facts: dict[str, object]) -> None:
    """Write a checkpoint in Hugging Face form, weights in bfloat16, and its README."""
    from transformers import PreTrainedTokenizerFast

    model.to(torch.bfloat16).save_pretrained(out)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(out, save_jinja_files=False)
    model.generation_config.eos_token_id = [SPECIAL.index("<|im_end|>"), SPECIAL.index("<|endoftext|>")]
    model.generation_config.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors writes 0600
    (out / "README.md").write_text(README.format(**facts))


README = """# tiny

A Qwen3.5 text model of {parameters:,} parameters (3 gated-delta-rule layers, 1 full-attention layer, hidden size 256,
byte-level BPE of {vocab} tokens), small enough to travel inside the package. It is the model that the demo and the
tests run. It writes English that looks like Python documentation, and knows nothing. Its chat template also writes
tools, calls and thinking (`enable_thinking`, off unless asked for), of which it knows nothing either: a grammar makes
its calls.

| held-out text | nats per token | bits per byte | tokens |
|---|---|---|---|
| all | {all} |
| prose: the language reference and docstrings | {prose} |
| source of the standard library | {source} |

Trained on {train_tokens:,} tokens of the same kinds, from Python {python}; 5 % of the topics and modules were held out,
by the hash of their names. Stored in bfloat16.

{phases}

Made with `python examples/train_tiny.py`. The text is under the PSF license; the weights are under this project's
license.
"""


def measure(model: torch.nn.Module, ids: torch.Tensor, num_bytes: int) -> tuple[float, int, int]:
    """(mean nats per token, tokens, bytes) of a text."""
    return loss_on(model, ids), ids.numel(), num_bytes


def as_row(measured: list[tuple[float, int, int]]) -> str:
    """A row of the table: one or several texts together."""
    tokens, num_bytes = sum(m[1] for m in measured), sum(m[2] for m in measured)
    nats = sum(m[0] * m[1] for m in measured)
    return f"{nats / tokens:.3f} | {nats / num_bytes / math.log(2):.3f} | {tokens:,}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("models/tiny"), help="folder to write (default: models/tiny)")
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time to train for (default: 60)")
    parser.add_argument("--resume", type=Path, help="continue from this checkpoint, with its tokenizer")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rate (default: 1)")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts: dict[tuple[str, bool], list[str]] = {}
    for kind, name, text in documents():
        texts.setdefault((kind, held_out(name)), []).append(text)
    random.Random(0).shuffle(texts["prose", False])
    random.Random(0).shuffle(texts["source", False])
    joined = {key: "<|endoftext|>".join(parts) for key, parts in texts.items()}
    model = build_model()
    phases: list[str] = []
    if args.resume:
        tokenizer = Tokenizer.from_file(str(args.resume / "tokenizer.json"))
        load_safetensors(model, args.resume / "model.safetensors", strict=False)  # the head is the embedding
        lines = (args.resume / "README.md").read_text().splitlines()
        phases = [line for line in lines if line.startswith("* ")]
    else:
        tokenizer = train_tokenizer(texts["prose", False])
    ids = {key: torch.tensor(tokenizer.encode(text).ids) for key, text in joined.items()}
    train_ids = {kind: ids[kind, False] for kind in ("prose", "source")}
    parameters = sum(p.numel() for p in model.parameters())
    print(json.dumps({"parameters": parameters, **{f"{k} {h}": v.numel() for (k, h), v in ids.items()}}), flush=True)
    steps = train(model, train_ids, args.minutes, args.rate)
    model.to(torch.bfloat16).float()  # the loss of what is stored
    measured = {kind: measure(model, ids[kind, True], len(joined[kind, True].encode())) for kind in train_ids}
    phases.append(
        f"* {steps} steps of 4096 tokens on prose and source in turn, {args.minutes:.0f} minutes on "
        f"{torch.get_num_threads()} CPU core(s), learning rate times {args.rate:g}"
    )
    facts: dict[str, object] = {
        "parameters": parameters,
        "vocab": VOCAB,
        "all": as_row(list(measured.values())),
        **{kind: as_row([one]) for kind, one in measured.items()},
        "train_tokens": sum(part.numel() for part in train_ids.values()),
        "python": platform.python_version(),
        "phases": "\n".join(phases),
    }
    print(json.dumps(facts))
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, args.out, facts)


if __name__ == "__main__":
    main()
