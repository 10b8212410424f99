"""``twinpool simulate``: what a pool would do with a trace of requests, in virtual time. Never a measurement."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path  # noqa: TC003 - cyclopts reads annotations when it runs
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from twinpool.cli.options import Format  # noqa: TC001 - read at run time by cyclopts
from twinpool.cli.pools import from_file
from twinpool.cli.table import write_table, write_value
from twinpool.core.economics import prices_of
from twinpool.core.errors import InvalidValue, TwinpoolError
from twinpool.core.kv import SHAPES, kv_bytes_per_token_per_gpu
from twinpool.core.model_config import shape_of
from twinpool.core.protocol import ROLES
from twinpool.core.sizing import Split, Workload, memory
from twinpool.core.timing import ACCELERATORS
from twinpool.core.units import parse_bytes, parse_duration
from twinpool.operator.logic.engine_limits import sequences
from twinpool.operator.logic.scaling import Limits
from twinpool.operator.logic.scaling_need import Group
from twinpool.operator.logic.scaling_step import promise_of
from twinpool.operator.logic.target import gpus as gpus_of
from twinpool.operator.logic.target import limits as limits_of
from twinpool.simulate.admission import Limits as QueueLimits
from twinpool.simulate.capacity import greatest_rate
from twinpool.simulate.drafting import Drafting, drafting_of
from twinpool.simulate.fleet import Life, Loss
from twinpool.simulate.pool import Setup
from twinpool.simulate.report import numbers, page
from twinpool.simulate.rules import RULES
from twinpool.simulate.scaler import life_of
from twinpool.simulate.tiers import setup_of
from twinpool.simulate.traces import read
from twinpool.simulate.whatif import Outcome, Variant, as_in, demand, planned, run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from twinpool.core.economics import Prices
    from twinpool.core.kv import ModelShape
    from twinpool.core.spec import InferencePool, WorkerRole
    from twinpool.core.timing import Accelerator
    from twinpool.operator.logic.scaling import Decision
    from twinpool.operator.logic.scaling_need import Promise
    from twinpool.simulate.traces import Problem, Request

#: Lines that cannot be read, named one by one.
_NAMED = 10
#: Steps of a sweep over rates.
_STEPS = 5
#: Changes of the numbers that are written in words.
_CHANGES = 20
_HEADERS = ("rate", "rule", "P:D", "attained", "TTFT mean", "TTFT p99", "ITL p99", "cached", "GPU hours")


@dataclass(frozen=True, slots=True)
class Question:
    """A pool, a trace, and what is to be tried on them."""

    trace: Sequence[Request]
    problems: Sequence[Problem]
    setup: Setup
    variants: Sequence[Variant]
    promise: Promise
    plan: Decision


@dataclass(frozen=True, slots=True)
class Tried:
    """What is tried beside the pool as it is, as it was typed: rules, rates, and numbers of groups.

    ``start``, ``lose`` and ``roll`` are what befalls the groups of each run.
    """

    compare: str
    sweep: str
    pairs: str
    start: str = "1m"
    lose: str = ""
    roll: str = ""


def simulate(
    *,
    trace: Annotated[
        Path, Parameter(help="Requests: Mooncake's, Azure's, BurstGPT's or vLLM's format, or a router's log.")
    ],
    pool: Annotated[Path, Parameter(name=["--pool", "-f"], help="Manifest of the pool.")],
    model: Annotated[str, Parameter(help=f"Shape of the model: {', '.join(SHAPES)}.")] = "llama-3-8b",
    model_config: Annotated[Path | None, Parameter(help="config.json of the model, instead of --model.")] = None,
    gpu: Annotated[str, Parameter(help=f"Kind of GPU: {', '.join(ACCELERATORS)}.")] = "h100",
    compare: Annotated[str, Parameter(help="Routing rules beside the pool's, separated by commas, or all.")] = "",
    sweep: Annotated[str, Parameter(help="Multiples of the trace's rate: rate=0.5..1.5 (five steps).")] = "",
    pairs: Annotated[str, Parameter(help="Prefill and decode groups beside the pool's: 1:3,2:2,3:1.")] = "",
    start: Annotated[str, Parameter(help="How long a new group takes until it serves.")] = "1m",
    lose: Annotated[str, Parameter(help="Groups that end, with what they do: 10m:decode:2,15m:prefill.")] = "",
    roll: Annotated[str, Parameter(help="When a new revision replaces all groups: 10m,20m.")] = "",
    capacity: Annotated[bool, Parameter(help="Also look for the greatest rate that each keeps objectives at.")] = False,
    first: Annotated[int | None, Parameter(help="Use only the first requests of the trace, so many.")] = None,
    seed: Annotated[int, Parameter(help="Same seed, same answer.")] = 0,
    report: Annotated[Path | None, Parameter(help="Also write a page with plots to this file (HTML).")] = None,
    output: Format = "text",
) -> int:
    """Replay a trace on a pool in virtual time, with the routing rule and the planner that decide in production.

    A pool with ``scaling`` is played with numbers that follow the work, and beside it with those that it begins with.
    Times come from data sheets (see --gpu), so this ranks choices; it measures nothing. Lines that cannot be read are
    named and left out. Exit code 1: the pool would keep its objectives for fewer requests than it promises.
    """
    tried = Tried(compare, sweep, pairs, start, lose, roll)
    asked = _question(from_file(pool), _lines(trace, first), _shape(model, model_config), gpu, tried, seed)
    outcomes = _run(asked)
    if capacity:
        outcomes = _with_capacity(asked, outcomes)
    if report is not None:
        _report(report, f"{pool.name} with {trace.name}", asked, outcomes)
    if output == "text":
        _write(asked, outcomes)
    else:
        write_value(_json(asked, outcomes), output)
    return 0 if outcomes[0].score.attainment >= 1 - asked.promise.miss else 1


def _report(path: Path, title: str, asked: Question, outcomes: Sequence[Outcome]) -> None:
    words = f"{asked.plan.prefill}:{asked.plan.decode}, since {asked.plan.reason}"
    try:
        path.write_text(page(title, words, outcomes))
    except OSError as error:
        raise TwinpoolError(f"{path} cannot be written: {error.strerror}", "give another file to --report") from None


def _lines(path: Path, first: int | None) -> tuple[Sequence[Request], Sequence[Problem]]:
    try:
        with path.open() as lines:
            found, problems = read(lines)
    except (OSError, UnicodeDecodeError) as error:
        raise TwinpoolError(f"{path} cannot be read: {error}", "give a text file with one request a line") from None
    if not found:
        why = f": {problems[0]}" if problems else ""
        raise TwinpoolError(f"{path} holds no request{why}", "docs/scaling.md says which formats are read")
    return found[:first], problems


def _shape(model: str, config: Path | None) -> ModelShape:
    if config is None:
        if model not in SHAPES:
            raise TwinpoolError(f"the model {model!r} is unknown", f"use {', '.join(SHAPES)}, or give --model-config")
        return SHAPES[model]
    try:
        return shape_of(json.loads(config.read_text()), config.name)
    except (OSError, ValueError) as error:
        raise TwinpoolError(f"{config} cannot be read: {error}", "give the model's config.json") from None


def _question(
    pool: InferencePool,
    lines: tuple[Sequence[Request], Sequence[Problem]],
    shape: ModelShape,
    gpu: str,
    tried: Tried,
    seed: int,
) -> Question:
    prefill, decode = pool.spec.prefill, pool.spec.decode
    if gpu not in ACCELERATORS:
        raise TwinpoolError(f"the GPU {gpu!r} is unknown", f"use {', '.join(ACCELERATORS)}")
    if prefill is None:
        raise TwinpoolError("the pool has no prefill role", "only pools that hand off are simulated")
    kind, (trace, problems) = ACCELERATORS[gpu], lines
    prices = [prices_of(shape, kind, role.ranks) for role in (prefill, decode)]
    setup = Setup(
        prices[0], prefill.replicas, decode.replicas, _room(shape, kind, prefill), _room(shape, kind, decode),
        rule=pool.spec.routing.policy, conditional=pool.spec.handoff.conditional == "auto", seed=seed,
        routers=max(1, pool.spec.routing.replicas), decode_prices=prices[1], both_links=True,
    )  # fmt: skip
    promise, each = promise_of(pool), gpus_of(pool.spec)
    if pool.spec.objectives.ttft is not None:
        queue = pool.spec.routing.queue
        kept = QueueLimits(queue.concurrency, queue.max, parse_duration(queue.timeout))
        setup = replace(setup, ttft=promise.ttft, queue=kept, sequences=sequences(pool))
    setup = replace(_with_tiers(setup, prefill, shape), drafting=_drafting(pool, prices[1]))
    setup = replace(setup, life=_life(pool, tried), scaling=pool if pool.spec.scaling is not None else None)
    work = demand(trace, prices[0], setup.prefill_cache)
    limits = Limits((1, 1000), (1, 1000), each["prefill"], each["decode"])
    if pool.spec.scaling is not None:
        limits = limits_of(pool, pool.spec.scaling)
    plan = planned(work, prices[1], promise, Group(setup.decode_capacity), limits)
    groups = _pairs(setup, tried.pairs)
    follows = (True, False) if setup.scaling is not None else (False,)
    variants = [
        Variant(rate, rule, *pair, scaled=scaled)
        for rate in _rates(tried.sweep)
        for rule in _rules(setup, tried.compare)
        for pair in groups
        for scaled in follows
        if not scaled or pair == groups[0]
    ]
    if (plan.prefill, plan.decode) not in groups:
        variants.append(Variant(1.0, setup.rule, plan.prefill, plan.decode))
    return Question(trace, problems, setup, variants, promise, plan)


def _with_tiers(setup: Setup, role: WorkerRole, shape: ModelShape) -> Setup:
    """Return the pool with the KV tiers of its prefill role."""
    # What a group of several pods keeps is spread over them.
    token = kv_bytes_per_token_per_gpu(shape, role.parallelism.tensor) * role.parallelism.tensor
    tiers = tuple(
        setup_of(tier, parse_bytes(tier.size) * (1 if tier.kind == "shared" else role.nodes), token)
        for tier in (role.kv_cache.tiers if role.kv_cache is not None else ())
    )
    if not tiers:
        return setup
    return replace(setup, tiers=tiers, prices=replace(setup.prices, load_token=min(one.price.token for one in tiers)))


def _drafting(pool: InferencePool, prices: Prices) -> Drafting | None:
    """Return how the pool's decode engines draft tokens."""
    if pool.spec.speculation is None:
        return None
    role = pool.spec.decode.speculation
    return drafting_of(pool.spec.speculation.method, "auto" if role is None else role.tokens, prices)


def _life(pool: InferencePool, tried: Tried) -> Life:
    """Return what befalls the groups of a run.

    Raises
    ------
    TwinpoolError
        When ``--start``, ``--lose`` or ``--roll`` is not understood.
    """
    try:
        losses = [_loss(text) for text in tried.lose.split(",") if text.strip()]
        rolls = [parse_duration(text.strip()) for text in tried.roll.split(",") if text.strip()]
        return life_of(pool, parse_duration(tried.start), losses, rolls)
    except (InvalidValue, ValueError):
        raise TwinpoolError(
            f"--start {tried.start} --lose {tried.lose or '-'} --roll {tried.roll or '-'} is not understood",
            "write durations such as 90s or 5m, and losses as AT:ROLE[:COUNT], such as 10m:decode:2",
        ) from None


def _loss(text: str) -> Loss:
    at, role, *count = (word.strip() for word in text.split(":"))
    if role not in ROLES or len(count) > 1:
        raise ValueError(text)
    return Loss(parse_duration(at), role, max(1, int(count[0])) if count else 1)


def _room(shape: ModelShape, gpu: Accelerator, role: WorkerRole) -> int:
    """Return the KV tokens that one group holds.

    Raises
    ------
    TwinpoolError
        When the weights alone do not fit.
    """
    split = Split(role.parallelism.tensor, role.parallelism.pipeline)
    one = memory(shape, gpu, split, Workload(concurrency=1))
    free = one.room - one.weights - one.redundant - one.activations
    if free <= 0:
        raise TwinpoolError(
            f"{shape.name} does not fit on {split.tensor * split.pipeline} {gpu.name}",
            "raise parallelism.tensor, or give another --gpu",
        )
    return int(free * split.pipeline / kv_bytes_per_token_per_gpu(shape, split.tensor))


def _rules(setup: Setup, compare: str) -> list[str]:
    others = list(RULES) if compare == "all" else [name.strip() for name in compare.split(",") if name.strip()]
    if unknown := [name for name in others if name not in RULES]:
        raise TwinpoolError(f"the rule {unknown[0]!r} is unknown", f"use all, or some of {', '.join(RULES)}")
    return list(dict.fromkeys([setup.rule, *others]))


def _pairs(setup: Setup, pairs: str) -> list[tuple[int, int]]:
    """Return the numbers of groups to try, the pool's own first."""
    found = [(setup.prefill, setup.decode)]
    for text in pairs.split(",") if pairs else ():
        prefill, _, decode = (word.strip() for word in text.partition(":"))
        if not (prefill.isdecimal() and decode.isdecimal() and int(prefill) and int(decode)):
            raise TwinpoolError(f"--pairs {pairs} is not understood", "write PREFILL:DECODE, such as 1:3,2:2,3:1")
        found.append((int(prefill), int(decode)))
    return list(dict.fromkeys(found))


def _rates(sweep: str) -> list[float]:
    """Return the multiples of the rate to try, 1 first."""
    if not sweep:
        return [1.0]
    low, _, high = sweep.removeprefix("rate=").partition("..")
    try:
        begin, end = float(low), float(high)
    except ValueError:
        begin, end = 0.0, 0.0
    if not 0 < begin < end:
        raise TwinpoolError(f"--sweep {sweep} is not understood", "write rate=LOW..HIGH, such as rate=0.5..1.5")
    steps = [begin + (end - begin) * step / (_STEPS - 1) for step in range(_STEPS)]
    return list(dict.fromkeys([1.0, *steps]))


def _run(asked: Question) -> list[Outcome]:
    """Run every variant, and show how far it is where somebody looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    total = len(asked.variants) * len(asked.trace)
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("requests", total=total)
        found = []
        for number, variant in enumerate(asked.variants):
            done = number * len(asked.trace)

            def told(count: int, done: int = done) -> None:
                progress.update(bar, completed=done + count)

            found.append(run(asked.trace, asked.setup, variant, asked.promise, told))
    return found


def _with_capacity(asked: Question, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes with the greatest rate of each pair and rule in requests/s."""
    given = len(asked.trace) / max(1e-9, asked.trace[-1].arrival)
    factors: dict[Variant, float] = {}
    for item in outcomes:
        kind = replace(item.variant, rate=1.0)
        if kind not in factors and not kind.scaled:
            factors[kind] = greatest_rate(asked.trace, as_in(asked.setup, kind), asked.promise)
    return [
        item if item.variant.scaled else replace(item, capacity=given * factors[replace(item.variant, rate=1.0)])
        for item in outcomes
    ]


def _json(asked: Question, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "requests": len(asked.trace),
        "skipped": [{"line": problem.line, "reason": problem.reason} for problem in asked.problems],
        "planned": {"prefill": asked.plan.prefill, "decode": asked.plan.decode, "reason": asked.plan.reason},
        "runs": [
            {
                **asdict(item.variant),
                **asdict(item.score),
                "gpu_hours": item.gpu_hours,
                "capacity": item.capacity,
                "groups": [{"at": at, "prefill": pair[0], "decode": pair[1]} for at, pair in item.groups],
                "changes": [
                    {"at": one.at, "prefill": one.pair[0], "decode": one.pair[1], "reason": one.reason}
                    for one in item.changes
                ],
            }
            for item in outcomes
        ],
    }


def _write(asked: Question, outcomes: Sequence[Outcome]) -> None:
    for problem in asked.problems[:_NAMED]:
        sys.stderr.write(f"left out: {problem}\n")
    if len(asked.problems) > _NAMED:
        sys.stderr.write(f"left out: {len(asked.problems) - _NAMED} more lines\n")
    sys.stdout.write(f"{len(asked.trace)} requests in virtual time; the model's seconds, nothing is measured\n")
    found = any(item.capacity is not None for item in outcomes)
    headers = (*_HEADERS, "keeps them up to") if found else _HEADERS
    write_table(headers, [_row(item) for item in outcomes])
    for change in outcomes[0].changes[:_CHANGES]:
        sys.stdout.write(f"{change.at:6.0f} s: {change.pair[0]}:{change.pair[1]}, since {change.reason}\n")
    if len(outcomes[0].changes) > _CHANGES:
        sys.stdout.write(f"changes not shown: {len(outcomes[0].changes) - _CHANGES} (-o json shows all)\n")
    sys.stdout.write(f"planner: {asked.plan.prefill}:{asked.plan.decode}, since {asked.plan.reason}\n")


def _row(item: Outcome) -> tuple[str, ...]:
    variant, score = item.variant, item.score
    return (
        f"{variant.rate:g}", variant.rule, numbers(item), f"{score.attainment:.1%}",
        f"{score.ttft_mean:.3f} s", f"{score.ttft_p99:.3f} s", f"{1000 * score.itl_p99:.1f} ms", f"{score.hit:.1%}",
        f"{item.gpu_hours:.2f}", *(() if item.capacity is None else (f"{item.capacity:.3g}/s",)),
    )  # fmt: skip
