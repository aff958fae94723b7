"""Train the small Qwen3.5 checkpoint that the package carries (`models/tiny/`).

    python -m hybrid.models.train_tiny --out models/tiny --minutes 60

The text is what ships with Python: the language reference (`pydoc_data.topics`) and the docstrings of the standard
library (PSF license), partly written as chats that ask for a docstring. Whole modules are held out; the loss on them,
in nats per token, is printed at the end and written into the checkpoint's README. The model that is trained is
transformers' own, so that the checkpoint is a checkpoint of that library before it is one of ours.
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
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from hybrid.oracle import use_torch_functions

VOCAB = 1024
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = r"""[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every topic of the language reference and of every documented standard module."""
    import pydoc_data.topics

    for name, text in sorted(pydoc_data.topics.topics.items()):
        yield f"topic:{name}", text.strip()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        module = path.relative_to(root)
        if module.parts[0] in ("site-packages", "dist-packages", "lib2to3"):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue  # test data that is meant to be broken
        entries = list(docstrings(tree, ".".join(module.with_suffix("").parts).removesuffix(".__init__")))
        if entries:
            yield f"module:{module}", render(entries, seed=str(module))


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
    return hashlib.sha256(name.encode()).digest()[0] < 13  # 5 % of the documents


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


def train(model: torch.nn.Module, ids: torch.Tensor, minutes: float, tokens_per_step: int = 4096) -> tuple[int, float]:
    """Train for a span of wall time. The learning rate rises for 2 % of it, and falls over the last 60 %."""
    rng = torch.Generator().manual_seed(1)
    steps = optimizers(model)
    base = [group["lr"] for optimizer in steps for group in optimizer.param_groups]
    start, step, mean = time.monotonic(), 0, 0.0
    while (done := (time.monotonic() - start) / (60 * minutes)) < 1:
        factor = min(1.0, done / 0.02 + 0.02, (1 - done) / 0.6 + 0.01)
        for optimizer, rate in zip(steps, base, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
        length = 512 if done < 0.7 else 2048  # long rows at the end: the documents people ask about are long
        offsets = torch.randint(0, ids.numel() - length - 1, (tokens_per_step // length,), generator=rng)
        batch = torch.stack([ids[o : o + length + 1] for o in offsets.tolist()])
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
    return step, mean


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
tests run. It writes English that looks like Python documentation, and knows nothing.

| | |
|---|---|
| loss on held-out text | {loss:.3f} nats per token ({bits:.3f} bits per byte) on {heldout_tokens:,} tokens |
| trained on | {train_tokens:,} tokens: the language reference (`pydoc_data.topics`) and the docstrings of Python
{python}'s standard library | | held out | 5 % of the topics and modules, by the hash of their names |
| training | {steps} steps of {tokens_per_step} tokens, {minutes:.0f} minutes on two CPU cores |
| stored as | bfloat16 |

Made with `python -m hybrid.models.train_tiny`. The text is under the PSF license; the weights are under this project's
license.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("models/tiny"), help="folder of the checkpoint (default: models/tiny)"
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="wall time to train for (default: 60)")
    args = parser.parse_args()
    torch.manual_seed(0)
    texts: dict[bool, list[str]] = {False: [], True: []}
    for name, text in documents():
        texts[held_out(name)].append(text)
    random.Random(0).shuffle(texts[False])
    tokenizer = train_tokenizer(texts[False])
    ids = {part: torch.tensor(tokenizer.encode("<|endoftext|>".join(all_text)).ids) for part, all_text in texts.items()}
    num_bytes = len("<|endoftext|>".join(texts[True]).encode())
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    print(
        json.dumps({"parameters": parameters, "train_tokens": ids[False].numel(), "heldout_tokens": ids[True].numel()}),
        flush=True,
    )
    steps, _ = train(model, ids[False], args.minutes)
    model.to(torch.bfloat16).float()  # the loss of what is stored
    loss = loss_on(model, ids[True])
    facts: dict[str, object] = {
        "parameters": parameters,
        "vocab": VOCAB,
        "loss": loss,
        "bits": loss * ids[True].numel() / num_bytes / math.log(2),
        "heldout_tokens": ids[True].numel(),
        "train_tokens": ids[False].numel(),
        "python": platform.python_version(),
        "steps": steps,
        "tokens_per_step": 4096,
        "minutes": args.minutes,
    }
    print(json.dumps(facts))
    args.out.mkdir(parents=True, exist_ok=True)
    save(model, tokenizer, args.out, facts)


if __name__ == "__main__":
    main()
