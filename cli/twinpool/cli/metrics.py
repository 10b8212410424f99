"""``twinpool metrics``: every metric that Twinpool makes, as the page in ``docs/`` or for machines."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - read at run time by cyclopts
from typing import Annotated, Literal

from cyclopts import Parameter

from twinpool.cli.crd import check_fresh
from twinpool.cli.table import write_value
from twinpool.core.metrics.page import DECLARED, markdown


def metrics(
    *,
    check: Path | None = None,
    output: Annotated[Literal["markdown", "json", "yaml"], Parameter(name=["--output", "-o"])] = "markdown",
) -> int:
    """List every metric of Twinpool: type, unit, labels, meaning, and the module that counts it.

    Parameters
    ----------
    check
        Compare this file with the page that would be printed, and fail when it differs.
    output
        The page as Markdown, or the declarations for programs.

    Raises
    ------
    Stale
        When the file is missing or differs.
    """
    if check is not None:
        check_fresh(check, markdown(), "core/twinpool/core/metrics")
    elif output == "markdown":
        sys.stdout.write(markdown())
    else:
        write_value([asdict(metric) for metric in DECLARED.values()], output)
    return 0
