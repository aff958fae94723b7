#!/usr/bin/env python
"""vLLM's own scheduler and cache manager on a trace, without a model: hits next to those of `hybrid doctor`'s model.

    python bench/doctor.py --hits hits.json --trace DIR/lmsys.jsonl --gb 3     # in an environment with vLLM 0.33
    python bench/doctor.py --check hits.json --trace DIR/lmsys.jsonl --gb 3    # in this package's: compares them

The first writes the cached tokens of each request; the second replays the trace and exits with status 1 where the hit
rates are more than half a point apart. Blocks of 528 tokens, and layers as those of a Qwen3.5-4B.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, help="a file of bench/traces.py")
    parser.add_argument("--gb", type=float, required=True, help="memory, 1 GB = 1e9 bytes")
    parser.add_argument("--hits", type=Path, help="write the hits of vLLM's scheduler")
    parser.add_argument("--check", type=Path, help="compare with these hits")
    args = parser.parse_args()
    if args.hits is not None:
        sys.path.insert(0, str(ROOT / "tests"))
        from support.vllm_served import Served

        served, hits = Served(args.gb * 1e9, None, token_by_token=True), []
        with args.trace.open(encoding="utf-8") as file:
            for line in file:
                fields, before = json.loads(line), served.hit_tokens
                served.serve([(fields["input_tokens"], fields["output_tokens"])])
                hits.append(served.hit_tokens - before)
        args.hits.write_text(json.dumps(hits))
        return 0
    from hybrid.doctor import Sizes, Traffic
    from hybrid.doctor.vllm import VllmScheduler

    theirs = json.loads(args.check.read_text())
    traffic = Traffic.read(args.trace)
    engine = VllmScheduler(Sizes(32768, 51511296), int(args.gb * 1e9))
    ours = [engine.serve(request).num_tokens for request, _ in traffic]
    rates = [100 * sum(hits) / traffic.num_prompt_tokens for hits in (theirs, ours)]
    different = sum(a != b for a, b in zip(theirs, ours, strict=True))
    print(f"vLLM {rates[0]:.2f} %, the model {rates[1]:.2f} %; {different} of {len(ours)} requests differ")
    return int(abs(rates[0] - rates[1]) > 0.5)


if __name__ == "__main__":
    sys.exit(main())
