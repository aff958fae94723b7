"""What was asked of an engine, and is not a request of it yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hybrid.engine.sampling_params import SamplingParams
from hybrid.prompts.encode import Prompt
from hybrid.serve.inbox import Inbox


@dataclass(frozen=True, eq=False)
class Asked:
    """One prompt, as it was asked.

    Attributes:
        prompt, params, namespace, request_id: as for `Engine.add_request`.
    """

    prompt: Prompt
    params: SamplingParams | None
    namespace: str
    request_id: str | None


class Door:
    """Prompts that wait until the engine takes another request, by turns between namespaces."""

    def __init__(self) -> None:
        self._by_namespace: dict[str, dict[Asked, Inbox]] = {}

    def __len__(self) -> int:
        return sum(len(own) for own in list(self._by_namespace.values()))

    def __iter__(self) -> Iterator[tuple[Asked, Inbox]]:
        for own in self._by_namespace.values():
            yield from own.items()

    def add(self, asked: Asked, inbox: Inbox) -> None:
        """Another one waits; its outputs go to the inbox."""
        self._by_namespace.setdefault(asked.namespace, {})[asked] = inbox

    def next(self) -> tuple[Asked, Inbox]:
        """Remove and return the one whose turn it is. There must be one."""
        name, own = next(iter(self._by_namespace.items()))
        asked = next(iter(own))
        inbox = own.pop(asked)
        del self._by_namespace[name]
        if own:
            self._by_namespace[name] = own  # the last namespace from now on
        return asked, inbox

    def put_back(self, asked: Asked, inbox: Inbox) -> None:
        """The one that was removed last could not be taken: it is the next again."""
        own = {asked: inbox, **self._by_namespace.pop(asked.namespace, {})}
        self._by_namespace = {asked.namespace: own, **self._by_namespace}

    def remove(self, inbox: Inbox) -> None:
        """Forget what is for one inbox."""
        for asked in [asked for asked, other in self if other is inbox]:
            own = self._by_namespace[asked.namespace]
            del own[asked]
            if not own:
                del self._by_namespace[asked.namespace]
