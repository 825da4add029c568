"""The time left is told from the startups that are over."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from loadpeak_exporter.ab.progress import Progress
from loadpeak_exporter.ab.records import Startup
from tests.exporter.ab.test_plan import experiment
from tests.fakes import FakeClock


@pytest.mark.parametrize(
    ("seconds", "left"),
    [([], ""), ([10.0, 30.0, 11.0], " · about 66 s left"), ([60.0], " · about 8 min left"), ([None], "")],
)
def test_time_left_is_the_median_for_each_startup_to_come(seconds: list[float | None], left: str) -> None:
    output = io.StringIO()
    progress = Progress(Console(file=output, width=200), experiment(pairs=3), FakeClock())
    finished = [
        Startup(pair=0, arm="a", began_at_wall_seconds=100.0, ended_at_wall_seconds=each and 100.0 + each)
        for each in seconds
    ]
    progress.begin(1, "b", finished)
    place = f"pair 2 of 3 · b · startup {len(seconds) + 1} of 9"
    assert output.getvalue() == f"loadpeak: {place}{left}\n"
