"""Lets the tests of this folder import `outcomes`; their pages are made and not drawn, which tests/pages does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    pass


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is asked about one image instead of four: test_oracle_consult asks about two."""
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 1)
