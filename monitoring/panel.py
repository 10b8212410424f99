"""What a dashboard is made of, before it is Grafana's JSON: the same data is tested against Prometheus and drawn.

Always true: every panel says how to read it and what to do; every query reads declared metrics and is limited to the
dashboard's variables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Series of the chosen pool, as scraped from its pods; and those that the operator tells of it.
POOL = 'namespace="$namespace",pool="$pool"'
OPERATOR_POOL = 'pool_namespace="$namespace",pool="$pool"'
#: Grafana's window for rates: at least four scrapes.
RATE = "$__rate_interval"

Unit = Literal["s", "short", "reqps", "Bps", "bytes", "percentunit", "ops"]


@dataclass(frozen=True)
class Query:
    """An expression of PromQL and the name of its series; ``{{label}}`` stands for a label's value.

    ``wish`` marks what should be, which is drawn dashed beside what is.
    """

    expr: str
    legend: str
    wish: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture. ``empty`` says why it may show nothing on a healthy pool; without it, no data is a fault."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "table"] = "timeseries"
    empty: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A page of panels in rows. ``per_pool`` says whether it is about one pool or about the operator."""

    uid: str
    title: str
    description: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    per_pool: bool = True

    @property
    def panels(self) -> tuple[Panel, ...]:
        """Return all panels in their order."""
        return tuple(panel for _, panels in self.rows for panel in panels)


def rate(metric: str, selector: str = POOL) -> str:
    """Return events per second of a counter."""
    return f"rate({metric}{{{selector}}}[{RATE}])"


def total(metric: str, by: str = "", selector: str = POOL) -> str:
    """Return events per second of a counter over all series, or for each value of the labels ``by``."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} ({rate(metric, selector)})"


def quantile(share: float, metric: str, by: str = "", selector: str = POOL) -> str:
    """Return a percentile of a histogram over all series, or for each value of the labels ``by``."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, sum by ({labels}) ({rate(f'{metric}_bucket', selector)}))"


def percentiles(metric: str, selector: str = POOL) -> tuple[Query, ...]:
    """Return the median and two high percentiles of a histogram."""
    return tuple(Query(quantile(share, metric, selector=selector), f"p{share * 100:g}") for share in (0.5, 0.95, 0.99))
