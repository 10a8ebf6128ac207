"""Every python block of every documentation page runs, and what the reference lists is there."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib import import_module
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
@pytest.mark.usefixtures("undrawn")
def test_code_runs(
    page: str, run_python_blocks: Callable[[Path], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes stays there
    names = run_python_blocks(DOCS / page)
    assert set(names) - {"__name__", "__builtins__"}, f"{page}: no block ran"


def test_what_the_reference_lists_is_there() -> None:
    listed = re.findall(r"auto(module|function):: ([\w.]+)", (DOCS / "api.md").read_text(encoding="utf-8"))
    assert len(listed) > 30
    for kind, name in listed:
        module, _, function = (name, "", "") if kind == "module" else name.rpartition(".")
        found = import_module(module)
        assert (found if kind == "module" else getattr(found, function)).__doc__, name
