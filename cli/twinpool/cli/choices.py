"""The part of ``twinpool explain`` that says what a pool's routers are at, and how they chose workers last."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console

from twinpool.cli.forward import Forwards
from twinpool.cli.pools import observe
from twinpool.cli.table import value_text
from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from twinpool.cli.kubectl import Kubectl

#: Choices of each data process that are told in words; JSON and YAML have all.
_TOLD = 8


def asked(kubectl: Kubectl, pool: str, seconds: float) -> dict[str, Any]:
    """Return what each router shows at ``/debug`` and ``/debug/decisions``, by pod; None of one that does not answer.

    Routers keep choices from the first look on, so there are two, ``seconds`` apart.

    Raises
    ------
    TwinpoolError
        When no router of the pool runs.
    """
    pods = observe(kubectl, pool)[0].pods
    routers = sorted(pod.name for pod in pods if pod.role == protocol.ROUTER_ROLE and pod.phase == "Running")
    if not routers:
        raise TwinpoolError(f"no router of {pool} runs", f"see `twinpool status {pool}`")
    with Forwards(kubectl) as forwards:

        def page(router: str, path: str) -> Any:
            text = forwards.page(router, protocol.ROUTER_ADMIN_PORT, path)
            return None if text is None else _read(text)

        for router in routers:
            page(router, "/debug/decisions")
        with Console(stderr=True).status(f"watching the routers of {pool} for {seconds:g} s"):
            time.sleep(seconds)
        return {
            router: {"debug": page(router, "/debug"), "decisions": page(router, "/debug/decisions")}
            for router in routers
        }


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def told(found: Mapping[str, Any], output: str) -> str:
    """Return what was found in words, or as JSON or YAML."""
    if output != "text":
        return value_text(dict(found), output)
    return "".join(f"{line}\n" for name, one in found.items() for line in _router(name, one["debug"], one["decisions"]))


def _router(name: str, debug: Any, decisions: Any) -> Iterator[str]:
    if not isinstance(debug, dict) or "processes" not in debug:
        yield f"{name}: its admin port does not answer; see `kubectl logs {name}`"
        return
    control = debug["control"]
    late = control["process"]["lag"]["worstMs"]
    yield (
        f"{name}: Twinpool {debug['versions']['twinpool']}, settings {debug['config']}, policy {debug['policy']}; "
        f"{control['admitted']} of {control['endpoints']} workers admitted; its loop was late by at most {late:g} ms"
    )
    kept = (decisions or {}).get("processes") or []
    for number, one in enumerate(debug["processes"]):
        yield from _process(number, one)
        yield from _choices(kept[number] if number < len(kept) else None)


def _process(number: int, one: Any) -> Iterator[str]:
    if one is None:
        yield f"  process {number} does not answer: it is stuck, or was just replaced"
        return
    yield (
        f"  process {number}: {one['clients']} clients, {one['running']} requests at workers, "
        f"{one['waiting']} waiting; its loop was late by at most {one['process']['lag']['worstMs']:g} ms in a minute"
    )
    for worker, opinion in one["breaker"].items():
        seconds = opinion.get("avoidedSeconds")
        yield f"    {worker}: " + (
            f"avoided for {seconds:g} s" if seconds is not None else f"share {opinion['share']:g}"
        )


def _choices(kept: Any) -> Iterator[str]:
    if not kept or not kept["decisions"]:
        return
    yield "    last choices (seconds that each worker would have cost; * chosen):"
    for one in kept["decisions"][-_TOLD:]:
        at = datetime.fromtimestamp(one["at"], UTC).strftime("%H:%M:%S")
        yield f"      {at} {one['choice']}, {one['promptTokens']} prompt tokens: {one['chosen']}{_options(one)}"


def _options(one: Mapping[str, Any]) -> str:
    if one["choice"] == "handoff":
        return f" (saves {one['saved']:g} s)"
    priced = [option for option in one["options"] if option["price"] is not None]
    words = [
        f"{option['worker']}{'*' if option['worker'] == one['chosen'] else ''} {option['price']:.3g}"
        + (f" ({option['held']} cached)" if option["held"] else "")
        for option in priced
    ]
    return f" of {', '.join(words)}" if words else ""
