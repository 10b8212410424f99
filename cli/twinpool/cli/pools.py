"""A pool on a cluster, seen as the operator sees it: with its groups, pods and stored revisions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from twinpool.cli.kubectl import KubectlFailed
from twinpool.core import protocol
from twinpool.core.errors import TwinpoolError
from twinpool.core.spec import InferencePool
from twinpool.operator.logic.observed import Observed, read_child, read_pod

if TYPE_CHECKING:
    from pathlib import Path

    from twinpool.cli.kubectl import Kubectl

RESOURCE = f"{protocol.PLURAL}.{protocol.GROUP}"


def observe(kubectl: Kubectl, name: str) -> tuple[Observed, dict[str, Any]]:
    """Return what belongs to a pool, and the pool as the API server holds it."""
    stored = kubectl.get(RESOURCE, name)
    pool = _parsed(stored, f"pool {name}")
    selector = f"{protocol.LABEL_MANAGED_BY}={protocol.MANAGED_BY},{protocol.LABEL_POOL}={name}"
    items = kubectl.get("statefulsets,pods,controllerrevisions", f"--selector={selector}")["items"]
    children = [read_child(item["kind"], item) for item in items if _owner(item) == pool.metadata.uid]
    pods = [read_pod(item) for item in items if item["kind"] == "Pod"]
    return Observed(pool, tuple(children), tuple(pods)), stored


def with_manifest(kubectl: Kubectl, file: Path) -> Observed:
    """Return what belongs to the pool of a manifest, as if the manifest had been applied just now."""
    wanted = from_file(file)
    try:
        observed, _ = observe(kubectl, wanted.metadata.name)
    except KubectlFailed as error:
        if "NotFound" not in str(error):
            raise
        return Observed(wanted)
    edited = observed.pool.model_copy(update={"spec": wanted.spec})
    return Observed(edited, observed.children, observed.pods)


def from_file(file: Path) -> InferencePool:
    """Return the one pool of a manifest.

    Raises
    ------
    TwinpoolError
        When the file cannot be read, holds another number of pools, or one that does not fit the API types.
    """
    try:
        documents = [item for item in yaml.safe_load_all(file.read_text()) if isinstance(item, dict)]
    except (OSError, yaml.YAMLError) as error:
        raise TwinpoolError(f"{file} cannot be read: {error}", "give a YAML file with one InferencePool") from None
    pools = [item for item in documents if item.get("apiVersion") == protocol.API_VERSION]
    if len(pools) != 1:
        raise TwinpoolError(f"{file} holds {len(pools)} pools", "give a YAML file with one InferencePool")
    return _parsed(pools[0], str(file))


def _parsed(document: dict[str, Any], where: str) -> InferencePool:
    try:
        return InferencePool.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise TwinpoolError(f"{where}: {place}: {first['msg']}", "see `twinpool validate`") from None


def _owner(item: dict[str, Any]) -> str:
    owners = [owner for owner in item["metadata"].get("ownerReferences") or () if owner.get("controller")]
    return str(owners[0]["uid"]) if owners else ""
