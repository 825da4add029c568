"""*Fleet headroom*: every host, the tightest first."""

from collections.abc import Callable

from grafanalib import core

from loadpeak_dashboards import thresholds as limits
from loadpeak_dashboards.frame import dashboard
from loadpeak_dashboards.links import FLEET_UID, comparison_url, run_url
from loadpeak_dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    OUTCOMES,
    RED,
    at,
    link,
    override,
    row,
    stat,
    steps,
    table,
    timeline,
)
from loadpeak_dashboards.queries import (
    RUN,
    cache_flushes,
    during_range,
    during_step,
    each,
    last,
    load_headroom,
    load_peak,
    metric,
    while_loading,
)

_CHOSEN = {"host__re": "$host"}
_SHARE_STEPS = steps(
    (None, RED), (limits.HEADROOM_CRITICAL_SHARE, ORANGE), (limits.HEADROOM_WARNING_SHARE, GREEN)
)

_NO_READING = {
    "type": "special",
    "options": {"match": "null+nan", "result": {"text": "—", "color": "transparent", "index": 0}},
}


def _of_model(expression: str) -> str:
    """An expression by run, kept for the chosen models."""
    runs = each(last(metric("run_info", model__re="$model", **_CHOSEN)), *RUN, "model")
    return f"{expression} * on ({', '.join(RUN)}) group_left (model) {runs}"


def _share() -> str:
    return _of_model(f"({_headroom(during_range)} / {_total(during_range)})")


def _headroom(range_of: Callable[[str], str]) -> str:
    return load_headroom(*RUN, range_of=range_of, **_CHOSEN)


def _total(range_of: Callable[[str], str]) -> str:
    return each(range_of(metric("device_total_bytes", **_CHOSEN)), *RUN)


def _count(outcome: str) -> str:
    by_run = each(f"{last(metric('run_outcome', outcome__re=outcome, **_CHOSEN))} == 1", *RUN)
    return f"count({_of_model(by_run)}) or vector(0)"


def build() -> core.Dashboard:
    """The dashboard."""
    figures = [
        stat(
            "Tightest headroom",
            "The smallest share of a GPU's memory that any startup in the time range left free.",
            at(0, 0, 6, 4),
            (f"min({_share()})", "headroom"),
            unit="percentunit",
            decimals=1,
            thresholds=_SHARE_STEPS,
        ),
        stat(
            "Hosts in danger",
            f"Hosts with a startup that left less than {limits.HEADROOM_WARNING_SHARE:.0%} of a GPU free.",
            at(6, 0, 6, 4),
            (
                f"count(min by (host) ({_share()}) < {limits.HEADROOM_WARNING_SHARE}) or vector(0)",
                "hosts",
            ),
            unit="none",
            thresholds=steps((None, GREEN), (1, ORANGE)),
        ),
        *(
            stat(
                title,
                f"Startups in the time range whose outcome is {outcome}.",
                at(12 + 3 * number, 0, 3, 4),
                (_count(outcome), outcome),
                unit="none",
                thresholds=steps((None, colour), *more),
            )
            for number, (title, outcome, colour, more) in enumerate(
                (
                    ("Loading", "loading", BLUE, ()),
                    ("Ready", "ready", GREEN, ()),
                    ("Out of memory", "oom", GREEN, ((1, RED),)),
                    ("Failed or killed", "failed|killed", GREEN, ((1, RED),)),
                )
            )
        ),
    ]
    outcome = each(f"{last(metric('run_outcome', **_CHOSEN))} == 1", *RUN, "outcome")
    startups = table(
        "Startups",
        "Every startup in the time range, the one with least headroom first. The run leads to Startup live, "
        "the variant to its comparison.",
        at(0, 5, 24, 11),
        [
            (_share(), "Headroom"),
            (_of_model(_headroom(during_range)), "Headroom, bytes"),
            (_of_model(each(during_range(load_peak(**_CHOSEN)), *RUN)), "Load peak"),
            (_of_model(cache_flushes(*RUN, **_CHOSEN)), "Cache flushes"),
            (_of_model(outcome), "outcome is"),
        ],
        {"host": "Host", "outcome": "Outcome", "variant": "Variant", "run": "Run", "model": "Model"},
        sort_by="Headroom",
        hidden=["outcome is"],
        overrides=[
            override(
                "Headroom",
                ("unit", "percentunit"),
                ("decimals", 1),
                ("thresholds", _SHARE_STEPS),
                ("mappings", [_NO_READING]),
                ("custom.cellOptions", {"type": "color-background", "mode": "basic"}),
                ("color", {"mode": "thresholds"}),
                ("custom.width", 110),
            ),
            override("Headroom, bytes", ("decimals", 1), ("custom.width", 130)),
            override("Load peak", ("decimals", 1), ("custom.width", 120)),
            override("Cache flushes", ("unit", "none"), ("decimals", 0), ("custom.width", 115)),
            override(
                "Outcome",
                ("custom.width", 100),
                (
                    "mappings",
                    [
                        {
                            "type": "value",
                            "options": {
                                name: {"text": name, "color": colour, "index": number}
                                for number, (name, colour) in enumerate(OUTCOMES.items())
                            },
                        }
                    ],
                ),
                ("custom.cellOptions", {"type": "color-text"}),
            ),
            override("Host", ("custom.width", 110)),
            override(
                "Variant",
                ("custom.width", 120),
                ("links", [link("Compare", comparison_url("${__data.fields.Run}"))]),
            ),
            override(
                "Run", ("custom.width", 270), ("links", [link("Startup live", run_url("${__value.raw}"))])
            ),
        ],
    )
    trends = [
        timeline(
            "Headroom by host",
            "Share of the fullest GPU's memory that was left free so far by the startups that were loading.",
            at(0, 17, 12, 9),
            [
                (
                    each(
                        while_loading(f"{_headroom(during_step)} / {_total(during_step)}", **_CHOSEN),
                        "host",
                        of="min",
                    ),
                    "{{host}}",
                )
            ],
            unit="percentunit",
            points=True,
        ),
        timeline(
            "Device memory by host",
            "Highest device memory use of any GPU of each host while it was loading.",
            at(12, 17, 12, 9),
            [
                (
                    each(
                        while_loading(during_step(metric("device_used_bytes", **_CHOSEN)), **_CHOSEN), "host"
                    ),
                    "{{host}}",
                )
            ],
            points=True,
        ),
    ]
    return dashboard(
        FLEET_UID,
        "How close to their limit the GPUs of each host come while engines start.",
        refresh="10s",
        since="now-6h",
        panels=[*figures, row("Startups", 4), startups, row("Over time", 16), *trends],
    )
