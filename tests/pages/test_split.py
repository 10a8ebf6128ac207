"""The page of a split audit: threat model and verdict first, pictures only where they were kept, honest lines."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from sent import not_tried, setting, split_audit, tried

from situs.audit.split.result import SettingResult, SplitAudit
from situs.audit.split.stage import Kept
from situs.audit.split.text import PromptAudit, Row
from situs.audit.text.recovered import Read
from situs.audit.text.result import finding_of
from situs.gate import Limit
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


def test_four_samples_are_shown_of_the_best_attacker_in_each_setting(
    monkeypatch: pytest.MonkeyPatch, undrawn: None
) -> None:
    drawn: list[Any] = []
    draw = figures.image_rows
    monkeypatch.setattr(figures, "image_rows", lambda rows: drawn.append(rows) or draw(rows))
    real = torch.rand(5, 3, 16, 16, dtype=torch.float64)
    poor, best = (replace(tried(psnr=psnr), shown=torch.full_like(real, psnr / 100)) for psnr in (10.0, 20.0))
    settings = [setting(parse_veil("noise=0.5", ()), Kept(0.5), poor, best), setting(parse_veil("none", ()), Kept(1.0))]
    make_page(split_audit(*settings, samples=5, pictures=real.float()))
    [rows] = drawn
    assert [name.partition("\n")[0] for name, _ in rows] == ["original", "noise=0.5"]
    assert torch.equal(rows[0][1], real[:4].float()) and torch.equal(rows[1][1], torch.full((4, 3, 16, 16), 0.2))


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


def prompts(*rows: tuple[int, str, bool, str]) -> PromptAudit:
    """A text audit: of each row the blocks that the client keeps, the defence, permuted columns, which words are read;
    "" where it was not attacked."""
    settings, findings = [], []
    for depth, veil, columns, right in rows:
        row = Row(depth, parse_veil(veil, ("columns",) * columns))
        words = tuple(range(4, 4 + len(right)))
        known = tuple(letter == "+" for letter in right)
        found = tuple(word * told for word, told in zip(words, known, strict=True))
        reads = [Read("text 1", words, found, known)] if right else []
        findings.append(finding_of(str(row), 1, "done" if reads else "refused", reads, attack="prompts"))
        settings.append(row)
    return PromptAudit(findings, "m", ["text 1"], 1, shown={}, about={}, rows=settings)


NOISY = [
    (0, "noise=2", False, "+---"), (0, "none", False, "++++"), (0, "noise=0.5", False, "++--"),
    (0, "none", True, "++++"), (0, "noise=0.5", True, "+++-"), (2, "none", False, ""),
]  # fmt: skip


def test_words_that_are_read_over_the_noise(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    calls: list[Any] = []
    draw = figures.curves
    monkeypatch.setattr(figures, "curves", lambda *given, **more: calls.append((given, more)) or draw(*given, **more))
    page = make_page(prompts(*NOISY))
    ((lines, *_), more), *rest = calls
    assert lines == {"depth 0": ([0.0, 0.5, 2.0], [1.0, 0.5, 0.25])} and not rest  # of two points no line is drawn
    assert more["y_limits"] == (0.0, 1.0) and "noise" in page.pictures
    assert [value for value, _ in page.numbers] == [
        "0 of 1",
        "1 of 1",
        "0 of 1",
    ]  # of the first three that were attacked
    assert (page.tone, page.mark) == ("bad", "Not private")
    assert page.lead.startswith(
        'In the setting "depth 0", an honest server recovers 1 of 1 text word for word, and '
        "100.0 % of the words of all texts."
    )
    make_page(prompts(*NOISY[:2], *NOISY[3:]))
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("right", "mark"),
    [("----", ("unsure", "Not proved private")), ("", ("unsure", "Not attacked, so not proved private"))],
)
def test_the_mark_of_texts_that_were_not_read(right: str, mark: tuple[str, str], undrawn: None) -> None:
    page = make_page(prompts((0, "none", False, right)))
    assert (page.tone, page.mark) == mark
    assert page.lead.startswith("Nothing was attacked") == (not right)
    assert len(page.numbers) == bool(right) and page.pictures == {}


def test_the_first_screen_has_the_best_scores_and_bars_from_the_highest(undrawn: None) -> None:
    page = make_page(audit(*CURVED))
    assert [value for value, _ in page.numbers] == ["50.0 dB", "100.0 %"]
    assert page.lead.startswith(
        "The server's best attackers recovered images at 50.0 dB and assigned 100 % of the patches to their true "
        "positions. "
    )
    bars = "".join(map(str, page.opening.blocks))
    order = [bars.index(f">{name}<") for name in ("none", "noise=0.2", "noise=0.2 + rows", "lowpass=0.3", "noise=0.5")]
    assert order == sorted(order) and (page.tone, page.mark) == ("bad", "Not private")
    bare = make_page(audit(setting(CURVED[0].veil, CURVED[0].kept, not_tried("labels", "none here"))))
    assert (bare.tone, bare.mark) == ("unsure", "Not attacked, so not proved private") and "At best" not in bare.lead


def test_a_blind_guess_is_a_line_over_all_utilities(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> None:
    seen: list[Any] = []
    draw = figures.curve_panels
    monkeypatch.setattr(
        figures, "curve_panels", lambda panels, *given, **more: seen.append(panels) or draw(panels, *given, **more)
    )
    blind = {"mean": {"psnr": 9.0}, "other": {"psnr": 11.0, "ssim": 0.5}}
    page = make_page(replace(audit(*CURVED), blind=blind))
    assert seen[0]["noise: PSNR, dB"]["blind guess"] == ([0.4, 1.0], [11.0, 11.0])
    assert "blind guess" not in seen[1]["noise: patches at their position, %"]
    assert "(blind guess: 11.0 dB)" in page.numbers[0][1]


def test_the_papers_table_is_there_where_its_attacker_was_tried(undrawn: None) -> None:
    both = setting(CURVED[0].veil, CURVED[0].kept, replace(tried("decoder", psnr=20.0, ssim=0.5), shown=IMAGES))
    for one, there in ((both, True), (CURVED[0], False)):
        text = make_page(audit(one)).render()
        assert ("The paper&#39;s Table 6</h2>" in text or "The paper's Table 6</h2>" in text) == there


def test_the_gate_has_a_section_of_its_own(undrawn: None) -> None:
    plain = prompts((0, "none", False, "++++"), (0, "noise=1", False, "+---"))
    judged = replace(plain, limit=Limit("tokens", 0.5))
    assert judged.ruling is not None and plain.ruling is None
    texts = [make_page(each).render() for each in (plain, judged)]
    assert ["Verdict</h2>" in text for text in texts] == [False, True]
    section = texts[1][texts[1].index("Verdict</h2>") :].split("<h2>")[0]
    assert html.escape(judged.ruling.sentence)[:40] in section or judged.ruling.sentence[:40] in section
