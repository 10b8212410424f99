"""What a layout costs in seconds, against sums that can be done by hand."""

from __future__ import annotations

import pytest

from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.communication import Wire, pipeline_seconds, tensor_seconds
from twinpool.core.kv import SHAPES, ModelShape
from twinpool.core.links import Measured, with_measured
from twinpool.core.sizing import Split, Workload
from twinpool.core.topology import topology
from twinpool.operator.logic.placement.model import Constraints, Gang, Node
from twinpool.operator.logic.placement.seconds import Served, costs, handoff_seconds
from twinpool.operator.logic.placement.tree import tree

LLAMA, H100 = SHAPES["llama-3-70b"], ACCELERATORS["h100"]
WORK = Workload(context=8192, concurrency=32)
LEVELS = topology({"block": ("b",), "rack": ("r",), "nvlink": ("c",)})
WANTS = Constraints()
#: Two blocks of two racks of two nodes, each rack one NVLink domain.
NODES = [Node(f"n{index}", {"b": f"b{index // 4}", "r": f"r{index // 2}", "c": f"c{index // 2}"}) for index in range(8)]
TREE = tree(LEVELS, NODES)


EIGHT, SIXTEEN = Split(8), Split(16)


def served(prefill: Split = EIGHT, decode: Split = SIXTEEN, shape: ModelShape = LLAMA) -> Served:
    return Served(shape, H100, {"prefill": prefill, "decode": decode}, WORK)


def gang(name: str, role: str, pods: int = 1, unit: int = 1) -> Gang:
    return Gang(name, "p", role, pods, unit, {"nvidia.com/gpu": 8}, "nvidia.com/gpu")


def test_tensor_ranks_pay_for_the_widest_level_of_their_unit() -> None:
    gangs = [gang("p", "prefill"), gang("d", "decode", 2, 2), gang("e", "decode", 2, 2)]
    places = {"p": ("n0",), "d": ("n2", "n3"), "e": ("n1", "n4")}
    found = {(item.role, item.level): item for item in costs(gangs, places, TREE, WANTS, served()).rules}
    assert set(found) == {("prefill", "host"), ("decode", "nvlink"), ("decode", "cluster")}
    near, far = found["decode", "nvlink"], found["decode", "cluster"]
    assert near.seconds == pytest.approx(tensor_seconds(LLAMA, 32, 16, Wire(450e9, 1e-6)))
    assert far.seconds == far.anywhere == pytest.approx(tensor_seconds(LLAMA, 32, 16, Wire(3.125e9, 1e-3)))
    assert near.anywhere == far.seconds
    assert (near.wanted, near.groups) == ("nvlink", 1)
    prompt = tensor_seconds(LLAMA, 8192, 8, Wire(450e9, 1e-6))
    assert found["prefill", "host"].seconds == pytest.approx(prompt / 8192), "a prompt's tokens share a step"


def test_stages_pay_for_the_widest_level_of_their_group() -> None:
    places = {"d": ("n0", "n2")}
    found = costs([gang("d", "decode", 2)], places, TREE, WANTS, served(decode=Split(8, 2)))
    tensor, span = (next(item for item in found.rules if item.rule == rule) for rule in ("tensor", "span"))
    assert (tensor.level, span.level, span.wanted) == ("host", "block", "rack")
    assert span.seconds == pytest.approx(pipeline_seconds(LLAMA, 32, 2, Wire(25e9, 6e-6)))
    assert found.handoffs == ()
    assert found.handoff == 0.0
    assert found.lost == {"decode": 0.0}, "it lies in no single rack"


def test_one_gpu_talks_to_nobody() -> None:
    found = costs([gang("d", "decode")], {"d": ("n0",)}, TREE, WANTS, served(decode=Split(1)))
    assert found.rules == ()
    assert found.lost == {"decode": 1.0}


def test_kv_is_told_by_the_level_that_it_crosses() -> None:
    gangs = [gang("p", "prefill"), gang("q", "prefill"), gang("d", "decode"), gang("e", "decode"), gang("f", "decode")]
    places = {"p": ("n0",), "d": ("n1",), "q": ("n4",), "e": ("n6",)}
    found = costs(gangs, places, TREE, WANTS, served(decode=Split(8)))
    # Each prefill group makes half of the KV and each decode group takes a third; one decode group has no place.
    shares = {item.level: item.share for item in found.handoffs}
    assert shares == {"nvlink": pytest.approx(1 / 3), "block": pytest.approx(1 / 3)}
    near, far = (handoff_seconds(served(decode=Split(8)), Wire(*link)) for link in ((450e9, 1e-6), (25e9, 6e-6)))
    assert found.handoff == pytest.approx((near + far) / 2)
    assert (found.wanted, found.at_wanted) == ("block", far)
    assert found.anywhere > far
    assert (found.lost, found.spread) == ({"decode": 0.5, "prefill": 0.5}, "rack")


def test_a_handoff_takes_the_bytes_of_one_gpu_and_their_pieces() -> None:
    wire = Wire(50e9, 3e-6)
    size, pieces = 327_680 / 8 * 8192, 2 * 80 * 512
    assert handoff_seconds(served(decode=Split(8)), wire) == pytest.approx(5e-4 + pieces * 2e-6 + size / 50e9 + 3e-6)
    latent = ModelShape("mla", 60, 128, 128, 160, 1e9, latent=576)
    pieces, size = 60 * 512, 60 * 576 * 2 * 8192
    assert handoff_seconds(served(shape=latent), wire) == pytest.approx(5e-4 + pieces * 2e-6 + size / 50e9 + 3e-6)


def test_what_was_measured_counts_whatever_the_data_sheet_says() -> None:
    made = with_measured(LEVELS, [Measured("rack", 3, 90e9, 2e-6), Measured("host", 3, 300e9, 3e-6)])
    assert served().wire(made, made.index("rack")) == Wire(90e9, 2e-6)
    assert served().wire(made, made.host) == Wire(300e9, 3e-6)


def test_nobody_gets_more_than_its_adapter_gives() -> None:
    slow = Served(LLAMA, ACCELERATORS["l4"], {"decode": Split(1)}, WORK)
    assert slow.wire(LEVELS, LEVELS.index("rack")).bandwidth == 1.5625e9
    assert slow.wire(LEVELS, LEVELS.index("host")).bandwidth == 32e9
    assert served().wire(LEVELS, 0).bandwidth == 3.125e9
