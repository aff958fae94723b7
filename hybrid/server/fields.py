"""Reading the body of a call: each field is taken by name and type, and what is left over is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from hybrid.checks import shown
from hybrid.server.body import MAX_VALUES, has_long_data, has_more_values
from hybrid.server.errors import HttpError

MAX_NAME = 64
"""Characters of an unknown name that are compared with those that are known."""


class Fields:
    """A JSON object that is read field by field. `null` is the same as absent.

    Args:
        values: as it was sent.
        where: its path in the body; empty: it is the body.

    Raises:
        HttpError: it is not an object.
    """

    def __init__(self, values: object, where: str = "") -> None:
        if not isinstance(values, dict):
            raise HttpError(400, f"{where or 'the body'} must be a JSON object; got {shown(values)}", where or None)
        self.where = where
        self._values: dict[str, Any] = {name: value for name, value in values.items() if value is not None}
        self._taken: list[str] = []

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def path(self, name: str | int) -> str:
        """The path of a field in the body."""
        return f"{self.where}[{name}]" if isinstance(name, int) else f"{self.where}.{name}" if self.where else name

    def refuse(self, name: str, expected: str, value: object) -> HttpError:
        """The refusal of a value."""
        return HttpError(
            400, f"{self.path(name)} must be {expected}; got {shown(value)}", self.path(name), "invalid_type"
        )

    def take(self, name: str) -> Any:
        """Any value, for one that checks it; None: absent."""
        self._taken.append(name)
        return self._values.pop(name, None)

    def offer(self, name: str, value: object) -> None:
        """Give a field a value that it has if the body does not name it."""
        self._values.setdefault(name, value)

    def text(self, name: str) -> str | None:
        """A text; None: absent."""
        value = self.take(name)
        if value is None or isinstance(value, str):
            return value
        raise self.refuse(name, "a text", value)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, bool):
            return value
        raise self.refuse(name, "true or false", value)

    def integer(self, name: str, low: int, high: int = 2**31 - 1) -> int | None:
        """An integer in `[low, high]`; None: absent."""
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return value
        raise self.refuse(name, f"an integer from {low} to {high}", value)

    def one_of(self, name: str, choices: Sequence[str], default: str) -> str:
        """One of several texts."""
        value = self.take(name)
        if value is None:
            return default
        if isinstance(value, str) and value in choices:
            return value
        raise self.refuse(name, " or ".join(f"'{choice}'" for choice in choices), value)

    def array(self, name: str) -> list[Any] | None:
        """A list; None: absent."""
        value = self.take(name)
        if value is None or isinstance(value, list):
            return value
        raise self.refuse(name, "a list", value)

    def nested(self, name: str) -> Fields | None:
        """An object; None: absent."""
        value = self.take(name)
        return None if value is None else Fields(value, self.path(name))

    def dictionary(self, name: str) -> dict[str, Any] | None:
        """An object that is passed on as it is; None: absent."""
        value = self.take(name)
        if value is None or (isinstance(value, dict) and not has_long_data(value)):
            return value
        raise self.refuse(name, "a JSON object, without the data of images", value)

    def inner(self, name: str, field: str) -> str | None:
        """A text in an object, which stays without it for others to read; None: absent."""
        value = self._values.get(name)
        if not isinstance(value, dict) or value.get(field) is None:
            return None
        found = Fields(value, self.path(name)).text(field)
        self._values[name] = {other: kept for other, kept in value.items() if other != field}
        return found

    def check_json(self, name: str, value: object) -> None:
        """Refuse JSON within a text that could not be parsed beside streams: in the body it counts as one value."""
        if isinstance(value, str) and has_more_values([value.encode()], MAX_VALUES):
            text = (
                f"{self.path(name)}: the JSON in this text has more than {MAX_VALUES} values, where a list, an object "
                "or a name counts as four; send less"
            )
            raise HttpError(413, text, self.path(name), "body_too_large")

    def ignore(self, *names: str) -> None:
        """Take fields that change no answer."""
        for name in names:
            self.take(name)

    def only(self, name: str, *allowed: object) -> bool:
        """Take a field of which this server has one value alone. Returns whether it is given."""
        value = self.take(name)
        if value is None or any(value == one and type(value) is type(one) for one in allowed):
            return value is not None
        shown_values = " or ".join(map(_as_json, allowed))
        text = f"{self.path(name)} is not supported but as {shown_values}; got {shown(value)}"
        raise HttpError(400, text, self.path(name), "unsupported_value")

    def never(self, **remedies: str) -> None:
        """Refuse fields of an API that this server does not have, each with what to do instead."""
        for name, remedy in remedies.items():
            if self.take(name) is not None:
                text = f"{self.path(name)} is not supported: {remedy}"
                raise HttpError(400, text, self.path(name), "unsupported_parameter")

    def close(self) -> None:
        """Refuse what was not taken.

        Raises:
            HttpError: there is an unknown field; the message names it, and the one that may be meant.
        """
        for name in self._values:
            near = get_close_matches(name[:MAX_NAME], self._taken, 1)  # its time is quadratic
            meant = f"; is {near[0]!r} meant?" if near else "; leave it out"
            text = f"unknown field {self.path(name)[:200]!r}{meant}"
            raise HttpError(400, text, self.path(name)[:200], "unknown_parameter")


def _as_json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value)
