"""Grafana's JSON of a dashboard, made with the Grafana Foundation SDK.

Always true: the same dashboard gives the same bytes, and nothing in it names a data source of one installation.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

if TYPE_CHECKING:
    from monitoring.panel import Dashboard, Panel

_SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
_WIDTH, _HEIGHT = 12, 8


def render(board: Dashboard) -> str:
    """Return the JSON of a dashboard as a file's text."""
    made = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["twinpool"])
        .timezone("browser")
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(
            builders.DashboardLink("Twinpool")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["twinpool"])
            .as_dropdown(True)
            .include_vars(True)
            .keep_time(True)
        )
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    if board.per_pool:
        groups = "twinpool_operator_pool_groups"
        made.with_variable(_variable("namespace", "Namespace", f"label_values({groups}, pool_namespace)"))
        made.with_variable(_variable("pool", "Pool", f'label_values({groups}{{pool_namespace="$namespace"}}, pool)'))
    for title, panels in board.rows:
        made.with_row(builders.Row(title))
        for panel in panels:
            made.with_panel(_table(panel) if panel.kind == "table" else _timeseries(panel))
    return json.dumps(made.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _variable(name: str, label: str, query: str) -> builders.QueryVariable:
    return (
        builders.QueryVariable(name)
        .label(label)
        .datasource(_SOURCE)
        .query(query)
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )


def _timeseries(panel: Panel) -> timeseries.Panel:
    made = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .unit(panel.unit)
        .min(0)
        .height(_HEIGHT)
        .span(_WIDTH)
        .line_width(2)
        .fill_opacity(5)
        .show_points(common.VisibilityMode.NEVER)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.TABLE)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
            .calcs(["lastNotNull", "max"])
        )
        .tooltip(common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    )
    for number, query in enumerate(panel.queries):
        made.with_target(
            prometheus.Dataquery().ref_id(chr(65 + number)).expr(query.expr).legend_format(query.legend).range()
        )
        if query.wish:
            dashed = models.DynamicConfigValue(id_val="custom.lineStyle", value={"fill": "dash", "dash": [8, 6]})
            made.override_by_query(chr(65 + number), [dashed])
    return made


def _table(panel: Panel) -> table.Panel:
    made = (
        table.Panel()
        .title(panel.title)
        .description(panel.description)
        .datasource(_SOURCE)
        .height(_HEIGHT)
        .span(_WIDTH)
        .override_by_name("Time", [models.DynamicConfigValue(id_val="custom.hidden", value=True)])
        .override_by_name("Value", [models.DynamicConfigValue(id_val="custom.hidden", value=True)])
    )
    for number, query in enumerate(panel.queries):
        made.with_target(
            prometheus.Dataquery().ref_id(chr(65 + number)).expr(query.expr).instant().format(PromQueryFormat.TABLE)
        )
    return made
