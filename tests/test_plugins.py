"""Attacks, defences and scenarios from outside: by an entry point, by a file, and by a script."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.audit import ATTACKS, DEFENCES, create_attack, create_defence, trace_defences
from situs.audit.registry import SCENARIOS, attacks_table, cards
from situs.audit.run import run
from situs.cli.main import main
from situs.errors import SitusError

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "own_attack.py"

PACKAGE = '''
from dataclasses import dataclass
from situs.audit import Defence
from situs.audit.run import Card
from situs.findings import HONEST, Exposure, Finding, Metric, Remark
from situs.gate import Report

@dataclass(frozen=True)
class Halved(Defence):
    """Every number is halved, which the attacker knows."""
    name, about, known = "halved", "every gradient is halved", "all of it"
    def upload(self, gradients, batch, chance):
        return {name: g / 2 for name, g in gradients.items()}

SHARE = Metric("share", margin=0.2)

@dataclass(frozen=True)
class Coins(Report):
    metrics = {"share": SHARE}
    file = "coins"
    def summary(self): ...
    def numbers(self): ...

class Coin:
    """A scenario of one coin."""
    name, threat = "coin", HONEST
    at, total, ended = 0, 1, False
    @staticmethod
    def cards():
        yield Card("toss", "coin", "nothing", "nothing", "ours", "")
    def planned(self):
        yield Finding("toss", "none", "not_run", asked=1)
    def trials(self):
        yield self
    def turn(self, deadline, left):
        self.at = 1
        yield Finding("toss", "none", "done", ("a",), 1, exposures=[Exposure("a", SHARE, 0.9, 0.5)])
    def report(self, findings, stopped):
        return Coins([*findings.values()], stopped=stopped)
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with its dist-info on the path, as pip leaves it, and one that cannot be imported."""
    folder = tmp_path / "site-packages"
    info = folder / "other-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "other_audit.py").write_text(PACKAGE)
    (folder / "other_attack.py").write_text(EXAMPLE.read_text())
    (folder / "broken_audit.py").write_text("raise RuntimeError('built for another machine')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[situs.attacks]\nbrightness = other_attack:Brightness\nbroken = broken_audit:Broken\n"
        "[situs.defences]\nhalved = other_audit:Halved\n[situs.scenarios]\ncoin = other_audit:Coin\n"
    )
    monkeypatch.syspath_prepend(folder)
    for plugins in (ATTACKS, DEFENCES, SCENARIOS):
        known: Any = plugins
        monkeypatch.setattr(known, "_classes", dict(known._classes))
        monkeypatch.setattr(known, "_points", None)


@pytest.mark.usefixtures("installed")
def test_a_package_adds_an_attack_a_defence_and_a_scenario() -> None:
    assert create_attack("brightness").about.startswith("one grey for a whole image")
    halved = create_defence("halved")
    assert torch.equal(halved.upload({"w": torch.ones(2)}, 1, torch.Generator())["w"], torch.full((2,), 0.5))
    report = run(SCENARIOS["coin"]())  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert report.judge().judgements[0].answer == "above" and report.stopped is None
    with pytest.raises(SitusError, match=r"'broken' \(broken_audit:Broken of other\) cannot be imported: RuntimeError"):
        create_attack("broken")
    with pytest.raises(SitusError, match=r"unknown attack 'nosuch'; choose one of: adaptive-mjp, .*brightness"):
        create_attack("nosuch")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The example's attack, known by its name for one test."""
    kind = runpy.run_path(str(EXAMPLE))["Brightness"]
    classes: Any = ATTACKS
    monkeypatch.setattr(classes, "_classes", dict(classes._classes))
    ATTACKS.add(kind)
    return kind


def test_the_gate_the_page_the_sweep_and_the_table_know_an_attack_of_ones_own(
    known: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["test_vit", "--data", "samples", "--img-size", "32", "--count", "5", "--device", "cpu"]
    words += ["--attacks", "brightness,patchembed", "--defences", "none", "--out", str(tmp_path)]
    assert main(["audit", "gradients", *words, "--fail-above", "blind", "--no-pictures"]) == 3
    told = json.loads((tmp_path / "gradients.json").read_text())
    assert [pair["attack"] for pair in told["pairs"]][:2] == ["brightness", "patchembed"]
    assert known.about in (tmp_path / "gradients.html").read_text()
    small = {"img_size": 32, "count": 1, "device": "cpu"}
    traced = trace_defences("test_vit", "samples", ["fedavg"], beside=["none"], attacks=[known()], **small)
    assert {point.by for line in traced.lines for point in line.points} == {"brightness"}
    assert ("brightness", "images") in [(card.attack, card.scenario) for card in cards()]
    capsys.readouterr()


def test_the_table_has_every_attack_of_every_scenario() -> None:
    table = attacks_table()
    assert {row[1] for row in table.rows} == {"images", "texts", "split", "prompts", "lock"}
    assert {row[0] for row in table.rows if row[1] == "images"} == set(ATTACKS)
    assert all(all(row[2:6]) for row in table.rows)
    assert {row[2] for row in table.rows} == {"honest-but-curious", "active"}


def test_a_card_tells_in_one_line_each_what_its_attack_needs_proves_and_does() -> None:
    texts = {
        (card.attack, name): text
        for card in cards()
        for name, text in card._asdict().items()
        if name in ("needs", "proves", "paper", "difference")
    }
    assert not {place: text for place, text in texts.items() if not text.strip() or "\n" in text or text.endswith(".")}
    assert all(len(text.split()) > 3 for (_, name), text in texts.items() if name == "difference")


def test_a_class_that_lacks_something_is_refused() -> None:
    with pytest.raises(SitusError, match="has no attribute about and no attribute prepare and no attribute recover"):
        ATTACKS.add(type("Mine", (), {"name": "mine"}))  # pyright: ignore[reportArgumentType]


def test_a_class_from_outside_does_not_take_the_place_of_ours() -> None:
    ours = ATTACKS["patchembed"]
    with pytest.raises(SitusError, match="its name 'patchembed' is already used by Situs"):
        ATTACKS.add(type("Mine", (ours,), {}))
    assert ATTACKS["patchembed"] is ours
