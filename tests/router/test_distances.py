"""Pairs of workers by the network between them: a near one is preferred for as much as the pull is shorter."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from twinpool.core import protocol
from twinpool.core.distance import Place
from twinpool.core.protocol import RouterConfig
from twinpool.router.logic.chooser import Chooser
from twinpool.router.logic.distances import ASSUMED_BANDWIDTH, MOST, Distances, far
from twinpool.router.logic.endpoints import Endpoint, worker_of_pod
from twinpool.router.logic.ledger import Ledger
from twinpool.router.logic.request import Request, Route, read
from twinpool.router.shell import channel

BANDWIDTHS = (1e9, ASSUMED_BANDWIDTH, 100e9)


def at(role: Any, name: str, rack: str | None, host: str) -> Endpoint:
    return Endpoint(name, role, "h", 1, pod=name, place=Place(("cluster", rack, host), BANDWIDTHS))


P = [at("prefill", "p0", "r0", "n0"), at("prefill", "p1", "r1", "n1")]
D = [at("decode", "d0", "r0", "n2"), at("decode", "d1", "r1", "n3")]


def chooser(**config: Any) -> tuple[Chooser, Ledger]:
    ledger = Ledger()
    return Chooser(RouterConfig("p", "n", ("m",), policy="price", **config), ledger, random.Random(1)), ledger


def long(words: int = 20_000) -> Request:
    return read(Route.COMPLETIONS, json.dumps({"model": "m", "prompt": "word " * words, "max_tokens": 5}).encode())


@pytest.mark.parametrize("place", [0, 1])
def test_decode_is_chosen_near_the_worker_that_has_prefilled(place: int) -> None:
    ours, _ = chooser()
    asked = ours.asked(long())
    chosen = {ours.decode(asked, D, whole=False, source=P[place]).id for _ in range(20)}
    assert chosen == {f"d{place}"}
    whole = {ours.decode(asked, D, whole=True).id for _ in range(20)}
    assert whole == {"d0", "d1"}, "nothing is pulled"


def test_a_near_worker_is_left_when_it_is_busier_than_the_pull_is_shorter() -> None:
    ours, ledger = chooser()
    asked = ours.asked(long(2000))
    for _ in range(400):
        ledger.admit("d0", 20_000)
    assert {ours.decode(asked, D, whole=False, source=P[0]).id for _ in range(20)} == {"d1"}


def test_without_places_all_are_equally_far() -> None:
    ours, _ = chooser()
    bare = [replace(worker, place=None) for worker in (*P, *D)]
    asked = ours.asked(long())
    assert {ours.decode(asked, bare[2:], whole=False, source=bare[0]).id for _ in range(40)} == {"d0", "d1"}
    assert far(P[0], bare[2]) == far(bare[0], D[0]) == 1.0
    other = replace(D[0], place=Place(("cluster", "n2"), (1e9, 2e9)))
    assert far(P[0], other) == 1.0, "told of another network"


def test_a_prompt_is_not_handed_over_a_slow_link_where_reading_it_again_is_cheaper() -> None:
    busy, ledger = chooser(conditional="auto")
    asked = busy.asked(long())
    slow = [replace(worker, place=Place(("cluster", "far", worker.id), BANDWIDTHS)) for worker in D]
    for _ in range(2):
        ledger.admit("d0", 2000)
    assert [busy.hands_off(asked, P[:1], workers) for workers in (D[:1], slow[:1])] == [True, False]


def test_the_first_token_is_foretold_by_the_pair() -> None:
    ours, _ = chooser()
    asked = ours.asked(long())
    near, distant = (ours.first(asked, D[place], None, P[0]) for place in (0, 1))
    bare = ours.first(asked, D[0], None)
    assert near == bare, "the assumed link"
    assert near is not None
    assert distant is not None
    assert distant.pull > 10 * near.pull
    assert distant.seconds - distant.step > 10 * (near.seconds - near.step)


def test_nobody_is_nearer_or_farther_than_a_measurement_may_say() -> None:
    here = Place(("cluster", "x"), (1.0, 1e15))
    one, same = Endpoint("a", "prefill", "h", 1, place=here), Endpoint("b", "decode", "h", 1, place=here)
    other = replace(same, place=Place(("cluster", "y"), (1.0, 1e15)))
    assert (far(one, same), far(one, other)) == (1 / MOST, MOST)


def test_distances_follow_what_changes_and_forget_who_is_gone() -> None:
    distances = Distances()
    assert distances.far(P[0], D[1]) == distances.far(P[0], D[1]) == MOST
    moved = replace(D[1], place=D[0].place)
    assert distances.far(P[0], moved) == 1.0
    distances.keep({"p0"})
    assert distances.far(P[0], moved) == 1.0


def test_places_come_from_the_pods_and_reach_data_processes() -> None:
    place = P[0].place
    assert place is not None
    pod = {
        "metadata": {
            "name": "p0",
            "uid": "u",
            "labels": {protocol.LABEL_ROLE: "prefill"},
            "annotations": {protocol.ANNOTATION_PLACE: place.to_json()},
        },
        "spec": {"containers": [{"ports": [{"name": protocol.ENGINE_PORT_NAME, "containerPort": 8000}]}]},
        "status": {"podIP": "10.0.0.1"},
    }
    found = worker_of_pod(pod)
    assert found is not None
    assert found.endpoint is not None
    assert found.endpoint.place == place
    message = channel.Endpoints((found.endpoint, replace(found.endpoint, place=None)))
    sent = channel._encode(message)
    assert channel.decode_down(sent) == message
