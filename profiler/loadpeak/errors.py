"""Every error that loadpeak raises on purpose.

    LoadpeakError
    ├── SettingError          a setting or an option has a value that cannot be used
    ├── RunNotFoundError      no run of that name in the run store
    ├── AmbiguousRunError     several runs fit the name
    ├── RecordError           a record cannot be read at all
    ├── SnapshotError         a memory-history snapshot cannot be read
    ├── MessageError          a text is no out-of-memory message
    └── CommandError          a command was called in a way that cannot work

A message says what was found, what was expected and what to do next. Only ``cli.main`` prints one.
"""


class LoadpeakError(Exception):
    """The root: everything a caller may want to catch as "loadpeak says no"."""


class SettingError(LoadpeakError):
    """A setting cannot be used.

    Attributes:
        name: the setting, as the user writes it.
        value: what was found.
        expected: what would have been accepted, in words.
    """

    def __init__(self, name: str, value: str, expected: str) -> None:
        super().__init__(f"{name}={value!r} cannot be used: expected {expected}")
        self.name, self.value, self.expected = name, value, expected


class RunNotFoundError(LoadpeakError):
    """The run store holds no such run."""


class AmbiguousRunError(LoadpeakError):
    """More than one run fits what was asked for."""


class RecordError(LoadpeakError):
    """A record cannot be read at all, or is of a version this loadpeak does not know."""


class SnapshotError(LoadpeakError):
    """A memory-history snapshot is damaged, too large, hostile, or none at all."""


class MessageError(LoadpeakError):
    """A text holds no out-of-memory message of PyTorch."""


class CommandError(LoadpeakError):
    """A command cannot do what it was asked to do."""
