"""`situs play`: a run's page, and mistakes in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main
from situs.play.page import Playground

SMALL = ["vit_tiny_patch16_224=random", "--img-size", "32", "--model-args.depth", "1", "--model-args.embed_dim", "12"]


def test_a_run_becomes_a_page(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said in (("mp3", "Where does each patch belong?"), ("one", "to this model?")):
        page = tmp_path / f"{name}.html"
        assert main(["play", str(getattr(trained, name)), "--out", str(page), "--count", "5"]) == 0
        printed = capsys.readouterr().out
        assert f"{page}: 0." in printed
        assert "and 5 images" in printed
        text = page.read_text()
        assert said in text
        assert str(trained.data) not in text


@pytest.mark.parametrize(
    ("bits", "words"), [(32, "in 32 bits\n"), (16, "in 16 bits (the rounding changes the logits by at most 2.5e-04)\n")]
)
def test_rounding_is_stated_where_there_is_any(
    bits: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = Playground(tmp_path / "play.html", 1.5, 1200, bits, 2.5e-4 if bits < 32 else 0.0, 1, "pets")
    monkeypatch.setattr("situs.play.write_playground", lambda *_, **__: written)
    assert main(["play", *SMALL, "--out", str(written.path)]) == 0
    first, second = capsys.readouterr().out.splitlines(keepends=True)
    assert first == f"{written.path}: 1.50 MB, 1,200 weights {words}"
    assert second.startswith("The page contains the model and 1 image from pets")


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "play.html")
    for words, said in (
        ([str(trained.mp3), "--out", str(tmp_path / "play")], "must be a file NAME.html (--out)"),
        ([str(trained.mp3), "--out", page, "--most-mb", "0.01"], "at most 0.01 MB are allowed"),
        ([str(trained.mp3), "--out", page, "--count", "0"], "--count"),
        ([*SMALL, "--out", page], "a position head or a trained classifier"),
    ):
        assert main(["play", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
    assert not list(tmp_path.iterdir())
