"""The verdict follows from what was found, and what was not tried is never protection."""

from __future__ import annotations

import json

import pytest

from situs.audit.split.attackers import Reading
from situs.audit.split.result import SettingFound, SplitAudit, table, verdict
from situs.audit.split.view import Setting
from situs.locks.features import parse_defence


def audit(*settings: SettingFound) -> SplitAudit:
    return SplitAudit("m", 3, 9, settings, {"mean image": {"psnr": 9.0}})


def found(*readings: Reading, defence: str = "none", rows: bool = True) -> SettingFound:
    return SettingFound(Setting(parse_defence(defence), rows), 0.9, None, readings)


def done(attack: str = "order", **scores: float) -> Reading:
    return Reading(attack, "the embedding", "done", {name.replace("_", " "): value for name, value in scores.items()})


SKIPPED = Reading("labels", "the head", "not tried", reason="the images have none")


@pytest.mark.parametrize(
    "readings", [(), (SKIPPED,), (done("linkage", linked=0.0),), (done("no-embedding", places=0.1),)]
)
def test_what_was_not_tried_is_no_protection(readings: tuple[Reading, ...]) -> None:
    said = verdict(audit(found(*readings)))
    assert "no attack on the pictures was tried, which is no protection" in said
    assert "private" not in said and "safe" not in said


def test_the_best_attacker_speaks() -> None:
    weak, strong = done("decoder", psnr=8.0), done(psnr=30.0, places=1.0)
    both = found(weak, strong)
    assert both.best("psnr") == 30 and both.pictured is strong and both.best("ssim") is None
    assert verdict(audit(both)) == (
        "Rows: the server sees the samples (30.0 dB); 100.0 % of the patches were put in their places."
    )
    assert "the attacks that were tried come to 8.0 dB" in verdict(audit(found(weak)))


def test_settings_that_come_to_the_same_are_said_once() -> None:
    same = [found(done(psnr=25.0), defence=defence, rows=False) for defence in ("none", "noise=0.1")]
    assert verdict(audit(*same)) == "None, noise=0.1: the server sees the samples (25.0 dB)."


def test_labels_are_in_the_verdict() -> None:
    settings = [found(done("labels", labels=share)) for share in (0.5, 1.0)]
    assert verdict(audit(*settings)).endswith("Labels, read off what comes back: 50.0 % to 100.0 %.")


def test_the_table_has_blind_guesses_first_and_the_scores_that_somebody_has() -> None:
    made = table(audit(found(done(psnr=30.0, places=1.0), SKIPPED), found(SKIPPED, defence="noise=1")))
    assert list(made.header) == ["client sends", "features", "attacker", "knows", "places", "psnr"]
    assert [list(row) for row in made.rows] == [
        ["nothing", None, "guess: mean image", "nothing", None, "9.0 dB"],
        ["rows", "0.900", "order", "the embedding", "100.0 %", "30.0 dB"],
        ["noise=1 + rows", "0.900", "none was tried", None, None, None],
    ]


def test_the_numbers_hold_every_score_and_every_reason() -> None:
    result = audit(found(done(patch_psnr=30.0), SKIPPED))
    numbers = json.loads(json.dumps(result.to_json()))
    [setting] = numbers["settings"]
    assert setting["attacks"][0]["patch_psnr"] == 30
    assert setting["attacks"][1]["reason"] == "the images have none"
    assert numbers["blind_guesses"] == {"mean image": {"psnr": 9.0}}
    assert result.summary().notes == ("Not tried, which is no protection: labels: the images have none (rows).",)
    assert not result.private
