"""Stable uids and the links between dashboards, which keep variables and time range."""

from grafanalib import core

LIVE_UID = "loadpeak-startup-live"
COMPARISON_UID = "loadpeak-baseline-and-fix"
FLEET_UID = "loadpeak-fleet-headroom"

_KEEP = "${datasource:queryparam}&${model:queryparam}&${host:queryparam}&from=${__from}&to=${__to}"


def dashboard_link(title: str, uid: str) -> core.DashboardLink:
    """A link in a dashboard's head."""
    return core.DashboardLink(
        title=title, type="link", uri=f"/d/{uid}", includeVars=True, keepTime=True, targetBlank=False
    )


def run_url(run: str) -> str:
    """The address of *Startup live* for a run, for example that of a table's row."""
    return f"/d/{LIVE_UID}?var-run={run}&{_KEEP}"


def comparison_url(fix: str) -> str:
    """The address of *Baseline and fix* with a run on the right-hand side."""
    return f"/d/{COMPARISON_UID}?var-fix={fix}&{_KEEP}"
