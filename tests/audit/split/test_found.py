"""One setting: the best of each score, the best pictures of whom one asks, and whether anything is hidden."""

from __future__ import annotations

import pytest

from situs.audit.split.attackers import ATTACKS, Reading
from situs.audit.split.found import UNDOING, SettingFound
from situs.audit.split.utility import Kept
from situs.audit.split.view import Setting
from situs.locks.features import parse_defence


def found(*readings: Reading, defence: str = "none", rows: bool = False, columns: bool = False) -> SettingFound:
    return SettingFound(Setting(parse_defence(defence), rows, columns), Kept(1.0), readings)


def test_the_best_of_a_score_and_of_the_pictures() -> None:
    weak, strong = (Reading(name, "", "done", {"psnr": psnr}) for name, psnr in (("decoder", 8.0), ("order", 30.0)))
    linked = Reading("linkage", "", "done", {"linked": 0.5})
    both = found(weak, strong, linked)
    assert (both.best("psnr"), both.best("linked"), both.best("ssim")) == (30, 0.5, None)
    assert both.pictured() is strong and both.pictured(("decoder",)) is weak and both.pictured(("repeats",)) is None
    assert found(linked).pictured() is None


@pytest.mark.parametrize(
    ("given", "hidden"),
    [({}, False), ({"defence": "noise=1"}, False), ({"rows": True}, True), ({"columns": True}, True),
     ({"defence": "batch-shuffle"}, True)],
)  # fmt: skip
def test_what_hides_rows_or_channels(given: dict[str, object], hidden: bool) -> None:
    assert found(**given).hidden is hidden  # pyright: ignore[reportArgumentType]


def test_who_undoes_is_an_attacker() -> None:
    assert set(UNDOING) < set(ATTACKS)
