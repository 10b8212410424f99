"""When routers are asked, and when a plan waits for their first answer. An idle pool asks nobody,
unless it has renderers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twinpool.operator.logic import books
from twinpool.operator.logic.drain import draining
from twinpool.operator.logic.gate import waits
from twinpool.operator.logic.groups import groups
from twinpool.operator.logic.ratio import wanted
from twinpool.operator.logic.renderer_objects import wanted as wanted_renderers
from twinpool.operator.logic.scale_in import choosing

if TYPE_CHECKING:
    from twinpool.operator.logic.observed import Observed, PodView


def to_ask(observed: Observed) -> list[PodView]:
    """Return the routers to ask for this pool: none while nothing waits for what they say.

    Those of a pool with renderers are always asked, because only they see whether renderers are right.
    """
    existing = groups(observed)
    waiting = any(waits(group) or draining(group) for group in existing) or _chooses(observed)
    if waiting or wanted_renderers(observed.pool):
        return books.routers(observed.pods)
    return []


def hold(observed: Observed) -> bool:
    """Return whether planning must wait for the first answers: a group is to be chosen by the work it has."""
    return observed.reports is None and _chooses(observed)


def _chooses(observed: Observed) -> bool:
    return choosing(observed, groups(observed), wanted(observed.pool))
