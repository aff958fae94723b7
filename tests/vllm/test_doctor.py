"""The doctor replays on vLLM's own scheduler where it is installed, and its model of it hits the same, request by
request: one after the other, several at a time, and by the times of the log."""

from pathlib import Path

import pytest

from support.vllm_needed import require_vllm

require_vllm()

from hybrid.doctor import Sizes, replay  # noqa: E402
from hybrid.doctor.arrivals import Arrivals, Pace  # noqa: E402
from hybrid.doctor.batch import ReplayLoop  # noqa: E402
from hybrid.doctor.engines import engine_of, installed  # noqa: E402
from support.doctor_traffic import turns, written  # noqa: E402

SIZES = Sizes(32768, 51511296)


@pytest.mark.parametrize("gigabytes", [1.2, 6])
@pytest.mark.parametrize("pace", [Pace(1), Pace(6), Pace(None)], ids=str)
def test_the_model_hits_what_the_scheduler_hits(gigabytes: float, pace: Pace) -> None:
    made, memory = list(turns(60)), int(gigabytes * 1e9)
    make = installed("vllm", SIZES).make
    assert make is not None
    theirs = {one.arrival.number: one.hit for one in make(SIZES, memory, Arrivals(made, pace)).run()}
    ours = {
        one.arrival.number: one.hit for one in ReplayLoop(engine_of("vllm", SIZES, memory), Arrivals(made, pace)).run()
    }
    assert sum(hit.num_tokens for hit in theirs.values()) > 0
    differing = [number for number, hit in ours.items() if hit.num_tokens != theirs[number].num_tokens]
    assert not differing


def test_the_report_says_what_was_replayed_on(tmp_path: Path) -> None:
    path = written(tmp_path, [{"input_tokens": [*range(3000), n], "output_tokens": [1, 2], "ts": n} for n in range(6)])
    report = replay(path, SIZES, memory="2GB", cures=False)
    assert report.rows[0].scheduler.endswith("own scheduler")
    assert report.to_json()["replays"][0]["scheduler"] == report.rows[0].scheduler
    row = replay(path, SIZES, memory="2GB", cures=False, models=True).rows[0]
    assert (row.scheduler, row.hit_tokens, row.causes) == ("a model", report.rows[0].hit_tokens, report.rows[0].causes)
