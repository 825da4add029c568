"""Where a command's server is to listen, and what is asked of it."""

from __future__ import annotations

import pytest

from loadpeak_exporter.ab.completions import Client, address_of


@pytest.mark.parametrize("host", ["a..b", "bad host", "x" * 70])
def test_host_that_cannot_be_one_is_a_server_that_does_not_answer(host: str) -> None:
    address = address_of(["vllm", "serve", "m", "--host", host, "--port", "1"], {})
    assert not address.taken()
    assert not Client(address, 1).healthy()
