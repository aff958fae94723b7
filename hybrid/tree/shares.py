"""Shares of the memory: the part of it that a tenant's nodes may hold before they are evicted first."""

from __future__ import annotations

from collections.abc import Mapping

from hybrid.tree.node import Tenant


class Shares:
    """The tenants that have a share of a memory.

    Args:
        of: parts of the memory, by tenant.
        num_pages, num_checkpoints: how many of one kind alone the memory would hold.
        are_apart: pages and checkpoints have memories of their own.

    Attributes:
        of: as given.
    """

    def __init__(
        self, of: Mapping[Tenant, float], num_pages: int = 1, num_checkpoints: int = 1, are_apart: bool = False
    ) -> None:
        self.of = of
        self._page, self._checkpoint = 1 / num_pages, 1 / num_checkpoints
        self._are_apart = are_apart

    def held(self, tenant: Tenant) -> float:
        """The part of the memory that a tenant has: of the scarcer kind where pages and checkpoints are apart."""
        parts = tenant.num_pages * self._page, tenant.num_checkpoints * self._checkpoint
        return max(parts) if self._are_apart else sum(parts)

    def excess(self, tenant: Tenant, pages: bool = True, checkpoints: bool = True) -> float:
        """How many times its share a tenant has: over 1, its nodes are evicted first; 0: it has no limit.

        Args:
            pages, checkpoints: which kinds memory is needed of, where they are apart.
        """
        if tenant not in self.of:
            return 0.0
        if not self._are_apart:
            return self.held(tenant) / self.of[tenant]
        parts = pages * tenant.num_pages * self._page, checkpoints * tenant.num_checkpoints * self._checkpoint
        return max(parts) / self.of[tenant]
