"""How many groups a pool with ``scaling`` should have: the target of its status, within the limits of its spec.

Always true: an edit of the limits counts at once, whatever the target was; without a target the numbers of the spec do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.core import protocol
from twinpool.operator.logic.scaling import Limits, Pair, cheapest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from twinpool.core.scaling import Scaling
    from twinpool.core.spec import InferencePool, InferencePoolSpec
    from twinpool.operator.logic.groups import Group


def gpus(spec: InferencePoolSpec) -> dict[str, int]:
    """Return the GPUs of one group of each role; on the CPU each rank counts as one."""
    roles = ((name, getattr(spec, name)) for name in protocol.ROLES)
    return {name: role.ranks for name, role in roles if role is not None}


def limits(pool: InferencePool, scaling: Scaling) -> Limits:
    """Return what the numbers must keep to."""
    each, band = gpus(pool.spec), pool.spec.ratio
    return Limits(
        (scaling.prefill.min, scaling.prefill.max),
        (scaling.decode.min, scaling.decode.max),
        each.get("prefill", 1),
        each["decode"],
        scaling.gpu_budget,
        None if band is None else band.fractions,
    )


def target(pool: InferencePool, scaling: Scaling) -> Pair:
    """Return the numbers to have."""
    stored = pool.status.scaling
    if stored is not None:
        pair = stored.target.prefill, stored.target.decode
    else:
        pair = (pool.spec.prefill.replicas if pool.spec.prefill else 0), pool.spec.decode.replicas
    return cheapest(pair, limits(pool, scaling))


def there(existing: Iterable[Group]) -> Pair:
    """Return the groups that exist and stay, pending ones included."""
    roles = [group.role for group in existing if not group.retired]
    return roles.count("prefill"), roles.count("decode")
