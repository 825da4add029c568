"""Ask a recorded run what other settings would have done: all combinations, replayed on all cores."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from loadpeak.allocator.replay import Change, Outcome, Release, Scenario, replay
from loadpeak.allocator.settings import added, options, parse
from loadpeak.whatif.source import Source


class Question(NamedTuple):
    """One combination.

    Attributes:
        alloc_conf: what the process is started with.
        release: the release policy, as it is spelled.
        capacity_bytes: the most that may be reserved, or nothing for no limit.
        keep_split_limit: whether the program's own changes of the split limit are left out
            (``LOADPEAK_SPLIT_LIMIT=keep``).
    """

    alloc_conf: str
    release: str = "off"
    capacity_bytes: int | None = None
    keep_split_limit: bool = False

    def scenario(self, changes: Sequence[Change]) -> Scenario:
        """What to replay."""
        if self.keep_split_limit:
            changes = [kept for change in changes if (kept := _without_split_limit(change)).alloc_conf]
        return Scenario(self.alloc_conf, Release.parse(self.release), self.capacity_bytes, tuple(changes))


def _without_split_limit(change: Change) -> Change:
    kept = {name: value for name, value in options(change.alloc_conf).items() if name != "max_split_size_mb"}
    return change._replace(alloc_conf=",".join(f"{name}:{value}" for name, value in kept.items()))


class Answer(NamedTuple):
    """What a combination comes to, on the device where it comes to most.

    Attributes:
        question: the combination.
        outcome: what the replay came to.
        device: index of that device.
    """

    question: Question
    outcome: Outcome
    device: int

    @property
    def name(self) -> str:
        """The combination in a few words."""
        question = self.question
        parts = [question.alloc_conf.replace(",", ", ") or "default"]
        parts += [f"release {question.release}"] * (question.release != "off")
        parts += ["split limit kept"] * question.keep_split_limit
        return ", ".join(parts)

    @property
    def fits(self) -> bool | None:
        """Whether every request found memory; not known without a capacity."""
        if self.outcome.failed_bytes is not None:
            return False
        return None if self.question.capacity_bytes is None else True

    @property
    def margin_bytes(self) -> int | None:
        """Capacity that was never reserved, where it fits and there is one."""
        if not self.fits or self.question.capacity_bytes is None:
            return None
        return self.question.capacity_bytes - self.outcome.peak_reserved_bytes


def recorded(source: Source, capacity_bytes: int | None) -> Question:
    """The run as it was."""
    return Question(source.alloc_conf, source.release, capacity_bytes)


def combinations(
    source: Source,
    alloc_confs: Sequence[str],
    releases: Sequence[str],
    split_limits: Sequence[str],
    capacities: Sequence[int | None],
) -> list[Question]:
    """All combinations of what is asked; without any question, those that usually matter.

    What is not asked is as it was in the recorded run.
    """
    if not alloc_confs and not releases and not split_limits:
        alloc_confs = [source.alloc_conf, _other_segments(source.alloc_conf)]
        releases = ["off", "moe-layer"] if source.layers_from != "unknown" else ["off"]
        split_limits = ["vllm", "keep"] if changes_split_limit(source) else ["vllm"]
    asked = itertools.product(
        alloc_confs or [source.alloc_conf],
        releases or [source.release],
        capacities or [None],
        [limit == "keep" for limit in split_limits or ["vllm"]],
    )
    return list(dict.fromkeys(itertools.starmap(Question, asked)))


def _other_segments(conf: str) -> str:
    """The same settings with expandable segments where there are none, and without where there are."""
    if not parse(conf).expandable_segments:
        return added(conf, "expandable_segments:True")
    kept = {name: value for name, value in options(conf).items() if name != "expandable_segments"}
    return ",".join(f"{name}:{value}" for name, value in kept.items())


def changes_split_limit(source: Source) -> bool:
    """Whether the program itself sets a split limit for a while."""
    return any(
        "max_split_size_mb" in options(change.alloc_conf) for run in source.devices for change in run.changes
    )


def ask(source: Source, questions: Sequence[Question]) -> list[Answer]:
    """The answers, in the order of the questions.

    Raises:
        SettingError: a question's conf string or release policy cannot be used.
    """
    for question in questions:
        for run in source.devices:
            for change in (None, *run.changes):
                parse(
                    question.alloc_conf if change is None else added(question.alloc_conf, change.alloc_conf)
                )
        Release.parse(question.release)
    places = range(len(source.devices))
    tasks = [(question, place) for question in dict.fromkeys(questions) for place in places]
    work = partial(_replay, source)
    cores = min(len(os.sched_getaffinity(0)), len(tasks))
    if cores == 1:
        outcomes = list(map(work, tasks))
    else:
        # Forked, so that the histories are shared and not sent.
        with multiprocessing.get_context("fork").Pool(cores, _share, (source,)) as pool:
            outcomes = pool.map(_replay_shared, tasks, chunksize=1)
    return [
        max(
            (
                Answer(question, outcome, source.devices[place].history.device)
                for (asked, place), outcome in zip(tasks, outcomes, strict=True)
                if asked == question
            ),
            key=lambda answer: (answer.fits is False, answer.outcome.peak_reserved_bytes),
        )
        for question in questions
    ]


_shared: Source


def _share(source: Source) -> None:
    global _shared
    _shared = source


def _replay_shared(task: tuple[Question, int]) -> Outcome:
    return _replay(_shared, task)


def _replay(source: Source, task: tuple[Question, int]) -> Outcome:
    question, place = task
    run = source.devices[place]
    return replay(run.history, question.scenario(run.changes), run.boundaries)


def ranked(answers: Sequence[Answer]) -> list[Answer]:
    """Those that fit first, then the lowest peak, then the fewest requests to the device."""
    order = {True: 0, None: 1, False: 2}
    return sorted(
        answers,
        key=lambda answer: (
            order[answer.fits],
            answer.outcome.peak_reserved_bytes,
            answer.outcome.calls,
        ),
    )
