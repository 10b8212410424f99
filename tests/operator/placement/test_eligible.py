"""Which nodes may hold a pod, as kube-scheduler sees it."""

from __future__ import annotations

import pytest

from twinpool.operator.logic.placement.eligible import eligible, untolerated
from twinpool.operator.logic.placement.model import Gang, Match, Node, Taint, Tolerates

LABELS = {"gpu": "h100", "slots": "8", "odd": "x"}


@pytest.mark.parametrize(
    ("terms", "fits"),
    [
        ((), True),
        (((),), False),
        (((Match("gpu", "In", ("a100", "h100")),),), True),
        (((Match("gpu", "In", ("a100",)),),), False),
        (((Match("gpu", "NotIn", ("a100",)),),), True),
        (((Match("none", "NotIn", ("a100",)),),), True),
        (((Match("gpu", "Exists"),),), True),
        (((Match("none", "Exists"),),), False),
        (((Match("none", "DoesNotExist"),),), True),
        (((Match("gpu", "DoesNotExist"),),), False),
        (((Match("slots", "Gt", ("7",)),),), True),
        (((Match("slots", "Gt", ("8",)),),), False),
        (((Match("slots", "Lt", ("9",)),),), True),
        (((Match("slots", "Lt", ("8",)),),), False),
        (((Match("slots", "Near", ("8",)),),), False),
        (((Match("odd", "Gt", ("7",)),),), False),
        (((Match("slots", "Gt"),),), False),
        (((Match("gpu", "Exists"), Match("none", "Exists")),), False),
        (((Match("none", "Exists"),), (Match("gpu", "Exists"),)), True),
        (((Match("metadata.name", "In", ("n1",), field=True),),), True),
        (((Match("metadata.name", "In", ("n2",), field=True),),), False),
    ],
)
def test_required_node_affinity(terms: tuple[tuple[Match, ...], ...], fits: bool) -> None:
    assert eligible(Node("n1", LABELS), Gang("g", "p", "decode", terms=terms)) is fits


def test_every_label_of_the_selector_must_be_there() -> None:
    node = Node("n1", LABELS)
    assert eligible(node, Gang("g", "p", "decode", selector={"gpu": "h100"}))
    assert not eligible(node, Gang("g", "p", "decode", selector={"gpu": "h100", "zone": "a"}))


@pytest.mark.parametrize(
    ("tolerates", "kept_away"),
    [
        ((), True),
        ((Tolerates("dedicated", "Equal", "llm", "NoSchedule"),), False),
        ((Tolerates("dedicated", "Equal", "llm"),), False),
        ((Tolerates("dedicated", "Equal", "other"),), True),
        ((Tolerates("dedicated", "Equal", "llm", "NoExecute"),), True),
        ((Tolerates("dedicated", "Exists"),), False),
        ((Tolerates("other", "Exists"),), True),
        ((Tolerates(operator="Exists"),), False),
        ((Tolerates(operator="Equal", value="llm"),), True),
    ],
)
def test_taints(tolerates: tuple[Tolerates, ...], kept_away: bool) -> None:
    taint = Taint("dedicated", "llm")
    node = Node("n1", taints=(Taint("soft", effect="PreferNoSchedule"), taint))
    gang = Gang("g", "p", "decode", tolerates=tolerates)
    assert untolerated(node, gang) == (taint if kept_away else None)
    assert eligible(node, gang) is not kept_away


def test_no_new_pod_goes_to_a_node_that_is_cordoned_or_not_ready() -> None:
    gang = Gang("g", "p", "decode")
    assert not eligible(Node("n1", cordoned=True), gang)
    assert not eligible(Node("n1", ready=False), gang)
