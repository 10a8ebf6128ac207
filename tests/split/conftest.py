"""Lets the tests of this folder import `wired`, and wait less for servers that stop and come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def _soon() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("situs.split.transport.serve.POLL", 0.02)
        backoff = (("grpc.initial_reconnect_backoff_ms", 10), ("grpc.max_reconnect_backoff_ms", 100))
        patch.setattr("situs.split.transport.connect._RECONNECT", backoff)
        yield
