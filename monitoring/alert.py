"""What an alert is made of: the rule, its runbook and the series that prove it, in one place.

Always true: an alert fires on what users feel or soon will, and its runbook says what to look at and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Alert:
    """One alert: it fires when ``value`` (PromQL) was above ``above`` for ``minutes``.

    ``fires`` and ``quiet`` are series in promtool's notation, a sample each minute, that must and must not raise it.
    ``empty`` says why ``value`` may be without data on a healthy pool.
    """

    name: str
    severity: Literal["critical", "warning"]
    value: str
    above: float
    minutes: int
    summary: str
    meaning: str
    look: tuple[str, ...]
    mend: tuple[str, ...]
    fires: tuple[tuple[str, str], ...]
    quiet: tuple[tuple[str, str], ...]
    empty: str = ""

    @property
    def expr(self) -> str:
        """Return the whole expression."""
        return f"({self.value}) > {self.above:g}"
