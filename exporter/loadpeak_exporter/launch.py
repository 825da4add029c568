"""The environment that a recorded command gets."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from loadpeak import run_folder, settings


def environment(base: Mapping[str, str], **chosen: str) -> dict[str, str]:
    """An environment with these settings, and a new run id where it names none; empty values change nothing.

    Args:
        base: what the command would get without us.
        chosen: variables of :data:`loadpeak.settings.TABLE`.

    Raises:
        SettingError: a value cannot be used.
    """
    wanted = {**base, **{name: value for name, value in chosen.items() if value}}
    found = settings.load(wanted)
    if found.problems:
        raise found.problems[0]
    run = found.run_id or run_folder.new_run_id(time.time(), f"{os.getpid():x}")
    return {**wanted, "LOADPEAK_RUN_ID": run}


def has_folder(environ: Mapping[str, str]) -> bool:
    """Whether the run store has a run of this environment's name, as far as we may look into it."""
    found = settings.load(environ)
    try:
        return (found.home / run_folder.RUNS / environ["LOADPEAK_RUN_ID"]).exists()
    except OSError:
        return False


def nothing_recorded(program: str, environ: Mapping[str, str], code: int = 0) -> str:
    """Why a command left no record that can be read, and what to do.

    Args:
        program: what was started.
        environ: with these settings.
        code: how it ended; 0 while it runs, too.
    """
    if settings.load(environ).disabled:
        return "nothing was recorded: LOADPEAK_DISABLE is set; unset it to record"
    if has_folder(environ):
        return f"the record {environ['LOADPEAK_RUN_ID']} cannot be read; `loadpeak runs` says why"
    if code:
        return (
            f"nothing was recorded: {program!r} ended with exit code {code} before a vLLM worker with "
            "loadpeak started; its output says why"
        )
    return (
        f"nothing was recorded: {program!r} started no vLLM worker that has loadpeak installed; "
        "install loadpeak into the Python environment that this command runs in"
    )
