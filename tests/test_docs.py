"""The examples in the documents are run here, as they stand there."""

import argparse
import inspect
import re
import runpy
from dataclasses import fields
from pathlib import Path

import pytest

import hybrid

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted(ROOT.glob("docs/*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{path.relative_to(ROOT)}-{at}")
    for path in DOCUMENTS
    for at, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL))
]


@pytest.mark.filterwarnings("error::FutureWarning")
@pytest.mark.parametrize("block", BLOCKS)
def test_the_programs_in_the_documents_run(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    exec(compile(block, "document", "exec"), {"__name__": "document"})


def test_the_documents_point_at_files_that_exist() -> None:
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (path.parent / target).exists(), f"{path.name} points at {target}"
        for target in re.findall(r"`(?:python )?((?:hybrid|kernels|models|bench|tests|examples)/[\w/]+\.py)", text):
            assert (ROOT / target).exists(), f"{path.name} names {target}"


def headings(path: Path) -> list[str]:
    """The anchors of a page, as GitHub derives them."""
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [re.sub(r"[^\w\- ]", "", found.lower()).replace(" ", "-") for found in re.findall(r"^#+ (.*)$", text, re.M)]


def test_links_to_a_heading_find_one() -> None:
    for path in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", path.read_text(encoding="utf-8")):
            page = path.parent / target if target else path
            assert headings(page).count(anchor) == 1, f"{path.name} points at {target}#{anchor}"


def commands_of(path: Path) -> list[str]:
    """Return what a page shows to be typed: spans and lines of code that begin with a program of ours or `make`."""
    text = path.read_text(encoding="utf-8")
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    lines = [line.split("#")[0] for block in blocks for line in block.splitlines()]
    return [
        " ".join(each.split()) for each in (*lines, *spans) if re.match(r"(hybrid|make) |(python )?bench/\S+\.py", each)
    ]


def test_commands_that_the_documents_show_have_these_options() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    of_hybrid = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("hybrid/commands/*.py"))
    for path in DOCUMENTS:
        for command in commands_of(path):
            program, *rest = command.removeprefix("python ").split()
            if program == "make":
                assert rest[0] in targets, f"{path.name}: {command}"
            else:
                source = of_hybrid if program == "hybrid" else (ROOT / program).read_text(encoding="utf-8")
                source += (ROOT / "bench" / "common.py").read_text(encoding="utf-8")
                for option in re.findall(r"--[a-z][a-z-]*", command):
                    assert f'"{option}"' in source or option == "--help", f"{path.name}: {command}"


def test_the_page_on_errors_has_every_public_one() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    things = {name: getattr(hybrid, name) for name in hybrid.__all__}
    errors = [name for name, thing in things.items() if isinstance(thing, type) and issubclass(thing, Exception)]
    assert [name for name in errors if not re.search(rf"`(hybrid\.)?{name}\b", page)] == []


def test_the_map_names_modules_that_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = "|".join(path.parent.name for path in ROOT.glob("hybrid/*/__init__.py"))
    for room, name in re.findall(rf"\b({rooms})/(\w+)", text):
        assert (ROOT / "hybrid" / room / f"{name}.py").exists(), f"{room}/{name}"


def test_every_command_in_the_readme_is_one() -> None:
    from hybrid.commands.main import COMMANDS

    named = set(re.findall(r"`hybrid (\w+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    assert named == {command.name for command in COMMANDS}


def test_the_page_of_the_public_names_is_what_their_docstrings_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_api.py"))
    assert made["PAGE"].read_text(encoding="utf-8") == made["page"](), "run python docs/make_api.py"


REPLACED = (
    r"\bso many\b",
    r"\bspared\b",
    r"\bthe books\b",
    r"\b(?:no|some|every)body\b",
    r"\bwhoever\b",
    r"\blikeliest\b",
    r"\bgo(?:es)? (?:first|on)\b",
    r"\bworth its room\b",
    r"\b(?:tells|told)\b",
)
"""Phrases of which documents and code have a plainer form: n, saved, bookkeeping, no request, most likely, is evicted
first, continues, admitted, reports."""


SOURCES = [path for folder in ("hybrid", "kernels", "models") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]


def test_the_words_are_those_of_the_field() -> None:
    for path in [*DOCUMENTS, *SOURCES]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            found = [phrase for phrase in REPLACED if re.search(phrase, line, re.IGNORECASE)]
            assert not found, f"{path.relative_to(ROOT)}:{number}: {line}"


def text_of(name: str) -> str:
    """The text of a page, on one line."""
    return " ".join((ROOT / name).read_text(encoding="utf-8").split())


def table_of(name: str, head: str) -> list[list[str]]:
    """The rows of the table of a page whose first line begins with a text, as cells without marks of stress."""
    text = (ROOT / name).read_text(encoding="utf-8")
    rows = text[text.index(f"\n|{head}") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip(" *") for cell in row.strip("|").split("|")] for row in (rows[0], *rows[2:])]


def test_the_default_memory_is_said_the_same_everywhere() -> None:
    from hybrid.cache.config import CPU_MEMORY, GPU_MEMORY
    from hybrid.commands.commands import DEFAULT_MEMORY

    assert f"{GPU_MEMORY} of what the weights leave free on a GPU, {CPU_MEMORY >> 30} GiB on a CPU" == DEFAULT_MEMORY
    assert DEFAULT_MEMORY in text_of("docs/api.md")


def options_of(command: str) -> list[argparse.Action]:
    """The options of a command."""
    from hybrid.commands.main import COMMANDS

    parser = argparse.ArgumentParser()
    next(each for each in COMMANDS if each.name == command).add_arguments(parser)
    return parser._actions


@pytest.mark.parametrize(
    "command", ["demo", "doctor", "fleet", "generate", "models", "parity", "serve", "stress", "tree"]
)
def test_the_help_names_the_default_that_an_option_has(command: str) -> None:
    for action in options_of(command):
        named = re.search(r"\(default: (\d[\w.-]*)\)", action.help or "")
        if named is not None and action.default is not None:
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert named[1] == default, f"hybrid {command} {action.option_strings}: {action.help}"


def test_what_the_documents_say_is_not_there_is_not_there() -> None:
    from hybrid import SamplingParams
    from hybrid.commands.main import COMMANDS

    page = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    absent = " ".join(re.findall(r"^\| (.*) \| not there \|$", page, re.MULTILINE))
    assert "beam search" in absent
    names = {field.name for field in fields(SamplingParams)}
    assert not names & set(re.findall(r"`(\w+)`", absent)) and "num_beams" not in names
    commands = {command.name for command in COMMANDS}
    assert {"serve", "fleet"} <= commands and "there is no server" not in text_of("docs/migrating.md")


def test_figures_that_are_quoted_twice_agree() -> None:
    rows = table_of("docs/performance.md", " operation | SGLang | ours")[1:]
    ratios = [float(row[3]) for row in rows if "memory" not in row[0]]
    said = f"{min(ratios):g} to {max(ratios):g} times as fast"
    assert said in text_of("README.md") and f"(#the-prefix-tree) | {said}" in text_of("docs/performance.md")

    (_, *cells), *rows = table_of("README.md", " trace, GB | lmsys 3")
    quoted = {name.replace("*", ""): figures for name, *figures in rows}
    known = {
        f"{row[1]} {row[2]}": row
        for row in table_of("docs/eviction.md", " geometry | trace | GB | LRU")
        if row[0] == "qwen35_4b"
    }
    assert quoted["LRU (SGLang-like)"] == [known[cell][3] for cell in cells]
    assert quoted["Marconi, best alpha in hindsight"] == [known[cell][4].split(", ")[1] for cell in cells]
    assert quoted["`lhd`, the default"] == [known[cell][6].strip("* ") for cell in cells]


def test_the_readme_has_every_model_type_that_is_tested() -> None:
    from hybrid.models.loading import ARCHITECTURES

    named = {name for row in table_of("README.md", " | CPU float32")[1:] for name in re.findall(r"`(\w+)`", row[0])}
    assert named == set(ARCHITECTURES)


def test_the_table_of_models_has_every_model_type_that_is_tested() -> None:
    """`tests/models/test_families.py` compares each with transformers, and its hits in three dtypes."""
    from hybrid.models.loading import ARCHITECTURES

    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.+?`) \| .* \| tested, fp32 \| tested, all three dtypes \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(ARCHITECTURES)


def defaults_of(name: str, page: str) -> list[object]:
    """The defaults of an option of a command, or of the fields of classes of settings that have a name.

    Raises:
        KeyError: there is no such option.
    """
    from hybrid import CacheConfig, EngineConfig, SamplingParams, SpeculationConfig, TenantConfig
    from hybrid.sglang.options import Options
    from hybrid.vllm.options import VllmOptions

    if name.startswith("--"):
        actions = options_of("doctor" if page == "doctor.md" else "serve")
        return [{option: action.default for action in actions for option in action.option_strings}[name]]
    plugin = {"vllm.md": VllmOptions, "sglang.md": Options}.get(page)
    general = (CacheConfig, EngineConfig, SamplingParams, SpeculationConfig, TenantConfig)
    kinds = general if plugin is None else (plugin,)
    return [field.default for kind in kinds for field in fields(kind) if field.name == name]


def said(text: str) -> object:
    """A value as a document writes it."""
    text = re.sub(r"(\d) ([KMG]iB)$", r"\1\2", text.strip('`"'))
    text = re.sub(r" (per\s+second|s)$", "", text).replace(",", "")
    known: dict[str, object] = {"true": True, "false": False, "None": None, "none": None}
    return known[text] if text in known else float(text) if re.fullmatch(r"[\d.]+", text) else text


NO_DEFAULTS = {
    ("server.md", "--max-body"): "the name that nginx has for it",
    ("doctor.md", "--prefill-rate"): "checked below, as its parser has none",
    ("doctor.md", "--decode-rate"): "checked below, as its parser has none",
    ("migrating.md", "bad_words"): "the type of its values",
    ("vllm.md", "hybrid_end_session"): "the value that is given",
    ("vllm.md", "hybrid_expect_resume"): "the type of its values",
    ("eviction.md", "expect_resume"): "the type of its values",
}
"""Names with something else in brackets behind them."""


def test_a_value_in_brackets_behind_the_name_of_a_setting_is_its_default() -> None:
    """As in: `max_num_seqs` (32)."""
    checked = set()
    for path in DOCUMENTS:
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        for name, value in re.findall(
            r"`(--[\w-]+|[a-z]\w*)` \((?:default:? )?(`?\"?[\w.,]+\"?`?(?: per\s+second| s| [KMG]iB)?)\)", text
        ):
            known = [] if (path.name, name) in NO_DEFAULTS else defaults_of(name, path.name)
            if known:  # else it is the name of something else
                assert said(value) in known, f"{path.name}: {name} is said to be {value} by default"
                checked.add((path.name, name))
    assert {page for page, _ in checked} == {"doctor.md", "server.md", "serving.md", "vllm.md", "sglang.md"} and len(
        checked
    ) >= 15


@pytest.mark.parametrize(
    ("page", "before", "name"),
    [
        ("docs/eviction.md", r"\| `(\w+)` \(default\) \| the fewest expected hits", "eviction"),
        ("docs/eviction.md", r"\| `(\w+)` \(default\), `lfu`", "eviction"),
        ("docs/eviction.md", r"\| `(\w+)` \(default\) \| 49", "state_dtype"),
        ("docs/eviction.md", r"\| `(\w+)` \(default\) \| 512 bytes", "kv_dtype"),
        ("docs/speculation.md", r"\| `(\w+)` \(default\) \| nothing", None),
        ("README.md", r"`(\w+)`, the default\*\*", "eviction"),
        ("docs/migrating.md", r"the default policy learns \(`(\w+)`\)", "eviction"),
    ],
)
def test_what_a_page_calls_the_default_is_it(page: str, before: str, name: str | None) -> None:
    [value] = re.findall(before, text_of(page))
    if name is None:
        assert inspect.signature(hybrid.Engine.from_pretrained).parameters["speculation"].default is None
        assert value == "None"
    else:
        assert defaults_of(name, page.removeprefix("docs/")) == [said(value)]


def test_the_placement_that_is_called_the_default_is_it() -> None:
    [value] = re.findall(r"the default \(`([\w,]+)`\)", text_of("docs/eviction.md"))
    assert tuple(value.split(",")) == hybrid.CacheConfig().placement
    rows = re.findall(
        r"^\| `(\w+)`", (ROOT / "docs/eviction.md").read_text().split("all by default:")[1].split("\n\n")[1], re.M
    )
    assert set(rows) == set(hybrid.CacheConfig().placement)


def test_other_sentences_that_name_a_default_hold() -> None:
    [tokens] = re.findall(r"`--max-tokens` tokens \((\d+)", text_of("docs/server.md"))
    assert defaults_of("--max-tokens", "server.md") == [int(tokens)]
    from hybrid.doctor.arrivals import DECODE_RATE, PREFILL_RATE
    from hybrid.doctor.sessions import GAP

    rates = r"`--prefill-rate` \(([\d,]+) per second\).* at `--decode-rate` \((\d+) per second\)"
    [found] = re.findall(rates, text_of("docs/doctor.md"))
    assert [float(rate.replace(",", "")) for rate in found] == [PREFILL_RATE, DECODE_RATE]
    assert f"a session begins every `--gap` seconds on average ({GAP:g}," in text_of("docs/doctor.md")
    params = hybrid.SamplingParams()
    assert "`SamplingParams()` are the defaults of the class (greedy, 128 tokens)" in text_of("docs/options.md")
    assert (params.temperature, params.max_new_tokens) == (0, 128)
    assert "every `chunk_size` tokens (128)" in text_of("docs/transformers.md")
    from hybrid.hf.prefix_cache import CPU_CHUNK_SIZE, DETERMINISTIC_CHUNK_SIZE, GPU_CHUNK_SIZE

    sizes = "`chunk_size` is 16 on a GPU, where 16 more tokens of a pass cost nothing, and 1 on a CPU"
    assert sizes in text_of("docs/transformers.md")
    assert (DETERMINISTIC_CHUNK_SIZE, GPU_CHUNK_SIZE, CPU_CHUNK_SIZE) == (128, 16, 1)


def test_the_limits_of_connections_have_the_defaults_that_the_page_names() -> None:
    defaults = {action.option_strings[0]: action.default for action in options_of("serve") if action.option_strings}
    units = {"KiB": 2**10}
    for options, value, *_ in table_of("docs/server.md", " | default | beyond it")[1:]:
        number, *unit = value.split()
        for option in re.findall(r"`(--[\w-]+)`", options):
            default = defaults[option]
            if isinstance(default, str):
                assert default.replace(" ", "") == value.replace(" ", ""), option
            else:
                expected = None if number == "none" else float(number) * units.get(*unit, 1) if unit else said(number)
                assert expected == default, option


HELD_BY: dict[str, dict[str, str]] = {
    "docs/fleet.md": {
        "Limits of connections and of headers": "tests/test_docs.py::test_a_fleet_has_no_limits_of_connections",
        "A limit of requests": "tests/commands/test_options.py::test_a_fleet_is_started_with_what_is_given",
        "`/explain/ID`": "tests/fleet/test_on_ray.py::test_bad_requests_are_refused_as_by_hybrid_serve",
        "More than one front": "tests/test_docs.py::test_a_fleet_has_one_front",
    },
    "docs/sglang.md": dict.fromkeys(
        (
            "hierarchical cache (HiCache)",
            "models with sliding windows",
            "session radix cache",
            "KV cache events",
            "`--mamba-max-states-per-path`",
            "models without such states",
        ),
        "tests/sglang/test_without_sglang.py::test_all_that_is_not_supported_is_refused_at_once_each_with_its_reason",
    )
    | {"the policies `slru`": "tests/sglang/test_backend.py::test_policies_for_trees_without_states_are_refused"},
    "docs/vllm.md": dict.fromkeys(
        (
            "models without states or without full attention",
            "layers with sliding windows",
            "`--mamba-cache-mode` other than `align`",
            "a hash unit below the block",
            "speculative decoding",
            "decode and prefill context parallelism",
            "KV connectors",
        ),
        "tests/vllm/test_without_vllm.py::test_what_is_not_supported_is_named_all_at_once",
    ),
}
"""What pages say is not there or is refused, by how it begins, and the test that holds it. Those of docs/migrating.md
are checked above, those of docs/transformers.md by tests/hf. Of what a fleet's front shows, the test asks for `/tree`
alone."""


@pytest.mark.parametrize("page", HELD_BY)
def test_what_is_not_there_or_refused_is_held_by_a_test(page: str) -> None:
    """Each thing of a section, in the order of the page: one without a row fails, as does a row without its test."""
    text = (ROOT / page).read_text(encoding="utf-8")
    section = re.split(r"^## (?:What is not there|What is refused)\n", text, flags=re.MULTILINE)[1].split("\n## ")[0]
    if section.lstrip().startswith("* "):
        things = re.findall(r"^\* (.*)", section, re.MULTILINE)
    else:
        listed = re.split(r": |\. ", " ".join(section.split()))[1]
        things = re.split(r", (?!which)", re.sub(r" \(which.*?\)", "", listed))
    rows = HELD_BY[page]
    assert len(things) == len(rows)
    assert all(thing.startswith(begins) for thing, begins in zip(things, rows, strict=True)), things
    for place in rows.values():
        path, name = place.split("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), place


def test_a_fleet_has_no_limits_of_connections() -> None:
    """`hybrid serve` has each option of the table of docs/server.md, and a fleet none but that of bodies."""
    rows = table_of("docs/server.md", " | default | beyond it")[1:]
    limits = {option for row in rows for option in re.findall(r"`(--[\w-]+)`", row[0])} - {"--body-timeout"}
    of_serve, of_fleet = (
        {option for action in options_of(name) for option in action.option_strings} for name in ("serve", "fleet")
    )
    assert len(limits) == 7 and limits <= of_serve and not limits & of_fleet and "--body-timeout" in of_fleet


def test_a_fleet_has_one_front() -> None:
    source = (ROOT / "hybrid" / "fleet" / "deployment.py").read_text(encoding="utf-8")
    [front] = re.findall(r"name=FRONT,\s+num_replicas=(\w+)", source)
    assert front == "1"
