"""Writes docs/api.md: the public names of `hybrid`, from their signatures and docstrings.

python docs/make_api.py            write it
python docs/make_api.py --check    exit status 1 if it is not what the docstrings say
"""

import inspect
import re
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import hybrid
import hybrid.hf

PAGE = Path(__file__).with_name("api.md")

SECTIONS = {
    "The engine": [
        *("Engine", "AsyncEngine", "EngineConfig", "SamplingParams"),
        *(
            "RequestOutput",
            "Completion",
            "Usage",
            "Explanation",
            "TextStream",
            "OutputStream",
            "TenantConfig",
            "Conversation",
            "Score",
            "Accepted",
            "ParsedAnswer",
            "ToolCall",
            "EngineStats",
        ),
    ],
    "The cache": ["CacheConfig", "HybridCache", "CacheMemory", "CacheStats", "Key", "Pin", "Mover"],
    "Eviction": ["Policy", "Facts"],
    "Images": ["Image", "ImagePrompt"],
}
"""What comes first, in this order. All other names follow by the alphabet, errors last."""


def sections() -> dict[str, list[str]]:
    """The names of each section; every public name is in one."""
    public = set(hybrid.__all__) - {"__version__"}
    found = {title: [name for name in names if name in public] for title, names in SECTIONS.items()}
    rest = sorted(public - {name for names in found.values() for name in names})
    errors = [name for name in rest if issubclass(getattr(hybrid, name), Warning | Exception)]
    found["Other types"] = [name for name in rest if name not in errors]
    found["Errors"] = errors
    return found


def signature(name: str, thing: Any) -> str:
    """`name(parameters) -> result`, as it is called; one parameter per line where it is long."""
    try:
        shown = inspect.signature(thing)
    except (TypeError, ValueError):
        return name
    parameters, keyword_only = [], False
    for key, value in shown.parameters.items():
        if value.kind is value.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            parameters.append("*")
        if key not in ("self", "cls"):
            star = {value.VAR_POSITIONAL: "*", value.VAR_KEYWORD: "**"}.get(value.kind, "")
            parameters.append(f"{star}{key}{_annotation(': ', value.annotation)}{_default(value)}")
    result = "" if inspect.isclass(thing) else _annotation(" -> ", shown.return_annotation)
    text = f"{name}({', '.join(parameters)}){result}"
    return text if len(text) <= 100 else f"{name}(\n" + "".join(f"    {line},\n" for line in parameters) + f"){result}"


def _annotation(before: str, annotation: Any) -> str:
    if annotation is inspect.Signature.empty:
        return ""
    return before + (annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation)))


def _default(value: inspect.Parameter) -> str:
    if value.default is inspect.Parameter.empty:
        return ""
    return (
        f" = {'...' if ' at 0x' in repr(value.default) or '<factory>' in repr(value.default) else repr(value.default)}"
    )


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: its sections (`Args:` and so on) become lists."""
    lines: list[str] = []
    in_section = False
    for line in inspect.cleandoc(docstring or "").splitlines():
        heading = re.fullmatch(r"(Args|Attributes|Returns|Raises|Yields|Example):", line)
        item = re.match(r"    ([\w*]+(?:, [\w*]+)*): (.*)", line)
        if heading:
            in_section = True
            lines += [f"*{heading[1]}*", ""]
        elif in_section and item:
            lines.append(f"* `{item[1]}`: {item[2]}")
        elif in_section and line.startswith(" "):
            lines.append("  " + line.strip())
        else:
            in_section = in_section and not line
            lines.append(line)
    return "\n".join(lines).strip()


def members(thing: type) -> list[str]:
    """A heading, signature and text for each public method and property that the class itself defines."""
    blocks = []
    for name, member in vars(thing).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if name.startswith("_") or not (inspect.isfunction(function) or isinstance(member, property)):
            continue
        text = prose(inspect.getdoc(function))
        if isinstance(member, property):
            blocks.append(f"**`{thing.__name__}.{name}`** (property): {text}" if text else "")
        else:
            blocks.append(f"```text\n{signature(f'{thing.__name__}.{name}', function)}\n```\n\n{text}")
    return [block for block in blocks if block]


def page() -> str:
    """The whole page."""
    parts = [
        "# API\n\nThe public names of `hybrid`, made from their docstrings by `python docs/make_api.py`. Names in "
        "other modules may change\nwithout notice, except `hybrid.hf.PrefixCache`, which is at the end."
    ]
    for title, names in sections().items():
        if names:
            parts.append(f"## {title}")
            parts += [part for name in names for part in entry(f"hybrid.{name}", getattr(hybrid, name))]
    parts.append("## Inside transformers")
    parts += entry("hybrid.hf.PrefixCache", hybrid.hf.PrefixCache)
    return "\n\n".join(parts) + "\n"


def entry(name: str, thing: type) -> list[str]:
    """The parts of one name."""
    is_error = issubclass(thing, Warning | Exception)
    parts = [f"### {name}"]
    if is_error:
        parents = ", ".join(f"`{base.__name__}`" for base in thing.__bases__)
        return [*parts, f"{prose(thing.__doc__)} Derives from {parents}."]
    if not issubclass(thing, Enum):
        parts.append(f"```text\n{signature(name, thing)}\n```")
    return [*parts, prose(thing.__doc__), *members(thing)]


if __name__ == "__main__":
    if "--check" in sys.argv:
        sys.exit(PAGE.read_text(encoding="utf-8") != page())
    PAGE.write_text(page(), encoding="utf-8")
