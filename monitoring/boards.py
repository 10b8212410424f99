"""All dashboards, in the order in which to read them."""

from __future__ import annotations

from monitoring.engine import CACHE, ENGINE
from monitoring.operators import OPERATOR
from monitoring.overview import OVERVIEW
from monitoring.router import ROUTER
from monitoring.stages import STAGES

DASHBOARDS = (OVERVIEW, STAGES, ROUTER, CACHE, ENGINE, OPERATOR)
