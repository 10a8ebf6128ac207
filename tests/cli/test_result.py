"""A result is whole or not there, and says the same in its three forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from situs.cli.main import main
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


class Named(NamedTuple):
    """As much of a subject as a result asks for."""

    name: str
    identity: str


def test_a_page_of_another_model_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(title: str, *of: Named) -> Path:
        return write_result(tmp_path, "grid", {"mean": 0.5}, Page(title), {"cells": title.encode()}, of=of)

    one, two, three = Named("mp3", "1"), Named("mjp", "2"), Named("mjp", "3")
    assert write("first", one) == tmp_path / "grid.html"
    assert write("again", one) == tmp_path / "grid.html"  # its own page is renewed
    assert capsys.readouterr().err == ""
    assert write("second", two) == tmp_path / "mjp" / "grid.html"
    said = f"situs: {tmp_path / 'grid.html'} is of another model and stays; this one goes to {tmp_path / 'mjp'}\n"
    assert capsys.readouterr().err == said
    assert write("third", three) == tmp_path / "mjp-2" / "grid.html"  # another model of that name
    assert write("renewed", two) == tmp_path / "mjp" / "grid.html"
    assert write("both", one, two) == tmp_path / "mp3-mjp" / "grid.html"
    titles = {"": "again", "mjp": "renewed", "mjp-2": "third", "mp3-mjp": "both"}
    for place, title in titles.items():
        assert f"<h1>{title}</h1>" in (tmp_path / place / "grid.html").read_text()
        assert (tmp_path / place / "grid-cells.png").read_bytes() == title.encode()
    (tmp_path / "grid.json").write_text("{torn")
    assert write("first", one) == tmp_path / "mp3" / "grid.html"  # nobody knows whose page that is
    assert write("any name", Named("a/../../b c", "9")).parent.parent == tmp_path


def test_two_models_looked_at_by_default_keep_a_page_each(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for run in (trained.one, trained.two, trained.one):
        assert main(["evaluate", "accuracy", str(run), "--device", "cpu"]) == 0
    assert "<h1>one: accuracy</h1>" in (tmp_path / "look" / "accuracy.html").read_text()
    assert "<h1>two: accuracy</h1>" in (tmp_path / "look" / "two" / "accuracy.html").read_text()
    assert sorted(path.name for path in (tmp_path / "look").iterdir() if path.is_dir()) == ["two"]
