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
from hybrid.commands.random_checkpoints import FAMILIES as RANDOM
from hybrid.commands.random_checkpoints import random_model
from hybrid.models.gguf_file import ARCHITECTURES, GGUFTensor, chosen_file, read_tokenizer
from hybrid.models.loading import TINY, open_checkpoint
from hybrid.models.moe import Experts

gguf = pytest.importorskip("gguf")

SETTINGS = CacheConfig(memory="64MiB", deterministic=True)
GREEDY = SamplingParams(max_new_tokens=4, logprobs=5, ignore_eos=True)


Array = np.ndarray[Any, Any]

STATE_SPACE = ("falcon_h1", "granitemoehybrid", "nemotron_h")


def stated(config: Any, *names: str) -> int:
    """The first of several settings that a configuration has."""
    return next(int(value) for name in names if (value := getattr(config, name, None)) is not None)


def parts_of(name: str, tensor: Array, config: Any) -> list[tuple[str, Array]]:
    """The names and values of a tensor of a family with Mamba-2 as llama.cpp's converter has them; those whose names
    the package `gguf` knows have that of the checkpoint."""
    layer = name.split(".")[2] if ".layers." in name else ""
    shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
    if name.endswith("input_linear.weight"):
        ends = ("ffn_gate_exps", "ffn_up_exps") if tensor.ndim == 3 else (f"ffn_gate{shared}", f"ffn_up{shared}")
        parts = np.split(tensor, 2, axis=-2)
        return [(f"blk.{layer}.{end}.weight", part) for end, part in zip(ends, parts, strict=True)]
    if name.endswith("shared_mlp.output_linear.weight"):
        return [(f"blk.{layer}.ffn_down{shared}.weight", tensor)]
    if config.model_type == "falcon_h1":
        tensor = tensor * multiplier(name, tensor, config)
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
        tensor = tensor.reshape(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)
    if name.endswith("A_log"):
        tensor = -np.exp(tensor)
    if name.endswith((".A_log", ".D")):
        tensor = tensor.reshape(-1, 1)
    elif name.endswith(".conv1d.weight"):
        tensor = tensor.squeeze(1)
    elif name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        tensor = tensor.reshape(stated(config, "mamba_n_groups", "n_groups"), -1)
    name = name.replace("e_score_correction_bias", "e_score_correction.bias").replace(".dt_bias", ".dt_proj.bias")
    if ".mixer.experts." in name:
        return [(f"blk.{layer}.ffn_{name.split('.')[-1].removesuffix('_proj')}_exps.weight", tensor)]
    return [(name.replace("model.", "backbone.") if config.model_type == "nemotron_h" else name, tensor)]


def multiplier(name: str, tensor: Array, config: Any) -> Any:
    """What the converter multiplies a weight of Falcon-H1 with."""
    if "in_proj" in name:
        shared, heads = config.mamba_n_groups * config.mamba_d_state, config.mamba_n_heads
        widths = (config.mamba_d_ssm, config.mamba_d_ssm, shared, shared, heads)
        rows = np.repeat(np.array(config.ssm_multipliers), widths) * config.ssm_in_multiplier
        return rows.astype(np.float32).reshape(-1, *[1] * (tensor.ndim - 1))
    factors = {
        "mamba.out_proj": config.ssm_out_multiplier,
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * config.attention_in_multiplier,
        "q_proj": config.attention_in_multiplier,
        "v_proj": config.attention_in_multiplier,
        "o_proj": config.attention_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    return np.float32(next((factor for part, factor in factors.items() if part in name), 1.0))


def describe_state_space(writer: Any, config: Any) -> None:
    """State the sizes of linear layers, and what the families with them have of their own."""
    writer.add_ssm_conv_kernel(stated(config, "mamba_d_conv", "conv_kernel"))
    writer.add_ssm_state_size(stated(config, "mamba_d_state", "ssm_state_size"))
    writer.add_ssm_group_count(stated(config, "mamba_n_groups", "n_groups"))
    heads = stated(config, "mamba_n_heads", "mamba_num_heads")
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(heads * stated(config, "mamba_d_head", "mamba_head_dim"))
    if config.model_type == "granitemoehybrid":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_rope_scaling_finetuned(False)
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type == "nemotron_h":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)


def converted(name: str, tensor: Array, config: Any) -> list[tuple[str, Array]]:
    """The names and the values of a tensor as llama.cpp's converter has them."""
    if config.model_type in STATE_SPACE:
        return parts_of(name, tensor, config)
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
    return [(name.replace(".dt_bias", ".dt_proj.bias"), tensor)]


def architecture_of(config: Any) -> str:
    """The name that files have of a model type."""
    names = {"granitemoehybrid": "granitehybrid", "nemotron_h": "nemotron_h_moe"}
    own = {kind: name for name, kind in ARCHITECTURES.items()} | names
    return own[config.model_type]


def described(path: Path, config: Any, tokens: list[str], tensors_of_a_part: int = 0) -> Any:
    """A writer of a file, with what it says of a model."""
    architecture = architecture_of(config)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_of_a_part)
    kinds = getattr(config, "layers_block_type", None) or getattr(config, "layer_types", None) or []
    layers = len(kinds) or config.num_hidden_layers
    writer.add_block_count(layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(96)
    writer.add_head_count(config.num_attention_heads)
    heads = [config.num_key_value_heads if each == "full_attention" else 0 for each in kinds]
    writer.add_head_count_kv(heads if config.model_type == "lfm2" else config.num_key_value_heads)
    eps = [getattr(config, name, None) for name in ("norm_eps", "rms_norm_eps", "layer_norm_epsilon")]
    writer.add_layer_norm_rms_eps(next(each for each in eps if each is not None))
    writer.add_rope_freq_base((getattr(config, "rope_parameters", None) or {"rope_theta": 10000.0})["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list(tokens)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if config.model_type in STATE_SPACE:
        describe_state_space(writer, config)
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


def write_gguf(folder: Path, path: Path, kind: str, tensors_of_a_part: int = 0) -> None:
    """Write a checkpoint as a file whose matrices are of a kind, and the checkpoint again with the numbers in it."""
    from transformers import AutoConfig

    config: Any = AutoConfig.from_pretrained(folder)
    architecture = architecture_of(config)
    writer = described(path, config, [f"<{at}>" for at in range(config.vocab_size)], tensors_of_a_part)
    mapping = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture), 8
    )
    stored: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        stored |= load_file(file)
    exact: dict[str, torch.Tensor] = {}
    for name, tensor in stored.items():
        is_product = (
            tensor.dim() > 1 and tensor.shape[-1] % 32 == 0 and not name.endswith("linear_attn.out_proj.weight")
        )
        own = gguf.GGMLQuantizationType[kind if is_product else "F32"]
        rounded = gguf.dequantize(gguf.quantize(tensor.float().numpy(), own), own)
        exact[name] = torch.from_numpy(rounded.copy())
        for known, values in converted(name, rounded, config):
            in_file = mapping.get_name(known, try_suffixes=(".weight", ".bias")) or known
            assert in_file.startswith(("blk.", "token_embd", "output")), name
            quantized = gguf.quantize(np.ascontiguousarray(values), own)  # the same numbers again
            writer.add_tensor(in_file, quantized, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    for file in folder.glob("*.safetensors"):
        file.unlink()
    save_file(exact, folder / "model.safetensors", {"format": "pt"})


FAMILY = {kind: kind for kind in STATE_SPACE} | {
    "lfm2": "lfm2",
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_5_text": "qwen3_5_text, untied, sharded",
}
"""A random checkpoint of each model type."""


def files(tmp_path: Path, model_type: str, kind: str) -> tuple[Path, Path]:
    """A checkpoint of numbers that a kind of file holds exactly, and the file."""
    folder = tmp_path / "checkpoint"
    random_model(RANDOM[FAMILY[model_type]]).save_pretrained(folder, save_original_format=model_type != "nemotron_h")
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    write_gguf(folder, tmp_path / "model.gguf", kind)
    return folder, tmp_path / "model.gguf"


def engine_of(path: Path) -> Engine:
    return Engine.from_pretrained(path, device="cpu", dtype="float32", cache=SETTINGS)


def first_logits(engine: Engine) -> torch.Tensor:
    return parity.prompt_logits(engine, list(range(5, 105)), 100)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        ("lfm2", "Q4_0"),
        ("lfm2", "BF16"),
        ("llama", "Q4_1"),
        ("qwen3", "F16"),
        ("qwen3_5_text", "Q8_0"),
        ("granitemoehybrid", "Q4_0"),
        ("nemotron_h", "Q4_1"),
        ("falcon_h1", "F32"),
        ("nemotron_h", "Q8_0"),
    ],
)
def test_the_model_is_that_of_the_numbers_in_the_file(model_type: str, kind: str, tmp_path: Path) -> None:
    folder, path = files(tmp_path, model_type, kind)
    engine = engine_of(path)
    kinds = {weight.dtype for weight in engine.loaded.model.parameters()}
    assert (torch.uint8 in kinds) == kind.startswith("Q4")
    experts = [module for module in engine.loaded.model.modules() if isinstance(module, Experts)]
    if experts and kind.startswith("Q4"):  # rows of the second matrices are no whole blocks of a file
        assert all(module.scales.keys() == {module.first} for module in experts)
    found, expected = first_logits(engine), first_logits(engine_of(folder))
    # 1 is added to norms and taken away, the logarithm of decays is taken twice, factors are multiplied before
    if model_type in (*STATE_SPACE, "qwen3_5_text"):
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
    writer = described(path, Lfm2Config(**RANDOM["lfm2"].settings), tokens)
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


def test_all_parts_of_a_split_file_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    random_model(RANDOM["llama"]).save_pretrained(folder)
    write_gguf(folder, tmp_path / "model.gguf", "F16", 7)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert [part.name for part in parts] == [f"model-0000{at}-of-00003.gguf" for at in (1, 2, 3)]
    whole = dict(engine_of(folder).loaded.model.named_parameters())
    for named in (parts[1], tmp_path):  # a part, and the folder that has no other file
        found = dict(engine_of(named).loaded.model.named_parameters())
        assert all(torch.equal(found[name], weight) for name, weight in whole.items())
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"of which model-00003-of-00003.gguf are missing"):
        open_checkpoint(parts[0])


def test_one_of_several_files_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["lfm-Q4_K_M.gguf", "lfm-Q8_0.gguf", "mmproj-F16.gguf", "big/lfm-BF16-00001-of-00002.gguf"]
    assert chosen_file(names, "bf16", "x") == chosen_file(names, "lfm-BF16-00002-of-00002.gguf", "x") == names[3]
    with pytest.raises(
        CheckpointError, match=r"several GGUF files: big/lfm-BF16.*, lfm-Q4_K_M.gguf, lfm-Q8_0.gguf; name"
    ):
        chosen_file(names, None, "x")
    with pytest.raises(CheckpointError, match="0 GGUF files that 'Q5' names: big"):
        chosen_file(names, "Q5", "x")
    for name in names[:3]:
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="several GGUF files"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"lfm-Q8_0.gguf is damaged or truncated"):
        open_checkpoint(f"{tmp_path}:q8_0")
    fetched: list[str] = []

    def download(repository: str, name: str) -> str:
        fetched.append(f"{repository}/{name}")
        return str(tmp_path / names[0])

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda *_: names)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    with pytest.raises(CheckpointError, match=r"lfm-Q4_K_M.gguf is damaged or truncated"):
        open_checkpoint("owner/lfm-GGUF:BF16")
    assert fetched == [f"owner/lfm-GGUF/big/lfm-BF16-0000{at}-of-00002.gguf" for at in (1, 2)]


def test_a_file_that_is_cut_off_and_a_type_that_is_not_known_are_refused(tmp_path: Path) -> None:
    _, path = files(tmp_path, "qwen3", "BF16")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1000])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        open_checkpoint(path)
    name = b"blk.0.ffn_up.weight"
    at = whole.index(name) + len(name) + 4 + 2 * 8  # its dimensions
    assert whole[at : at + 4] == bytes([30, 0, 0, 0])
    path.write_bytes(whole[:at] + bytes([250]) + whole[at + 1 :])
    with pytest.raises(UnsupportedModelError, match=r"type that the installed package gguf does not know.*250"):
        open_checkpoint(path)
    path.write_bytes(whole[:at] + bytes([9]) + whole[at + 1 :])  # Q8_1
    with pytest.raises(UnsupportedModelError, match=r"ffn_up.weight is of type Q8_1, which the package gguf"):
        engine_of(path)
