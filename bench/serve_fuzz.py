"""Random bodies and headers against a running server: no answer may be a 500.

hybrid serve tiny --port 8000 &
python bench/serve_fuzz.py http://127.0.0.1:8000 --examples 2000
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.strategies import SearchStrategy

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.bodies import HEADERS, PATHS, PICTURES, SEED, SEEN, bodies
from support.served import Poster


def main() -> None:
    """Post bodies, and headers to paths that are looked at; print how many got which status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of the server")
    parser.add_argument("--examples", type=int, default=500, help="for each path (default: 500)")
    parser.add_argument("--seed", type=int, default=SEED, help="of the bodies (default: of the day)")
    parser.add_argument(
        "--pictures", action="store_true", help="in each body that takes one: for models that take them"
    )
    args = parser.parse_args()
    post = Poster(args.address)
    print(f"seed {args.seed}")

    def try_all(what: str, values: SearchStrategy[Any], send: Callable[[Any], httpx.Response]) -> None:
        found: Counter[int] = Counter()

        @seed(args.seed)
        @settings(max_examples=args.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(values)
        def try_one(value: Any) -> None:
            answer = send(value)
            found[answer.status_code] += 1
            assert answer.status_code < 500, answer.text

        try_one()
        print(what, dict(sorted(found.items())), flush=True)

    for path in PICTURES if args.pictures else PATHS:
        try_all(path, bodies(path, with_pictures=args.pictures), partial(post.raw, path))
    for path in () if args.pictures else SEEN:
        try_all(path, HEADERS, lambda headers, path=path: post.get(path, **headers))


if __name__ == "__main__":
    main()
