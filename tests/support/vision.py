"""Small random vision-language checkpoints, made with transformers itself, and prompts with images for them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hybrid.commands.random_checkpoints import EXPERTS, GATED_DELTA
from hybrid.models.torch_functions import use_torch_functions

PAD = 5
"""The token that stands for an image."""

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}[{{ image }}]{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


def vision_model(name: str) -> Any:
    """A model of transformers: "Qwen3_5" or "Qwen3_5Moe"."""
    experts = EXPERTS if name.endswith("Moe") else {}
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [3, 3, 2]}
    config = getattr(transformers, f"{name}Config")(
        text_config={**GATED_DELTA, **experts, "rope_parameters": {**rope, "mrope_interleaved": True}},
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "patch_size": 4,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "initializer_range": 0.2,
        },
        image_token_id=PAD,
        video_token_id=6,
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    use_torch_functions(model)
    return model


def write_vision_checkpoint(path: Path, model: Any, tokenizer: Any) -> Path:
    model.save_pretrained(path)
    kept, tokenizer.chat_template = tokenizer.chat_template, TEMPLATE.replace("{{ image }}", tokenizer.decode([PAD]))
    tokenizer.save_pretrained(path, save_jinja_files=False)
    tokenizer.chat_template = kept
    (path / "preprocessor_config.json").write_text('{"size": {"shortest_edge": 64, "longest_edge": 4096}}')
    return path


def picture(seed: int, height: int = 40, width: int = 56) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def chat(*images: Any, text: str = "What is to be seen here, and where?", before: str = "Look: ") -> Any:
    parts = [{"type": "text", "text": before}, *({"type": "image", "image": image} for image in images)]
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]}
