"""What the server shows of itself: why a request's hit was what it was, what runs, and the tree."""

from __future__ import annotations

from functools import partial
from hashlib import blake2b
from importlib.resources import files
from itertools import islice
from typing import Any

from hybrid.cache.snapshot import take_snapshot
from hybrid.engine.adapters import split_namespace
from hybrid.engine.engine import Engine
from hybrid.observe.draw import make_page
from hybrid.server.call import Call
from hybrid.server.errors import HttpError
from hybrid.server.service import Server
from hybrid.server.tenants import PARTS, Caller, split_salt

NUM_ENDED = 30
"""Requests that ended, as the page shows them."""


async def explain(server: Server, call: Call) -> None:
    """Answer `GET /explain/{id}`: the hit of a request that runs or ended, and why it was not longer."""
    record = server.records.find(call.path_params["id"], call.tenant)
    if record is None:
        text = "no request of yours has this id; the latest 1000 that ended are known"
        raise HttpError(404, text, code="request_not_found")
    await call.respond(record.as_json())


async def page(server: Server, call: Call) -> None:
    """Answer `GET /`: the page, which asks `/live` and `/tree`."""
    text = files("hybrid.server").joinpath("page.html").read_bytes()
    policy = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'"
    headers = {"content-type": "text/html; charset=utf-8", "content-security-policy": policy}
    await call.respond(text, headers=headers | {"x-content-type-options": "nosniff", "cache-control": "no-cache"})


async def live(server: Server, call: Call) -> None:
    """Answer `GET /live`: what runs, what ended lately, and what the memory holds."""
    tenant, counts = call.tenant, server.records.counts
    names = {name for name, _ in counts} if tenant.sees_all else {tenant.name}
    prompt, cached = (sum(counts[name, kind] for name in names) for kind in ("prompt_tokens", "cached_tokens"))
    found: dict[str, Any] = {
        "model": server.name,
        "tenant": tenant.name,
        "live": [record.as_json() for record in islice(server.records.live(tenant), 200)],
        "ended": [record.as_json() for record in islice(server.records.ended(tenant), NUM_ENDED)],
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "requests": sum(counts[name, f"requests_{r}"] for name in names for r in ("stop", "length", "abort", "error")),
    }
    if tenant.sees_all:
        engine, cache = server.engine.stats(), server.engine.engine.cache.stats()
        found |= {
            "running": engine.running,
            "waiting": engine.waiting,
            "tokens_per_second": round(engine.tokens_per_second, 1),
            "memory": {name: size for name, size, _ in cache.kinds} | {"free": engine.bytes_free},
            "evicted_checkpoints": cache.evicted_checkpoints,
        }
    await call.respond(found)


async def tree(server: Server, call: Call) -> None:
    """Answer `GET /tree`: the page of `hybrid tree`, of the tenant's namespaces, without texts."""
    snapshot = await server.engine.call(partial(of_tenant, tenant=call.tenant, secret=server.secret))
    page = await server.beside(call, lambda: make_page(snapshot).encode())
    await call.respond(page, headers={"content-type": "text/html; charset=utf-8"})


def of_tenant(engine: Engine, tenant: Caller, secret: bytes) -> dict[str, Any]:
    """What a tenant may see of the tree: the nodes of its namespace, without tokens. In place of salts, which
    let in a caller that knows them, it has their digests.

    Args:
        secret: that keys them.
    """
    snapshot = take_snapshot(engine.cache.tree, engine.cache.stats(), engine.cache.tiers)
    places: dict[int, int] = {-1: -1}
    nodes: list[dict[str, Any]] = []
    for at, node in enumerate(snapshot["nodes"]):
        own, salt = split_salt(split_namespace(node["namespace"])[1])
        if not tenant.sees_all and own != tenant.namespace:
            continue
        places[at] = len(nodes)
        shown = f"{own}{PARTS}{blake2b(salt.encode(), digest_size=4, key=secret).hexdigest()}" if salt else own
        nodes.append({**node, "parent": places[node["parent"]], "ids": [], "namespace": shown})
    if tenant.sees_all:
        return {**snapshot, "nodes": nodes}
    return {**snapshot, "nodes": nodes, "lives": [], "totals": dict.fromkeys(snapshot["totals"], 0), "tiers": []}
