"""Memory of a server whose clients do not read: log-probabilities, outputs and headers of 1,000 of them.

python bench/serve_unread.py --clients 1000
"""

import argparse
import subprocess
import sys
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from support.unread import largest, unread


def main() -> None:
    """Print the memory before, at its largest, and after."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000, help="of each kind (default: 1000)")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer (default: 100)")
    args = parser.parse_args()
    command = [sys.executable, "-m", "hybrid", "serve", "tiny", "--port", "0", "--memory", "32MiB"]
    more = ["--max-requests", str(args.clients + 1), "--max-connections", str(3 * args.clients), "--send-timeout", "5"]
    server = subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert server.stdout is not None
    try:
        address = "http://127.0.0.1:" + server.stdout.readline().split("127.0.0.1:")[1].split()[0].rstrip("/")
        process = psutil.Process(server.pid)
        for what, count in (("to warm up", 8), (f"{args.clients} clients", args.clients)):
            before = process.memory_info().rss
            with unread(address, count, args.tokens):
                most = largest(address, process, 600.0)
            after = process.memory_info().rss
            print(f"{what}: MiB before {before >> 20}, at most {most >> 20}, after {after >> 20}", flush=True)
    finally:
        server.terminate()
        server.wait(60)


if __name__ == "__main__":
    main()
