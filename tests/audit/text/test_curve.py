"""Sentences over the strength of noise and the type of what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tiny_texts import write_folder

from situs.audit import trace_texts
from situs.audit.text.audit import SENT, WITHHELD
from situs.errors import SitusError
from situs.pages import make_page


def test_sentences_are_lost_as_noise_grows(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "bert", "bert", width=64), tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\n")
    found = trace_texts(folder, file, ["noise", "precision"], count=1)
    assert [(line.curve, line.beside) for line in found.lines[:2]] == [("noise", SENT), ("noise", WITHHELD)]
    for line in found.lines[:2]:
        assert line.points[0].values["sentences"] == 1.0 and line.points[-1].values["sentences"] == 0.0
    assert [point.strength for point in found.lines[2].points] == ["fp32", "fp16", "bf16", "int8"]
    points = [point for line in found.lines for point in line.points]
    assert {point.values["sentences"] < 1 for point in points if point.said} == {True}  # why no more, where there is
    assert "every sentence exactly at" in found.summary().sentence
    # A sentence that is not whole is not hidden: what is known of its words is said too.
    told = found.summary().sentence.split(f"noise, {SENT}: ")[1].split(". ")[0]
    left = [point for point in found.lines[0].points if point.values["sentences"] < 1]
    assert left[-1].values["words"] == 1.0 and told.endswith("100 % at 1")
    assert told.split("; of the words ")[1].count(" at ") == len(left)
    words = replace(found, lines=[replace(found.lines[0], points=[left[-1]])])  # no sentence, and every word
    none = replace(left[-1], values=dict.fromkeys(left[-1].values, 0.0))
    nothing = replace(found, lines=[replace(found.lines[0], points=[none])])
    said = "Sentences came back whole at 0 of 1 strength attacked.</h1>"
    for curves, judged in ((words, "Not private at every strength"), (nothing, "Not proved private")):
        assert all(each in make_page(curves).render() for each in (judged, said))
    assert set(make_page(found).pictures) == {
        f"{curve}-{metric}" for curve in ("noise", "precision") for metric in ("tokens", "sentences")
    }
    with pytest.raises(SitusError, match="fedavg"):
        trace_texts(folder, file, ["fedavg"])
