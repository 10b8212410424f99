"""Whether the API server takes the pods of a new revision, asked before the first group goes for it.

A rollout without surge begins by letting a group go. If what replaces it can never be made, because ``podTemplate``
holds what the API server refuses, that group would be lost for nothing. So the sets of a revision of which nothing
exists yet are tried in a dry run first, and no group goes before. A revision with a group of each role needs no trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from twinpool.operator.logic.groups import Group
    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.revision import Revision
    from twinpool.operator.logic.rollout import Step


def untried(
    observed: Observed, newest: Revision, existing: Iterable[Group], wanted: Mapping[str, int], todo: Step
) -> tuple[str, ...]:
    """Return the roles whose sets must be tried before ``todo`` may be done; none where it lets nothing go."""
    if observed.tried is None or not todo.retire:
        return ()
    made = {group.role for group in existing if group.revision == newest.name}
    return tuple(
        role
        for role in newest.templates
        if wanted.get(role) and role not in made and (newest.name, role) not in observed.tried
    )
