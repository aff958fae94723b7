"""The commands of `hybrid`: their names, their help and their arguments, whose values are checked as they are read.

The function that a command runs is in the module of its name, which is imported when it runs: to import torch alone
takes longer than the help."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from rich.console import Console

from hybrid.checks import DTYPE_NAMES, KV_DTYPE_NAMES, STATE_DTYPE_NAMES
from hybrid.errors import ArgumentError

MODEL_HELP = "folder or hub id of a checkpoint (default: 'tiny', the model inside the package)"

DEFAULT_MEMORY = "0.9 of what the weights leave free on a GPU, 4 GiB on a CPU"
"""Of a cache, as `CacheConfig` has it; a percent sign would be one of argparse."""

API_KEY = "HYBRID_API_KEY"
"""The environment variable with the key of a server's callers."""


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        passed: False if something that was checked does not hold.
        result: what `--json` prints.
    """

    passed: bool
    result: dict[str, Any]


@dataclass(frozen=True)
class Command:
    """One command of `hybrid`.

    Attributes:
        name: as it is typed, and of the module of `hybrid.commands` whose function `run(args, console)` does the work
            and prints to the console what people read. With `--json` the console is silent.
        help: one line for the list of commands.
        description: a paragraph for `hybrid NAME --help`.
        add_arguments: adds the command's arguments to its parser; `--json` is added for every command.
    """

    name: str
    help: str
    description: str
    add_arguments: Callable[[argparse.ArgumentParser], None]

    def run(self, args: argparse.Namespace, console: Console) -> Outcome:
        """Import the command's module, and run it."""
        outcome: Outcome = import_module(f"hybrid.commands.{self.name}").run(args, console)
        return outcome


OWN_DTYPE = (
    "the checkpoint's on a GPU, and on a CPU where it is bfloat16 and the CPU multiplies that faster, else float32"
)
"""The type that an engine runs a model in, unless it is given."""


def add_dtype(parser: argparse.ArgumentParser, default: str | None = None, *, otherwise: str = OWN_DTYPE) -> None:
    """The argument `--dtype`: the type that a model runs in.

    Args:
        default: None: no type, which is what `otherwise` says.
        otherwise: for the help.
    """
    text = f"type that the model runs in (default: {default or otherwise})"
    parser.add_argument("--dtype", default=default, choices=DTYPE_NAMES, help=text)


def add_load_dtype(parser: argparse.ArgumentParser, more: str = "") -> None:
    """The argument `--load-dtype`: what weights are quantized to.

    Args:
        more: for the help.
    """
    text = f"quantize weights of matrix products to int8, int4, int4:32 or int4:128{more} (default: as they are)"
    parser.add_argument("--load-dtype", metavar="TYPE", help=text)


def add_engine(parser: argparse.ArgumentParser, *, memory: str | None = None, of: str = "of the cache") -> None:
    """The arguments of an engine, which `hybrid.commands.engine` reads.

    Args:
        memory: of the cache by default; None: `DEFAULT_MEMORY`.
        of: what the memory is that of, for the help.
    """
    add = parser.add_argument
    text = f"size {of}: '512MiB', or '50%%' of what is free (default: {memory or DEFAULT_MEMORY})"
    add("--memory", default=memory, help=text)
    add("--host-memory", help="memory for copies of what is evicted, '8GiB' (default: none)")
    add("--disk", help="bytes on disk for copies of what is evicted, '100GiB', in --directory (default: none)")
    add("--directory", help="where they are")
    text = (
        "what is evicted first: lhd, lru, lfu, fifo, mru, filo, priority, or flop_aware, also as flop_aware:alpha=0.5"
    )
    add("--eviction", default="lhd", metavar="POLICY", help=f"{text} (default: lhd)")
    text = "how keys and values are kept: as they are (auto), or in a byte each (default: auto)"
    add("--kv-dtype", default="auto", choices=KV_DTYPE_NAMES, help=text)
    text = "how checkpoints are stored: smaller ones need --no-deterministic (default: float32)"
    add("--state-dtype", default="float32", choices=STATE_DTYPE_NAMES, help=text)
    add("--no-deterministic", action="store_true", help="hits may differ from cold runs by rounding, as on a GPU")
    add("--device", default=None, help="cuda or cpu (default: a GPU if there is one)")
    add_dtype(parser)
    add_load_dtype(parser)
    text = "a LoRA adapter, which requests name as their model; may be given several times"
    add("--adapter", metavar="NAME=FOLDER", action="append", default=[], help=text)
    text = "drafts, from what is cached, by the checkpoint's own predictor (mtp), or by both; the answers are the same"
    add("--speculation", choices=("cache", "mtp", "cache+mtp"), help=f"{text} (default: one token per pass)")


def integer(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """The type of an argument that is an integer in `[low, high]`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if low <= value <= high:
            return value
        raise argparse.ArgumentTypeError(f"it must be an integer from {low} to {high}; got {text!r:.100}")

    return parse


def seconds(text: str) -> float:
    """The type of an argument that is a duration."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if 0 < value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"it must be a positive number of seconds, such as 20 or 0.5; got {text!r:.100}")


def refuse_given(args: argparse.Namespace, why: str, **defaults: object) -> None:
    """Refuse options that would do nothing.

    Args:
        why: they would.
        defaults: by the names of the options.

    Raises:
        ArgumentError: one has another value than its default.
    """
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise ArgumentError(f"--{name.replace('_', '-')} does nothing here: {why}; leave it out")


def check_encoding(arguments: Sequence[str]) -> None:
    """Check that arguments are texts: bytes of the command line that are not UTF-8 arrive as lone surrogates.

    Raises:
        ArgumentError: one is not.
    """
    for number, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            shown = argument.encode("utf-8", "surrogateescape")
            raise ArgumentError(
                f"argument {number} is not UTF-8 at character {error.start}: {shown!r:.100}; give texts in UTF-8"
            ) from None


def add_demo(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid demo`."""
    parser.add_argument("--model", default="tiny", help=MODEL_HELP)
    add_dtype(parser)
    parser.add_argument("--no-cache", action="store_true", help="run without the prefix cache only")
    parser.add_argument("--verbose", action="store_true", help="print all answers, explanations and trees too")


def add_generate(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid generate`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, hub id, or 'tiny', the model inside the package")
    add("prompts", metavar="PROMPT", nargs="+", help="text to continue; several prompts run in one batch")
    add("--chat", action="store_true", help="apply the chat template: each prompt is a user message")
    add("--max-new-tokens", type=integer(1), default=64, help="maximum length of an answer, in tokens (default: 64)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default); 1: sample from the model's distribution")
    add("--top-k", type=integer(0), default=0, help="sample from the k most likely tokens (default: 0, all)")
    add("--top-p", type=float, default=1.0, help="sample from the most likely tokens of this total probability")
    add(
        "--seed",
        type=integer(0, 2**63 - 1),
        default=None,
        help="seed of the sampling: the same seed gives the same answer",
    )
    add("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    add("--no-cache", action="store_true", help="disable the prefix cache")
    add_engine(parser, memory="1GiB")


def add_serve(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid serve`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder, hub id, or 'tiny', the model inside the package")
    add("--name", help="of the model, in requests and responses (default: MODEL)")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's own needs a key")
    add("--port", type=integer(0, 65535), default=8000, help="0: any that is free (default: 8000)")
    add("--api-key", help=f"key of all callers (default: {API_KEY} in the environment; none: none is needed)")
    add("--keys", metavar="FILE", help="JSON with a key for each tenant: docs/server.md")
    add_engine(parser)
    text = "folder below which POST /v1/load_lora_adapter may load adapters (default: none are loaded at run time)"
    add("--adapter-dir", metavar="FOLDER", help=text)
    add("--max-num-seqs", type=integer(1), default=32, help="requests that run at once, at most (default: 32)")
    add("--max-requests", type=integer(2), default=256, help="that run or wait, at most; others get 429 (default: 256)")
    add("--max-model-len", type=integer(2), help="tokens of prompt and answer (default: what the model takes)")
    text = "tokens of an answer whose request does not say it (default: 1024)"
    add("--max-tokens", type=integer(1), default=1024, help=text)
    text = "bytes of a request's body, at most (default: 8 to 64MiB, by what the model takes)"
    add("--max-body", help=text)
    add("--timeout", type=seconds, help="seconds that a request may take (default: any)")
    text = "seconds that requests under way have to end after SIGTERM (default: as long as they take)"
    add("--drain", type=seconds, help=text)
    text = "connections of one address (default: any number; behind a proxy all clients have one)"
    add("--max-connections-per-address", type=integer(1), help=text)
    add("--max-connections", type=integer(1), default=1024, help="in all (default: 1024)")
    add("--max-head", default="32KiB", help="bytes of a request line with its headers (default: 32KiB)")
    add("--max-headers", type=integer(1), default=100, help="of a request (default: 100)")
    add("--head-timeout", type=seconds, default=60.0, help="seconds that headers may take to come (default: 60)")
    add("--body-timeout", type=seconds, default=60.0, help="seconds that a body may take to come (default: 60)")
    add("--idle-timeout", type=seconds, default=75.0, help="of a connection without a request (default: 75)")
    text = "seconds in which a client must take something of its answer (default: 60)"
    add("--send-timeout", type=seconds, default=60.0, help=text)


def add_fleet(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid fleet`."""
    add = parser.add_argument
    add("action", choices=("serve",), help="answer requests until a signal ends the process")
    add("model", metavar="MODEL", help="folder, hub id, or 'tiny', the model inside the package")
    add("--replicas", type=integer(1, 1024), default=2, help="of the model (default: 2)")
    add("--address", help="of a Ray cluster to join, 'auto' for this machine's (default: Ray is started here)")
    text = "CPUs that each replica takes of those that Ray counts (default: 0, replicas share what there is)"
    add("--cpus", type=float, default=0.0, help=text)
    add("--threads", type=integer(1, 1024), help="threads of each replica on a CPU (default: chosen by torch)")
    add("--name", help="of the model, in requests and responses (default: MODEL)")
    add("--host", default="127.0.0.1", help="address to listen on; any but this machine's own needs a key")
    add("--port", type=integer(1, 65535), default=8000, help="(default: 8000)")
    add("--api-key", help=f"key of all callers (default: {API_KEY} in the environment; none: none is needed)")
    add("--keys", metavar="FILE", help="JSON with a key for each tenant: docs/server.md")
    add_engine(parser, of="of the cache of each replica")
    text = "memory that the replicas of a machine share for copies of what is evicted, '64GiB', in place of --disk"
    add("--shared-memory", help=f"{text} (default: none)")
    text = "what replicas of all machines share: redis://HOST:PORT/NUMBER, s3://BUCKET/FOLDER, a path"
    add("--store", metavar="URL", help=f"{text} (default: none)")
    add("--max-num-seqs", type=integer(1), default=32, help="requests that run at once in each (default: 32)")
    add("--max-requests", type=integer(1), default=256, help="that wait in each; others get 429 (default: 256)")
    add("--max-model-len", type=integer(2), help="tokens of prompt and answer (default: what the model takes)")
    text = "tokens of an answer whose request does not say it (default: 1024)"
    add("--max-tokens", type=integer(1), default=1024, help=text)
    add("--max-body", default="64MiB", help="bytes of a request's body, at most (default: 64MiB)")
    add("--body-timeout", type=seconds, default=60.0, help="seconds that a body may take to come (default: 60)")
    add("--timeout", type=seconds, help="seconds that a request may take (default: any)")
    text = "seconds that the requests of a replica have to end when it is to end (default: 60)"
    add("--drain", type=seconds, default=60.0, help=text)


def add_tree(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid tree`."""
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*", help="texts to continue first (default: the prompts of the demo)")
    add("--model", default="tiny", help=MODEL_HELP)
    add("--memory", default="8MiB", help="size of the cache (default: 8MiB, so that the demo's prompts do not all fit)")
    add("--max-new-tokens", type=integer(1), default=16, help="maximum length of an answer, in tokens (default: 16)")
    add("--out", metavar="FILE", help="write a page for a browser, tree.html for example, instead of text")


def add_cache(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid cache`."""
    add = parser.add_argument
    add("action", choices=("show", "check"), help="list what it holds, or see that it is right")
    add("file", metavar="FILE", help="a file that engine.save has written, or a disk tier's folder")
    add("--fix", action="store_true", help="check of a folder: drop what is not what was written")
    add("--model", default="tiny", help=MODEL_HELP)
    add_dtype(parser, otherwise="that of the file; only check runs a model")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid doctor`."""
    add = parser.add_argument
    text = "files of logged requests, one a line; folders of recorded sessions; or: anonymize FILE; or: watch URL"
    add("traffic", metavar="TRAFFIC", nargs="+", help=text)
    text = "whose sizes: a config.json, its folder, a hub id, 'tiny', or bytes per token and of a state, 32768,51511296"
    add("--model", help=f"{text} (default: these, of a Qwen3.5 with 4B parameters; of watch: what hybrid serve shows)")
    add_dtype(parser, otherwise="that of the configuration")
    add("--memory", action="append", help="bytes of the cache, '24GiB'; may be repeated (default: 24GiB)")
    names = ("vllm", "sglang", "hybrid", "lru", "marconi", "bound")
    text = f"{', '.join(names)} (no cache hits more); may be repeated; the first is explained (default: vllm, sglang, "
    add("--engine", action="append", choices=names, metavar="NAME", help=f"{text}hybrid, bound)")
    add("--tokenizer", metavar="MODEL", help="folder or hub id that makes tokens of texts (default: about, by words)")
    add("--out", metavar="FILE", help="write a page for a browser; of anonymize: the file of hashes")
    text = "tokens of a block of vLLM, as its log says (default: what vLLM chooses for the model on a GPU)"
    add("--block-size", type=integer(16), metavar="N", help=text)
    add("--models", action="store_true", help="use models of engines also where the engines are installed: faster")
    add("--no-cures", action="store_true", help="do not replay what may help")
    text = "requests that are in flight at a time (default: they come by their times, else one after the other)"
    add("--concurrency", type=integer(1), metavar="N", help=text)
    text = "tokens of prompts that are computed per second, for times (requests that come by theirs: 10,000)"
    add("--prefill-rate", type=seconds, metavar="N", help=text)
    text = "tokens per second of each answer, where requests come by their times (default: 50)"
    add("--decode-rate", type=seconds, metavar="N", help=text)
    text = "recorded sessions at a time: the next request of each after its answer and its pause (default: by times)"
    add("--users", type=integer(1), metavar="N", help=text)
    text = "seconds between the beginnings of recorded sessions, on average (default: as recorded, else 240)"
    add("--gap", type=seconds, metavar="S", help=text)
    text = "seconds that nothing happens in a recorded session, at most (default: 1800)"
    add("--max-pause", type=seconds, default=1800.0, metavar="S", help=text)
    add("--price", type=seconds, metavar="P", help="of a million tokens of prompts that are computed, for costs")
    add("--within", type=seconds, default=5.0, help="points that watch allows between server and replay (default: 5)")
    add("--api-key", help=f"of watch: key of a server that needs one (default: {API_KEY} in the environment)")


def add_models(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid models`."""
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="folder, config.json or hub id of a model (default: published ones)"
    )


def add_parity(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid parity`."""
    of = parser.add_mutually_exclusive_group()
    of.add_argument("--model", default="tiny", help=MODEL_HELP)
    of.add_argument(
        "--all-families", action="store_true", help="small random checkpoints of every model family instead"
    )
    text = "those of one family instead, by its model type; may be given several times"
    of.add_argument("--family", metavar="NAME", action="append", default=[], help=text)
    parser.add_argument(
        "--seed", type=integer(0), default=0, help="seed of random prompts and checkpoints (default: 0)"
    )
    text = f"that of an engine, with logits in float32 too; an engine's is {OWN_DTYPE}"
    add_dtype(parser, otherwise=text)
    text = "; logits are then compared with transformers on the numbers that they stand for, and their error against "
    add_load_dtype(parser, f"{text}the checkpoint is measured")


def add_stress(parser: argparse.ArgumentParser) -> None:
    """The arguments of `hybrid stress`."""
    add = parser.add_argument
    add("--model", default="tiny", help=MODEL_HELP)
    add_dtype(parser, "float32")
    add("--no-model", action="store_true", help="use a model of arithmetic, whose right answers are known")
    add("--seconds", type=seconds, default=20.0, help="duration (default: 20)")
    add("--operations", type=integer(1), default=None, help="stop after this number of operations instead")
    add("--no-signals", action="store_true", help="do not interrupt calls by a timer: the same seed gives the same run")
    add("--audit-every", type=integer(1), help="operations between audits (default: 1 with a model, 100 without)")
    add(
        "--seed",
        type=integer(0),
        default=0,
        help="of requests and failures; it also selects mode (odd: not deterministic), memory, policy, overlap, drafts "
        "(8 to 15), host memory (16 to 31), disk (32 to 47) and both (48 to 63)",
    )


COMMANDS: tuple[Command, ...] = (
    Command(
        name="demo",
        help="show the prefix cache at work on real text",
        description=(
            "Four questions about one long document, launched together; a second turn of each; a memory that is too "
            "small; a branch in the middle of the document. Each act runs with the cache and without it, and times "
            "and answers are compared."
        ),
        add_arguments=add_demo,
    ),
    Command(
        name="generate",
        help="continue prompts",
        description=(
            "Continue prompts in one batch, print the answers as they are computed, and report for each how much of "
            "it was cached and why."
        ),
        add_arguments=add_generate,
    ),
    Command(
        name="serve",
        help="serve a model to clients of OpenAI's and Anthropic's APIs",
        description=(
            "Answer requests over HTTP until a signal ends the process: chat completions, completions and responses "
            "as OpenAI's API has them, messages as Anthropic's has them, /metrics with vLLM's names, /explain/ID, and "
            "a page at / that shows requests, hits and the tree as they are. SIGTERM lets the requests under way end."
        ),
        add_arguments=add_serve,
    ),
    Command(
        name="fleet",
        help="serve a model on several replicas, each request where its prefix is",
        description=(
            "`hybrid fleet serve MODEL --replicas N` starts replicas on Ray Serve behind the APIs of `hybrid serve`, "
            "and sends each request to the replica that can resume most of it, by what the caches say of themselves. "
            "GET /fleet shows the replicas, what was promised of them, and what of it was not kept. SIGTERM lets the "
            "requests under way end."
        ),
        add_arguments=add_fleet,
    ),
    Command(
        name="tree",
        help="draw the prefix tree, as text or as a page for a browser",
        description=(
            "Run prompts, those of the demo by default, and draw the prefix tree that they leave in the cache: as "
            "text, or with --out as a page of one file, to zoom and fold, coloured by value, last use, hits, locks "
            "or tier, with the checkpoints that were evicted as a timeline. From Python: "
            "engine.cache.draw('tree.html')."
        ),
        add_arguments=add_tree,
    ),
    Command(
        name="cache",
        help="list or check a file of cached prefixes, or the folder of a disk tier",
        description=(
            "List the prefixes that a file of engine.save holds, or compute all of them again and compare every page "
            "and checkpoint: bit by bit where the file was made in deterministic mode on such a machine, else within "
            "rounding. States are reproducible, so a file need not be trusted. Of the folder of a disk tier every copy "
            "is compared with its checksum; --fix drops what is wrong."
        ),
        add_arguments=add_cache,
    ),
    Command(
        name="doctor",
        help="replay logged traffic on engines' schedulers: what hits, what does not, and why",
        description=(
            "Replay the requests of a log on models of the schedulers of vLLM, SGLang and this package, without "
            "a model and without a GPU, and say how many tokens of prompts hit, where all others went, and what would "
            "change it, each change replayed. `anonymize FILE` writes salted hashes in place of texts, which replay "
            "alike. `watch URL` reads a running server's figures, and with traffic says whether they are as predicted."
        ),
        add_arguments=add_doctor,
    ),
    Command(
        name="models",
        help="list the model families, and the bytes that models keep per page and per state",
        description=(
            "List the model families that run in the engine and what computes them, and for published sizes, or for a "
            "model, the bytes of a page and of a state, and how many tokens of keys and values a state weighs. "
            "Configurations alone are read, no weights."
        ),
        add_arguments=add_models,
    ),
    Command(
        name="parity",
        help="check that cache hits do not change results",
        description=(
            "Compare logits with transformers' own model on the same checkpoint, and cache hits with cold runs: "
            "every token and every log-probability must be equal bit by bit, and every scenario must have hits. "
            "Logits in float32 must be those of transformers; in another type they must be as near to these as the "
            "logits of transformers' own model in that type. Both are compared by default, where an engine chooses "
            "another type, and hits are computed in that one."
        ),
        add_arguments=add_parity,
    ),
    Command(
        name="stress",
        help="random requests with injected failures, audited",
        description=(
            "Random conversations, forks, aborts, streams, images, pins and priorities in a tiny memory. "
            "Allocations, passes and deliveries fail, passes yield NaN, other threads call, and a timer interrupts. "
            "Nothing may leak, no output may be lost, every answer must be right, and every checkpoint must be the "
            "state of its key."
        ),
        add_arguments=add_stress,
    ),
)
