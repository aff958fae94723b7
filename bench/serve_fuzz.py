"""Random bodies against a running server: no answer may be a 500.

hybrid serve tiny --port 8000 &
python bench/serve_fuzz.py http://127.0.0.1:8000 --examples 2000
"""

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.bodies import PATHS, bodies
from support.served import Poster


def main() -> None:
    """Post bodies to each path, and print how many got which status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address", help="of the server")
    parser.add_argument("--examples", type=int, default=500, help="for each path (default: 500)")
    args = parser.parse_args()
    post = Poster(args.address)
    for path in PATHS:
        found: Counter[int] = Counter()

        def try_bodies(path: str = path, found: Counter[int] = found) -> None:
            @settings(max_examples=args.examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(bodies(path))
            def try_one(body: Any) -> None:
                answer = post.raw(path, body)
                found[answer.status_code] += 1
                assert answer.status_code < 500, (body, answer.text)

            try_one()

        try_bodies()
        print(path, dict(sorted(found.items())), flush=True)


if __name__ == "__main__":
    main()
