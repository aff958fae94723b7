#!/usr/bin/env python
"""Images in transformers: in a chat about a picture, each turn computes only what is new in it.

    python examples/images.py [--tokens 16]

The vision model has random weights, so what it says means nothing. With a checkpoint of Qwen3.5, `prompt` is what its
processor returns: `processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")`.
"""

import argparse
from typing import Any

import numpy as np
import torch
import transformers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import hybrid

IMAGE, START, END, VOCAB = 5, 6, 7, 512
"""The tokens of an image, before it and after it; size of the vocabulary."""


def random_model() -> Any:
    """A small vision model of the Qwen3.5 family."""
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, image_token_id=IMAGE)
    torch.manual_seed(0)
    return transformers.Qwen3_5ForConditionalGeneration(config).eval()


def picture(colour: tuple[int, int, int]) -> np.ndarray:
    """A square of one colour."""
    return np.full((256, 256, 3), colour, dtype=np.uint8)


def words(count: int, seed: int) -> list[int]:
    """Tokens of a question."""
    return torch.randint(8, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer (default: 16)")
    args = parser.parse_args()

    model = random_model()
    processor = Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    cache = hybrid.hf.PrefixCache(model, memory="64MiB", chunk_size=16)

    for colour in ("red", "red", "blue"):
        square = picture((255, 0, 0) if colour == "red" else (0, 0, 255))
        prompt = dict(processor(images=[square], input_data_format="channels_last", return_tensors="pt"))
        tokens = [START, *[IMAGE] * (int(prompt["image_grid_thw"].prod()) // 4), END]
        for turn in range(2):
            tokens += words(20, seed=turn)
            ids = torch.tensor([tokens])
            # All of the conversation and its picture in each turn: the cache finds what it has.
            output = cache.generate(
                ids,
                **prompt,
                mm_token_type_ids=(ids == IMAGE).int(),
                max_new_tokens=args.tokens,
                suppress_tokens=[IMAGE],
            )
            print(f"{colour} square, turn {turn + 1}: {cache.explanations[0]}")
            tokens = output[0].tolist()

    print(f"{cache.stats().hit_rate:.0%} of the prompt tokens were not computed")
    cache.audit()


if __name__ == "__main__":
    main()
