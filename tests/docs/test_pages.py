"""Every python block of every documentation page runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = sorted(
    page.relative_to(DOCS).as_posix()
    for page in DOCS.rglob("*.md")
    if "_build" not in page.parts and "```python" in page.read_text(encoding="utf-8")
)


def test_the_tour_is_among_the_pages() -> None:
    assert "tour.md" in PAGES


@pytest.mark.parametrize("page", PAGES)
def test_code_runs(page: str, run_python_blocks: Callable[[Path], dict[str, Any]]) -> None:
    names = run_python_blocks(DOCS / page)
    assert set(names) - {"__name__", "__builtins__"}, f"{page}: no block ran"
