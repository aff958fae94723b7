"""Chats in the forms of the families: turns between marks of theirs, answers that end at their end tokens. Templates
are written for these tests, on the model inside the package, whose control tokens take other names."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid import CacheConfig, Conversation, Engine, SamplingParams
from hybrid.models.loading import TINY
from support.engines import GRID

OWN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""The control tokens of the model inside the package, by their ids."""


def turns(before: str, after: str, opening: str, roles: str = "message.role", start: str = "") -> str:
    """A template: each message between marks, and the mark that an answer follows."""
    role = f"{{{{ {roles} }}}}"
    return (
        start
        + "{% for message in messages %}"
        + before.replace("ROLE", role)
        + "{{ message.content }}"
        + after
        + "{% endfor %}{% if add_generation_prompt %}"
        + opening
        + "{% endif %}"
    )


NAMED = "{'user': 'USER', 'system': 'SYSTEM', 'assistant': 'ANSWER'}[message.role]"

FORMS: dict[str, tuple[tuple[str, str, str], list[int], str]] = {
    "qwen3, qwen3_5, falcon_h1": (OWN, [2, 0], turns("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n")),
    "lfm2": (
        ("<|startoftext|>", *OWN[1:]),
        [2],
        turns("<|im_start|>ROLE\n", "<|im_end|>\n", "<|im_start|>assistant\n", start="<|startoftext|>"),
    ),
    "gemma3, recurrent_gemma": (
        ("<eos>", "<start_of_turn>", "<end_of_turn>"),
        [0, 2],
        turns(
            "<start_of_turn>ROLE\n",
            "<end_of_turn>\n",
            "<start_of_turn>model\n",
            "'model' if message.role == 'assistant' else message.role",
        ),
    ),
    "llama": (
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        [2],
        turns(
            "<|start_header_id|>ROLE<|end_header_id|>\n\n",
            "<|eot_id|>",
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ),
    "granitemoehybrid": (
        ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"),
        [2],
        turns("<|start_of_role|>ROLE<|end_of_role|>", "<|end_of_text|>\n", "<|start_of_role|>assistant<|end_of_role|>"),
    ),
    "nemotron_h": (
        ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"),
        [2],
        turns("<SPECIAL_11>ROLE\n", "<SPECIAL_12>\n", "<SPECIAL_11>Assistant\n", "message.role.capitalize()"),
    ),
    "gpt_oss": (  # an answer ends with another token than it is shown with
        ("<|return|>", "<|start|>", "<|end|>"),
        [0],
        turns("<|start|>ROLE<|message|>", "<|end|>", "<|start|>assistant<|message|>"),
    ),
    "kimi_linear": (
        ("[EOS]", "<|im_middle|>", "<|im_end|>"),
        [2, 0],
        turns("<|im_ROLE|>ROLE<|im_middle|>", "<|im_end|>", "<|im_assistant|>assistant<|im_middle|>"),
    ),
    "bailing_hybrid": (
        ("<role>", "</role>", "<|role_end|>"),
        [2],
        turns("<role>ROLE</role>", "<|role_end|>", "<role>ANSWER</role>", NAMED),
    ),
    "jamba": (
        ("<|startoftext|>", "<|bom|>", "<|eom|>"),
        [2],
        turns("<|bom|><|ROLE|> ", "<|eom|>", "<|bom|><|assistant|> ", start="<|startoftext|>"),
    ),
    "minimax": (
        ("<end_of_document>", "<beginning_of_sentence>", "<end_of_sentence>"),
        [2],
        turns("<beginning_of_sentence>ROLE name=A\n", "<end_of_sentence>\n", "<beginning_of_sentence>ai name=A\n"),
    ),
    "olmo_hybrid": (
        ("<|endoftext|>", "<|user|>", "<|assistant|>"),
        [0],
        "<|endoftext|>{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>\n"
        "{{ message.content }}<|endoftext|>\n{% else %}<|user|>\n{{ message.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    ),
}
"""By families: the names of the control tokens, those that end an answer, and a template of this form."""


def written(folder: Path, names: tuple[str, str, str], ends: list[int], template: str) -> Path:
    """The model inside the package with other names of control tokens, end tokens and another template."""
    shutil.copytree(TINY, folder)
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    for at, own in enumerate(OWN):
        tokenizer = tokenizer.replace(f'"{own}"', f'"@{at}@"')
    for at, name in enumerate(names):
        tokenizer = tokenizer.replace(f'"@{at}@"', f'"{name}"')
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    for file, changes in (
        ("tokenizer_config.json", {"chat_template": template, "eos_token": names[ends[0]], "pad_token": names[0]}),
        ("generation_config.json", {"eos_token_id": ends}),
        ("config.json", {"eos_token_id": ends[0]}),
    ):
        entries = json.loads((folder / file).read_text(encoding="utf-8"))
        (folder / file).write_text(json.dumps({**entries, **changes}), encoding="utf-8")
    return folder


@pytest.mark.parametrize("families", FORMS)
def test_a_chat_in_the_form_of_a_family_ends_its_answers_and_hits_its_turns(families: str, tmp_path: Path) -> None:
    names, ends, template = FORMS[families]
    cache = CacheConfig(page_size=GRID, chunk_size=GRID, memory="8MiB", deterministic=True)
    engine = Engine.from_pretrained(written(tmp_path / "model", names, ends, template), device="cpu", cache=cache)
    assert engine.tokenizer is not None
    assert engine.tokenizer.convert_tokens_to_ids(list(names)) == [0, 1, 2]
    end = iter(ends * 3)

    def process(answer: list[int], logits: torch.Tensor) -> torch.Tensor:
        """Answers have 21 tokens and an end token; no control token comes before it."""
        logits[:3] = -1e9
        if len(answer) == 21:
            logits[next(end)] = 1e9
        return logits

    params = SamplingParams(max_new_tokens=40, temperature=1.0, seed=8, logits_processors=[process])
    chat = Conversation(engine, [{"role": "system", "content": "Answer in short sentences. " * 3}], params)
    known: list[Any] = []
    for said in ("What is a tuple?", "And a list?", "And a set?"):
        output = chat.ask(said)
        assert output.finish_reason == "stop"
        assert len(output.token_ids) == 22 and output.token_ids[-1] in ends
        assert not any(name in output.text for name in names)
        assert output.usage.cached_tokens >= max(len(known) - 1, 0) // GRID * GRID
        shown = engine.tokenizer.decode(output.prompt_token_ids)
        assert shown.count(said) == 1 and names[1] in shown
        known = chat.token_ids[:]
    engine.close()
