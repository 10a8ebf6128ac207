"""A result is whole or not there, and says the same in its three forms."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.result import write_result
from situs.errors import SitusError
from situs.report.html import Page


def test_result_has_numbers_pictures_and_page(tmp_path: Path) -> None:
    page = write_result(tmp_path / "new", "grid", {"mean": 0.5}, Page("Grid"), {"cells": b"\x89PNG"})
    assert page == tmp_path / "new" / "grid.html"
    assert "<h1>Grid</h1>" in page.read_text()
    assert json.loads((tmp_path / "new" / "grid.json").read_text()) == {"mean": 0.5}
    assert (tmp_path / "new" / "grid-cells.png").read_bytes() == b"\x89PNG"
    assert sorted(path.name for path in page.parent.iterdir()) == ["grid-cells.png", "grid.html", "grid.json"]


def test_folder_that_is_a_file_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(SitusError, match=r"taken: could not be written: .* \(--out\)"):
        write_result(tmp_path / "taken", "grid", {}, Page("Grid"))
