"""Parts of what the admin pages show. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.router.logic.ledger import Load

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.router.logic.endpoints import Endpoint
    from twinpool.router.shell.children import Child


def entry_of(endpoint: Endpoint, load: Load, warmth: int) -> dict[str, Any]:
    """Return an endpoint as ``/admin/endpoints`` shows it."""
    return {
        "id": endpoint.id,
        "uid": endpoint.uid,
        "name": endpoint.pod,
        "group": endpoint.group,
        "role": endpoint.role,
        "revision": endpoint.revision,
        "address": f"{endpoint.host}:{endpoint.port}",
        "wanted": endpoint.wanted,
        "admitted": endpoint.admitted,
        "draining": endpoint.draining,
        "kvTokens": endpoint.kv_tokens,
        **books_of(load),
        "cachedTokensUsed": warmth,
    }


def least_room(endpoints: Iterable[Endpoint]) -> int:
    """Return the tokens that every admitted decode worker has KV room for, as far as known; 0: of none."""
    known = (each.kv_tokens for each in endpoints if each.role == "decode" and each.admitted and each.kv_tokens)
    return min(known, default=0)


def loads_in(children: Iterable[Child]) -> dict[str, Load]:
    """Return what the data processes have at each endpoint, together."""
    loads: dict[str, Load] = {}
    for child in children:
        for identity, load in child.loads:
            mine = loads.setdefault(identity, Load())
            mine.tokens += load.tokens
            mine.requests += load.requests
            mine.prefill += load.prefill
            mine.unpulled += load.unpulled
    return loads


def books_of(load: Load) -> dict[str, float]:
    """Return the work of one endpoint as admin pages show it."""
    return {
        "inFlight": load.requests,
        "tokensInFlight": load.tokens,
        "prefillSeconds": load.backlog,
        "unpulledHandoffs": load.unpulled,
    }


def predictions_of(learnt: Mapping[str, tuple[float, int]]) -> dict[str, dict[str, float]]:
    """Return what a data process has learnt of its predictions: observed over foretold, and from how many samples."""
    return {name: {"factor": round(factor, 4), "samples": samples} for name, (factor, samples) in learnt.items()}
