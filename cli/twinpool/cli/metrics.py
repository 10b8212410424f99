"""``twinpool metrics``: every metric that Twinpool makes, as the page in ``docs/`` or for machines."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path  # noqa: TC003 - read at run time by cyclopts
from typing import Annotated, Literal

from cyclopts import Parameter

from twinpool.cli.crd import check_fresh
from twinpool.core.metrics.page import DECLARED, markdown


def metrics(
    *,
    check: Path | None = None,
    output: Annotated[Literal["markdown", "json"], Parameter(name=["--output", "-o"])] = "markdown",
) -> int:
    """List every metric of Twinpool: type, unit, labels, meaning, and the module that counts it.

    Parameters
    ----------
    check
        Compare this file with the page that would be printed, and fail when it differs.
    output
        The page as Markdown, or the declarations as JSON.

    Raises
    ------
    Stale
        When the file is missing or differs.
    """
    if check is not None:
        check_fresh(check, markdown(), "core/twinpool/core/metrics")
    elif output == "json":
        sys.stdout.write(json.dumps([asdict(metric) for metric in DECLARED.values()]) + "\n")
    else:
        sys.stdout.write(markdown())
    return 0
