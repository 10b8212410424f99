"""``twinpool doctor``: why does my pool not serve? Reads the cluster, from CRD to engine, and says what to do."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twinpool.cli.checks import CRD, Answer, Evidence, Unread, findings, secret_names
from twinpool.cli.forward import Forwards
from twinpool.cli.kubectl import Kubectl, KubectlFailed
from twinpool.cli.options import Context, Format, Namespace  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import RESOURCE, observe
from twinpool.cli.table import write_table, write_value
from twinpool.core import protocol
from twinpool.operator.logic import names

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.operator.logic.observed import Observed

#: Seconds that one token may take.
_PATIENCE = 60.0
_OPERATOR = "--selector=app.kubernetes.io/name=twinpool-operator"


def doctor(
    pool: Annotated[str, Parameter(help="Name of the pool.")],
    *,
    namespace: Namespace = "",
    context: Context = "",
    ask: bool = True,
    output: Format = "text",
) -> int:
    """Check everything between the CRD and the engines of a pool, and say for each fault what to do.

    What you may not read is `unknown`. Exit code 1: at least one check failed.

    Parameters
    ----------
    ask
        Ask a router for one token, through `kubectl port-forward`.
    """
    kubectl = Kubectl(namespace, context)
    seen = evidence(kubectl, pool)
    if ask and seen.observed is not None:
        seen = replace(seen, answer=answer(kubectl, seen.observed))
    found = list(findings(seen))
    if output == "text":
        write_table(("CHECK", "RESULT", "WHAT WAS FOUND"), [(item.check, item.outcome, item.detail) for item in found])
        for item in found:
            if item.outcome == "failed" and item.fix:
                sys.stdout.write(f"\n{item.check}: {item.fix}\n")
    else:
        write_value([asdict(item) for item in found], output)
    return 1 if any(item.outcome == "failed" for item in found) else 0


def evidence(kubectl: Kubectl, name: str) -> Evidence:
    """Read what the checks need; what is absent or forbidden is told as such.

    Raises
    ------
    KubectlFailed
        When the cluster cannot be reached at all.
    """
    crd = _get(kubectl, "customresourcedefinitions", CRD)
    stored = _get(kubectl, RESOURCE, name)
    deployments = _get(kubectl, "deployments", "--all-namespaces", _OPERATOR)
    operators: Sequence[Any] | Unread = deployments if isinstance(deployments, Unread) else deployments["items"]
    if isinstance(stored, Unread):
        return Evidence(name, crd, operators, stored, None, {})
    secrets = {secret: _exists(kubectl, secret) for secret in secret_names(stored)}
    return Evidence(name, crd, operators, stored, observe(kubectl, name)[0], secrets)


def answer(kubectl: Kubectl, observed: Observed) -> Answer | str:
    """Return what a ready router answers to a question for one token, or why none was asked."""
    spec = observed.pool.spec
    routers = [pod.name for pod in observed.pods if pod.role == names.ROUTER and pod.ready]
    if not routers:
        return "no router is ready"
    if spec.routing.tls is not None or spec.routing.auth is not None:
        return "the endpoint asks for HTTPS or an API key: ask it yourself"
    body = json.dumps({"model": spec.model.name, "prompt": "The capital of France is", "max_tokens": 1}).encode()
    with Forwards(kubectl) as forwards:
        came = forwards.post(routers[0], protocol.ROUTER_PORT, "/v1/completions", body, _PATIENCE)
    return Answer(routers[0], *(came or (0, "")))


def _get(kubectl: Kubectl, *arguments: str) -> dict[str, Any] | Unread:
    try:
        return kubectl.get(*arguments)
    except KubectlFailed as error:
        return _unread(error)


def _unread(error: KubectlFailed) -> Unread:
    """Return why something could not be read; a cluster that cannot be reached is the caller's only finding."""
    text = str(error)
    absent = "NotFound" in text or "the server doesn't have a resource type" in text
    if not absent and "Forbidden" not in text:
        raise error
    return Unread(absent, text)


def _exists(kubectl: Kubectl, secret: str) -> bool | None:
    """Say whether a Secret is there, None when that may not be read; its content is never asked for."""
    try:
        kubectl.run("get", "secret", secret, "--output=name")
    except KubectlFailed as error:
        return False if _unread(error).absent else None
    return True
