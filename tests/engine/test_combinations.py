"""Random lives of engines with random settings: every answer is that of a cold run. In 100 lives all pairs of values of
the options of engine and cache meet.

    HYBRID_FUZZ=1000-1400 python -m pytest -q tests/engine/test_combinations.py

runs the lives of these seeds instead of those of the suite. A failure names its seed, the settings, and what happened
before it. `bench/lives.py` has lives in which most answers are hits.
"""

import os
import shutil
import warnings

import pytest

from support.combinations import PAIRWISE
from support.lives import Life

pytestmark = pytest.mark.usefixtures("untraced")  # long runs through the lines of other tests

FIRST, LAST = map(int, os.environ.get("HYBRID_FUZZ", "0-6").split("-"))
"""Seeds of the lives: from the first to before the last."""

EVENTS = 7
"""Things that happen in a life."""


@pytest.mark.parametrize("seed", range(FIRST, LAST))
def test_a_random_life_answers_as_cold_runs(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # pins that are too large
        life = Life(seed, PAIRWISE[seed])
        try:
            for _ in range(EVENTS):
                life.step()
            life.engine.close()
        except BaseException as error:
            error.add_note(f"seed {seed}: " + "\n  ".join(life.log))
            raise
        finally:
            shutil.rmtree(life.makes.place, ignore_errors=True)
