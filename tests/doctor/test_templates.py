"""A model's own tokenizer and chat template, from a local folder."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hybrid.commands.main import main
from hybrid.doctor import Report, Sizes, Traffic, replay
from hybrid.doctor.causes import Cause
from hybrid.doctor.text import Template
from hybrid.errors import ArgumentError
from hybrid.models.loading import TINY
from hybrid.prompts.encode import load_tokenizer
from support.doctor_traffic import logged, message, prose

CHATML = """{%- if tools %}<|im_start|>system
# Tools
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'developer' %}{{ raise_exception('no such role') }}{% endif %}
{%- set content = message.content or '' %}
{%- if message.role == 'assistant' and not loop.last %}
{%- set content = content.split('</think>')[-1].lstrip() %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function.name }}
{%- for name, value in call.function.arguments.items() %} {{ name }}={{ value }}{% endfor %}</call>{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(TINY / name, folder / name)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def report_of(folder: Path, model: Path, lines: list[Any]) -> Report:
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    template = Template(load_tokenizer(model))
    return replay(Traffic.read(folder / "log.jsonl", template), Sizes(1000, 50_000), "hybrid", "1GB")


def conversation(thinks: bool = False) -> list[Any]:
    lines, history = [], [message("system", prose(1, 100))]
    for n in range(6):
        history.append(message("user", [{"type": "text", "text": prose(n + 10, 40)}] if n == 2 else prose(n + 10, 40)))
        thoughts = f"<think>\n{prose(n + 100, 100)}\n</think>\n\n" if thinks else ""
        answer = message("assistant", thoughts + prose(n + 50, 200))
        if n == 3:
            call = {"name": "look", "arguments": '{"place": "here"}'}
            answer["tool_calls"] = [{"id": "a", "type": "function", "function": call}]
        lines.append(logged(history, answer))
        history.append(answer)
    return lines


def test_a_turn_continues_the_one_before(tmp_path: Path, model: Path) -> None:
    report = report_of(tmp_path, model, conversation())
    pairs = list(report.traffic)
    for (before, _), (_, fact) in pairwise(pairs):
        assert fact.seen == before.num_tokens // 64 * 64  # the template ends an answer as it writes it in the history
    assert report.unit == "tokens" and report.rows[0].hit_rate > 70


def test_thinking_that_the_template_drops(tmp_path: Path, model: Path) -> None:
    report = report_of(tmp_path, model, conversation(thinks=True))
    assert report.causes[0][0] is Cause.THINKING


def test_tools_in_another_order(tmp_path: Path, model: Path) -> None:
    every = [{"type": "function", "function": {"name": f"t{n}", "description": prose(n, 60)}} for n in range(8)]
    lines = []
    for n in range(8):
        tools = [*every[n:], *every[:n]]
        lines.append(logged([message("user", prose(n, 30))], message("assistant", "Yes"), tools=tools))
    report = report_of(tmp_path, model, lines)
    assert report.causes[0][0] is Cause.TOOLS
    assert report.cures[0].name == "tools in one order"


def test_what_a_template_refuses_is_named(tmp_path: Path, model: Path) -> None:
    with pytest.raises(ArgumentError, match=r"line 1: .*no such role"):
        report_of(tmp_path, model, [{"messages": [message("developer", "a")]}])


def test_a_wrong_tokenizer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "log.jsonl").write_text('{"prompt": "a"}\n')
    for given in (tmp_path, tmp_path / "nothing"):
        assert main(["doctor", str(tmp_path / "log.jsonl"), "--tokenizer", str(given)]) == 2
        assert "no tokenizer was found" in capsys.readouterr().err
