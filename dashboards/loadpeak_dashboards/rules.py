"""Recording rules and alerts for Prometheus; thresholds and queries come from their own modules."""

from __future__ import annotations

from typing import Any, NamedTuple

from loadpeak_dashboards import thresholds as limits
from loadpeak_dashboards.queries import RANK, RUN, each, load_headroom, load_peak, metric, newly, recently

RUNBOOKS = "docs/runbooks"


class Record(NamedTuple):
    """A recording rule."""

    name: str
    expr: str

    def rule(self) -> dict[str, Any]:
        """As Prometheus takes it."""
        return {"record": self.name, "expr": self.expr}


class Alert(NamedTuple):
    """An alert; ``runbook`` is the page's name in docs/runbooks."""

    name: str
    expr: str
    severity: str
    summary: str
    description: str
    runbook: str
    minutes: int = 0
    keep_minutes: int = 0
    or_on_hosts: str = ""
    """Fires too, where the host service is expected."""

    def rule(self, runbooks: str, hosts: bool) -> dict[str, Any]:
        """As Prometheus takes it."""
        expr = f"{self.expr} or {self.or_on_hosts}" if hosts and self.or_on_hosts else self.expr
        found: dict[str, Any] = {"alert": self.name, "expr": expr}
        if self.minutes:
            found["for"] = f"{self.minutes}m"
        if self.keep_minutes:
            found["keep_firing_for"] = f"{self.keep_minutes}m"
        found["labels"] = {"severity": self.severity}
        found["annotations"] = {
            "summary": self.summary,
            "description": self.description,
            "runbook_url": f"{runbooks}/{self.runbook}.md",
        }
        return found


LOADING = "loadpeak:run_loading"
HEADROOM = "loadpeak:load_headroom_bytes"
HEADROOM_RATIO = "loadpeak:load_headroom_ratio"
PEAK = "loadpeak:load_peak_bytes"
LAST_READY_PEAK = "loadpeak:last_ready_load_peak_bytes"

_TOTAL = each(metric("device_total_bytes"), *RANK)
_PEAK_OF_RUN = each(load_peak(), *RUN)
_MODEL = each(metric("run_info"), *RUN, "model")
_LOADED_RECENTLY = f"and on (host, run) ({recently(LOADING, limits.RECENT_MINUTES)})"
_BECAME_READY = newly(metric("run_outcome", outcome="ready"), limits.RECENT_MINUTES, "host", "run")

RECORDS: tuple[Record, ...] = (
    Record(LOADING, each(metric("run_outcome", outcome="loading"), "host", "run")),
    Record(HEADROOM, load_headroom(*RANK)),
    Record(HEADROOM_RATIO, f"{HEADROOM} / {_TOTAL}"),
    Record(PEAK, f"{_PEAK_OF_RUN} * on (host, run, variant) group_left (model) {_MODEL}"),
    # Keeps its value from one start to the next, for as long as Prometheus looks back.
    Record(
        LAST_READY_PEAK,
        f"max by (host, model) ({PEAK} and on (host, run) ({_BECAME_READY})) "
        f"or last_over_time({LAST_READY_PEAK}[30d])",
    ),
)


def _headroom(share: float, size: int) -> str:
    low = f"({HEADROOM} < {size} or {HEADROOM} and on ({', '.join(RANK)}) {HEADROOM_RATIO} < {share})"
    return f"{low} {_LOADED_RECENTLY}"


def _unchanged(name: str) -> str:
    changes = f"changes({metric(name)}[{limits.STALLED_MINUTES}m])"
    return f"sum by (host, run) ({changes}) == 0"


_WHERE = "run {{ $labels.run }} on {{ $labels.host }}"
_RANK = "rank {{ $labels.rank }} of " + _WHERE
_FIX = "Start it with `loadpeak run --release moe-layer` or `--split-limit keep` and compare the two."


def _outcome(outcome: str) -> str:
    return newly(metric("run_outcome", outcome=outcome), limits.RECENT_MINUTES, *RUN)


ALERTS: tuple[Alert, ...] = (
    Alert(
        "LoadpeakHeadroomCritical",
        _headroom(limits.HEADROOM_CRITICAL_SHARE, limits.HEADROOM_CRITICAL_BYTES),
        "critical",
        "Startup headroom of " + _RANK + " is down to {{ $value | humanize1024 }}B",
        "At its highest before the KV cache, device memory left {{ $value | humanize1024 }}B free. "
        "The next start with a slightly larger model, batch or driver can fail. " + _FIX,
        "headroom",
    ),
    Alert(
        "LoadpeakHeadroomLow",
        _headroom(limits.HEADROOM_WARNING_SHARE, limits.HEADROOM_WARNING_BYTES),
        "warning",
        "Startup headroom of " + _RANK + " is {{ $value | humanize1024 }}B",
        "At its highest before the KV cache, device memory left {{ $value | humanize1024 }}B free. " + _FIX,
        "headroom",
    ),
    Alert(
        "LoadpeakCacheFlushed",
        f"{each(metric('allocator_retries_total'), *RANK)} > 0 {_LOADED_RECENTLY}",
        "warning",
        "The allocator of " + _RANK + " hit its limit {{ $value }} times while loading",
        "An allocation failed and only succeeded after the whole cache was given back ({{ $value }} times). "
        "The startup was one step from out of memory. " + _FIX,
        "cache-flushed",
    ),
    Alert(
        "LoadpeakOutOfMemory",
        _outcome("oom"),
        "critical",
        _WHERE + " ran out of device memory while loading",
        "The startup did not become ready: outcome oom ({{ $value }} run). `loadpeak runs` and the page of "
        "the host service have the error, the layer and the peak. " + _FIX,
        "out-of-memory",
    ),
    Alert(
        "LoadpeakStartupStalled",
        f"{LOADING} == 1 and {LOADING} offset {limits.STALLED_MINUTES}m == 1 "
        f"and on (host, run) ({_unchanged('layers_done')}) and on (host, run) ({_unchanged('phase')})",
        "warning",
        _WHERE + f" has made no progress for {limits.STALLED_MINUTES} minutes",
        "It is loading ({{ $value }}) and neither finished a layer nor entered a phase for "
        f"{limits.STALLED_MINUTES} minutes. Look at the disk it reads weights from and at the engine's log.",
        "startup-stalled",
    ),
    Alert(
        "LoadpeakPeakRegression",
        f"{PEAK} / on (host, model) group_left () {LAST_READY_PEAK} > {1 + limits.REGRESSION_SHARE} "
        f"and on (host, run) {LOADING} == 1",
        "warning",
        "The load peak of " + _WHERE + " is {{ $value | humanizePercentage }} of the last ready start's",
        "The last ready start of {{ $labels.model }} on this host needed less: this one is at "
        "{{ $value | humanizePercentage }} of its peak. Compare the two: their records have settings and "
        "versions.",
        "peak-regression",
        keep_minutes=limits.RECENT_MINUTES,
    ),
    Alert(
        "LoadpeakStartupKilled",
        _outcome("killed"),
        "critical",
        _WHERE + " was killed before it was ready",
        "Its process went without a word ({{ $value }} run): a signal, the kernel's out-of-memory killer, an "
        "evicted pod. The record names the signal where it could be read.",
        "startup-killed",
    ),
    Alert(
        "LoadpeakRecorderDegraded",
        f"({each(metric('sampler_gap_seconds'), *RANK)} > {limits.SAMPLER_GAP_SECONDS} "
        f"or {each(metric('hook_errors_total'), *RANK)} > 0) {_LOADED_RECENTLY}",
        "info",
        "The recording of " + _RANK + " has gaps",
        "Device samples were {{ $value }} s apart, or so many hooks failed: peaks of this run may be too "
        "low. The journal has the errors.",
        "recorder-degraded",
    ),
    Alert(
        "LoadpeakTargetDown",
        # An engine's exporter is a target before its worker starts to listen.
        f'up{{job="loadpeak"}} == 0 or up{{job=~"loadpeak-.+"}} == 0 '
        f'and max_over_time(up{{job=~"loadpeak-.+"}}[{limits.RECENT_MINUTES}m]) == 1',
        "warning",
        'Prometheus cannot scrape {{ or $labels.instance "any target" }} ({{ $labels.job }})',
        "The host service or an exporter of an engine does not answer: up is {{ $value }} (1 where there is "
        "no target at all). Startups there are recorded on disk, but nobody is warned.",
        "target-down",
        minutes=limits.DOWN_MINUTES,
        or_on_hosts='absent(up{job="loadpeak"})',
    ),
)


def rules(runbooks: str = RUNBOOKS, hosts: bool = True) -> dict[str, Any]:
    """The rule file.

    Args:
        runbooks: where the pages of docs/runbooks are, a folder or a URL.
        hosts: whether there are host services to scrape, as nowhere in Kubernetes.
    """
    return {
        "groups": [
            {"name": "loadpeak-records", "interval": "2s", "rules": [record.rule() for record in RECORDS]},
            {
                "name": "loadpeak-alerts",
                "interval": "2s",
                "rules": [alert.rule(runbooks, hosts) for alert in ALERTS],
            },
        ]
    }
