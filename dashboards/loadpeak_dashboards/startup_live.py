"""*Startup live*: one run, while it loads and after."""

from grafanalib import core

from loadpeak.record import PHASES
from loadpeak_dashboards import thresholds as limits
from loadpeak_dashboards import variables
from loadpeak_dashboards.frame import dashboard
from loadpeak_dashboards.links import LIVE_UID
from loadpeak_dashboards.panels import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    at,
    bars,
    override,
    per_layer,
    row,
    stat,
    states,
    steps,
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

_RUN = {"run": "$run"}


def _selector(name: str, **labels: str) -> str:
    return metric(name, **_RUN, **labels)


def _layer(name: str, of: str = "max") -> str:
    return each(last(_selector(name)), "layer", of=of)


_HEADROOM_STEPS = steps(
    (None, RED), (limits.HEADROOM_CRITICAL_BYTES, ORANGE), (limits.HEADROOM_WARNING_BYTES, GREEN)
)
_NONE_IS_GOOD = steps((None, GREEN), (1, RED))


def build() -> core.Dashboard:
    """The dashboard."""
    outcome = each(f"{last(_selector('run_outcome'))} == 1", "outcome")
    phase = each(f"{last(_selector('phase'))} == 1", "phase")
    done = each(last(_selector("layers_done")), "run", of="min")
    expected = each(last(_selector("layers")), "run")
    headroom = load_headroom("run", range_of=during_range, **_RUN)
    peak = each(during_range(load_peak(**_RUN)), "run")
    figures = [
        stat(
            "Outcome",
            "How the startup went: loading, ready, oom, failed or killed.",
            at(0, 0, 4, 4),
            (outcome, "{{outcome}}"),
            unit="none",
            name=True,
        ),
        stat(
            "Phase",
            "The phase that the rank which is furthest behind is in.",
            at(4, 0, 5, 4),
            (phase, "{{phase}}"),
            unit="none",
            name=True,
        ),
        stat(
            "Layers done",
            "Share of the layers whose weights have been converted, on the slowest rank.",
            at(9, 0, 3, 4),
            (f"{done} / {expected}", "converted"),
            unit="percentunit",
            decimals=0,
        ),
        stat(
            "Headroom",
            "Device memory that was left at the highest use before the KV cache, on the fullest GPU.",
            at(12, 0, 4, 4),
            (headroom, "headroom"),
            decimals=1,
            thresholds=_HEADROOM_STEPS,
        ),
        stat(
            "Load peak",
            "Highest device memory use before the KV cache takes what is left, on the fullest GPU.",
            at(16, 0, 4, 4),
            (peak, "load peak"),
            decimals=1,
        ),
        stat(
            "Cache flushes",
            "Allocations that only succeeded after the whole cache was given back, over all ranks: each is "
            "one step from out of memory.",
            at(20, 0, 4, 4),
            (cache_flushes("run", **_RUN), "retries"),
            unit="none",
            thresholds=_NONE_IS_GOOD,
        ),
    ]
    over_time = [
        timeline(
            "Device memory",
            "Memory in use on each GPU by everybody, and what it has.",
            at(0, 5, 12, 9),
            [
                (each(during_step(_selector("device_used_bytes")), "rank", "gpu"), "rank {{rank}} in use"),
                (each(_selector("device_total_bytes"), "run"), "total of a GPU"),
            ],
            overrides=[
                override(
                    "total of a GPU",
                    ("color", {"mode": "fixed", "fixedColor": RED}),
                    ("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
                    ("custom.lineWidth", 1),
                )
            ],
        ),
        timeline(
            "Caching allocator",
            "What PyTorch's allocator holds and what of it is in live tensors, on the rank with most. The "
            "distance between the two is the cache.",
            at(12, 5, 12, 9),
            [
                (each(during_step(_selector("allocator_reserved_bytes")), "run"), "reserved"),
                (each(during_step(_selector("allocator_allocated_bytes")), "run"), "allocated"),
                (
                    each(during_step(_selector("allocator_inactive_split_bytes")), "run"),
                    "split, not releasable",
                ),
            ],
            colours={"^reserved$": BLUE, "^allocated$": GREEN, "^split": PURPLE},
        ),
        states(
            "Phases",
            "When the startup was in which phase.",
            at(0, 14, 12, 8),
            [(each(during_step(_selector("phase", phase=name)), "phase"), "{{phase}}") for name in PHASES],
        ),
        bars(
            "Peaks by phase",
            "The highest use within each phase, on the rank with most: in which phase the startup peak lies.",
            at(12, 14, 12, 8),
            [
                (each(during_range(_selector("device_used_peak_bytes")), "phase"), "device"),
                (each(during_range(_selector("allocator_reserved_peak_bytes")), "phase"), "reserved"),
                (each(during_range(_selector("allocator_allocated_peak_bytes")), "phase"), "allocated"),
            ],
            "phase",
            PHASES[:-1],
            colours=SERIES,
        ),
    ]
    layers = [
        per_layer(
            "Memory by layer",
            "On the rank with most. Reserved memory that grows from layer to layer is cache that a release "
            "per layer gives back; a peak inside single layers needs another allocator setting.",
            at(0, 23, 24, 10),
            [
                (_layer("layer_device_peak_bytes"), "device peak"),
                (_layer("layer_reserved_peak_bytes"), "reserved peak"),
                (_layer("layer_reserved_bytes"), "reserved after"),
                (_layer("layer_allocated_peak_bytes"), "allocated peak"),
            ],
            colours={
                "device peak": ORANGE,
                "reserved peak": BLUE,
                "reserved after": BLUE,
                "allocated peak": GREEN,
            },
            dashed=["reserved peak"],
        ),
        per_layer(
            "Released by layer",
            "Cached memory that was given back to the device after each layer, on the rank with most; empty "
            "where no release was asked for.",
            at(0, 33, 24, 6),
            [(_layer("layer_released_bytes"), "released")],
            bars=True,
            colours={"released": PURPLE},
            none="no release in this run",
        ),
        per_layer(
            "Duration by layer",
            "Time that the conversion of each layer took, on the slowest rank.",
            at(0, 39, 24, 6),
            [(_layer("layer_duration_seconds"), "duration")],
            unit="s",
            bars=True,
            colours={"duration": BLUE},
        ),
    ]
    return dashboard(
        LIVE_UID,
        "One startup of a vLLM engine: where its memory peak lies, while it loads and after.",
        refresh="1s",
        since="now-5m",
        runs=[variables.run("run", "Run")],
        panels=[
            *figures,
            row("Over time", 4),
            *over_time,
            row("By layer", 22),
            *layers,
        ],
    )
