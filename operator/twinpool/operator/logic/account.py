"""Routers get new tokens when their ServiceAccount is another one.

A pod's token is bound to its account's uid. When somebody deletes the account, it is made again, but the tokens of
running pods stay void until the kubelet renews them, most of an hour later: routers would see no pods any more. So the
Deployment notes the account that its pods were started with, and its pods are replaced when that is not the one that
exists. The note is on the Deployment itself, where it restarts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.operator.logic.merge import merge
from twinpool.operator.logic.names import ACCOUNT_ANNOTATION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.operator.logic.observed import Child

Body = dict[str, Any]


def with_account(deployment: Body, children: Mapping[tuple[str, str], Child]) -> Body:
    """Return a Deployment that notes its pods' account, and replaces its pods when that is not the noted one.

    ``children`` are the pool's objects by kind and name; the account's is that of the pod template.
    """
    account = children.get(("ServiceAccount", deployment["spec"]["template"]["spec"]["serviceAccountName"]))
    live = children.get(("Deployment", deployment["metadata"]["name"]))
    noted = live.annotation(ACCOUNT_ANNOTATION) if live else None
    started = _started_with(live) if live else None
    if account and not account.deleting:
        if noted and noted != account.uid:
            started = account.uid
        noted = account.uid
    note = {"metadata": {"annotations": {ACCOUNT_ANNOTATION: noted}}} if noted else {}
    restart = {"metadata": {"annotations": {ACCOUNT_ANNOTATION: started}}} if started else {}
    return merge(merge(deployment, note), {"spec": {"template": restart}} if restart else {})


def _started_with(live: Child) -> str | None:
    metadata = live.content.get("spec", {}).get("template", {}).get("metadata") or {}
    value: str | None = (metadata.get("annotations") or {}).get(ACCOUNT_ANNOTATION)
    return value
