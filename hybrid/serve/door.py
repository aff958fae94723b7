"""Prompts that were asked of an engine, and are not requests of it yet."""

from __future__ import annotations

from collections import OrderedDict
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
        self._by_namespace: OrderedDict[str, OrderedDict[Inbox, Asked]] = OrderedDict()  # both with the next one first
        self._namespaces: dict[Inbox, str] = {}

    def __len__(self) -> int:
        return len(self._namespaces)

    def __contains__(self, inbox: object) -> bool:
        return inbox in self._namespaces

    def __iter__(self) -> Iterator[tuple[Inbox, Asked]]:
        for own in self._by_namespace.values():
            yield from own.items()

    def add(self, inbox: Inbox, asked: Asked) -> None:
        """Another one waits; its outputs go to the inbox."""
        self._by_namespace.setdefault(asked.namespace, OrderedDict())[inbox] = asked
        self._namespaces[inbox] = asked.namespace

    def next(self) -> tuple[Inbox, Asked]:
        """Remove and return the one whose turn it is. There must be one."""
        namespace, own = next(iter(self._by_namespace.items()))
        inbox, asked = next(iter(own.items()))
        self._by_namespace.move_to_end(namespace)
        self.remove(inbox)
        return inbox, asked

    def put_back(self, inbox: Inbox, asked: Asked) -> None:
        """The one that was removed last could not be taken: it is the next again."""
        self.add(inbox, asked)
        self._by_namespace[asked.namespace].move_to_end(inbox, last=False)
        self._by_namespace.move_to_end(asked.namespace, last=False)

    def remove(self, inbox: Inbox) -> None:
        """Forget the one of an inbox, if it waits."""
        namespace = self._namespaces.pop(inbox, None)
        if namespace is None:
            return
        own = self._by_namespace[namespace]
        del own[inbox]
        if not own:
            del self._by_namespace[namespace]

    def mend(self) -> None:
        """Make it consistent after an exception in one of the calls. Who was added or removed then may be there."""
        for namespace in [name for name, own in self._by_namespace.items() if not own]:
            del self._by_namespace[namespace]
        self._namespaces = {inbox: asked.namespace for inbox, asked in self}
