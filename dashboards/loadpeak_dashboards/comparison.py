"""*Baseline and fix*: two runs over each other, by phase and by layer."""

from grafanalib import core

from loadpeak.record import PHASES
from loadpeak_dashboards import variables
from loadpeak_dashboards.frame import dashboard
from loadpeak_dashboards.links import COMPARISON_UID
from loadpeak_dashboards.panels import (
    GREEN,
    ORANGE,
    RED,
    SERIES,
    at,
    bars,
    override,
    per_layer,
    row,
    stat,
    steps,
    table,
    timeline,
)
from loadpeak_dashboards.queries import (
    cache_flushes,
    during_range,
    during_step,
    each,
    last,
    load_headroom,
    load_peak,
    metric,
)

SIDES = (("baseline", "$baseline"), ("fix", "$fix"))


def _reduction() -> str:
    baseline, fix = (f"max({during_range(load_peak(run=run))})" for _, run in SIDES)
    return f"{baseline} - {fix}"


def build() -> core.Dashboard:
    """The dashboard."""
    figures = [
        stat(
            f"Load peak, {side}",
            f"Highest device memory use of the {side} run before its KV cache, on its fullest GPU.",
            at(4 * number, 0, 4, 4),
            (each(during_range(load_peak(run=run)), "run"), side),
            decimals=1,
        )
        for number, (side, run) in enumerate(SIDES)
    ]
    figures += [
        stat(
            "Peak reduction",
            "How much lower the fix run's load peak is; red when it is higher.",
            at(8, 0, 4, 4),
            (_reduction(), "reduction"),
            decimals=1,
            thresholds=steps((None, RED), (0, GREEN)),
        ),
        stat(
            "Headroom gained",
            "Device memory left at the load peak: the fix run's less the baseline's, on their fullest GPUs.",
            at(12, 0, 4, 4),
            (
                f"{load_headroom(range_of=during_range, run='$fix')} "
                f"- {load_headroom(range_of=during_range, run='$baseline')}",
                "headroom gained",
            ),
            decimals=1,
            thresholds=steps((None, RED), (0, GREEN)),
        ),
        stat(
            "Ready difference",
            "Live memory when ready, fix less baseline, at the rank where they differ most: 0 when both hold "
            "the same weights.",
            at(16, 0, 4, 4),
            (
                "max(abs("
                f"{each(last(metric('ready_allocated_bytes', run='$fix')), 'rank')} - "
                f"{each(last(metric('ready_allocated_bytes', run='$baseline')), 'rank')}))",
                "difference",
            ),
            thresholds=steps((None, GREEN), (1, ORANGE)),
            none="not both ready",
        ),
        stat(
            "Cache flushes, fix",
            "Allocations of the fix run that only succeeded after the whole cache was given back.",
            at(20, 0, 4, 4),
            (cache_flushes("run", run="$fix"), "retries"),
            unit="none",
            thresholds=steps((None, GREEN), (1, RED)),
        ),
    ]
    about = table(
        "The two runs",
        "What ran on either side.",
        at(0, 4, 24, 5),
        [
            (
                each(
                    last(metric("run_info", run__re="$baseline|$fix")),
                    "run",
                    "variant",
                    "host",
                    "model",
                    "alloc_conf",
                    "release",
                    "split_limit",
                    "engine_version",
                ),
                "info",
            )
        ],
        {
            "run": "Run",
            "variant": "Variant",
            "host": "Host",
            "model": "Model",
            "alloc_conf": "Allocator setting",
            "release": "Release",
            "split_limit": "Split limit",
            "engine_version": "Engine",
        },
        sort_by="Run",
        hidden=["info"],
        overrides=[
            override(name, ("custom.width", width))
            for name, width in (
                ("Run", 270),
                ("Variant", 110),
                ("Host", 110),
                ("Allocator setting", 260),
                ("Release", 100),
                ("Split limit", 90),
                ("Engine", 80),
            )
        ],
    )
    by_layer = [
        per_layer(
            "Reserved memory by layer",
            "What the caching allocator held, on the rank with most: dashed inside the layer, solid after "
            "it. Both runs are aligned by layer.",
            at(0, 10, 24, 10),
            [
                (each(last(metric(name, run=run)), "layer"), f"{side}, {words}")
                for side, run in SIDES
                for name, words in (
                    ("layer_reserved_peak_bytes", "peak inside"),
                    ("layer_reserved_bytes", "after"),
                )
            ],
            colours={
                "baseline, peak inside": RED,
                "baseline, after": RED,
                "fix, peak inside": GREEN,
                "fix, after": GREEN,
            },
            dashed=["baseline, peak inside", "fix, peak inside"],
        ),
        per_layer(
            "Device memory by layer",
            "Highest device memory use while each layer was converted, on the fullest GPU.",
            at(0, 20, 24, 8),
            [(each(last(metric("layer_device_peak_bytes", run=run)), "layer"), side) for side, run in SIDES],
            colours={"baseline": RED, "fix": GREEN},
        ),
        bars(
            "Device peak by phase",
            "Highest device memory use within each phase, on the fullest GPU: aligned by phase, since the "
            "two runs did not start at the same time.",
            at(0, 29, 8, 10),
            [
                (each(during_range(metric("device_used_peak_bytes", run=run)), "phase"), side)
                for side, run in SIDES
            ],
            "phase",
            PHASES[:-1],
            colours=SERIES,
        ),
    ]
    over_time = [
        timeline(
            f"Device memory, {side}",
            f"Memory in use on each GPU of the {side} run, at the time it ran.",
            at(8 + 8 * number, 29, 8, 10),
            [(each(during_step(metric("device_used_bytes", run=run)), "rank"), "rank {{rank}}")],
        )
        for number, (side, run) in enumerate(SIDES)
    ]
    return dashboard(
        COMPARISON_UID,
        "Two startups side by side: what a fix did to the memory peak.",
        refresh="30s",
        since="now-1h",
        runs=[variables.run("baseline", "Baseline run"), variables.run("fix", "Fix run")],
        panels=[
            *figures,
            about,
            row("By layer", 9),
            *by_layer,
            row("By phase and over time", 28),
            *over_time,
        ],
    )
