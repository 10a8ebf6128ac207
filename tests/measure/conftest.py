"""Pages are made and their figures not drawn: tests/pages draws the page of every result."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    pass
