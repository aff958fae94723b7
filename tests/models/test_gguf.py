"""GGUF files as llama.cpp's converter writes them, by the package `gguf`: the model is that of the numbers in them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid import CacheConfig, CheckpointError, Engine, SamplingParams, UnsupportedModelError
from hybrid.commands import parity
from hybrid.commands.random_checkpoints import FAMILIES, write_random_checkpoint
from hybrid.models.gguf_file import ARCHITECTURES, GGUFTensor, read_tokenizer
from hybrid.models.loading import TINY

gguf = pytest.importorskip("gguf")

SETTINGS = CacheConfig(memory="64MiB", deterministic=True)
GREEDY = SamplingParams(max_new_tokens=4, logprobs=5, ignore_eos=True)


def converted(name: str, tensor: np.ndarray[Any, Any], config: Any) -> tuple[str, np.ndarray[Any, Any]]:
    """The name and the values of a tensor as llama.cpp's converter has them."""
    if config.model_type == "llama":
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        tensor = tensor.squeeze(1)
    if config.model_type == "qwen3_5_text":
        keys, values, size = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim

        def tiled(rows: np.ndarray[Any, Any], of_head: int) -> np.ndarray[Any, Any]:
            grouped = rows.reshape(keys, values // keys, of_head, *rows.shape[1:])
            return grouped.swapaxes(0, 1).reshape(rows.shape)

        before = 2 * keys * config.linear_key_head_dim
        if name.endswith("A_log"):
            tensor = tiled(-np.exp(tensor), 1)
        elif name.endswith(("dt_bias", "in_proj_a.weight", "in_proj_b.weight")):
            tensor = tiled(tensor, 1)
        elif name.endswith("in_proj_z.weight"):
            tensor = tiled(tensor, size)
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            tensor = np.concatenate((tensor[:before], tiled(tensor[before:], size)))
        elif name.endswith("linear_attn.out_proj.weight"):
            tensor = tiled(tensor.T, size).T
        elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            tensor = tensor + 1
    return name.replace(".dt_bias", ".dt_proj.bias"), np.ascontiguousarray(tensor)


def described(path: Path, config: Any, tokens: list[str]) -> Any:
    """A writer of a file, with what it says of a model."""
    architecture = {kind: name for name, kind in ARCHITECTURES.items()}[config.model_type]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(96)
    writer.add_head_count(config.num_attention_heads)
    kinds = getattr(config, "layer_types", None) or []
    heads = [config.num_key_value_heads if each == "full_attention" else 0 for each in kinds]
    writer.add_head_count_kv(heads if config.model_type == "lfm2" else config.num_key_value_heads)
    eps = config.norm_eps if config.model_type == "lfm2" else config.rms_norm_eps
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.model_type == "lfm2":
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_key_length(head_dim)
    if config.model_type == "qwen3_5_text":
        writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
        writer.add_rope_dimension_sections([2, 1, 1, 0])
        writer.add_full_attention_interval(2)
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    return writer


def write_gguf(folder: Path, path: Path, kind: str) -> None:
    """Write a checkpoint as a file whose matrices are of a kind, and the checkpoint again with the numbers in it."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    architecture = {kind: name for name, kind in ARCHITECTURES.items()}[config.model_type]
    writer = described(path, config, [f"<{at}>" for at in range(config.vocab_size)])
    mapping = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), config.num_hidden_layers
    )
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        is_product = (
            tensor.dim() == 2 and tensor.shape[1] % 32 == 0 and not name.endswith("linear_attn.out_proj.weight")
        )
        own = gguf.GGMLQuantizationType[kind if is_product else "F32"]
        rounded = gguf.dequantize(gguf.quantize(tensor.float().numpy(), own), own)
        exact[name] = torch.from_numpy(rounded.copy())
        known, values = converted(name, rounded, config)
        in_file = mapping.get_name(known, try_suffixes=(".weight", ".bias"))
        assert in_file is not None, name
        writer.add_tensor(in_file, gguf.quantize(values, own), raw_dtype=own)  # the same numbers again
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(exact, folder / "model.safetensors", {"format": "pt"})


FAMILY = {"lfm2": "lfm2", "llama": "llama", "qwen3": "qwen3", "qwen3_5_text": "qwen3_5_text, untied, sharded"}
"""A random checkpoint of each model type."""


def files(tmp_path: Path, model_type: str, kind: str) -> tuple[Path, Path]:
    """A checkpoint of numbers that a kind of file holds exactly, and the file."""
    folder = write_random_checkpoint(tmp_path / "checkpoint", FAMILY[model_type])
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    write_gguf(folder, tmp_path / "model.gguf", kind)
    return folder, tmp_path / "model.gguf"


def first_logits(path: Path, **options: Any) -> torch.Tensor:
    engine = Engine.from_pretrained(path, device="cpu", dtype="float32", cache=SETTINGS, **options)
    return parity.prompt_logits(engine, list(range(5, 105)), 100)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("lfm2", "Q4_0"), ("lfm2", "BF16"), ("llama", "Q8_0"), ("qwen3", "F16"), ("qwen3_5_text", "Q8_0")],
)
def test_the_model_is_that_of_the_numbers_in_the_file(model_type: str, kind: str, tmp_path: Path) -> None:
    folder, path = files(tmp_path, model_type, kind)
    found, expected = first_logits(path), first_logits(folder)
    if model_type == "qwen3_5_text":  # 1 is added to norms and taken away, and the logarithm of decays is taken twice
        assert float((found - expected).abs().max()) < 1e-3 * float(expected.max() - expected.min())
    else:
        assert torch.equal(found, expected)
    theirs = torch.from_numpy(parity.transformers_logits(folder, range(5, 105)))
    assert parity.compare_logits(kind, found, theirs).passed


def test_a_hit_is_its_cold_run_and_the_weights_may_be_quantized_again(tmp_path: Path) -> None:
    _, path = files(tmp_path, "lfm2", "Q8_0")
    engine = Engine.from_pretrained(path, device="cpu", dtype="bfloat16", load_dtype="int4", cache=SETTINGS)
    prompt = list(range(5, 155))
    cold, warm = (engine.generate([prompt], GREEDY, progress=False)[0] for _ in range(2))
    assert warm.usage.cached_tokens >= 128
    assert (warm.token_ids, warm.logprobs) == (cold.token_ids, cold.logprobs)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_rows_of_k_quants_are_read_a_few_at_a_time(kind: str) -> None:
    own = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[own][1]
    data = np.random.default_rng(0).integers(0, 60, (6, 2 * size), dtype=np.uint8)  # factors are small and finite
    rows = torch.tensor([3, 0, 5, 1, 2, 4])
    tensor = GGUFTensor(Path("file"), "x", torch.float32, (6, 512), data, own, rows)
    whole = torch.from_numpy(gguf.dequantize(data, own).copy())[rows]
    assert torch.equal(tensor.tensor(), whole)
    assert torch.equal(tensor.part(700, (2, 300), torch.empty(0)), whole.flatten()[700:1300].view(2, 300))


def test_the_tokenizer_and_its_template_come_from_the_file(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Lfm2Config

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY)
    model = json.loads((TINY / "tokenizer.json").read_text())["model"]
    path = tmp_path / "model.gguf"
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    writer = described(path, Lfm2Config(**FAMILIES["lfm2"].settings), tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]])
    writer.add_chat_template("{% for message in messages %}{{ message.content }}{% endfor %}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found: Any = read_tokenizer(path)
    text = "The names of functions are listed here, and words of a file"  # which both cut into the same words
    assert found.encode(text, add_special_tokens=False) == tokenizer.encode(text, add_special_tokens=False)
    assert found.apply_chat_template([{"role": "user", "content": "one"}], tokenize=False) == "one"


def test_what_is_no_file_of_a_known_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        Engine.from_pretrained(path)
    writer = gguf.GGUFWriter(path, "gptj")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match="'gptj'; supported are: falcon-h1, granite, granitehybrid, lfm2, llama, "
    ):
        Engine.from_pretrained(path)
