"""Find the other packages of the distribution through its entry points, without importing them.

Only our own distribution is looked at: a search through all installed ones takes ten milliseconds of
an engine's start.
"""

from importlib.metadata import EntryPoint, distribution

EXTENSIONS = "loadpeak.extensions"
"""Functions that are given each :class:`loadpeak.recording.Recording` before its first phase."""
COMMANDS = "loadpeak.commands"
"""Verbs of the command line: functions, or typer apps of their own."""


def find(group: str) -> list[EntryPoint]:
    """The entry points of a group, in no particular order."""
    return list(distribution("loadpeak").entry_points.select(group=group))
