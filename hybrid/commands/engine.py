"""The engine that the arguments of a command describe (`hybrid.commands.commands.add_engine`)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hybrid.cache.config import CacheConfig
from hybrid.errors import ArgumentError


def model_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """How the model is loaded and drafts are made, as arguments of `Engine.from_pretrained`."""
    return {name: getattr(args, name) for name in ("device", "dtype", "load_dtype", "speculation")}


def cache_of(args: argparse.Namespace, **others: Any) -> CacheConfig:
    """The settings of the cache.

    Args:
        others: settings that the arguments do not decide.

    Raises:
        ArgumentError: they contradict each other.
    """
    if args.state_dtype != "float32" and not args.no_deterministic:
        raise ArgumentError(
            f"--state-dtype {args.state_dtype} rounds states, so that hits are not bitwise cold runs any more: "
            "give --no-deterministic, too"
        )
    given = {
        "memory": args.memory,
        "host": args.host_memory,
        "disk": args.disk,
        "directory": args.directory,
        "eviction": args.eviction,
        "kv_dtype": args.kv_dtype,
        "state_dtype": args.state_dtype,
        "deterministic": False if args.no_deterministic else None,
    }
    return CacheConfig(**given | others)


def adapters_of(args: argparse.Namespace, model: str) -> dict[str, str]:
    """The folders of adapters by their names.

    Args:
        model: the name of the model, which no adapter may have.

    Raises:
        ArgumentError: an argument is not of the form NAME=FOLDER, or two have one name.
    """
    found: dict[str, str] = {}
    for text in args.adapter:
        name, is_given, folder = text.partition("=")
        if not (name and is_given and folder) or name in found or name == model:
            raise ArgumentError(f"--adapter is NAME=FOLDER, each name once and not the model's; got {text!r:.200}")
        found[name] = str(Path(folder).resolve())
    return found
