"""Who calls: keys, and what belongs to each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

from hybrid.checks import shown
from hybrid.engine.config import TenantConfig
from hybrid.errors import ArgumentError
from hybrid.server.errors import HttpError

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that no other one reaches."""


@dataclass(frozen=True)
class Caller:
    """A sender of requests.

    Attributes:
        name: for counts and the page; of the engine's tenant.
        namespace: of the cache; tenants with the same one share what is cached.
        sees_all: `/metrics`, `/explain` and the page show the requests of all tenants.
        config: its weight and limits in the engine.
    """

    name: str
    namespace: str
    sees_all: bool = False
    config: TenantConfig = field(default_factory=TenantConfig)

    def namespace_of(self, salt: str) -> str:
        """The namespace of the engine for its requests with a salt; empty: without."""
        return f"{self.namespace}{PARTS}{salt}" if salt else self.namespace


PARTS = "/"
"""Parts a salt from the namespace of a tenant, which has none."""


def split_salt(namespace: str) -> tuple[str, str]:
    """The namespace of a tenant, and the salt, of which `Caller.namespace_of` made a namespace."""
    own, _, salt = namespace.partition(PARTS)
    return own, salt


EVERYONE = Caller("", "", sees_all=True)
"""The tenant of a server without keys, or with one for all."""


class Tenants:
    """The keys of a server.

    Args:
        keys: tenants by their keys; empty: every caller is `EVERYONE`.
        hosts: names that a `Host` header may have; empty: any. Of a server without keys they keep pages of other sites
            out that a browser here has open.
    """

    def __init__(self, keys: Mapping[str, Caller], hosts: Iterable[str] = ()) -> None:
        self._by_digest = {_digest(key.encode()): tenant for key, tenant in keys.items()}
        self._hosts = frozenset(hosts)

    def of(self, headers: Mapping[bytes, bytes]) -> Caller:
        """The tenant of a call.

        Args:
            headers: of the call, names in lower case.

        Raises:
            HttpError: it has no key, or a wrong one.
        """
        if not self._by_digest:
            return EVERYONE
        given = headers.get(b"x-api-key", b"")
        scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer":
            given = token.strip()
        if not given:
            text = "a key is needed: send 'Authorization: Bearer KEY', or 'x-api-key: KEY'"
            raise HttpError(401, text, code="missing_api_key", headers={"www-authenticate": "Bearer"})
        tenant = self._by_digest.get(_digest(given))  # digests of guesses say nothing about a key by their time
        if tenant is None:
            raise HttpError(
                401, "this key is not known", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return tenant

    def check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Refuse calls that a page of another site makes in a browser.

        Raises:
            HttpError: it is from another site, or to a name that is not this server's.
        """
        host = headers.get(b"host", b"").decode("latin-1").lower()
        if self._hosts and _name(host) not in self._hosts:
            raise HttpError(
                403, f"the Host {host!r:.100} is not this server's: without a key it answers to its own names"
            )
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower().partition("://")[2] != host:
            raise HttpError(
                403, f"calls from pages of other sites are refused (Origin {origin.decode('latin-1')!r:.100})"
            )


def _name(host: str) -> str:
    """The name in a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


KNOWN: dict[str, type[Any]] = {"key": str, "namespace": str, "sees_all": bool}
"""Fields of a tenant in a file of keys, and their types. The others are those of `TenantConfig`."""

LIMITS = tuple(field.name for field in fields(TenantConfig))


def read_keys(path: str | Path) -> dict[str, Caller]:
    """Read a file of keys: `{"NAME": {"key": "...", "namespace": "...", "sees_all": false, "max_requests": 8}}`, where
    all but the key may be absent. Without `namespace` a tenant has one of its own.

    Raises:
        ArgumentError: the file is not as described.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except ValueError as error:
        raise ArgumentError(f"{path} is not JSON: {error!s:.200}") from None
    if not isinstance(content, dict) or not content:
        raise ArgumentError(f"{path} must hold a JSON object, NAME: {{'key': ...}} for each tenant")
    found: dict[str, Caller] = {}
    for name, entry in content.items():
        where = f"{path}: {name!r}"
        if not isinstance(entry, dict) or "key" not in entry or not set(entry) <= {*KNOWN, *LIMITS}:
            others = ", ".join(map(repr, ("namespace", "sees_all", *LIMITS)))
            raise ArgumentError(f"{where} must have 'key', and may have {others}")
        if not name or PARTS in name or PARTS in str(entry.get("namespace")):
            raise ArgumentError(f"{where}: names are not empty, and neither they nor namespaces have a {PARTS!r}")
        key, namespace, sees_all = (_checked(where, field, entry) for field in KNOWN)
        try:
            config = TenantConfig(**{limit: entry[limit] for limit in LIMITS if limit in entry})
        except ArgumentError as error:
            raise ArgumentError(f"{where}: {error}") from None
        if key in found:
            raise ArgumentError(f"{where} has the key of {found[key].name!r}; give each its own")
        found[key] = Caller(name, name if namespace is None else namespace, bool(sees_all), config)
    return found


def _checked(where: str, field: str, entry: dict[str, Any]) -> Any:
    """One field of an entry; None: it is absent."""
    value, kind = entry.get(field), KNOWN[field]
    if value is not None and (not isinstance(value, kind) or value == ""):
        raise ArgumentError(f"{where}: {field} must be a {kind.__name__}; got {shown(value)}")
    return value
