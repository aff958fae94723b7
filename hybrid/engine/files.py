"""Saving what an engine has cached, and loading what another has saved."""

from __future__ import annotations

from collections.abc import Sequence

from hybrid.cache.cache import HybridCache
from hybrid.cache.explain import Explanation, explain
from hybrid.cache.fingerprints import fingerprint_of
from hybrid.engine.adapters import Adapters, namespace_of
from hybrid.engine.build import LoadedModel
from hybrid.engine.intake import Intake
from hybrid.key import Key
from hybrid.prompts.encode import Prompt, as_prompts
from hybrid.tiers.archive import Archive
from hybrid.tiers.fingerprint import Fingerprint


class Files:
    """The prompts of an engine as keys of its cache, and the fingerprint of its contents.

    Args:
        loaded: the model.
        cache: what is saved, and loaded into.
        intake: makes ids of prompts.
        adapters: those that prompts may name.
        deterministic: contents are bitwise those of cold runs.
    """

    def __init__(
        self, loaded: LoadedModel, cache: HybridCache, intake: Intake, adapters: Adapters, deterministic: bool
    ) -> None:
        self._loaded = loaded
        self._cache = cache
        self._intake = intake
        self._adapters = adapters
        self._deterministic = deterministic
        tiers = cache.tiers
        self._fingerprint: Fingerprint | None = tiers.fingerprint if tiers is not None else None  # known for the disk

    def fingerprint(self) -> Fingerprint:
        """What the contents of the cache are made with. The first call reads all weights, where there is
        no directory on disk, for which they have been read."""
        if self._fingerprint is None:
            self._fingerprint = fingerprint_of(
                self._cache.memory, self._cache.config, self._loaded.digest(), self._deterministic
            )
        return self._fingerprint

    def archive(
        self, prompts: Prompt | Sequence[Prompt] | None, namespace: str | None, adapter: str | None, after: int = 0
    ) -> Archive:
        """What is cached of prompts; None: of all of a namespace, or of all."""
        if prompts is not None:
            keys = [self.key(prompt, namespace, adapter) for prompt in as_prompts(prompts)]
            return self._cache.archive(keys, model=self.fingerprint(), after=after)
        space = self._namespace(namespace or "", adapter) if namespace is not None or adapter is not None else None
        return self._cache.archive(namespace=space, model=self.fingerprint(), after=after)

    def explain(self, prompt: Prompt, namespace: str, adapter: str | None) -> Explanation:
        """The hit that a prompt would have now."""
        key, tree = self.key(prompt, namespace, adapter), self._cache.tree
        return explain(tree, key, len(key) - 1, tree.peek(key, len(key) - 1))

    def key(self, prompt: Prompt, namespace: str | None, adapter: str | None) -> Key:
        """The key of a prompt."""
        return self._intake.encode(prompt).key(self._namespace(namespace or "", adapter))

    def _namespace(self, namespace: str, adapter: str | None) -> str:
        return namespace_of(self._adapters.named(adapter) if adapter is not None else None, namespace)
