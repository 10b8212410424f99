"""What is decided about a pool's groups, before it is put into objects; the command line foretells from the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from twinpool.operator.logic import reprieve, scale_in, units
from twinpool.operator.logic.admission import argument
from twinpool.operator.logic.groups import Group, groups
from twinpool.operator.logic.ratio import wanted
from twinpool.operator.logic.revision import Revision, stored, surplus, target
from twinpool.operator.logic.rollout import State, Step, step
from twinpool.operator.logic.trial import untried

if TYPE_CHECKING:
    from collections.abc import Mapping

    from twinpool.operator.logic.observed import Observed
    from twinpool.operator.logic.settings import Settings


@dataclass(frozen=True, slots=True)
class Decision:
    """Which revision the pool is to have, and the next step towards it."""

    existing: tuple[Group, ...]
    newest: Revision
    #: The stored revisions and the newest one, by name.
    revisions: Mapping[str, Revision]
    #: Names of stored revisions beyond the history limit.
    beyond: frozenset[str]
    state: State
    todo: Step
    #: Roles whose sets are tried first; ``todo`` only keeps the numbers until then.
    trials: tuple[str, ...] = ()


def decide(observed: Observed, settings: Settings, now: float) -> Decision:
    """Return what is to be done about the pool's groups; ``now`` is in seconds since 1970."""
    pool = observed.pool
    existing, known = groups(observed), stored(observed)
    newest = target(observed, known, existing, settings)
    existing = reprieve.returned(pool, existing, newest.name)
    leaving_first = scale_in.order(existing, scale_in.facts(observed, existing, newest.name))
    state = units.state(pool, leaving_first, newest.name, known, now)
    todo = step(state)
    trials = untried(observed, newest, existing, wanted(pool), todo)
    # Whose engines would not start: nothing goes for them.
    held = bool(trials) or (argument(pool) is not None and not any(g.revision == newest.name for g in existing))
    return Decision(
        existing=existing,
        newest=newest,
        revisions={revision.name: revision for revision in (*known, newest)},
        beyond=frozenset(surplus(known, newest.name, existing, pool.spec.rollout.revision_history_limit)),
        state=state,
        todo=step(replace(state, paused=True)) if held else todo,
        trials=trials,
    )
