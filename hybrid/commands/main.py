"""The command line: demo, generate, parity, stress."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from hybrid import __version__
from hybrid.errors import HybridError

EPILOG = """examples:
  hybrid demo                                   what the cache spares, on real text, and that the answers stay the same
  hybrid generate tiny "The with statement"     continue a prompt with the model inside the package
  hybrid generate Qwen/Qwen3.5-0.8B --chat "Why is the sky blue?" --memory 2GiB
  hybrid parity --model ./my-checkpoint         hits are bitwise what cold runs are, and logits those of transformers
  hybrid parity --all-families                  the same on a small random checkpoint of every model family
  hybrid stress --seconds 30 --seed 7           random work with failures injected, audited

Exit status: 0 when all is well, 1 when what was checked failed, 2 when the command was wrong.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit status."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    console = Console(highlight=False, quiet=args.json, width=None if sys.stdout.isatty() else 140)
    try:
        status, result = args.run(args, console)
    except HybridError as error:
        print(f"hybrid: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hybrid: interrupted", file=sys.stderr)
        return 130
    if args.json:
        print(json.dumps(result))
    return int(status)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="hybrid",
        description="A prefix cache for hybrid-architecture language models, with the engine that runs them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"hybrid {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    json_flag = argparse.ArgumentParser(add_help=False)
    json_flag.add_argument("--json", action="store_true", help="print one JSON object and nothing else")

    demo = commands.add_parser(
        "demo", parents=[json_flag], help="tell the story of the cache on real text", description=run_demo.__doc__
    )
    demo.add_argument(
        "--model", default="tiny", help="folder, hub id, or 'tiny', the model inside the package (default)"
    )
    demo.add_argument("--no-cache", action="store_true", help="leave the cache out")
    demo.set_defaults(run=run_demo)

    generate = commands.add_parser(
        "generate", parents=[json_flag], help="continue prompts", description=run_generate.__doc__
    )
    generate.add_argument("model", metavar="MODEL", help="folder, hub id, or 'tiny'")
    generate.add_argument(
        "prompts", metavar="PROMPT", nargs="+", help="text to continue; several are answered together"
    )
    generate.add_argument(
        "--chat", action="store_true", help="take each prompt as a user's message, through the chat template"
    )
    generate.add_argument("--max-new-tokens", type=int, default=64, help="length of an answer at most (default: 64)")
    generate.add_argument(
        "--temperature", type=float, default=0.0, help="0: the likeliest token (default); 1: as the model has it"
    )
    generate.add_argument("--top-k", type=int, default=0, help="keep the k likeliest tokens (default 0: all)")
    generate.add_argument(
        "--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this probability (default: 1)"
    )
    generate.add_argument("--seed", type=int, default=None, help="the same seed, the same answer (with a temperature)")
    generate.add_argument(
        "--stop", action="append", default=[], help="text that ends an answer; may be given several times"
    )
    generate.add_argument(
        "--memory", default="1GiB", help="memory of the cache: '512MiB', or a fraction of what is free (default: 1GiB)"
    )
    generate.add_argument("--device", default=None, help="cuda, cpu (default: a GPU if there is one)")
    generate.add_argument(
        "--dtype", default=None, choices=("float32", "bfloat16", "float16"), help="default: the best for the device"
    )
    generate.add_argument("--no-cache", action="store_true", help="leave the cache out")
    generate.set_defaults(run=run_generate)

    parity = commands.add_parser(
        "parity", parents=[json_flag], help="prove that hits do not change results", description=run_parity.__doc__
    )
    parity.add_argument(
        "--model", default="tiny", help="folder or hub id of a checkpoint (default: the model inside the package)"
    )
    parity.add_argument(
        "--all-families", action="store_true", help="instead: small random checkpoints of every model family"
    )
    parity.add_argument("--seed", type=int, default=0, help="of the random prompts and checkpoints (default: 0)")
    parity.set_defaults(run=run_parity)

    stress = commands.add_parser(
        "stress", parents=[json_flag], help="random work with failures injected", description=run_stress.__doc__
    )
    stress.add_argument(
        "--model", default="tiny", help="folder or hub id of a checkpoint (default: the model inside the package)"
    )
    stress.add_argument("--no-model", action="store_true", help="the bookkeeping alone: tokens are dice")
    stress.add_argument("--seconds", type=float, default=20.0, help="how long (default: 20)")
    stress.add_argument("--operations", type=int, default=None, help="stop after so many operations instead")
    stress.add_argument(
        "--audit-every", type=int, help="operations between audits (default: 1 on a model, 100 without)"
    )
    stress.add_argument(
        "--seed",
        type=int,
        default=0,
        help="the same seed makes the same run; it also chooses mode (odd: not deterministic), memory and policy",
    )
    stress.set_defaults(run=run_stress)
    return parser


def run_demo(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Four questions about one long document, launched together; a second turn of each; a branch in the middle of the
    document; all of it again in a memory too small for it. Then the same without the cache, and the verdict."""
    from hybrid.commands import demo

    story = demo.Story(demo.load_engine(args.model))

    def told(stage: str, rows: list[demo.Row]) -> None:
        console.print(_demo_table(stage, rows))
        for row in rows:
            console.print(f"  [dim]{row.explain}[/dim]")
        console.print()

    if args.no_cache:
        plain = story.tell(False, told)
        return 0, demo.as_json(None, plain, None)
    console.rule("with the cache")
    cached = story.tell(True, told)
    for name, tree in cached.trees.items():
        console.rule(f"the tree {name}")
        console.print(tree, markup=False, soft_wrap=True)
    console.print(demo.LEGEND)
    console.rule("without the cache")
    plain = story.tell(False, lambda stage, rows: console.print(_demo_table(stage, rows)))
    verdict = demo.compare(cached, plain)
    console.rule("verdict")
    same = (
        "identical bit by bit"
        if verdict.identical
        else "the same tokens"
        if verdict.same_tokens
        else "[red]NOT the same[/red]"
    )
    console.print(f"answers: [bold]{same}[/bold], with the cache and without")
    spared = verdict.spared_tokens / verdict.prompt_tokens
    console.print(
        f"prompt tokens spared: [bold]{verdict.spared_tokens} of {verdict.prompt_tokens}[/bold] ({spared:.0%})"
    )
    for stage, times in verdict.faster.items():
        console.print(f"first token [bold]{times:.1f} times[/bold] as fast: {stage}")
    holds = verdict.identical or not story.engine.deterministic
    return (0 if holds else 1), demo.as_json(cached, plain, verdict)


def run_generate(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Continue prompts, all together, and say for each what the cache had."""
    from hybrid.cache.config import CacheConfig
    from hybrid.engine.engine import Engine
    from hybrid.engine.sampling_params import SamplingParams
    from hybrid.prompts.encode import Prompt

    memory = float(args.memory) if args.memory.replace(".", "", 1).isdigit() else args.memory
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        stop=args.stop,
    )
    config = CacheConfig(memory=memory, enabled=not args.no_cache)
    engine = Engine.from_pretrained(args.model, device=args.device, dtype=args.dtype, cache=config)
    prompts: list[Prompt] = [[{"role": "user", "content": text}] if args.chat else text for text in args.prompts]
    outputs = engine.generate(prompts, params)
    for prompt, output in zip(args.prompts, outputs, strict=True):
        console.print(f"[bold]{_plain(prompt)}[/bold]{'' if not args.chat else chr(10)}{_plain(output.text)}")
        console.print(f"[dim]{output.usage.completion_tokens} tokens, {output.finish_reason}; {output.explain}[/dim]\n")
    return 0, {
        "outputs": [
            {
                "prompt": prompt,
                "text": output.text,
                "token_ids": output.token_ids,
                "finish_reason": output.finish_reason,
                "prompt_tokens": output.usage.prompt_tokens,
                "cached_tokens": output.usage.cached_tokens,
                "explain": output.explain,
            }
            for prompt, output in zip(args.prompts, outputs, strict=True)
        ]
    }


def run_parity(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Compare logits with transformers' own model on the same checkpoint, and hits with cold runs, bit by bit: every
    log-probability of every token. Each scenario must have hit something. In fp32."""
    from hybrid.commands import parity

    if args.all_families:
        families = parity.run_all_families(args.seed)
    else:
        families = {args.model: parity.run_parity(args.model, args.seed)}
    for model, checks in families.items():
        table = Table("", "check", "hit tokens", "measured", title=f"parity of {model}")
        for check in checks:
            mark = "[green]ok[/green]" if check.passed else "[red]MISS[/red]"
            table.add_row(mark, check.name, "" if check.hit_tokens is None else str(check.hit_tokens), check.detail)
        console.print(table)
    results = {model: parity.as_json(checks) for model, checks in families.items()}
    passed = all(result["passed"] for result in results.values())
    result = {"passed": passed, "families": results} if args.all_families else results[args.model]
    return (0 if passed else 1), result


def run_stress(args: argparse.Namespace, console: Console) -> tuple[int, dict[str, Any]]:
    """Random conversations, forks and aborts in a tiny memory, with allocations and forward passes that fail, pins,
    moves, and the audit."""
    from hybrid.commands import stress

    report = stress.run_stress(
        None if args.no_model else args.model,
        args.seed,
        args.seconds,
        args.operations,
        progress=not args.json and None,
        audit_every=args.audit_every or (100 if args.no_model else 1),
    )
    result = report.as_json()
    for name, value in result.items():
        if name not in ("passed", "leaked"):
            console.print(f"{name.replace('_', ' '):>22}: {value}")
    console.print(f"{'leaked':>22}: {report.leaked}")
    return (0 if report.passed else 1), result


def _demo_table(stage: str, rows: Sequence[Any]) -> Table:
    table = Table(title=stage, title_justify="left", title_style="bold")
    for name in ("prompt tokens", "page hit", "usable hit", "first token", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("answer begins")
    for row in rows:
        table.add_row(
            str(row.prompt_tokens),
            str(row.page_hit),
            str(row.usable_hit),
            f"{1000 * row.time_to_first_token:.0f} ms",
            f"{row.tokens_per_second:.0f}",
            _plain(row.first_words),
        )
    return table


def _plain(text: str) -> str:
    """Text that rich prints as it is."""
    return text.replace("[", "\\[")


if __name__ == "__main__":
    sys.exit(main())
