"""What the three dashboards have in common: time zone, tags, the first variables, links to the other two."""

from collections.abc import Sequence

from grafanalib import core

from loadpeak_dashboards import variables
from loadpeak_dashboards.grafana import SCHEMA_VERSION, Variable
from loadpeak_dashboards.links import COMPARISON_UID, FLEET_UID, LIVE_UID, dashboard_link

TITLES = {
    FLEET_UID: "Fleet headroom",
    LIVE_UID: "Startup live",
    COMPARISON_UID: "Baseline and fix",
}


def dashboard(
    uid: str,
    description: str,
    *,
    refresh: str,
    since: str,
    panels: Sequence[core.Panel],
    runs: Sequence[Variable] = (),
) -> core.Dashboard:
    """One of the dashboards.

    Args:
        uid: one of :data:`TITLES`.
        description: one sentence.
        refresh: how often it asks again, as in ``5s``.
        since: where its time range begins, as in ``now-5m``.
        panels: in the order of the page.
        runs: variables that choose a run, after data source, model and host.
    """
    return core.Dashboard(
        uid=uid,
        title=TITLES[uid],
        description=description,
        tags=["loadpeak"],
        timezone="browser",
        schemaVersion=SCHEMA_VERSION,
        refresh=refresh,
        graphTooltip=1,
        time=core.Time(since, "now"),
        templating=core.Templating(list=[variables.DATA_SOURCE, variables.MODEL, variables.HOST, *runs]),
        links=[dashboard_link(title, other) for other, title in TITLES.items() if other != uid],
        panels=list(panels),
    ).auto_panel_ids()
