"""Failures of ours stay ours."""

import logging

import pytest

from loadpeak.guard import Guard


def _fail() -> None:
    raise LookupError("nothing there")


def test_failing_hook_is_logged_once_and_counted_each_time(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, int]] = []
    guard = Guard(lambda hook, error, count: seen.append((hook, count)))
    with caplog.at_level(logging.WARNING, "loadpeak"):
        assert guard.call("phase", _fail) is None
        assert guard.call("phase", _fail) is None
        assert guard.call("layer", _fail) is None
    assert seen == [("phase", 1), ("phase", 2), ("layer", 3)]
    assert [record.getMessage() for record in caplog.records] == [
        "the hook phase failed (LookupError: nothing there); the engine goes on without it",
        "the hook layer failed (LookupError: nothing there); the engine goes on without it",
    ]


def test_error_that_cannot_be_recorded_is_swallowed_too() -> None:
    def broken(hook: str, error: BaseException, count: int) -> None:
        raise OSError

    guard = Guard(broken)
    guard.call("phase", _fail)
    assert guard.errors == 1


def test_interrupt_is_not_ours_to_swallow() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Guard().call("phase", interrupted)
