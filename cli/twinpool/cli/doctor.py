"""``twinpool doctor``: why does my pool not serve? Reads the cluster, from CRD to engine, and says what to do."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from twinpool.cli.checks import CRD, Evidence, Unread, findings, secret_names
from twinpool.cli.kubectl import Kubectl, KubectlFailed
from twinpool.cli.pools import RESOURCE, observe
from twinpool.cli.table import Context, Format, Namespace, write_table, write_value

if TYPE_CHECKING:
    from collections.abc import Sequence

_OPERATOR = "--selector=app.kubernetes.io/name=twinpool-operator"


def doctor(
    pool: Annotated[str, Parameter(help="Name of the pool.")],
    *,
    namespace: Namespace = "",
    context: Context = "",
    output: Format = "text",
) -> int:
    """Check everything between the CRD and the engines of a pool, and say for each fault what to do.

    What you may not read is `unknown`. Exit code 1: at least one check failed.
    """
    found = list(findings(evidence(Kubectl(namespace, context), pool)))
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
