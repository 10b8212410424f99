"""What the guides work out by hand is what the decisions say."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from bench.placement.cases import node, pool
from twinpool.cli.rollout import _write_plan
from twinpool.core.accelerators import ACCELERATORS
from twinpool.core.drafts import DRAFTERS, USUAL_CONTEXT, best, schedule, speedup, step_seconds
from twinpool.core.economics import prices_of
from twinpool.core.expert_load import expected_most
from twinpool.core.kv import SHAPES, kv_bytes_per_token
from twinpool.core.parallelism import Network, option
from twinpool.core.sizing import Split, Workload
from twinpool.core.tiers import ASSUMED_BANDWIDTH as TIERS
from twinpool.core.tiers import ASSUMED_SETUP, Run, TierPrice, pays_from, plan
from twinpool.core.topology import PRESETS, Weights, topology
from twinpool.operator.logic.forecast import forecast
from twinpool.operator.logic.placement.model import Constraints
from twinpool.operator.logic.placement.score import score
from twinpool.operator.logic.placement.tree import tree
from twinpool.operator.logic.rollout import Bounds, Health, State, Unit
from twinpool.worker.logic.preflight import Link, bus_bandwidth, slow_links

if TYPE_CHECKING:
    import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_steps_of_a_rollout(capsys: pytest.CaptureFixture[str]) -> None:
    units = [Unit(f"p{n}", "prefill", "old", Health.READY) for n in range(2)]
    units += [Unit(f"d{n}", "decode", "old", Health.READY) for n in range(4)]
    begin = State(tuple(units), {"prefill": Bounds(2, 1, 0), "decode": Bounds(4, 1, 0)}, "new")
    _write_plan("llama", begin, list(forecast(begin)))
    said = (DOCS / "rollout.md").read_text().partition("```text\n")[2].partition("```")[0]
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == said.splitlines()


def test_three_placements_of_one_pool() -> None:
    nodes = [node(f"n{n}", f"b{n // 4}", f"r{n // 2}", None, 8) for n in range(8)]
    groups, network = pool("p", 2, 2, 8), tree(topology(PRESETS["topograph"]), nodes)
    text = (DOCS / "placement.md").read_text().partition("### Example")[2]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| n")]
    assert len(rows) == 3
    for prefill, decode, *figures in rows:
        names = [name.strip() for name in (*prefill.split(","), *decode.split(","))]
        places = {group.name: (name,) for group, name in zip(groups, names, strict=True)}
        found = score(groups, places, network, {"p": Constraints()}, Weights())
        terms = dataclasses.asdict(found)
        wanted = [terms[name] for name in ("handoff", "pair", "spread", "stranded")] + [found.total]
        assert [figure.strip().strip("*") for figure in figures] == [f"{value:.2f}" for value in wanted]


def rows(page: str, section: str, skip: int = 0) -> list[list[str]]:
    """Return the cells of a table behind a heading, the first or one behind it, without those of its head."""
    tables = (DOCS / page).read_text().partition(f"## {section}\n")[2].split("\n\n|")[1:]
    lines = tables[skip].partition("\n\n")[0].splitlines()
    return [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_three_splits_of_one_model() -> None:
    work = Workload(context=4000, concurrency=32, ttft=0.8, itl=0.04, answer=300)
    for tensor, *cells in rows("parallelism.md", "One example by hand"):
        found = option(SHAPES["llama-3-70b"], ACCELERATORS["h100"], Split(int(tensor)), work, Network())
        held = found.memory
        said = [f"{held.weights / 1e9:.1f} GB", f"{held.kv / 1e9:.1f} GB", f"{found.prompt * 1e3:.0f} ms"]
        if held.fits:
            said += [f"{found.prefill:.0f}", f"{found.token * 1e3:.1f} ms", str(found.requests), f"{found.decode:.0f}"]
        else:
            needed = (held.room + held.lacking) / 1e9
            said += [f"does not fit: {needed:.1f} of {held.room / 1e9:.1f} GB", "", "", ""]
        assert cells == said


def test_what_drafts_win_in_three_batches() -> None:
    prices, drafter = prices_of(SHAPES["llama-3-8b"], ACCELERATORS["h100"]), DRAFTERS["ngram"]
    for batch, *cells in rows("speculation.md", "One example by hand"):
        size = int(batch)
        gains = [f"{speedup(prices, drafter, size, count):.2f}" for count in range(1, 5)]
        step = f"{step_seconds(prices, drafter, size, 0, USUAL_CONTEXT) * 1e3:.1f} ms"
        assert cells == [step, *gains, str(best(prices, drafter, size, drafter.most))]
    text = (DOCS / "speculation.md").read_text()
    for count, time in ((2, "13.7"), (3, "17.9")):
        assert f"{step_seconds(prices, drafter, 128, count, USUAL_CONTEXT) * 1e3:.1f}" == time
        assert f"({time} ms)" in text
    (_, a, four), (_, b, three), (_, c, two), (_, d, one), (*_, none) = schedule(prices, drafter)
    assert (four, three, two, one, none) == (4, 3, 2, 1, 0)
    assert f"4 drafts up to {a} sequences, 3 up to {b}, 2 up to {c}, 1 up to {d}, none above" in text


def test_bandwidth_of_links() -> None:
    text = (DOCS / "preflight.md").read_text()
    for kind in ("all-reduce", "all-to-all"):
        assert f"**{bus_bandwidth(kind, 8, 16 * 2**20, 100e-6) / 1e9:.1f} GB/s**" in text  # type: ignore[arg-type]

    def links(*speeds: float) -> list[Link]:
        pairs = (("p-0", "p-1"), ("p-0", "p-2"), ("p-1", "p-2"))
        return [Link(*pair, bandwidth=speed * 1e9, latency=0.0) for pair, speed in zip(pairs, speeds, strict=True)]

    (named,) = slow_links(links(50, 48, 20))
    assert f'"{named}"' in text
    assert slow_links(links(50, 48, 25)) == ()


def test_what_tiers_win() -> None:
    shape = SHAPES["llama-3-8b"]
    prices, held = prices_of(shape, ACCELERATORS["h100"]), kv_bytes_per_token(shape)
    found = rows("kv-tiers.md", "One example by hand")
    assert [cells[0] for cells in found] == [f"{kind}, {speed / 1e9:.0f} GB/s" for kind, speed in TIERS.items()]
    for kind, cells in zip(TIERS, found, strict=True):
        price = TierPrice(ASSUMED_SETUP[kind], held / TIERS[kind])
        chosen = plan(prices, 4000, 0, [Run(3840, price)])
        times = f"{price.token * 1e6:.1f} us", str(chosen.tokens), f"{chosen.seconds * 1e3:.1f} ms"
        assert cells[1:] == [*times, f"{pays_from(prices, price)} tokens"]
    alone = prices.prefill(4000, 0)
    said = (DOCS / "kv-tiers.md").read_text()
    assert f"computes 4000 new ones in {alone * 1e3:.1f} ms, {alone / 4000 * 1e6:.1f} us each" in said
    assert f"keeps {held / 1024:.0f} KiB for a token" in said


def test_what_chance_does_to_experts() -> None:
    for tokens, *cells in rows("experts.md", "Is it skewed?", skip=1):
        mean = int(tokens) * 8 / 32
        most = expected_most(mean, 32)
        assert cells == [f"{mean:.0f}", f"{most:.1f}", f"{most / mean:.2f}"]
