"""How much of the traffic each revision gets while a rollout runs: as much as it has pairs for.

A handoff stays within one revision, so a new one with half of the prefill workers and a tenth of the decode workers can
do a tenth of the work. Choosing among all prefill workers alone would drown its decode worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from random import Random

    from twinpool.router.logic.endpoints import Directory, Endpoint


def shares(directory: Directory) -> dict[str, float]:
    """Return the weight of every revision that can hand off: the smaller one of its shares of both stages."""
    prefill: dict[str, int] = {}
    for endpoint in directory.prefill:
        prefill[endpoint.revision] = prefill.get(endpoint.revision, 0) + 1
    decode = {revision: len(directory.decode_by_revision[revision]) for revision in prefill}
    return {
        revision: min(count / len(directory.prefill), decode[revision] / sum(decode.values()))
        for revision, count in prefill.items()
    }


def of_one_revision(candidates: Sequence[Endpoint], weights: Mapping[str, float], rng: Random) -> Sequence[Endpoint]:
    """Return the candidates of one revision, drawn by weight; all of them while there is only one revision."""
    if len(weights) < 2:
        return candidates
    there = sorted({endpoint.revision for endpoint in candidates})
    (chosen,) = rng.choices(there, [weights[revision] for revision in there])
    return [endpoint for endpoint in candidates if endpoint.revision == chosen]
