"""Sentences over the strength of noise and the type of what is sent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_texts import write_folder
from torch.nn import functional as F

from situs.audit import trace_texts
from situs.audit.defences import Step
from situs.audit.sweep import curve
from situs.audit.sweep.curve import Curves
from situs.audit.sweep.ladder import Scale, curve_ladder
from situs.audit.text.audit import CLASSES, SENT, WITHHELD, label_of
from situs.audit.text.recovered import Read
from situs.audit.text.result import TextAudit, finding_of
from situs.audit.text.victim import open_text_victim
from situs.errors import SitusError
from situs.findings import Remark
from situs.pages import make_page

WHOLE = Read("sentence 1", (2, 5, 3), (2, 5, 3), (True, True, True))
PART = Read("sentence 1", (2, 5, 3), (2, 9, 3), (True, False, True))


@pytest.mark.parametrize("hidden", [False, True])
def test_each_point_is_the_row_of_its_defence_for_the_attacker_who_knows_most(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hidden: the client hides positions, as MJP does, so that the audit has two rows for each defence."""

    def audit_texts(*_: object, defences: list[Any], keep: Any, **__: object) -> TextAudit:
        findings = [
            finding_of(label_of(defence, sent, aware), 1, "done", [WHOLE if sent and aware is not False else PART])
            for defence in defences
            for sent in (True, False)
            for aware in ((False, True) if hidden else (None,))
        ]
        late = Remark("stopped", "half of it")
        findings[-1] = finding_of(findings[-1].defence, 1, "stopped", (), [late, Remark("gap", "one is missing")])
        audit = TextAudit(findings, "bert", ["sentence 1"], 1)
        keep(audit)
        return audit

    monkeypatch.setattr(curve, "audit_texts", audit_texts)
    monkeypatch.setattr(curve, "_text_scale", lambda *_: Scale(1.0, 1.0))
    kept: list[Curves] = []
    curves = trace_texts("bert", "lines.txt", ["noise", "precision", "noise"], keep=kept.append)
    assert [(line.curve, line.beside) for line in curves.lines] == [
        (name, beside) for name in ("noise", "precision") for beside in (SENT, WITHHELD)
    ]
    aware = True if hidden else None
    for line in curves.lines:
        rungs = curve._sendable(curve_ladder(line.curve, Scale(1.0, 1.0), Step())).rungs
        assert [(point.strength, point.defence) for point in line.points] == [
            (rung.label, label_of(rung.defence, line.beside == SENT, aware)) for rung in rungs
        ]
        for point in line.points[:-1]:
            assert point.values["sentences"] == (line.beside == SENT) and point.whole and not point.reason
    last = curves.lines[-1].points[-1]
    assert (last.whole, last.reason, last.values) == (False, "stopped after half of it; one is missing", {})
    assert kept == [curves]


@pytest.mark.parametrize(("over", "said"), [([], "clip, noise, precision"), (["noise", "nois"], "nois")])
def test_a_curve_that_texts_do_not_have_is_refused(over: list[str], said: str) -> None:
    with pytest.raises(SitusError, match=said) as caught:
        trace_texts("bert", "lines.txt", over)
    assert caught.value.fields == ("curve",)


def test_the_scale_is_that_of_the_first_sentences_gradient(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "bert", "bert", width=32), tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\nw2 w2 w5\n")
    victim = open_text_victim(str(folder), classes=CLASSES, seed=0)
    ids = torch.tensor(victim.coded(["w3 w7 w1 w9"]))
    logits = victim.backbone(ids, torch.ones_like(ids, dtype=torch.bool))
    F.cross_entropy(logits, torch.tensor([0])).backward()
    sent = torch.cat([p.grad.flatten() for p in victim.backbone.parameters() if p.grad is not None])
    scale = curve._text_scale(str(folder), file, {})
    assert scale.norm == pytest.approx(float(sent.norm()), rel=1e-4)
    assert scale.rms == pytest.approx(float(sent.square().mean().sqrt()), rel=1e-4)


@pytest.mark.slow
def test_sentences_are_lost_as_noise_grows(tmp_path: Path) -> None:
    folder, file = write_folder(tmp_path / "bert", "bert", width=64), tmp_path / "lines.txt"
    file.write_text("w3 w7 w1 w9\n")
    found = trace_texts(folder, file, ["noise", "precision"], count=1)
    assert [(line.curve, line.beside) for line in found.lines[:2]] == [("noise", SENT), ("noise", WITHHELD)]
    sent, withheld = found.lines[:2]
    assert sent.points[0].values["sentences"] == 1.0  # rows of words and places are matched through all of this noise
    assert sent.points[-1].values["tokens"] > 0.5 > withheld.points[-1].values["tokens"]
    assert withheld.points[0].values["sentences"] == 1.0 and withheld.points[-1].values["sentences"] == 0.0
    assert withheld.points[-1].values["picked"] == 1.0  # and who has candidates needs no row of words
    assert [point.strength for point in found.lines[2].points] == ["fp32", "fp16", "bf16", "int8"]
    points = [point for line in found.lines for point in line.points]
    assert {point.values["sentences"] < 1 for point in points if point.reason} == {True}  # why no more, where there is
    assert "all sentences were recovered exactly at" in found.summary().sentence
    # A sentence that is not whole is not hidden: what is known of its words is said too.
    lost = replace(withheld.points[-1], values={**withheld.points[-1].values, "words": 1.0, "sentences": 0.0})
    words = replace(found, lines=[replace(withheld, points=[lost])])  # no sentence, and every word
    told = words.summary().sentence.split(f"noise, {WITHHELD}: ")[1].split(". ")[0]
    assert told.endswith("100 % at 1") and told.split("; words recovered: ")[1].count(" at ") == 1
    none = replace(lost, values=dict.fromkeys(lost.values, 0.0))
    nothing = replace(found, lines=[replace(withheld, points=[none])])
    said = "Sentences were recovered completely at 0 of 1 attacked strength.</h1>"
    for curves, judged in ((words, "Not private at one strength or more"), (nothing, "Not proved private")):
        assert all(each in make_page(curves).render() for each in (judged, said))
    assert set(make_page(found).pictures) == {
        f"{curve}-{metric}" for curve in ("noise", "precision") for metric in ("tokens", "sentences")
    }
    with pytest.raises(SitusError, match="fedavg"):
        trace_texts(folder, file, ["fedavg"])
