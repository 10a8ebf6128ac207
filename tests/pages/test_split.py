"""The page of a split audit: threat model and verdict first, pictures only where they were kept, honest lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sent import not_tried, setting, split_audit, tried

from situs.audit.split.result import SettingResult, SplitAudit
from situs.audit.split.stage import Kept
from situs.locks.veil import parse_veil
from situs.pages import PRIVATE, make_page
from situs.pages.split import trade_offs
from situs.report import figures

IMAGES = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def found(text: str, cosine: float, rows: bool = False, **scores: float) -> SettingResult:
    finding = replace(tried(**scores), shown=IMAGES if "psnr" in scores else None)
    return setting(parse_veil(text, ("rows",) * rows), Kept(cosine), finding)


def audit(*settings: SettingResult, pictures: bool = False) -> SplitAudit:
    return split_audit(*settings, samples=2, pictures=IMAGES.float() if pictures else None)


CURVED = (
    found("none", 1.0, psnr=50.0),
    found("noise=0.5", 0.4, psnr=12.0),
    found("noise=0.2", 0.8, psnr=30.0),
    found("none", 1.0, rows=True, psnr=50.0, places=1.0),
    found("noise=0.5", 0.4, rows=True, places=0.25),
    found("noise=0.2", 0.8, rows=True, psnr=29.0, places=0.5),
    found("lowpass=0.3", 0.7, psnr=16.0),
)


def test_lines_run_over_the_strengths_of_a_defence_and_hold_what_somebody_found() -> None:
    assert trade_offs(audit(*CURVED)) == {
        "psnr": {
            "noise": {"not permuted": ([1.0, 0.8, 0.4], [50.0, 30.0, 12.0])}
        },  # under rows one strength has pictures
        "places": {"noise": {"rows": ([1.0, 0.8, 0.4], [100.0, 50.0, 25.0])}},
    }
    assert trade_offs(audit(*CURVED[:1], *CURVED[-1:])) == {}


def test_the_axis_of_a_share_is_all_of_it(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    limits: dict[str, object] = {}
    draw = figures.curve_panels

    def curve_panels(panels: Any, label: str, ends: Any, **more: Any) -> Any:
        limits.update(dict.fromkeys((title.partition(": ")[2] for title in panels), ends))
        return draw(panels, label, ends, **more)

    monkeypatch.setattr(figures, "curve_panels", curve_panels)
    settings = [found(text, 1.0, psnr=20.0, ssim=0.5, places=0.5) for text in ("none", "noise=0.2", "noise=0.5")]
    make_page(audit(*settings))
    assert limits == {"PSNR, dB": None, "SSIM": (0, 1), "patches at their position, %": (0, 100)}


@pytest.mark.parametrize("pictures", [False, True])
def test_the_threat_model_and_the_verdict_come_first(
    pictures: bool, outline: Callable[[str], list[str]], undrawn: None
) -> None:
    made = make_page(audit(*CURVED, pictures=pictures))
    assert outline(made.render()) == [
        "First screen, 1 figure" if pictures else "First screen, bars",
        "Threat model, 1 fold, facts",
        "Verdict, 1 text",
        "Attackers and defences, 8 rows, facts",
        "What a defence hides, and what it costs, 1 text, 2 figures, 7 rows",
        "Attackers that were tried, 7 rows",
    ]
    assert "of the best attacker" in made.render() and "worth something" not in made.render()
    assert made.notice == (PRIVATE if pictures else "") and ("pictures" in made.pictures) == pictures
    assert "TLS" in made.render() and "may still succeed" in made.render()


def test_what_was_not_tried_stands_below_the_verdict() -> None:
    one = setting(CURVED[0].veil, CURVED[0].kept, not_tried("labels", "the images have no labels"))
    text = make_page(audit(one)).render()
    assert "Not tried (such an attack may still succeed): labels: the images have no labels (none)." in text
    assert "no attack on the pictures was run: inconclusive" in text
