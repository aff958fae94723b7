"""The command line, as a person and as a machine use it; and that what it proves could fail."""

import gc
import io
import json
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hybrid import CacheConfig, Engine, HybridCache, RequestOutput
from hybrid.commands import demo, parity, stress
from hybrid.commands.checkpoints import check_checkpoints
from hybrid.commands.commands import Command
from hybrid.commands.main import COMMANDS, main
from hybrid.commands.parity import Judge
from hybrid.commands.random_checkpoints import FAMILIES, random_model
from hybrid.commands.stress import Stress, StressReport
from hybrid.commands.toy_model import ToyPass, ToyRunner
from hybrid.engine.scheduler import Scheduler
from hybrid.models.loading import TINY
from hybrid.tiers.archive import read_archive
from support.engines import answer, greedy
from support.small_parity import only_repeated_prompts


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status and the one JSON object of a command."""
    status = main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_parity_passes_on_the_model_inside_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_json(capsys, "parity")
    assert status == 0
    assert result["passed"]
    of_logits = 3 * len({"float32", result["dtype"]})
    assert len(result["checks"]) == of_logits + 36
    assert all(check["hit_tokens"] for check in result["checks"][of_logits:])


def test_parity_runs_hits_in_the_type_that_an_engine_chooses_and_compares_logits_in_float32_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever this CPU would choose."""
    only_repeated_prompts(monkeypatch, logits=True)
    for chosen in (torch.bfloat16, torch.float32):
        monkeypatch.setattr(parity, "default_dtype", lambda *_, chosen=chosen: (chosen, "as the test says"))
        status, result = run_json(capsys, "parity")
        names = [check["name"] for check in result["checks"]]
        types = list(dict.fromkeys(("float32", result["dtype"])))
        ways = ["a prompt in one pass", "a prompt in chunks", "decoded tokens"]
        assert (status, result["dtype"]) == (0, str(chosen).removeprefix("torch."))
        assert names == [f"logits of {way}, {name}" for name in types for way in ways] + ["a repeated prompt"]


@pytest.mark.parametrize(
    ("dtype", "load_dtype"),
    [("bfloat16", "int4:32"), (None, "int4")],  # more of them: test_options.py
)
def test_parity_compares_logits_of_quantized_weights_in_every_type(
    dtype: str | None, load_dtype: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only_repeated_prompts(monkeypatch, logits=True)
    given = {"--dtype": dtype, "--load-dtype": load_dtype}
    options = [text for name, value in given.items() if value is not None for text in (name, value)]
    status, result = run_json(capsys, "parity", "--family", "llama", *options)
    assert status == 0, result
    [checks] = [family["checks"] for family in result["families"].values()]
    assert len(checks) == 5
    assert all(f", {dtype or 'float32'}" in check["name"] for check in checks[:-1])


def test_parity_of_a_family_is_of_its_variants_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(parity, "check_all", lambda *_, **__: parity.Parity([], "float32"))
    _, result = run_json(capsys, "parity", "--family", "lfm2", "--family", "qwen3")
    assert list(result["families"]) == ["lfm2", "lfm2, odd sizes, untied", "qwen3", "qwen3, odd sizes, tied"]
    assert main(["parity", "--family", "lfm3"]) == 2
    assert "--family must be one of bailing_hybrid, bamba, " in capsys.readouterr().err


def test_parity_finds_a_memory_with_tiers_whatever_the_sizes_of_a_page_and_a_state_are(tmp_path: Path) -> None:
    """Here a page is a little smaller than a state, so that pieces of one budget hold several of both."""
    sizes = {"hidden_size": 160, "head_dim": 40, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes |= {"linear_num_value_heads": 6, "linear_key_head_dim": 24, "linear_value_head_dim": 16}
    family = FAMILIES["qwen3_5_text"]
    random_model(replace(family, settings={**family.settings, **sizes})).save_pretrained(tmp_path)
    engine = Engine.from_pretrained(tmp_path, dtype="bfloat16", cache=CacheConfig(memory="64MiB", deterministic=True))
    check = Judge(engine).attempt(parity.to_host_memory_and_back)
    assert check.passed, check


def test_parity_fails_where_a_hit_changes_a_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint that is off by one bit is noticed."""
    only_repeated_prompts(monkeypatch)
    commit = HybridCache.commit

    def spoil(cache: HybridCache, *arguments: Any) -> None:
        commit(cache, *arguments)
        tensor = cache.state_tensors["recurrent"]
        for _, node in cache.tree.nodes():
            if node.slot is not None:
                tensor[node.slot] = torch.nextafter(tensor[node.slot], torch.tensor(torch.inf))

    monkeypatch.setattr(HybridCache, "commit", spoil)
    assert main(["parity"]) == 1
    assert "log-probabilities differ" in capsys.readouterr().out


def test_parity_fails_where_nothing_is_hit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    only_repeated_prompts(monkeypatch)
    monkeypatch.setattr(HybridCache, "commit", lambda *_: None)
    status, result = run_json(capsys, "parity")
    assert status == 1
    assert "nothing was hit" in result["checks"][0]["detail"]


def test_logits_that_are_off_are_noticed() -> None:
    theirs = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    assert parity.compare_logits("same", theirs.clone(), theirs).passed
    off = theirs.clone()
    off[7, 3] += 0.01
    assert not parity.compare_logits("off", off, theirs).passed
    nudged = theirs + (off - theirs) / 2
    assert not parity.compare_logits("further off than roundings", off, theirs, nudged).passed
    near = theirs + (off - theirs) / 8
    assert not parity.compare_logits("off", near, theirs).passed
    assert parity.compare_logits("as roundings", near, theirs, nudged).passed


def test_parity_compares_rounding_apart_from_rows_in_which_another_expert_is_chosen() -> None:
    torch.manual_seed(0)
    exact, noise = torch.randn(200, 50), 0.01 * torch.randn(2, 200, 50)
    ours, theirs = exact + noise[0], exact + noise[1]
    assert parity.compare_errors("alike", ours, theirs, exact).passed
    for worse in (exact + 1.7 * noise[0], torch.cat((ours[:100], exact[100:] + 4 * noise[0, 100:]))):
        for has_experts in (False, True):
            assert not parity.compare_errors("worse", worse, theirs, exact, has_experts).passed
    ours[:5] += 0.5 * torch.randn(5, 50)
    assert parity.compare_errors("another expert", ours, theirs, exact, has_experts=True).passed
    assert not parity.compare_errors("some rows", ours, theirs, exact).passed


STRESS = ("stress", "--no-model", "--no-signals", "--operations", "1000")


def test_stress_leaks_nothing_and_the_same_seed_makes_the_same_run(capsys: pytest.CaptureFixture[str]) -> None:
    first = run_json(capsys, *STRESS, "--seed", "4")
    second = run_json(capsys, *STRESS, "--seed", "4")
    assert first == second
    status, report = first
    assert status == 0
    assert report["leaked"] == 0
    for happened in (
        "hits",
        "evicted_pages",
        "evicted_checkpoints",
        "retractions",
        "streams",
        "images",
        "pins",
        "failed",
        "failed_allocations",
        "failed_passes",
        "nan_passes",
        "intrusions",
        "checked_checkpoints",
    ):
        assert report[happened] > 0, happened
    assert run_json(capsys, *STRESS, "--seed", "5")[1] != report


@pytest.mark.usefixtures("untraced")  # thousands of operations by the lines of the test before
@pytest.mark.parametrize("seed", [52])
def test_stress_with_copies_on_disk_and_files_that_fail(seed: int) -> None:
    report = stress.run_stress(None, seed, 0, 2500, progress=False, audit_every=50)
    assert report.passed, report
    assert report.restored_checkpoints > 0
    assert report.faults.failed_transfers > 0


def test_stress_survives_signals(untraced: None) -> None:
    report = stress.run_stress(None, 1, 0, 1500, progress=False, audit_every=10, signals=True)
    assert report.passed, report
    assert report.faults.interrupts > 0


def test_stress_notices_contents_that_were_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyRunner, "move_pages", lambda *_: None)
    report = stress.run_stress(None, 0, 0, 1500, progress=False, audit_every=100)
    assert not report.passed
    assert report.wrong_contents > 0


def test_stress_notices_an_answer_that_is_another_request_s(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = ToyRunner.launch

    def swapped(runner: ToyRunner, step: Any) -> ToyPass:
        launched = launch(runner, step)
        results = launched.known
        rows = [row for row, result in enumerate(results) if result.tokens]
        tokens = [results[row].tokens for row in rows]
        for row, token in zip(rows, tokens[1:] + tokens[:1], strict=True):
            results[row] = results[row]._replace(tokens=token)
        return ToyPass(launched.parts, results)

    monkeypatch.setattr(ToyRunner, "launch", swapped)
    assert stress.run_stress(None, 0, 0, 300, progress=False, audit_every=100).wrong_answers > 0


def test_stress_notices_outputs_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: step(engine)[:2])
    assert stress.run_stress(None, 0, 0, 500, progress=False, audit_every=100).lost > 0


@pytest.mark.parametrize("seed", [2, 3])  # even: deterministic mode; odd: the other
def test_stress_on_the_model_finds_every_checkpoint_exact(seed: int) -> None:
    report = stress.run_stress(TINY, seed, 0, 120, progress=False)
    assert report.passed
    assert report.checked_checkpoints > 0


@pytest.mark.usefixtures("untraced")  # the lines of the test before
@pytest.mark.parametrize("seed", [8, 9])  # both modes, with a drafter that lies
def test_stress_on_the_model_in_bfloat16_is_clean(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("stress", "--dtype", "bfloat16", "--no-signals", "--operations", "50", "--seed", str(seed))
    status, report = run_json(capsys, *arguments)
    assert status == 0, report
    assert report["checked_checkpoints"] > 0


def test_stress_counts_what_leaks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    finish = Stress.finish

    def leaking(run: Stress) -> StressReport:
        report = finish(run)
        report.leaked += 1
        return report

    monkeypatch.setattr(Stress, "finish", leaking)
    assert main(["stress", "--no-model", "--operations", "10"]) == 1
    assert "leaked: 1" in capsys.readouterr().out


def test_stress_notices_a_checkpoint_that_is_not_the_state_of_its_key(tiny: Engine) -> None:
    from support.engines import answer, engine_on, ids

    engine = engine_on(tiny)
    answer(engine, ids(100))
    assert check_checkpoints(engine)[1] == 0
    slot = next(node.slot for _, node in engine.cache.tree.nodes() if node.slot is not None)
    engine.cache.state_tensors["recurrent"][slot].view(-1)[5] += 1e-3
    assert check_checkpoints(engine)[1] == 1


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def story(request: pytest.FixtureRequest) -> list[demo.Act]:
    """The demo, played once in each type that it may run in on a CPU."""
    engine = Engine.from_pretrained("tiny", device="cpu", dtype=request.param, cache=CacheConfig(memory="2GiB"))
    return demo.Demo(engine).run(lambda act: None)


def test_the_demo_shows_hits_and_the_answers_are_the_same(story: list[demo.Act]) -> None:
    verdict = demo.judge(story)
    assert verdict.identical
    assert verdict.same_tokens
    assert verdict.saved_tokens > 0.7 * verdict.prompt_tokens
    first, second, small, branch = story
    assert [output.usage.cached_tokens for output in first.cached] == [0, 1728, 1728, 1728]
    assert all(output.usage.cached_tokens >= 1728 for output in second.cached)
    assert small.cached[1].usage.cached_tokens == 1728
    before, after = (output.usage for output in branch.cached)
    assert before.page_tokens > before.cached_tokens  # pages alone do not make a hit
    assert after.cached_tokens == after.page_tokens >= before.page_tokens
    for act in story:
        assert all(output.usage.cached_tokens == 0 for output in act.plain)


@pytest.mark.parametrize("width", [100, 140])
@pytest.mark.parametrize("verbose", [False, True])
def test_the_demo_fits_into_a_terminal(story: list[demo.Act], width: int, verbose: bool) -> None:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    narrator = demo.Narrator(console, verbose)
    for act in story:
        narrator.tell(act)
    narrator.conclude(demo.judge(story))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    for text in ("identical bit by bit", "prompt tokens saved", "●", "only these are not computed again"):
        assert any(text in line for line in lines)
    if not verbose:  # answers and explanations may be longer than a line
        assert max(map(len, lines)) <= width
        assert len(lines) < 60


@pytest.mark.parametrize("story", ["float32"], indirect=True)  # sizes of pages are in it
def test_the_transcript_in_the_documents_is_what_the_demo_prints(story: list[demo.Act]) -> None:
    """But for times, bars, and how many times as fast."""
    console = Console(file=io.StringIO(), width=100, highlight=False)
    narrator = demo.Narrator(console, False)
    for act in story:
        narrator.tell(act)
    narrator.conclude(demo.judge(story))
    assert isinstance(console.file, io.StringIO)
    page = (TINY.parent.parent / "docs" / "demo.md").read_text(encoding="utf-8")
    transcript = page.split("```")[1]

    def lasting(text: str) -> list[str]:
        text = re.sub(r"[█▏▎▍▌▋▊▉ ]*\d+ ms", " T", re.sub(r"[╭╮╰╯│─]", " ", text))
        text = re.sub(r"^ +\d+\.\d ", " x ", text, flags=re.MULTILINE)
        return [" ".join(line.split()) for line in text.splitlines() if line.strip()]

    assert lasting(transcript) == lasting(console.file.getvalue())


def test_the_demo_runs_without_the_cache(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "QUESTIONS", demo.QUESTIONS[:1])
    status, result = run_json(capsys, "demo", "--no-cache")
    assert status == 0
    assert all(row["usable_hit"] == 0 for row in result["without_cache"])


def test_tree_draws_text_and_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = ("The with statement is used to wrap " * 20, "The with statement is used to wrap " * 10)
    status, result = run_json(capsys, "tree", *prompts, "--max-new-tokens", "2")
    assert status == 0
    assert "●" in result["tree"]
    page = tmp_path / "tree [1].html"
    assert main(["tree", *prompts, "--max-new-tokens", "2", "--out", str(page)]) == 0
    assert str(page) in capsys.readouterr().out
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert main(["tree", *prompts, "--out", str(tmp_path / "no" / "tree.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_generate_continues_prompts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", "tiny", "The with statement", "class A:", "--max-new-tokens", "5", "--memory", "64MiB")
    status, result = run_json(capsys, *arguments)
    assert status == 0
    assert [len(output["token_ids"]) <= 5 for output in result["outputs"]] == [True, True]
    assert main([*arguments, "--chat", "--temperature", "1", "--seed", "3"]) == 0
    assert "tokens cached" in capsys.readouterr().out


@pytest.mark.parametrize("speculation", ["cache", "mtp", "cache+mtp"])
def test_generate_drafts(speculation: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", "tiny", "1, 1, 1, 1, 1, 1,", "--max-new-tokens", "24", "--memory", "64MiB")
    plain, drafted = (
        run_json(capsys, *arguments, *more)[1]["outputs"][0] for more in ((), ("--speculation", speculation))
    )
    assert drafted["token_ids"] == plain["token_ids"]
    assert plain["drafted_tokens"] == plain["accepted_tokens"] == 0
    assert 0 < drafted["accepted_tokens"] <= drafted["drafted_tokens"]
    assert main([*arguments, "--speculation", speculation]) == 0
    assert re.search(r"24 tokens \(\d+ of \d+ drafts accepted\), length; ", capsys.readouterr().out)


def test_generate_prints_an_answer_while_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tiny: Engine
) -> None:
    shown: list[str] = []
    step = Engine.step

    def watched(engine: Engine) -> list[RequestOutput]:
        shown.append(capsys.readouterr().out)
        return step(engine)

    monkeypatch.setattr(Engine, "step", watched)
    prompts = ["The with [bold]statement", "C:\\", "import"]
    assert main(["generate", "tiny", *prompts, "--max-new-tokens", "8", "--memory", "64M"]) == 0
    shown.append(capsys.readouterr().out)
    assert len([piece for piece in shown if piece]) >= 6
    texts = [prompt + answer(tiny, prompt, greedy(8)).text for prompt in prompts]
    for text, found in zip(texts, "".join(shown).split("tokens cached"), strict=False):
        assert text in found


def test_generate_says_which_prompt_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Scheduler, "finish", lambda *_: 1 // 0)
    status, result = run_json(capsys, "generate", "tiny", "import", "--max-new-tokens", "3", "--memory", "64M")
    assert status == 1
    assert result["outputs"][0]["error"].startswith("ZeroDivisionError")


FULL = "hybrid: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    "arguments", [["generate", "tiny", "a", "--max-new-tokens", "2", "--memory", "64M"], ["--help"]]
)
def test_what_cannot_be_written_is_one_line_and_status_2(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "hybrid", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr == FULL


def test_a_command_whose_output_is_closed_runs() -> None:
    command = f"exec {sys.executable} -m hybrid --version >&-"
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("arguments", [[], *([command.name] for command in COMMANDS)], ids=" ".join)
def test_help_imports_no_torch(arguments: list[str]) -> None:
    """It takes ten times as long as the help."""
    code = (
        "import sys; from hybrid.commands.main import main\n"
        "try: main()\n"
        "finally: print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *arguments, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("usage: ")
    assert result.stdout.splitlines()[-1] == "[]"


def test_the_command_alone_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code in (None, 0)
    shown = capsys.readouterr().out
    assert all(f"\n    {command.name} " in shown for command in COMMANDS)


SMALL = {
    "generate": ["tiny", "a", "--max-new-tokens", "2"],
    "tree": ["a", "--max-new-tokens", "2"],
    "stress": ["--no-model", "--no-signals", "--operations", "20"],
    "parity": [],
    "demo": [],
    "serve": ["tiny", "--port", "0", "--memory", "8MiB"],
    "fleet": ["serve", "tiny"],
    "models": [],
}


WRITING = [(command, more) for command in COMMANDS for more in (["--json"], [], ["--help"])]
WRITING = [each for each in WRITING if (each[0].name, each[1]) != ("serve", ["--json"])]  # it writes when it has ended
WRITING = [each for each in WRITING if each[0].name != "fleet" or each[1] == ["--help"]]  # Ray is not everywhere


@pytest.mark.parametrize(("command", "more"), WRITING, ids=lambda part: getattr(part, "name", None) or " ".join(part))
def test_a_full_disk_behind_stdout_ends_every_command_with_status_2(
    command: Command,
    more: list[str],
    saved: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In this process, with the results of the slow commands given: what is looked at is what they print."""
    (tmp_path / "log.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    given = SMALL | {"doctor": [str(tmp_path / "log.jsonl"), "--model", "32768,51511296"]}
    check = parity.Check("a check", True, None, "")
    monkeypatch.setattr(parity, "run_parity", lambda *_: parity.Parity([check], "float32"))
    monkeypatch.setattr(demo.Demo, "run", lambda *_: [])
    monkeypatch.setattr(demo, "judge", lambda _: demo.Verdict(True, True, 1, 1, {}))
    monkeypatch.setattr("hybrid.commands.main.forget_output", lambda: None)
    with suppress(OSError), Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        try:
            own = given.get(command.name, ["show", str(saved)])
            status: Any = main([command.name, *own, *more])
        finally:
            monkeypatch.undo()
    assert status == 2
    assert capfd.readouterr().err.endswith(FULL)


def test_a_wrong_command_exits_with_2_and_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["generate", str(tmp_path), "hello"]) == 2
    assert "it has no config.json" in capsys.readouterr().err
    assert main(["generate", "tiny", ""]) == 2
    assert "the prompt is empty" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "tiny"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("command", [[], ["demo"], ["generate"], ["tree"], ["parity"], ["stress"]])
def test_help_teaches(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*command, "--help"])
    assert exit_.value.code == 0
    assert len(capsys.readouterr().out) > 300


def test_the_command_is_installed() -> None:
    result = subprocess.run([sys.executable, "-m", "hybrid", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "hybrid 0.1.0"


# hybrid cache


@pytest.fixture
def saved(tiny: Engine, tmp_path: Path) -> Path:
    """A file of two conversations, and one in another namespace."""
    engine = tiny.with_cache(CacheConfig(page_size=16, chunk_size=16, memory="16MiB", deterministic=True))
    answer(engine, [*range(3, 80)], greedy(20))
    answer(engine, [*range(3, 40), *range(90, 130)], greedy(20))
    answer(engine, [*range(200, 260)], greedy(2), namespace="tenant")
    engine.save(tmp_path / "a.hybrid")
    return tmp_path / "a.hybrid"


def test_a_file_is_listed(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = run_json(capsys, "cache", "show", str(saved))
    assert status == 0
    assert result["fingerprint"]["page_size"] == 16
    assert {node["namespace"] for node in result["nodes"]} == {"", "tenant"}
    assert result["checkpoints"] == sum(node["kind"] is not None for node in result["nodes"]) > 8
    assert main(["cache", "show", str(saved)]) == 0
    assert "'tenant'" in capsys.readouterr().out


@pytest.mark.parametrize("readable", [False, True])
def test_a_directory_is_listed(
    tiny: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], readable: bool
) -> None:
    path = tmp_path / "cache"
    config = CacheConfig(
        page_size=16, chunk_size=16, memory="16MiB", disk="16MiB", directory=path, directory_readable=readable
    )
    with tiny.with_cache(config) as engine:
        answer(engine, [*range(3, 80)], greedy(20))
        engine.generate([[*range(200, 260)]], greedy(2), namespace="tenant", progress=False)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    status, result = run_json(capsys, "cache", "show", str(path))
    assert status == 0
    [found] = result["contents"]
    assert found["checkpoints"] > 2
    assert found["pages"] == 6 + 3  # answers too
    assert found["bytes"] == sum(len(data) for name, data in before.items() if name.endswith(".safetensors"))
    assert main(["cache", "show", str(path)]) == 0
    assert ("'tenant'" in capsys.readouterr().out) == readable
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert run_json(capsys, "cache", "check", str(path))[1]["wrong"] == []
    file = next(path.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    status, result = run_json(capsys, "cache", "check", str(path))
    assert (status, len(result["wrong"])) == (1, 1)
    assert run_json(capsys, "cache", "check", str(path), "--fix")[0] == 0
    assert run_json(capsys, "cache", "check", str(path))[0] == 0
    (path / "manifest.sqlite").write_bytes(b"nothing")
    assert main(["cache", "show", str(path)]) == 2
    assert "is not a usable folder of cached prefixes" in capsys.readouterr().err


def assert_right(path: Path, capsys: pytest.CaptureFixture[str], at_least: int = 2) -> None:
    """Assert that a file holds what the model computes; as many pages and checkpoints were compared."""
    status, result = run_json(capsys, "cache", "check", str(path))
    assert (status, result["wrong"], result["unchecked"]) == (0, [], [])
    assert result["checked"] >= at_least


def test_a_file_is_computed_again_and_compared(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert_right(saved, capsys, at_least=9)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_file_with_smaller_keys_and_values_is_compared_too(
    tiny: Engine, tmp_path: Path, kv_dtype: Any, deterministic: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CacheConfig(
        memory="16MiB",
        page_size=16,
        chunk_size=16,
        deterministic=deterministic,
        kv_dtype=kv_dtype,
        placement=("prompt_end",),
    )
    path = tmp_path / "small.hybrid"
    with tiny.with_cache(config) as engine:
        for length in (40, 70):
            answer(engine, [*range(3, 3 + length)], greedy(2))
        engine.save(path)
    assert_right(path, capsys)
    archive = read_archive(path)
    rows = archive.pages.clone()
    rows[1] = rows[0]  # keys and values of other tokens
    replace(archive, pages=rows).write(path)
    status, result = run_json(capsys, "cache", "check", str(path))
    assert status == 1 and any("differ" in line for line in result["wrong"])


def save_half(path: Path, prompt: range, new: int, **settings: Any) -> None:
    """Save what a prompt and its answer have left, computed in bfloat16."""
    config = CacheConfig(memory="16MiB", page_size=16, chunk_size=16, **settings)
    with Engine.from_pretrained("tiny", device="cpu", dtype="bfloat16", cache=config) as engine:
        answer(engine, [*prompt], greedy(new))
        engine.save(path)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_file_is_computed_again_in_the_type_it_was_made_in(
    tmp_path: Path, kv_dtype: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine where another type is the default."""
    path = tmp_path / "half.hybrid"
    save_half(path, range(3, 43), 2, kv_dtype=kv_dtype)
    assert_right(path, capsys)
    assert main(["cache", "check", str(path), "--dtype", "float32"]) == 2
    assert "bfloat16" in capsys.readouterr().err


def test_a_file_of_the_other_mode_is_compared_within_the_rounding_of_its_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The states of decode steps are in it; one of another token is found out."""
    path = tmp_path / "fast"
    save_half(path, range(3, 23), 30, deterministic=False)
    assert_right(path, capsys)
    archive = read_archive(path)
    replace(archive, checkpoints=archive.checkpoints.roll(1, 0)).write(path)
    status, result = run_json(capsys, "cache", "check", str(path))
    assert status == 1 and any("recurrent states" in line for line in result["wrong"])


@pytest.mark.parametrize("what", ["pages", "checkpoints"])
def test_a_file_that_was_made_up_is_found(saved: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One value of one page or state, and digests and a seal that fit: only the model knows."""
    archive = read_archive(saved)
    rows = getattr(archive, what).clone()
    rows[2].view(torch.float32)[7] += 0.001
    replace(archive, **{what: rows}).write(saved)
    status, result = run_json(capsys, "cache", "check", str(saved))
    assert status == 1
    assert any("differ" in line for line in result["wrong"])


def test_what_is_no_file_of_prefixes_ends_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").write_bytes(b"nothing")
    for action in ("show", "check"):
        assert main(["cache", action, str(tmp_path / "a")]) == 2
        assert "is not a usable file of cached prefixes" in capsys.readouterr().err


def test_garbage_is_looked_for_as_before_once_a_check_has_ended() -> None:
    before = gc.get_threshold()
    with suppress(KeyboardInterrupt), parity.rare_collections():
        rarely = gc.get_threshold()
        raise KeyboardInterrupt
    assert rarely[0] > before[0]
    assert gc.get_threshold() == before


def test_a_terminal_with_ascii_alone_shows_checkpoints_and_tombstones_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["tree"]) == 0
    sys.stdout.flush()
    shown = raw.getvalue().decode("ascii")
    assert "* checkpoint   o tombstone" in shown
    assert re.search(r"^`- .* \d*\*", shown, re.MULTILINE)
