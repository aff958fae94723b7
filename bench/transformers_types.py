#!/usr/bin/env python
"""Try every causal language model of transformers in the engine, on tiny random weights.

    python bench/transformers_types.py              # all types that no family of this package has: minutes
    python bench/transformers_types.py gpt2 olmo3

Three prompts and then a turn more of each run through an engine. Log-probabilities are compared with those of one pass
of transformers. A type is right, refused with a reason, or too large with the sizes that are tried here; where one is
wrong the exit status is 1.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hybrid import CacheConfig, Engine, HybridError, SamplingParams
from hybrid.models.loading import ARCHITECTURES

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 2048,
    "pad_token_id": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

MOST = 30_000_000
"""Parameters of a model that is tried."""

CLOSE = 1e-4
"""Largest difference of log-probabilities."""


def random_model(name: str) -> Any:
    """A random model of a type.

    Raises:
        Exception: it has no such sizes, of many kinds.
        ValueError: it is too large.
    """
    config = AutoConfig.for_model(name, **SIZES)
    if config.get_text_config() is not config:
        raise ValueError("has a configuration of several parts")
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST:
        raise ValueError(f"has {count / 1e6:.0f}M parameters with these sizes")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def largest_difference(model: Any, folder: str) -> float:
    """Of log-probabilities of answers, and of those of a next turn, from transformers' own."""
    greedy = SamplingParams(max_new_tokens=6, ignore_eos=True, logprobs=2)
    prompts = [
        [3 + (37 * row + 7 * at * at + at) % 120 for at in range(length)] for row, length in enumerate((50, 33, 81))
    ]
    worst = 0.0
    with Engine.from_pretrained(
        folder, dtype="float32", cache=CacheConfig(memory="256MiB", chunk_size=16, page_size=16)
    ) as engine:
        outputs = list(engine.generate(prompts, greedy))
        turns = [[*output.prompt_token_ids, *output.token_ids, 5, 6, 7] for output in outputs]
        outputs += engine.generate(turns, greedy)
        assert [output.usage.cached_tokens for output in outputs[3:]] == [48, 32, 80]
        for output in outputs:
            start = len(output.prompt_token_ids) - 1
            ids = torch.tensor([[*output.prompt_token_ids, *output.token_ids]])
            with torch.no_grad():
                expected = model(input_ids=ids).logits[0].float().log_softmax(-1)
            rows = output.outputs[0].logprobs or []
            found = [(start + at, token, value) for at, row in enumerate(rows) for token, value in row.items()]
            worst = max(worst, *(abs(float(expected[at, token]) - value) for at, token, value in found))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types (default: all that no family of this package has)")
    names = parser.parse_args().types or [
        name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in ARCHITECTURES
    ]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.getLogger("hybrid").setLevel(logging.ERROR)
    counts = dict.fromkeys(("right", "refused", "not tried", "WRONG"), 0)
    for name in names:
        try:
            model = random_model(name)
        except Exception as error:  # configurations raise many kinds for sizes that are not theirs
            verdict, why = "not tried", str(error)
        else:
            try:
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    difference = largest_difference(model, folder)
                verdict, why = ("right" if difference < CLOSE else "WRONG"), f"{difference:.1e}"
            except HybridError as error:
                verdict, why = "refused", str(error).split("in the engine: ")[-1]
            except Exception as error:
                verdict, why = "WRONG", f"{type(error).__name__}: {error}"
        counts[verdict] += 1
        print(f"{name:28} {verdict:10} {' '.join(why.split())[:150]}", flush=True)
    print(
        ", ".join(f"{count} {verdict}" for verdict, count in counts.items()),
        f"; transformers {transformers.__version__}",
    )
    return counts["WRONG"] > 0


if __name__ == "__main__":
    sys.exit(main())
