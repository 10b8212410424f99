"""Moves of a defragmentation: what keeps one from beginning, how far it is, and what ends it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from twinpool.operator.logic import names
from twinpool.operator.logic.groups import Group
from twinpool.operator.logic.observed import Child, PodView
from twinpool.operator.logic.placement.defragment import Move
from twinpool.operator.logic.placement.moving import Budget, obstacle, progress
from twinpool.operator.logic.placement.score import Score

MOVE = Move("team/a", "decode", ("n1", "n2"), ("n3", "n4"), Score(span=2.0), Score())
WANTED, SURGE = {"decode": 2}, {"decode": 1}


def group(name: str, *nodes: str, ready: bool = True, role: str = "decode", retired: bool = False) -> Group:
    pods = tuple(
        PodView(f"{name}-{rank}", role, name, rank=rank, node=node, ready=ready) for rank, node in enumerate(nodes)
    )
    marks = {names.RETIRED_ANNOTATION: "true"} if retired else {}
    template = {"metadata": {"labels": {"pool": "p", "group": name}}}
    content: dict[str, Any] = {"metadata": {"annotations": marks, "labels": {}}, "spec": {"template": template}}
    return Group(Child("StatefulSet", name, f"u-{name}", "1", content), role, "r", 1, pods, 2)


OLD, OTHER = group("a", "n1", "n2"), group("b", "n5", "n6")
LEAVING = group("a", "n1", "n2", retired=True)
KNOWN = {"a", "b"}


def test_a_move_begins_when_the_pool_is_at_rest() -> None:
    budgets = [Budget("p-decode", {"pool": "p"}, 1), Budget("others", {"pool": "q"}, 0)]
    assert obstacle(MOVE, [OLD, OTHER], WANTED, SURGE, budgets) == ""
    bare = dataclasses.replace(OLD.child, content={"metadata": {"annotations": {}, "labels": {}}})
    assert obstacle(MOVE, [dataclasses.replace(OLD, child=bare), OTHER], WANTED, SURGE, budgets) == ""


@pytest.mark.parametrize(
    ("groups", "surge", "budgets", "words"),
    [
        ([OTHER], SURGE, [], "a is not there any more"),
        ([LEAVING, OTHER], SURGE, [], "a is not there any more"),
        ([OLD, OTHER, group("c", retired=True)], SURGE, [], "on their way out"),
        ([OLD], SURGE, [], "there are 1 of 2 decode groups"),
        ([OLD, group("b", "n5", "n6", ready=False)], SURGE, [], "group b does not serve"),
        ([OLD, OTHER], {"decode": 0}, [], "rollout.maxSurge"),
        ([OLD, OTHER], SURGE, [Budget("mine", {"group": "a"}, 0)], "mine lets no pod of group a go now"),
        ([OLD, OTHER], SURGE, [Budget("mine", {}, 0, other=True)], "mine (which may not be meant for it)"),
    ],
)
def test_what_keeps_a_move_from_beginning(
    groups: list[Group], surge: dict[str, int], budgets: list[Budget], words: str
) -> None:
    assert words in obstacle(MOVE, groups, WANTED, surge, budgets)


@pytest.mark.parametrize(
    ("groups", "stage", "words"),
    [
        ([LEAVING, OTHER], "waiting", "opens the successor"),
        ([LEAVING, OTHER, group("c")], "waiting", "c has 0 of 2 nodes"),
        ([LEAVING, OTHER, group("c", "n3", ready=False)], "waiting", "c has 1 of 2 nodes"),
        ([LEAVING, OTHER, group("c", "n4", "n3", ready=False)], "loading", "c loads on n4, n3"),
        ([LEAVING, OTHER, group("c", "n3", "n4")], "leaving", "a ends its requests"),
        ([OTHER, group("c", "n3", "n4")], "done", "c serves on n3, n4"),
        ([LEAVING, OTHER, group("c", "n3", "n9")], "departed", "c went to n3, n9, not to n3, n4 as foretold"),
        ([OLD, OTHER], "departed", "took the mark off group a"),
        ([LEAVING], "departed", "group b goes too"),
        ([LEAVING, group("b", retired=True)], "departed", "group b goes too"),
        ([LEAVING, OTHER, group("c"), group("d")], "departed", "2 groups came"),
        ([LEAVING, OTHER, group("c", role="prefill")], "departed", "1 groups came"),
    ],
)
def test_how_far_a_move_is(groups: list[Group], stage: str, words: str) -> None:
    found = progress(MOVE, KNOWN, groups)
    assert found.stage == stage
    assert words in found.words
    assert found.successor == ("c" if any(each.name == "c" for each in groups) and "came" not in words else "")


def test_pods_that_go_hold_no_place() -> None:
    successor = group("c", "n3", "n4")
    going = tuple(dataclasses.replace(pod, deadline=1.0) for pod in successor.pods)
    assert progress(MOVE, KNOWN, [LEAVING, OTHER, dataclasses.replace(successor, pods=going)]).stage == "waiting"
