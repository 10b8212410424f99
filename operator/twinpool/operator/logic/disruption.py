"""PodDisruptionBudgets: one per role over the pods of all its groups and ranks.

``maxUnavailable: 1`` means that one eviction blocks every other group of the role until the evicted one is back, which
for a worker means until routers list it again (its gate). ``AlwaysAllow`` lets pods that do not serve go, as a broken
pool must never hold up a node drain. A role of one group can be evicted too: refusing would hold the node for ever.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from twinpool.core import protocol
from twinpool.operator.logic import names

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.core.spec import InferencePool

Body = dict[str, Any]


def disruption_budget(pool: InferencePool, role: str) -> Body:
    """Return the budget of a role."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(pool, names.child_name(pool, role), role),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector(pool, role)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def exposed(wanted: Mapping[str, int], scales: bool = False) -> str:
    """Return which roles an eviction can interrupt, empty when every role has a second group.

    ``scales`` says whether the numbers follow the work, within bounds that are then what to change.
    """
    alone = [role for role in protocol.ROLES if wanted.get(role) == 1]
    if not alone:
        return ""
    fields = " and ".join(f"scaling.{role}.min" if scales else f"{role}.replicas" for role in alone)
    subject = f"{' and '.join(alone)} {'has' if len(alone) == 1 else 'have'}"
    return f"{subject} one group, so evicting it (a node drain) interrupts; set {fields} to 2 to serve through it"
