"""The tables of a split audit: the paper's own form, the strengths, and who was tried on what."""

from __future__ import annotations

from situs.audit.split.attackers import ATTACKS, Reading
from situs.audit.split.found import SettingFound
from situs.audit.split.tables import paper_table, strengths, table, tables, trade_off, who_was_tried
from situs.audit.split.utility import Kept
from situs.audit.split.view import Setting
from situs.locks.features import parse_defence


def found(*readings: Reading, defence: str = "none", rows: bool = True, columns: bool = False) -> SettingFound:
    return SettingFound(Setting(parse_defence(defence), rows, columns), Kept(0.9), readings)


def done(attack: str = "order", **scores: float) -> Reading:
    return Reading(attack, "the embedding", "done", {name.replace("_", " "): value for name, value in scores.items()})


BLIND = {"mean image": {"psnr": 9.0}}
SKIPPED = Reading("labels", "the head", "not tried", reason="the images have none")


def test_the_table_has_blind_guesses_first_and_the_scores_that_somebody_has() -> None:
    made = table("m", [found(done(psnr=30.0, places=1.0), SKIPPED), found(SKIPPED, defence="noise=1")], BLIND)
    assert list(made.header) == ["client sends", "features", "attacker", "knows", "places", "psnr"]
    assert [list(row) for row in made.rows] == [
        ["nothing", None, "guess: mean image", "nothing", None, "9.0 dB"],
        ["rows", "0.900", "order", "the embedding", "100.0 %", "30.0 dB"],
        ["noise=1 + rows", "0.900", "none was tried", None, None, None],
    ]


def test_the_papers_table_has_its_rows_its_attacker_and_the_one_who_undoes_permutations() -> None:
    blind, knowing = done("decoder", psnr=6.0, ssim=0.1), done(psnr=55.0, places=1.0)
    better = done("ordered-decoder", psnr=56.0, ssim=0.99, places=1.0, channels=1.0)
    settings = [
        found(blind, knowing, better, defence=defence, rows=rows, columns=columns)
        for defence in ("none", "noise=0.2", "lowpass=0.3", "batch-shuffle=8")
        for rows in (False, True)
        for columns in (False, True)
    ]
    made = paper_table(settings)
    assert [row[0] for row in made.rows] == [
        "SL", "columns", "SL+ (rows)", "rows + columns", "GN (noise=0.2)", "GN+ (noise=0.2)", "LP (lowpass=0.3)",
        "LP+ (lowpass=0.3)", "BS (batch-shuffle=8)", "BS+ (batch-shuffle=8)",
    ]  # fmt: skip
    held = dict(zip(made.header, made.rows[-1], strict=True))
    assert (held["decoder psnr"], held["decoder ssim"]) == ("6.0 dB", "0.100")
    assert "psnr, 16 sendings" not in made.header
    noisy = [found(blind, knowing, done("repeats", psnr=60.0), defence="noise=1")]
    often = dict(zip(paper_table(noisy).header, paper_table(noisy).rows[0], strict=True))
    assert (often["undone by"], often["psnr"], often["psnr, 16 sendings"]) == ("order", "55.0 dB", "60.0 dB")
    assert (held["undone by"], held["psnr"], held["channels"]) == ("ordered-decoder", "56.0 dB", "100.0 %")
    assert made in tables("m", settings, BLIND) and len(tables("m", [found(knowing)], BLIND)) == 1


def test_strengths_stand_beside_the_best_attacker_of_each() -> None:
    some = [found(done(psnr=30.0 - 10 * s), done("linkage", linked=1.0), defence=f"noise={s}") for s in (0.5, 1)]
    assert strengths(some) == ["noise"] and strengths(some[:1]) == []
    made = trade_off(some)
    assert [list(row) for row in made.rows] == [
        ["noise=0.5 + rows", "0.900", "order", None, "25.0 dB", None, None, "100.0 %"],
        ["noise=1 + rows", "0.900", "order", None, "20.0 dB", None, None, "100.0 %"],
    ]
    assert tables("m", some, BLIND)[-1] == made


def test_every_setting_and_attacker_is_said_to_be_tried_or_not() -> None:
    [row] = who_was_tried([found(done(psnr=30.0), SKIPPED)]).rows
    assert dict(zip(ATTACKS, row[1:], strict=True)) == {
        name: {"order": "tried", "labels": "not tried"}.get(name, "not asked for") for name in ATTACKS
    }
