"""Small random checkpoints in Hugging Face form, made with transformers itself, and a tokenizer for them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from hybrid.models.torch_functions import use_torch_functions

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = [
    "The cache keeps the pages of a prefix, and the states at a few positions in it.",
    "def tokens(prefix: str) -> list[int]:\n    return [ord(letter) for letter in prefix]\n",
    "Größe, façade, naïve, Ελλάδα, Привет, 日本語のテキスト, 中文, 한국어, 🙂🙃🚀 and 👩‍👩‍👧",
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def layers(kinds: str) -> list[str]:
    """Layer types of a drawing: "LLF" is two linear layers and a full-attention layer."""
    return [{"L": "linear_attention", "F": "full_attention"}[kind] for kind in kinds]


def text_config(**changes: Any) -> Qwen3_5TextConfig:
    """A small configuration whose sizes all differ, so that none can stand for another."""
    settings: dict[str, Any] = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 96,
        "layer_types": layers("LFL"),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 20,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "eos_token_id": SPECIAL.index("<|im_end|>"),
        "pad_token_id": 0,
        **changes,
    }
    return Qwen3_5TextConfig(**settings, num_hidden_layers=len(settings["layer_types"]))


def random_model(config: Qwen3_5TextConfig, seed: int = 0) -> Qwen3_5ForCausalLM:
    """transformers' own model with random weights. No parameter has its neutral value, and greedy answers vary."""
    torch.manual_seed(seed)
    model = Qwen3_5ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", "norm.weight", "A_log", "dt_bias")):
                parameter.add_(0.2 * torch.randn_like(parameter))
    use_torch_functions(model)
    return model


def byte_tokenizer(texts: Sequence[str] = TEXT) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 300 tokens: every byte and some merges; most characters beyond ASCII take several tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", additional_special_tokens=SPECIAL
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_checkpoint(path: Path, model: Qwen3_5ForCausalLM, tokenizer: PreTrainedTokenizerFast | None = None) -> Path:
    model.save_pretrained(path)
    if tokenizer is not None:
        tokenizer.save_pretrained(path, save_jinja_files=False)
    return path


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def edit_config(path: Path, **changes: Any) -> None:
    """Change entries of config.json; None removes one."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS, {"format": "pt"})


def cast_weights(path: Path, dtype: torch.dtype) -> Path:
    """Store all weights, in one file or several, as another type; returns the path."""
    for file in path.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    return path


def shard(path: Path) -> None:
    """Cut the one file of weights into three, with an index."""
    tensors = load_file(path / WEIGHTS)
    (path / WEIGHTS).unlink()
    weight_map = {}
    for part in range(3):
        file = f"model-{part + 1:05}-of-00003.safetensors"
        mine = {name: tensors[name] for name in sorted(tensors)[part::3]}
        save_file(mine, path / file, {"format": "pt"})
        weight_map.update(dict.fromkeys(mine, file))
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
