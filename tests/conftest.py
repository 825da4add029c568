"""What tests need from the machine, and what happens when it is not there."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared"
"""Recorded histories and other facts that lie beside the repository."""


def free_port() -> int:
    """A port of the loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def need() -> Callable[[bool, str], None]:
    """Skip with a reason where a part is missing; fail instead where all are required (CI)."""

    def check(there: bool, reason: str) -> None:
        if there:
            return
        if os.environ.get("LOADPEAK_REQUIRE_ALL") == "1":
            pytest.fail(f"required here, but {reason}")
        pytest.skip(reason)

    return check


@pytest.fixture
def traces(need: Callable[[bool, str], None]) -> Path:
    """The folder of recorded allocator histories."""
    folder = SHARED / "traces"
    need(folder.is_dir(), f"the recorded histories are not there ({folder})")
    return folder
