"""What ``twinpool plan`` says comes true: random clusters of nodes without processes, real control plane and operator.

A sample; ``make placement-clusters`` plays 200.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from bench.placement.live.__main__ import control_plane, play_all

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.placement.live.play import Outcome
    from twinpool.localcluster.cluster import LocalCluster

pytestmark = pytest.mark.cluster

#: Seeds that have, together, pools of one and of two roles, groups over several nodes, shortages of several kinds,
#: cordoned, tainted and dead nodes, contradicting labels, and pods of others that compete.
SEEDS = (1, 4, 5, 6, 7, 8, 9, 17, 20, 21)


@pytest.fixture(scope="module")
def hollow(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A control plane with the operator, whose other nodes are objects only."""
    if request.config.getoption("--cluster") == "external":
        pytest.skip("the nodes must be ours")
    request.getfixturevalue("binaries")
    with control_plane() as local:
        yield local


async def test_what_was_foretold_is_what_was_applied(hollow: LocalCluster) -> None:
    played: list[Outcome] = await play_all(hollow, SEEDS)
    assert [(outcome.seed, outcome.wrong) for outcome in played if outcome.wrong] == []
    assert any(outcome.competed for outcome in played)
    assert any(outcome.short for outcome in played)
