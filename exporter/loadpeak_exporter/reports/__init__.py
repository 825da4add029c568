"""Reports: built from records, redacted, then rendered in one of :data:`FORMATS`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from loadpeak.errors import CommandError
from loadpeak_exporter.ab.records import Evidence, Experiment
from loadpeak_exporter.records import RunRecord
from loadpeak_exporter.reports import experiment as experiments
from loadpeak_exporter.reports import junit, markdown, page
from loadpeak_exporter.reports import run as runs
from loadpeak_exporter.reports.document import Report
from loadpeak_exporter.reports.redaction import redact
from loadpeak_exporter.store import RunStore

FORMATS = ("md", "html", "json", "junit")


def of_experiment(
    experiment: Experiment, evidence: Sequence[Evidence], store: RunStore, redacted: bool = True
) -> Report:
    """The report of an experiment."""
    report = experiments.build(experiment, evidence, store)
    if not redacted:
        return report
    found = [item.run for item in evidence if item.run is not None]
    hosts = [experiment.hostname, *(run.header.hostname for run in found)]
    return redact(report, hosts, _paths(experiment, evidence))


def of_run(run: RunRecord, store: RunStore, redacted: bool = True) -> Report:
    """The report of a single run."""
    report = runs.build(run, store)
    return redact(report, [run.header.hostname], [run.header.model or ""]) if redacted else report


def render(report: Report, form: str) -> str:
    """A report in one of the formats.

    Raises:
        CommandError: there is no such format, or not for a single run.
    """
    if form == "md":
        return markdown.render(report)
    if form == "html":
        return page.render(report)
    if form == "json":
        return (
            msgspec.json.format(msgspec.json.encode(report.verdict or report.run), indent=2).decode() + "\n"
        )
    if form == "junit" and report.verdict is not None:
        return junit.render(report.verdict, report.title)
    if form == "junit":
        raise CommandError(
            "a single run has no gate, so no JUnit report: name an experiment, or use another format"
        )
    raise CommandError(f"there is no format {form!r}: expected {', '.join(FORMATS)}")


def _paths(experiment: Experiment, evidence: Sequence[Evidence]) -> Iterator[str]:
    """Arguments and settings that may be paths."""
    for arm in experiment.arms:
        yield arm.environment or ""
        yield from (part for argument in arm.arguments for part in (argument, argument.partition("=")[2]))
    yield from (part for argument in experiment.command for part in (argument, argument.partition("=")[2]))
    for item in evidence:
        yield from (item.settings or {}).values()
        if item.run is not None:
            yield item.run.header.model or ""
