"""Forms of strangers: what one does to the library's code, and to its processes, costs the requests that have it."""

import gc
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import psutil
import pytest

from hybrid import Engine, QueueFullError, RequestError, SamplingError, SamplingParams
from hybrid.engine import forms
from hybrid.engine.forms import FormProcesses, Grammars
from hybrid.server.errors import failure_of
from support.engines import answer, assert_nothing_held, engine_on, greedy, ids

LETTERS = {"regex": "[a-f]{400}"}
BOMB = {"regex": "a?" * 30_000}
AMBIGUOUS = {"grammar": 'start: s\ns: s s s | s s | /[a-z ]/ | ""'}


def references(count: int) -> dict[str, Any]:
    """A schema that refers `count` deep."""
    rules = {f"r{n}": {"properties": {"a": {"$ref": f"#/$defs/r{n + 1}"}}} for n in range(count)}
    return {"json_schema": {"$ref": "#/$defs/r0", "$defs": rules | {f"r{count}": {"type": "null"}}}}


def rules(count: int) -> dict[str, Any]:
    """A grammar whose rules refer `count` deep."""
    lines = [f'r{n}: "a" r{n + 1} | "b"' for n in range(count)]
    return {"grammar": "\n".join(["start: r0", *lines, f'r{count}: "c"'])}


def form_processes() -> list[psutil.Process]:
    """Those of forms, without the one that forks them."""
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.ppid() != psutil.Process().pid and one.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture
def processes(tiny: Engine) -> FormProcesses:
    """Processes that no other test has."""
    return FormProcesses(tiny.tokenizer, tiny.model.config.vocab_size, tiny.loaded.end_tokens)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds of time that a test can wait for."""
    monkeypatch.setattr(forms, "COMPILE_SECONDS", 0.2)
    monkeypatch.setattr(forms, "TOKEN_SECONDS", 0.05)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "form",
    [references(1500), rules(3000), BOMB, {"regex": "(" * 3000 + "a" + ")" * 3000}, {"regex": "(a?){1000}a{1000}"}],
    ids=["references", "rules", "a?", "groups", "repeats"],
)
def test_no_form_ends_the_engine(tiny: Engine, form: dict[str, Any]) -> None:
    engine = engine_on(tiny)
    expected = answer(engine, ids(20), greedy(4)).token_ids
    with suppress(SamplingError):
        answer(engine, ids(20), SamplingParams(structured=form, max_new_tokens=4))
    assert answer(engine, ids(20), greedy(4)).token_ids == expected
    assert_nothing_held(engine)


def test_a_form_has_bounds_of_time_and_memory(processes: FormProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "FORM_BYTES", 2**21)
    monkeypatch.setattr(forms, "COMPILE_SECONDS", 0.2)
    before = form_processes()
    for form in (BOMB, {"json_schema": {"enum": [f"v{n}" for n in range(20_000)]}}):
        with pytest.raises(SamplingError, match=r"cannot be used: it took more than .* of CPU time"):
            processes.compile(form)
    compiled = processes.compile(LETTERS)
    assert compiled.first.mask is not None
    psutil.wait_procs([one for one in form_processes() if one not in before], timeout=0.1)
    assert len([one for one in form_processes() if one not in before]) <= 2  # its own, and the one for the next form


def test_an_answer_whose_form_takes_too_long_ends_with_an_error_and_holds_up_no_other(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "TOKEN_SECONDS", 0.05)
    engine = engine_on(tiny, pages=60, states=16)
    params = SamplingParams(structured=AMBIGUOUS, max_new_tokens=300, logit_bias=dict.fromkeys((0, 2), -100))
    slow = engine.add_request(ids(20), params)
    alone = answer(engine_on(tiny), ids(30), greedy(300))
    other = engine.add_request(ids(30), greedy(300))
    ended: dict[str, Any] = {}
    num_steps = 0
    while len(ended) < 2:
        num_steps += 1
        ended |= {output.request_id: output for output in engine.step() if output.finish_reason is not None}
    assert ended[other].token_ids == alone.token_ids
    assert ended[slow].finish_reason == "error"
    assert "s for a token" in ended[slow].error
    assert_nothing_held(engine)


@pytest.mark.parametrize("drafts", [None, "cache"])
@pytest.mark.parametrize("overlap", [False, True])
def test_answers_are_the_same_where_forms_are_always_late(
    tiny: Engine, monkeypatch: pytest.MonkeyPatch, drafts: str | None, overlap: bool
) -> None:
    some = [LETTERS, {"regex": "([a-f][0-9];){9}"}, {"choice": ["yes, it is", "no"]}, {"json_object": True}]
    params = [SamplingParams(structured=form, max_new_tokens=40, temperature=0.8, seed=3) for form in some]

    def answers() -> list[Any]:
        engine = engine_on(tiny, overlap=overlap)
        engine = Engine(engine.loaded, engine.cache, engine.config, speculation=drafts)
        found = [engine.generate([ids(20, seed=2)] * 4, params, progress=False) for _ in range(2)]
        assert_nothing_held(engine)
        return [(output.token_ids, output.finish_reason, output.error) for outputs in found for output in outputs]

    expected = answers()
    monkeypatch.setattr(forms, "AT_ONCE", 1e-6)
    assert answers() == expected


def test_a_process_that_is_killed_ends_the_answers_of_its_form_alone(processes: FormProcesses) -> None:
    grammars = Grammars(processes)
    before = form_processes()
    mine = grammars.matcher(LETTERS, "")
    (own,) = [one for one in form_processes() if one not in before and one.memory_info().rss][:1]
    other = grammars.matcher({"regex": "[0-9]+"}, "")
    own.send_signal(signal.SIGKILL)
    for _ in range(3):  # of what was asked before and after
        mine.accept(70)
        with pytest.raises(SamplingError, match="the answer cannot be followed"):
            mine.mask()
    assert other.mask().any()
    again = grammars.matcher(LETTERS, "")
    assert again.mask().any()


def test_the_process_that_forks_is_started_again(processes: FormProcesses) -> None:
    before = set(psutil.Process().children())
    kept = Grammars(processes).matcher(LETTERS, "")
    (starter,) = set(psutil.Process().children()) - before
    starter.kill()
    starter.wait(10)
    assert Grammars(processes).matcher({"regex": "[0-9]+"}, "").mask().any()
    assert kept.mask().any()


def test_a_process_that_ends_before_it_has_a_form_is_not_the_forms_fault(
    tiny: Engine, processes: FormProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = subprocess.Popen
    started: list[Any] = []

    def killed(num_times: int) -> Any:
        def start(*args: Any, **options: Any) -> Any:
            started.append(original(*args, **options))
            if len(started) <= num_times:
                started[-1].kill()
            return started[-1]

        return start

    monkeypatch.setattr(subprocess, "Popen", killed(1))
    assert Grammars(processes).matcher(LETTERS, "").mask().any()
    assert len(started) == 2
    started[-1].kill()
    for one in form_processes():  # with the one that was forked ahead
        one.kill()
    assert Grammars(processes).matcher({"regex": "[0-9]+"}, "").mask().any()
    started.clear()
    monkeypatch.setattr(subprocess, "Popen", killed(99))
    other = FormProcesses(tiny.tokenizer, tiny.model.config.vocab_size, tiny.loaded.end_tokens)
    with pytest.raises(RequestError, match="did not start") as failed:
        Grammars(other).matcher(LETTERS, "")
    assert failure_of(failed.value).status == 500


def test_processes_are_as_many_as_may_be_and_end_with_their_answers(
    processes: FormProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS", 3)
    grammars = Grammars(processes)
    for number in range(10):  # those that no answer follows give way
        grammars.matcher({"regex": f"a{number}"}, "")
    held = [grammars.matcher({"regex": f"b{number}"}, "") for number in range(3)]
    with pytest.raises(QueueFullError, match="answers of 3 forms are under way"):
        grammars.matcher({"regex": "c"}, "")
    assert grammars.matcher({"regex": "b0"}, "").mask().any()  # one that is there
    del held
    assert grammars.matcher({"regex": "c"}, "").mask().any()


def test_an_answer_that_has_ended_holds_no_form(tiny: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS", 3)
    loaded = replace(tiny.loaded)  # with processes of its own
    own = engine_on(tiny)
    engine = Engine(loaded, own.cache, own.config)
    params = [SamplingParams(structured={"regex": f"{n}[a-f]+"}, max_new_tokens=2, n=1 + n % 2) for n in range(7)]
    gc.disable()  # requests are in circles
    try:
        found = [answer(engine, ids(20), one).finish_reason for one in params]
    finally:
        gc.enable()
    assert found == ["length"] * 7


def test_forms_are_compiled_by_several_threads(processes: FormProcesses) -> None:
    grammars = Grammars(processes)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda n: grammars.matcher({"regex": f"{n}[a-f]+"}, "").mask().tobytes(), range(8)))
    assert found == [grammars.matcher({"regex": f"{n}[a-f]+"}, "").mask().tobytes() for n in range(8)]
    assert len(set(found)) == 8
