#!/usr/bin/env python
"""Compare GGUF files that llama.cpp's own converter writes with transformers, and with llama.cpp.

    python bench/gguf_files.py SOURCE                        # llama.cpp's source folder; its build/bin for K-quants
    python bench/gguf_files.py SOURCE --family falcon-h1 --kind Q4_K_M --keep folder

A random checkpoint of each architecture, with rows of multiples of 256, is converted to float32, whose logits must be
those of the checkpoint in transformers: names, reordered rows, metadata and configuration. Then it is converted to
bf16, f16 and q8_0, and, where `llama-quantize` is built, quantized to Q4_0, Q4_K_M and Q6_K. Logits of such a file must
be those of transformers with the numbers that it stands for. Where `llama-server` is built, its log-probabilities of
the next token are printed beside ours. The exit status is 1 where logits differ.
"""

import argparse
import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file
from torch import Tensor

from hybrid import CacheConfig, Engine
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import Family, random_model
from hybrid.models.layers import Linear
from hybrid.models.loading import ARCHITECTURES
from hybrid.models.moe import Experts

BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.06,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
STATE_SPACE: dict[str, Any] = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 16}
GRANITE: dict[str, Any] = {
    **BASE,
    **STATE_SPACE,
    "mamba_n_groups": 1,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
    "embedding_multiplier": 1.5,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.75,
    "logits_scaling": 2.0,
    "shared_intermediate_size": 256,
    "tie_word_embeddings": True,
}
NEMOTRON: dict[str, Any] = {
    **BASE,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 16,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256}
FAMILIES: dict[str, Family] = {
    "falcon-h1": Family(
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {
            **BASE,
            **STATE_SPACE,
            "num_hidden_layers": 2,
            "head_dim": 64,
            "mamba_d_ssm": 512,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.75, 1.25],
            "key_multiplier": 0.5,
            "attention_in_multiplier": 1.25,
            "attention_out_multiplier": 0.75,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.5,
            "ssm_multipliers": [0.75, 1.25, 0.5, 1.5, 0.25],
        },
    ),
    "granitehybrid": Family("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**GRANITE, **EXPERTS}),
    "granitehybrid, dense": Family(
        "GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM", {**GRANITE, "num_local_experts": 0}
    ),
    "granite": Family(
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "num_local_experts": 0,
            "shared_intermediate_size": 512,
            "layer_types": ["full_attention"] * 2,
            "num_hidden_layers": 2,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": Family(
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "moe_shared_expert_intermediate_size": 512,
            "routed_scaling_factor": 1.5,
        },
    ),
    "lfm2": Family(
        "Lfm2Config",
        "Lfm2ForCausalLM",
        {**BASE, "layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3},
    ),
    "llama": Family("LlamaConfig", "LlamaForCausalLM", {**BASE, "num_hidden_layers": 2}),
    "llama, rotations of Llama 3": Family(
        "LlamaConfig",
        "LlamaForCausalLM",
        {
            **BASE,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM", {**BASE, "num_hidden_layers": 2, "head_dim": 64}),
    "qwen35": Family(
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            **BASE,
            "head_dim": 64,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "num_hidden_layers": 4,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}
"""By architecture."""

CONVERTED = ("bf16", "f16", "q8_0")
QUANTIZED = ("Q4_0", "Q4_1", "Q4_K_M", "Q5_K_M", "Q6_K")

CONVERT = """
import json
import sys
source, model, file, kind = sys.argv[1:]
sys.path[:0] = [source, source + "/gguf-py"]
import convert_hf_to_gguf as program
from conversion import falcon_h1, granite, lfm2, llama, nemotron, qwen
from conversion.base import ModelBase, TextModel

def write_vocabulary(self):
    size, writer = self.hparams["vocab_size"], self.gguf_writer
    writer.add_tokenizer_model("gpt2"), writer.add_tokenizer_pre("llama-bpe"), writer.add_token_merges(["t 0"])
    writer.add_token_list(["t", "0", *(f"t{number}" for number in range(size - 2))])
    writer.add_token_types([1] * size)
    writer.add_bos_token_id(1), writer.add_eos_token_id(2)

def classes(base):
    yield base
    for derived in base.__subclasses__():
        yield from classes(derived)

for model_class in classes(TextModel):
    model_class.set_vocab = write_vocabulary  # a random checkpoint has no tokenizer
with open(model + "/config.json") as file_:
    config = json.load(file_)
if config["model_type"] == "nemotron_h":  # transformers' class would add experts to a dense model
    ModelBase.load_hparams = staticmethod(lambda *_, **__: dict(config))
sys.argv = ["convert", model, "--outfile", file, "--outtype", kind]
sys.argv += ["--no-mtp"] * config["model_type"].startswith("qwen3_5")
program.main()
"""

SETTINGS = CacheConfig(memory="64MiB", deterministic=True)
SERVER = "http://127.0.0.1:18117"
PROMPT = [7 + (at * at * 31 + at) % 480 for at in range(100)]


def write_checkpoint(folder: Path, family: Family) -> None:
    """Write a random checkpoint, with the configuration as published ones have it."""
    model = random_model(family)
    model.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if config["model_type"] == "granitemoehybrid":
        names = {"linear_attention": "mamba", "full_attention": "attention"}
        config["layer_types"] = [names[kind] for kind in config["layer_types"]]
        if not config["num_local_experts"]:
            config["num_experts_per_tok"] = 0
    if config["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-", "moe": "E"}
        kinds = config.pop("layers_block_type", None) or config.pop("layer_types")
        config["hybrid_override_pattern"] = "".join(letters[kind] for kind in kinds)
        config["num_hidden_layers"] = len(kinds)
        config["rms_norm_eps"] = config["layer_norm_epsilon"]
        if "moe" not in kinds:
            of_experts = ("n_group", "topk_group", "norm_topk_prob", "routed_scaling_factor")
            left_out = {name for name in config if "expert" in name or "moe" in name or name in of_experts}
            config = {name: value for name, value in config.items() if name not in left_out}
    file.write_text(json.dumps(config))


def write_numbers(engine: Engine, folder: Path) -> None:
    """Write the numbers that a model is computed with as a checkpoint for transformers."""
    model = engine.loaded.model
    weights: dict[str, Tensor] = dict(model.named_parameters())
    for name, each in model.named_modules():
        if isinstance(each, Linear | Experts):
            weights |= {f"{name}.{own}": each.numbers(own) for own in each.scales}
    layouts = ARCHITECTURES[model.config.model_type].layouts
    stored = {}
    for name, weight in weights.items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        whole = [way[0] for way in layouts(name, model.config) if len(way) == 1 and way[0].rows is None]
        stored[whole[0].name] = weight.detach().float().contiguous()
    folder.mkdir()
    model.config.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})


def logits_of(engine: Engine) -> Tensor:
    return parity.prompt_logits(engine, PROMPT, len(PROMPT))


def engine_of(file: Path) -> Engine:
    return Engine.from_pretrained(file, device="cpu", dtype="float32", cache=SETTINGS)


@contextmanager
def served(program: Path, file: Path) -> Iterator[None]:
    command = [program, "-m", file, "-t", "1", "-c", "512", "-np", "1", "--port", SERVER.rpartition(":")[2]]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                assert process.poll() is None, "llama-server ended"
                try:
                    if urlopen(f"{SERVER}/health").status == 200:
                        break
                except URLError:
                    time.sleep(0.2)
            yield
        finally:
            process.terminate()


def against_llama(program: Path, file: Path, logits: Tensor) -> str:
    """Greatest and mean difference of the log-probabilities of the ten most likely next tokens at some places."""
    ours, differences, same = logits.log_softmax(-1), [], 0
    places = (1, 10, 37, 64, 100)
    with served(program, file):
        for length in places:
            asked = {"prompt": PROMPT[:length], "n_predict": 1, "n_probs": 10, "temperature": 0, "ignore_eos": True}
            with urlopen(Request(f"{SERVER}/completion", json.dumps(asked).encode())) as answer:
                found = json.load(answer)["completion_probabilities"][0]["top_logprobs"]
            differences += [abs(each["logprob"] - float(ours[length - 1, each["id"]])) for each in found]
            same += found[0]["id"] == int(ours[length - 1].argmax())
    mean = sum(differences) / len(differences)
    by = f"log-probabilities differ by {mean:.1e}, at most {max(differences):.1e}"
    return f"llama.cpp: {same} of {len(places)} tokens, {by}"


def try_family(name: str, source: Path, folder: Path, kinds: list[str]) -> bool:
    """Try a family; prints a line for each kind of file, and tells whether all were right."""
    checkpoint, programs = folder / "checkpoint", source / "build" / "bin"
    write_checkpoint(checkpoint, FAMILIES[name])
    passed = True
    for kind in ["f32", *CONVERTED, *QUANTIZED]:
        if kinds and kind not in kinds and kind != "f32":
            continue
        file = folder / f"{kind}.gguf"
        if kind in QUANTIZED:
            if not (programs / "llama-quantize").exists():
                continue
            command: list[Any] = [programs / "llama-quantize", "--pure", folder / "f32.gguf", file, kind]
            if kind.endswith("_M"):
                command.remove("--pure")
        else:
            command = [sys.executable, "-c", CONVERT, source, checkpoint, file, kind]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True)
        if done.returncode:
            print(f"{name}, {kind}: not converted: {done.stderr[-600:]}")
            passed = False
            continue
        engine = engine_of(file)
        found = logits_of(engine)
        if kind == "f32":
            theirs, of = parity.transformers_logits(checkpoint, PROMPT), "the checkpoint"
        else:
            write_numbers(engine, folder / f"numbers of {kind}")
            theirs, of = parity.transformers_logits(folder / f"numbers of {kind}", PROMPT), "the numbers in the file"
        check = parity.compare_logits(kind, found, torch.from_numpy(theirs))
        four = sum(weight.dtype == torch.uint8 for weight in engine.loaded.model.parameters())
        print(
            f"{name}, {kind}: {'ok' if check.passed else 'MISS'} against transformers with {of}: {check.detail}; "
            f"{four} weights in four bits"
        )
        if (programs / "llama-server").exists():
            print(f"    {against_llama(programs / 'llama-server', file, found)}", flush=True)
        passed = passed and check.passed
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--family", action="append", choices=FAMILIES, help="all by default")
    parser.add_argument("--kind", action="append", help="all by default")
    parser.add_argument("--keep", type=Path, help="folder for the files")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    passed = True
    with tempfile.TemporaryDirectory() as temporary:
        for name in args.family or FAMILIES:
            folder = (args.keep or Path(temporary)) / name
            folder.mkdir(parents=True)
            passed = try_family(name, args.source.resolve(), folder, args.kind or []) and passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
