"""JSON files of a checkpoint, read within limits: a checkpoint may come from anywhere."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from hybrid.errors import CheckpointError

MAX_CONFIG_BYTES = 16 * 2**20
"""The maximum size of a configuration."""

MAX_INDEX_BYTES = 64 * 2**20
"""The maximum size of an index of weights: about 500,000 tensors."""

MAX_NESTING = 64
"""The maximum depth of lists and objects in a configuration."""

MAX_ITEMS = 2**17
"""The maximum number of values in a configuration."""

MAX_NUMBER = 2**53
"""The largest integer in a configuration."""

MAX_COUNTS = {
    "depth": 4096,
    "num_hidden_layers": 4096,
    "mtp_num_hidden_layers": 256,
    "num_experts": 2**16,
    "num_attention_heads": 2**16,
    "num_key_value_heads": 2**16,
    "linear_num_key_heads": 2**16,
    "linear_num_value_heads": 2**16,
    "mamba_n_heads": 2**16,
    "hidden_size": 2**20,
    "intermediate_size": 2**24,
    "vocab_size": 2**28,
    "max_position_embeddings": 2**31 - 1,
}
"""Values of a configuration that lists and loops are as long as, or tensors as large as, with their maxima."""


MIN_COUNTS = (
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
)
"""Values of a configuration that are at least 1."""

MAY_BE_INFINITE = ("time_step_limit",)
"""Values of a configuration that have no bound in some checkpoints."""


def parse_json(text: str | bytes, of: Path) -> Any:
    """Parse JSON.

    Raises:
        CheckpointError: the text is not JSON, or is nested too deeply.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise CheckpointError(f"{of} is not valid JSON: its lists and objects are nested too deeply") from error
    except ValueError as error:  # also an integer of too many digits, and bytes that are not UTF-8
        raise CheckpointError(f"{of} is not valid JSON: {error}") from error


def read_json(path: Path, max_bytes: int) -> Any:
    """Read a file as JSON.

    Raises:
        CheckpointError: the file cannot be read, is larger than `max_bytes`, or is not JSON.
    """
    return parse_json(read_bytes(path, max_bytes), path)


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Read a file.

    Raises:
        CheckpointError: the file cannot be read, or is larger than `max_bytes`.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} has more than {max_bytes} bytes: it is not a file of this kind")
    return content


def read_config(path: Path) -> Any:
    """Read a configuration, and check its size: nothing that is built from it can take unbounded time or memory.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or a value in it is out of bounds.
    """
    return parse_config(read_bytes(path, MAX_CONFIG_BYTES), path)


def parse_config(text: bytes, path: Path) -> Any:
    """Parse a configuration, as `read_config` reads it."""
    config = parse_json(text, path)
    values: list[tuple[str, Any, int]] = [("", config, 0)]
    num_values = 1
    while values:
        name, value, depth = values.pop()
        num_values += len(value) if isinstance(value, dict | list) else 0
        if depth > MAX_NESTING or num_values > MAX_ITEMS:
            raise CheckpointError(
                f"{path}: a configuration has up to {MAX_NESTING} levels and {MAX_ITEMS} values; this one has more"
            )
        if isinstance(value, dict):
            values += ((key, item, depth + 1) for key, item in value.items())
        elif isinstance(value, list):
            values += ((name if isinstance(item, float) else "", item, depth + 1) for item in value)
        elif isinstance(value, float) and not (math.isfinite(value) or (name in MAY_BE_INFINITE and value == math.inf)):
            raise CheckpointError(f"{path}: {name or 'a number'} is {value}; it must be a finite number")
        elif isinstance(value, int) and not isinstance(value, bool) and name in MIN_COUNTS and value < 1:
            raise CheckpointError(f"{path}: {name} is {value}; it must be at least 1")
        elif isinstance(value, int):
            limit = MAX_COUNTS.get(name, MAX_NUMBER)
            if not -limit <= value <= limit:
                shown = value if abs(value) < 10**20 else f"an integer of {value.bit_length()} bits"
                raise CheckpointError(f"{path}: {name or 'a number'} is {shown}; at most {limit} is supported")
    return config
