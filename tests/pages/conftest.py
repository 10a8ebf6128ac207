"""Of each result one page is drawn; in the other tests figures are made and not drawn, which takes most of the time."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _undrawn(
    request: pytest.FixtureRequest,
    undrawing: Callable[[pytest.MonkeyPatch], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = request.path.stem.endswith(("browser", "frames"))
    if not drawn and request.function.__name__ != "test_a_page_says_what_its_result_says":
        undrawing(monkeypatch)
