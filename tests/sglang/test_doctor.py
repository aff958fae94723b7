"""The doctor replays on SGLang's own cache where it is installed, and its model of it hits the same, request by
request: one after the other, several at a time, and by the times of the log."""

from pathlib import Path

import pytest

from support.sglang_absent import require_sglang

require_sglang()

from hybrid.doctor import Sizes, replay  # noqa: E402
from hybrid.doctor.arrivals import Arrivals, Pace  # noqa: E402
from hybrid.doctor.batch import ReplayLoop  # noqa: E402
from hybrid.doctor.engines import engine_of, installed  # noqa: E402
from support.doctor_traffic import turns, written  # noqa: E402

SIZES = Sizes(32768, 51511296)


@pytest.mark.parametrize("gigabytes", [1.2, 6])
@pytest.mark.parametrize("pace", [Pace(1), Pace(4), Pace(None)], ids=str)
def test_the_model_hits_what_the_cache_hits(gigabytes: float, pace: Pace) -> None:
    made, memory = list(turns(80)), int(gigabytes * 1e9)
    make = installed("sglang", SIZES).make
    assert make is not None
    theirs = {one.arrival.number: one.hit for one in make(SIZES, memory, Arrivals(made, pace)).run()}
    engine = engine_of("sglang", SIZES, memory)
    ours = {one.arrival.number: one.hit for one in ReplayLoop(engine, Arrivals(made, pace)).run()}
    assert sum(hit.num_tokens for hit in theirs.values()) > 0
    assert ours == theirs


def test_the_report_says_what_was_replayed_on(tmp_path: Path) -> None:
    path = written(tmp_path, [{"input_tokens": [*range(3000), n], "output_tokens": [1, 2], "ts": n} for n in range(6)])
    report = replay(path, SIZES, "sglang", "2GB", cures=False)
    assert report.rows[0].scheduler.endswith("own cache and pools")
    row = replay(path, SIZES, "sglang", "2GB", cures=False, models=True).rows[0]
    assert (row.scheduler, row.hit_tokens, row.causes) == ("a model", report.rows[0].hit_tokens, report.rows[0].causes)
