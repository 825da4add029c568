"""Reports in every format: what they show, and that nothing of hosts and people is left in them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from loadpeak import run_folder
from loadpeak.cli import build
from loadpeak.errors import CommandError, LoadpeakError, RunNotFoundError
from loadpeak.record import EngineSettings, Failure, WeightHashes, WeightsHashed, encode_line
from loadpeak_exporter import reports
from loadpeak_exporter.ab.records import Arm, Evidence, Experiment
from loadpeak_exporter.ab.rules import RULES
from loadpeak_exporter.ab.store import append_startup, experiment_folder, read_experiment, write_plan
from loadpeak_exporter.reports.redaction import redact
from loadpeak_exporter.store import RunStore
from tests.exporter import building
from tests.exporter.ab.making import (
    BASELINE,
    RELEASE,
    change,
    evidence,
    experiment,
    with_fields,
    with_rank,
    with_startup,
)
from tests.fakes import MiB
from tests.profiler.test_record_files import header

PLAN = experiment()


def written(home: Path, plan: Experiment, found: list[Evidence]) -> None:
    """The experiment as `loadpeak ab` leaves it."""
    folder = experiment_folder(home, plan.experiment)
    write_plan(folder, plan)
    for item in found:
        append_startup(folder, item.startup)
        assert item.run is not None
        for rank, hashes in (item.weights or {}).items():
            with run_folder.journal_path(home / "runs" / item.run.run, rank).open("ab") as journal:
                for line in (
                    EngineSettings(at_seconds=1, settings=item.settings or {}),
                    WeightHashes(at_seconds=1, module="", hashes=hashes),
                    WeightsHashed(at_seconds=1, tensors=len(hashes), size_bytes=1, duration_seconds=1),
                ):
                    journal.write(encode_line(line))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOADPEAK_HOME", str(tmp_path))
    written(tmp_path, PLAN, evidence(tmp_path, PLAN))
    return tmp_path


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(build(["report"]), ["report", *arguments])
    if result.exception is not None:
        raise result.exception
    return result.stdout


def rendered(plan: Experiment, found: list[Evidence], home: Path, form: str, redacted: bool = True) -> str:
    return reports.render(reports.of_experiment(plan, found, RunStore(home), redacted), form)


def test_markdown_begins_with_the_reference_table(home: Path) -> None:
    text = invoke("awq")
    assert text.startswith("""## loadpeak A/B: awq

**The gate passed: 8 passed.**

### Peaks

| format | mode | worst-GPU load peak, baseline → fix (MiB) | worst-GPU startup peak, baseline → fix (MiB) \
| ready live allocation per GPU (MiB) |
|---|---|---:|---:|---:|
| awq | eager 1 | 720 → 630 | 720 → 630 | 100.000 |
| awq | eager 2 | 720 → 630 | 720 → 630 | 100.000 |
""")
    for line in (
        "| Prepared weight and scale tensors are equal by hash | passed | 8 tensors on 1 rank, all equal |",
        "| baseline | 2 | 720 | 720 | 220 | 100.000 | 0 |",
        "| baseline | 720 | 600 | 1.20 | across layers | the cache grows across the layers, by 30 MiB a "
        "layer up to layer 3; a release per layer helps: --release moe-layer |",
        "| release | until ready | 2 | 41.0 · 41.5 · 42.0 | the ranges overlap: no difference shown |",
        "vllm serve Qwen3 --enforce-eager",
        "| release | moe-layer | vllm | as it is | — | this one |",
    ):
        assert f"\n{line}\n" in text


def test_markdown_is_what_a_renderer_takes_for_tables(tmp_path: Path) -> None:
    """Cells with bars and markup in them stay cells."""
    plan = experiment(BASELINE, Arm(name="a|b*<i>`", split_limit="keep"), pairs=1)
    found = change(evidence(tmp_path, plan), "a|b*<i>`", 1, with_startup(note="two\nlines | <b>"))
    text = rendered(plan, found, tmp_path, "md")
    page = MarkdownIt("commonmark").enable("table").render(text)
    assert page.count("<table>") == 8
    for table in re.findall("<table>.*?</table>", page, re.DOTALL):
        rows = [len(re.findall("<t[hd]", row)) for row in table.split("<tr>")[1:]]
        assert len(set(rows)) == 1, table
    assert "<i>" not in page
    assert "a|b*&lt;i&gt;`" in page
    assert "two lines | &lt;b&gt;" in page


def test_junit_has_a_case_for_each_rule_of_each_arm(tmp_path: Path) -> None:
    plan = experiment(BASELINE, RELEASE, Arm(name="split", split_limit="keep"), pairs=1)
    found = change(evidence(tmp_path, plan), "release", 1, with_fields(weights=None))
    suites = ElementTree.fromstring(rendered(plan, found, tmp_path, "junit"))
    (suite,) = suites
    cases = {(case.get("classname"), case.get("name")): case for case in suite}
    assert cases.keys() == {(arm, rule.name) for arm in ("release", "split") for rule in RULES}
    failures = {key: failure for key, case in cases.items() if (failure := case.find("failure")) is not None}
    assert suites.tag == "testsuites"
    assert suite.get("tests") == "16"
    assert suite.get("failures") == str(len(failures)) == "2"
    assert failures["release", "weights"].get("type") == "not-judged"
    peak = failures["split", "device-peak"]
    assert peak.get("type") == "failed"
    assert peak.text == peak.get("message")
    assert "rank 0 720 → 720 MiB is not lower" in (peak.text or "")


def test_characters_that_xml_lacks_do_not_break_it(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    found = change(evidence(tmp_path, plan), "release", 1, with_startup(error="\x1b[31mno\x00 <&>"))
    (suite,) = ElementTree.fromstring(rendered(plan, found, tmp_path, "junit"))
    assert "no\N{REPLACEMENT CHARACTER} <&>" in (suite[0][0].text or "")


def test_json_of_an_experiment_is_its_verdict(home: Path) -> None:
    printed = json.loads(invoke("awq", "--format", "json"))
    assert json.loads(invoke("awq", "--json")) == printed
    assert printed.keys() == {"pairs", "gate", "passed"}
    assert printed["passed"] is True
    assert [entry["rule"] for entry in printed["gate"]] == [rule.name for rule in RULES]


def test_charts_have_the_curves_of_a_store_that_was_not_read_yet(home: Path) -> None:
    plan, found = read_experiment(home, "awq")
    report = reports.of_experiment(plan, found, RunStore(home))
    assert [drawn.variant for drawn in report.drawn] == ["baseline", "release"]
    assert all(drawn.timeline.device_used_bytes for drawn in report.drawn)


def test_failed_startup_is_said_with_its_reason(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    found = change(evidence(tmp_path, plan), "baseline", 1, with_startup(error="CUDA out of memory"))
    text = rendered(plan, found, tmp_path, "md")
    assert "**The gate did not pass: 1 failed, 7 not judged.**" in text
    assert "| eager 1 | 720 (not ready) → 630 |" in text
    assert "What could not be judged was not shown" in text
    nothing = [with_fields(run=None, weights=None, settings=None)(item) for item in found]
    assert "| — | — 1 | — (not ready) → — |" in rendered(plan, nothing, tmp_path, "md")


def test_allocation_that_differs_is_shown_on_both_sides(tmp_path: Path) -> None:
    plan = experiment(pairs=1)
    found = change(
        evidence(tmp_path, plan, ranks=2), "release", 1, with_rank(1, ready_allocated_bytes=101 * MiB)
    )
    assert "| 100.000 → 100.000 to 101.000 |" in rendered(plan, found, tmp_path, "md")


# ── single runs ───────────────────────────────────────────────────────────────────────────────────


def test_run_has_a_report_of_its_own(home: Path) -> None:
    text = invoke("baseline-1")
    for line in (
        "## loadpeak run baseline-1",
        "**baseline: ready, load peak 720 MiB, 1 rank.**",
        "| 0 | ready | 720 | 32,048 | 720 | 220 | 100 | 100.000 | 0 |",
        "Rank 0, across layers: the cache grows across the layers, by 30 MiB a layer up to layer 3; a "
        "release per layer helps: --release moe-layer.",
        "| process_weights | 0.4 | 100 | 220 | 720 | expandable_segments:True |",
        "| 3 | model.layers.3.experts | 190 | 220 | 220 | 100 | — | 0.10 |",
    ):
        assert f"\n{line}\n" in "\n" + text
    printed = json.loads(invoke("latest:baseline", "--format", "json"))
    assert printed["header"]["hostname"] == "HOST"


def test_run_that_ran_out_of_memory_says_why(home: Path) -> None:
    startup = building.Startup(home, "dead").load()
    message = "CUDA out of memory. Tried to allocate 384.00 MiB.\n  in /opt/venv/torch/cuda.py"
    startup.journal.append(
        Failure(at_seconds=startup.clock(), outcome="oom", error="OutOfMemoryError", message=message)
    )
    text = invoke("dead")
    assert "### Failure of rank 0" in text
    assert "CUDA out of memory. Tried to allocate 384.00 MiB.\n  in cuda.py" in text


def test_run_without_ranks_has_a_report_too(home: Path) -> None:
    (home / "runs" / "early").mkdir()
    run_folder.write_header(home / "runs" / "early", header("early", created=time.time()))
    assert "baseline: loading, 0 ranks." in invoke("early")


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["nope"], RunNotFoundError, "no run and no experiment 'nope' in"),
        (["latest:nope"], RunNotFoundError, "no run of variant 'nope'"),
        (["broken"], RunNotFoundError, "run broken is damaged: run.json is not there"),
        (["torn"], CommandError, "experiment.json cannot be read"),
        (
            ["awq", "--format", "pdf"],
            CommandError,
            "there is no format 'pdf': expected md, html, json, junit",
        ),
        (["baseline-1", "--format", "junit"], CommandError, "a single run has no gate"),
        (
            ["awq", "--output", "no/such/folder/file"],
            CommandError,
            "no/such/folder/file cannot be written: No",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    home: Path, arguments: list[str], error: type[LoadpeakError], words: str
) -> None:
    (home / "runs" / "broken").mkdir()
    (home / "experiments" / "torn").mkdir()
    (home / "experiments" / "torn" / "experiment.json").write_text("{")
    with pytest.raises(error, match=re.escape(words)) as raised:
        invoke(*arguments)
    assert "\n" not in str(raised.value)


def test_report_goes_to_a_file(home: Path, tmp_path: Path) -> None:
    assert invoke("awq", "--output", str(tmp_path / "report.md")) == ""
    assert (tmp_path / "report.md").read_text() == invoke("awq")


# ── redaction ─────────────────────────────────────────────────────────────────────────────────────

SECRETS = (
    "gpu-host-7",
    "corp.example",
    "anna",
    "bert",
    "/home",
    "/data",
    "/opt",
    "secret",
    "10.1.2.3",
    "fe80::1",
    "node9.cluster.internal",
)
SECRET_ERROR = (
    "OSError at gpu-host-7.corp.example (10.1.2.3:29500, fe80::1, node9.cluster.internal): no such file "
    "'/data/secret models/of anna/Qwen 3' nor /home/anna/.cache/secret/x.bin; see file:///opt/secret/y.py "
    "or http://gpu-host-7:8000/secret/z, and ~bert/secret/w, run by anna"
)


def secretive(home: Path) -> tuple[Experiment, list[Evidence]]:
    """An experiment in which hosts, people and paths stand in all places where they can."""
    arm = Arm(
        name="release",
        release="moe-layer",
        environment="/opt/secret/venv",
        arguments=("--download-dir", "/data/secret models/of anna/Qwen 3"),
    )
    plan = msgspec.structs.replace(
        experiment(BASELINE, arm, pairs=1),
        command=(
            "/opt/secret/bin/vllm",
            "serve",
            "--model=/data/secret models/of anna/Qwen 3",
            "--host",
            "10.1.2.3",
        ),
    )
    found = evidence(home, plan, model="/data/secret models/of anna/Qwen 3")
    found = change(
        found,
        "release",
        1,
        lambda item: with_fields(
            settings={"load_config.download_dir": "/home/bert/secret", "VLLM_HOST_IP": "10.1.2.3"}
        )(with_startup(error=SECRET_ERROR, note=SECRET_ERROR)(item)),
    )
    return plan, [found[0], found[1]]


@pytest.mark.parametrize("form", reports.FORMATS)
def test_nothing_of_hosts_and_people_survives_in_any_format(
    tmp_path: Path, form: str, need: Callable[[bool, str], None]
) -> None:
    plan, found = secretive(tmp_path)
    text = rendered(plan, found, tmp_path, form)
    # The charting library in the page is not ours: its words are none of the report's.
    ours = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    left = [secret for secret in SECRETS if secret in ours]
    assert not left, ours
    assert "OSError at HOST" in ours
    assert form in ("json", "junit") or "Qwen 3" in ours
    kept = rendered(plan, found, tmp_path, form, redacted=False)
    assert [secret for secret in SECRETS if secret in kept] == list(SECRETS) or form in ("json", "junit")
    assert "gpu-host-7" in kept


@pytest.mark.parametrize("form", ["md", "html", "json"])
def test_nothing_of_hosts_and_people_survives_in_the_report_of_a_run(tmp_path: Path, form: str) -> None:
    model = "/data/secret models/of anna/Qwen 3"
    startup = building.Startup(tmp_path, "r", hostname="gpu-host-7", model=model, boot_id="b-1").load()
    startup.journal.append(
        Failure(at_seconds=startup.clock(), outcome="failed", error="OSError", message=SECRET_ERROR)
    )
    store = RunStore(tmp_path)
    text = reports.render(reports.of_run(store.find("r"), store), form)
    ours = re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    assert not [secret for secret in (*SECRETS, "b-1") if secret in ours], ours


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model.layers.3.mlp w13/w2 12 MiB/s 0.26.0", "model.layers.3.mlp w13/w2 12 MiB/s 0.26.0"),
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("127.0.0.1:8000 and ::1 and 0.0.0.0", "127.0.0.1:8000 and ::1 and 0.0.0.0"),
        ("c10::CUDAError at 12:30:45, 1 / 2", "c10::CUDAError at 12:30:45, 1 / 2"),
        ("expandable_segments:True,max_split_size_mb:20", "expandable_segments:True,max_split_size_mb:20"),
        ("--a=/x/y.py --b /x/z/", "--a=y.py --b z"),
        ("PATH=/x/a:/x/b ../x/c ./d ~/e/f", "PATH=a:b c d f"),
        ("s3://bucket/models/Qwen?key=1", "s3://HOST/Qwen"),
        ("tcp://10.9.8.7:29500", "tcp://HOST"),
        ("in /home/carla, by carla and (carla).", "in ~, by USER and (USER)."),
        ("at h7 and h7.some.where but not h77", "at HOST and HOST but not h77"),
    ],
)
def test_redaction_takes_out_paths_and_names_and_nothing_else(text: str, expected: str) -> None:
    assert redact((text,), ["h7"], []) == (expected,)


def test_redaction_keeps_the_words_of_the_record(home: Path) -> None:
    """A host may have any name, also one of ours."""
    store = RunStore(home)
    run = store.find("baseline-1")
    named: Any = redact(run, ["ready", "process_weights", "nvml"], [])
    assert (named.outcome, named.ranks[0].phases, named.ranks[0].device.kind) == (
        "ready",
        run.ranks[0].phases,
        "nvml",
    )


def test_paths_that_differ_still_differ_when_they_are_redacted() -> None:
    text = ["/a/model → /b/model", "/b/model and /a/model/", "/c/other"]
    assert redact(text, (), ()) == ["model → model (2)", "model (2) and model", "other"]
