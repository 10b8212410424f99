"""What preflights measured beside what the levels of the network promise."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import pytest

from bench.placement.cases import LABELS
from twinpool.core import protocol
from twinpool.core.status import SlowLink
from twinpool.core.topology import PRESETS, paths, topology
from twinpool.operator.logic import names
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.interconnect import (
    Link,
    Note,
    Preflight,
    between,
    noted,
    noting,
    read_preflight,
    to_ask,
    to_read,
)
from twinpool.operator.logic.observed import Child, ContainerView, Observed, PodView
from twinpool.operator.logic.slow_links import MOST, REMEMBERED, known, remembered, verified

if TYPE_CHECKING:
    from collections.abc import Callable

    from twinpool.core.spec import InferencePool

    Make = Callable[..., InferencePool]

NOW = 1_000_000.0
TOPOLOGY = topology(PRESETS["topograph"])
RACK, OTHER = {LABELS["rack"]: "r1"}, {LABELS["rack"]: "r2"}
NODES = {"a": RACK, "b": RACK, "c": OTHER}


def pod(rank: int, node: str, **changes: Any) -> PodView:
    made = PodView(
        f"g-{rank}",
        "decode",
        "g",
        phase="Running",
        uid=f"u{rank}",
        rank=rank,
        address="10.0.0.1",
        node=node,
        containers=(ContainerView("engine", "i"),),
    )
    return dataclasses.replace(made, **changes)


def group(*pods: PodView, note: str = "", name: str = "g", retired: bool = False, **config: Any) -> Group:
    given = {"engine": "vllm", "tensor": 2, "nodes": 2, **config}
    settings = protocol.WorkerConfig("p", "ns", "decode", "r", model="m", model_path="m", **given)
    marks = {names.RETIRED_ANNOTATION: "true"} if retired else {}
    marks |= {names.INTERCONNECT_ANNOTATION: note} if note else {}
    env = [{"name": protocol.WORKER_CONFIG_ENV, "value": settings.to_json()}]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    content = {"metadata": {"annotations": marks, "labels": {}}, "spec": {"replicas": 2, "template": template}}
    return Group(Child("StatefulSet", name, f"u{name}", "7", content), "decode", "r", 1, pods, 2)


def several(*links: tuple[str, str, float], outcome: str = "passed") -> dict[str, Any]:
    found = [
        {"first": f"{first} (rank 0)", "second": f"{second} (rank 1)", "latency": 1e-5, "bandwidth": bandwidth}
        for first, second, bandwidth in links
    ]
    return {"outcome": outcome, "problem": "", "backend": "nccl", "links": found}


def said(bandwidth: float, *, first: str = "g-0", second: str = "g-1", outcome: str = "passed") -> dict[str, Any]:
    link = {"first": f"{first} (rank 0)", "second": f"{second} (rank 1)", "latency": 1e-5, "bandwidth": bandwidth}
    return {"outcome": outcome, "problem": "", "backend": "nccl", "links": [link]}


PAIR = group(pod(0, "a"), pod(1, "b"))


def note_of(
    pool: InferencePool, document: Any, found: Group = PAIR, *, sees_nodes: bool = True, labels: Any = None
) -> Note | None:
    answer = read_preflight(document)
    assert answer is not None
    seen = NODES if labels is None else labels
    observed = Observed(pool, preflights={"u0": answer}, node_labels=seen)
    actions = noting(observed, [found], TOPOLOGY, NOW, sees_nodes=sees_nodes)
    if not actions:
        return None
    (action,) = actions
    assert (action.kind, action.name, action.key) == ("StatefulSet", "g", names.INTERCONNECT_ANNOTATION)
    return Note.from_json(action.value or "")


@pytest.mark.parametrize(
    ("changes", "config"),
    [
        ({"phase": "Pending"}, {}),
        ({"address": ""}, {}),
        ({"deadline": 1.0}, {}),
        ({"rank": 1}, {}),
        ({}, {"engine": "simulated"}),
        ({}, {"preflight": False}),
        ({}, {"tensor": 1, "nodes": 1}),
    ],
)
def test_who_is_asked(changes: dict[str, Any], config: dict[str, Any]) -> None:
    assert to_ask([PAIR]) == [PAIR.leader]
    assert to_ask([group(dataclasses.replace(PAIR.pods[0], **changes), **config)]) == []
    assert to_ask([group(*PAIR.pods, retired=True)]) == []


def test_labels_are_read_of_the_nodes_of_groups_that_answered(make_pool: Make) -> None:
    other = group(pod(0, "c", uid="v0"), pod(1, ""), name="h")
    silent = Observed(make_pool())
    assert to_read(silent, [PAIR, other, group()]) == set()
    assert to_read(dataclasses.replace(silent, preflights={"u0": Preflight("passed")}), [PAIR, other]) == {"a", "b"}
    assert to_read(dataclasses.replace(silent, preflights={"v0": Preflight("passed")}), [other]) == {"c"}


@pytest.mark.parametrize("document", [None, [], {}, {"outcome": "passed"}, {**said(1.0), "links": [{}]}])
def test_what_is_no_answer(document: Any) -> None:
    assert read_preflight(document) is None


def test_a_link_is_judged_by_the_level_that_its_nodes_share(make_pool: Make) -> None:
    note = note_of(make_pool(), said(24e9))
    assert note is not None
    slow = Link(("a", "b"), 24_000_000_000, "rack", 50_000_000_000)
    assert (note.worst, note.slow, note.nodes, note.inside, note.at) == (slow, (slow,), ("a", "b"), False, NOW)
    assert slow.words == "24 GB/s of the 50 GB/s that level rack promises between nodes a and b"
    enough = note_of(make_pool(), said(26e9))
    assert enough is not None
    assert (enough.slow, enough.outcome) == ((), "passed")
    apart = note_of(make_pool(), said(2e9), group(pod(0, "a"), pod(1, "c")))
    assert apart is not None
    assert apart.slow == ()
    assert apart.worst == Link(("a", "c"), 2_000_000_000, "cluster", 3_125_000_000)


def test_the_gpus_of_one_node_are_no_nvlink_by_assumption(make_pool: Make) -> None:
    note = note_of(make_pool(), said(20e9, second="g-0"), group(pod(0, "a"), tensor=2, nodes=1))
    assert note is not None
    assert note.inside
    assert note.slow[0].level == "host"
    assert note.slow[0].words == "20 GB/s of the 450 GB/s that level host promises between the GPUs of node a"


def test_nothing_is_noted_before_the_nodes_are_known(make_pool: Make) -> None:
    assert note_of(make_pool(), said(1e9), labels={"a": RACK}) is None
    silent = Observed(make_pool(), node_labels=NODES)
    assert noting(silent, [PAIR], TOPOLOGY, NOW, sees_nodes=True) == []
    blind = note_of(make_pool(), said(1e6), sees_nodes=False, labels={})
    assert blind is not None
    assert (blind.slow, blind.worst) == ((), Link(("a", "b"), 1_000_000))


def test_links_of_strangers_are_left_out(make_pool: Make) -> None:
    for names_ in ({"first": "x-0"}, {"second": "x-1"}):
        note = note_of(make_pool(), said(1e9, **names_))
        assert note is not None
        assert (note.worst, note.slow) == (None, ())


def test_a_note_is_about_one_start_of_the_leader(make_pool: Make) -> None:
    note = note_of(make_pool(), said(1e9))
    assert note is not None
    there = group(*PAIR.pods, note=note.to_json())
    assert noted(there) == note
    assert to_ask([there]) == []
    again = dataclasses.replace(PAIR.pods[0], containers=(ContainerView("engine", "i", restarts=1),))
    assert noted(group(again, PAIR.pods[1], note=note.to_json())) is None
    assert noted(group(note=note.to_json())) is None, "no leader"


def test_the_median_of_each_level_is_noted(make_pool: Make) -> None:
    trio = group(pod(0, "a"), pod(1, "b"), pod(2, "c"))
    answer = several(("g-0", "g-1", 30e9), ("g-0", "g-2", 3e9), ("g-1", "g-2", 2e9), ("g-0", "g-0", 400e9))
    note = note_of(make_pool(), answer, trio)
    assert note is not None
    assert [(item.level, item.pairs, item.bandwidth) for item in note.levels] == [
        ("cluster", 2, 2e9),
        ("host", 1, 400e9),
        ("rack", 1, 30e9),
    ]
    assert Note.from_json(note.to_json()) == note
    broken = note_of(make_pool(), {**answer, "outcome": "unfinished"}, trio)
    assert broken is not None
    assert broken.levels == (), "what broke off tells nothing of the network"
    blind = note_of(make_pool(), answer, trio, sees_nodes=False, labels={})
    assert blind is not None
    assert blind.levels == (), "without labels nobody knows the level"
    older = json.loads(note.to_json())
    del older["levels"]
    earlier = Note.from_json(json.dumps(older))
    assert earlier is not None, "an older operator noted no levels"
    assert earlier.levels == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", json.dumps({"leader": "x"})])
def test_what_is_no_note(text: str) -> None:
    assert Note.from_json(text) is None


def test_the_level_between_two_nodes() -> None:
    labels = {
        "a": {LABELS["block"]: "b1", LABELS["rack"]: "r1"},
        "b": {LABELS["block"]: "b1", LABELS["rack"]: "r2"},
        "c": {LABELS["block"]: "b1"},
        "d": {LABELS["block"]: "b2", LABELS["rack"]: "r1"},
    }
    where, _ = paths(TOPOLOGY, labels)
    assert between(TOPOLOGY, where["a"], where["b"]).name == "block"
    assert between(TOPOLOGY, where["a"], where["a"]).name == "host"
    assert between(TOPOLOGY, where["a"], where["c"]).name == "block"
    assert between(TOPOLOGY, where["a"], where["d"]).name == "cluster"


SLOW = Link(("a", "b"), 24_000_000_000, "rack", 50_000_000_000)
NOTE = Note("u0/0", NOW, "passed", worst=SLOW, slow=(SLOW,), nodes=("a", "b"))


def with_note(**changes: Any) -> Group:
    return group(*PAIR.pods, note=dataclasses.replace(NOTE, **changes).to_json())


def test_what_the_condition_says() -> None:
    assert verified([group(*PAIR.pods, engine="simulated")]) is None
    assert verified([PAIR]) == ("Unknown", "NotMeasured", "the links of group g have not been measured yet")
    status, reason, text = verified([with_note()]) or ("", "", "")
    assert (status, reason) == ("False", "SlowLink")
    assert text.startswith("group g: 24 GB/s of the 50 GB/s that level rack promises between nodes a and b - look at")
    worse = Link(("a", "b"), 900_000, "rack", 50_000_000_000)
    _, _, both = verified([with_note(), with_note(slow=(worse,))]) or ("", "", "")
    assert "900 kB/s of" in both
    assert "(1 more slow links)" in both
    good = Link(("a", "b"), 40_000_000, "rack", 50_000_000)
    fine = verified([with_note(slow=(), worst=good)])
    assert fine == (
        "True",
        "AsPromised",
        "the worst link of 1 groups carries 40 MB/s of the 50 MB/s that level rack promises between nodes a and b",
    )


def test_what_was_not_measured_is_unknown() -> None:
    broken = verified([with_note(slow=(), outcome="unfinished", problem="rank 3 went")])
    assert broken == ("Unknown", "PreflightUnfinished", "group g: rank 3 went")
    skipped = verified([with_note(slow=(), outcome="skipped")])
    assert skipped == ("Unknown", "PreflightSkipped", "group g: see /preflight of its leader's launcher")
    blind = verified([with_note(slow=(), worst=Link(("a", "b"), 1_000_000))])
    assert blind is not None
    assert blind[:2] == ("Unknown", "NothingPromised")
    assert "carries 1 MB/s between nodes a and b" in blind[2]
    nothing = verified([with_note(slow=(), worst=None)])
    assert nothing is not None
    assert nothing[2].startswith("no link was measured")


def entry(*nodes: str, at: str = "1970-01-12T13:46:40Z") -> SlowLink:
    return SlowLink(nodes=nodes, level="rack", measured=1, promised=10, since=at)


def with_links(make_pool: Make, *links: SlowLink) -> InferencePool:
    pool = make_pool()
    return pool.model_copy(update={"status": pool.status.model_copy(update={"slow_links": links})})


def nodes_of(found: list[dict[str, Any]]) -> list[list[str]]:
    return [list(item["nodes"]) for item in found]


def test_a_slow_link_outlives_its_group_for_a_day(make_pool: Make) -> None:
    (flagged,) = remembered(make_pool(), [with_note()], NOW)
    assert flagged == {
        "nodes": ["a", "b"],
        "level": "rack",
        "measured": SLOW.measured,
        "promised": SLOW.promised,
        "since": "1970-01-12T13:46:40Z",
    }
    pool = with_links(make_pool, SlowLink.model_validate(flagged))
    assert remembered(pool, [], NOW + REMEMBERED - 1) == [flagged]
    assert remembered(pool, [], NOW + REMEMBERED) == []
    assert known([pool, make_pool()]) == {frozenset({"a", "b"})}


def test_a_later_measurement_clears_a_link(make_pool: Make) -> None:
    pool = with_links(make_pool, entry("a", "b"), entry("a"))
    later = with_note(at=NOW + 5, slow=(), worst=None)
    assert nodes_of(remembered(pool, [later], NOW + 6)) == [["a"]], "links inside a node were not measured"
    inside = with_note(at=NOW + 5, slow=(), worst=None, inside=True)
    assert remembered(pool, [inside], NOW + 6) == []
    for changes in ({"at": NOW - 5}, {"outcome": "unfinished"}, {"nodes": ("a", "c")}):
        kept = with_note(**{"at": NOW + 5, "slow": (), "worst": None, **changes})
        assert ["a", "b"] in nodes_of(remembered(pool, [kept], NOW + 6))


def test_the_newest_are_remembered(make_pool: Make) -> None:
    links = [entry(f"n{number}", "z", at=f"1970-01-12T10:{number:02}:00Z") for number in range(MOST + 4)]
    found = remembered(with_links(make_pool, *links), [], NOW)
    assert len(found) == MOST
    assert ["n0", "z"] not in nodes_of(found)
    assert [f"n{MOST + 3}", "z"] in nodes_of(found)
