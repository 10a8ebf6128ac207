from __future__ import annotations

import html
import io
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from builders import small_method, small_vit
from outcomes import outcome
from PIL import Image

from situs import progress
from situs.cli.demo import findings, stage
from situs.cli.demo import run as demo
from situs.cli.demo.stage import Stage
from situs.cli.main import main
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.locks.attacks.audit import LockAuditConfig, audit_lock
from situs.locks.attacks.match import Schedule, long_schedule
from situs.locks.attacks.recovery import KeyRecovery
from situs.measure import hooks
from situs.measure.reconstruct import PuzzleRatios, study
from situs.report.html import Page
from situs.results import Table

_measure = hooks.measure_accuracy


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, undrawing: Callable[[pytest.MonkeyPatch], None]) -> tuple[str, str]:
    """One whole `situs demo --quick` in a folder that is not there yet: (what it printed, the page)."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained), pytest.MonkeyPatch.context() as patch:
        undrawing(patch)
        # A few of the test images are enough here, for the classifiers and for every finding.
        patch.setattr(stage, "QUICK", replace(stage.QUICK, test_images=16))
        patch.setattr(hooks, "measure_accuracy", lambda model, images, **how: _measure(model, islice(images, 3), **how))
        patch.setattr(findings.situs, "audit_lock", partial(audit_lock, config=LockAuditConfig(test=100)))
        quick = lambda heat: Schedule(1.0, long_schedule(heat).steps[::10])  # noqa: E731
        patch.setattr("situs.locks.attacks.images.long_schedule", quick)
        patch.setattr(progress, "FIRST", 1e9)  # else a slow machine is told how far it is
        assert main(["demo", "--quick", "--out", str(out)]) == 0
    assert complained.getvalue() == ""
    assert said.getvalue().splitlines()[-1] == str(out / "report.html")
    assert sorted(each.name for each in out.iterdir()) == ["report.html", "runs"]
    check_runs(out / "runs")
    return said.getvalue(), (out / "report.html").read_text(encoding="utf-8")


def check_runs(folder: Path) -> None:
    """What the demo trained can be looked at by the other verbs."""
    from situs.train.run import load_run

    found = {each.name: load_run(each) for each in folder.iterdir() if each.is_dir()}
    assert sorted(found) == ["after-MP3", "from-random-weights", "mp3"]
    assert len(found["after-MP3"].classes or ()) == 10


def test_a_folder_of_runs_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "precious").mkdir(parents=True)
    with pytest.raises(SitusError, match=r"runs: exists but does not come from an earlier demo") as stop:
        demo.Demo(out=tmp_path).run()
    assert stop.value.field == "out"
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "precious").is_dir()


def told(page: str) -> list[tuple[str, str, str]]:
    """Title, number and what it is of, of each finding on the page."""
    found = r'<h2>([^<]*)</h2>\s*<p class="big">(.*?) <span>(.*?)</span>'
    return [(html.unescape(a), b, html.unescape(c)) for a, b, c in re.findall(found, page)]


def test_five_findings_come_first_each_with_a_picture_and_are_printed_too(ran: tuple[str, str]) -> None:
    printed, page = ran
    articles = re.findall(r"<article.*?</article>", page, re.DOTALL)
    assert len(articles) == len(told(page)) == 5
    assert all("<img" in each or 'role="img"' in each for each in articles)
    assert "Training for 1 epoch. Each patch" in page
    assert page.index("</article>") < page.index("<section")
    for number, (title, value, of) in enumerate(told(page), start=1):
        assert f"  {number}  {title}\n     {value} {of}\n" in printed
    assert demo.QUICK_NOTE in printed and demo.QUICK_NOTE in page
    assert "situs demo --quick --seed 0" in page and "Zalando SE" in page


def test_it_ends_with_commands_that_run_as_printed(
    ran: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder that has what they need, in their order; the training is cut short and small."""
    printed, page = ran
    lines = printed.partition("Next, with your own data and model")[2].split("\n\n")[0].splitlines()
    assert demo.NEEDS in lines[0] and demo.NEEDS in html.unescape(page)
    assert [line.strip() for line in lines[1:]] == [*demo.NEXT]
    assert all(line in html.unescape(page) for line in demo.NEXT)
    for label in "ab":
        for number in range(8):
            write_image(tmp_path / "photos" / label / f"{number}.png", number)
    (tmp_path / "my_model.py").write_text(MY_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shorter = {"pretrain": SHORT, "audit gradients": ["--count", "1", "--attacks", "patchembed"]}
    for command in (command for line in demo.NEXT for command in line.split(" && ")):
        words = command.split()[1:]
        more = next((flags for verb, flags in shorter.items() if command.startswith(f"situs {verb} ")), [])
        with redirect_stdout(io.StringIO()):
            assert main([*words, *more]) == 0, command
    assert (tmp_path / "audit" / "gradients.html").exists() and (tmp_path / "locked" / "manifest.json").exists()


SHORT = [
    *(
        "--steps",
        "1",
        "--data.batch",
        "8",
        "--data.workers",
        "0",
        "--data.img-size",
        "32",
        "--backbone.patch-size",
        "8",
    ),
    *(
        "--backbone.model-args.depth",
        "1",
        "--backbone.model-args.embed-dim",
        "16",
        "--backbone.model-args.num-heads",
        "2",
    ),
    *("--optim.warmup-epochs", "0", "--device", "cpu"),
]

MY_MODEL = """
import torch
from torch import nn


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 12, 12)
        self.places = nn.Parameter(0.02 * torch.randn(1, 9, 16))
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.classifier = nn.Linear(16, 10)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.places
        return self.classifier(self.block(tokens).mean(dim=1))


def build():
    return Mine()
"""


def write_image(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (40, 40, 3), dtype="uint8")
    Image.fromarray(pixels).save(path)


def test_a_finding_says_only_what_its_figures_bear(ran: tuple[str, str]) -> None:
    """After the steps of --quick the model knows nothing of places; what needs no training holds all the same."""
    places, labels, gradients, lock, order = told(ran[1])
    assert (float(places[1].split()[0]) > 4.0) == (
        places[0] == "A model can learn where patches belong, without labels."
    )
    if float(labels[1].replace("−", "-")) < 2:  # less than chance moves it, of 2,000 images
        assert labels[0] == "In this run, pretraining on position did not improve the accuracy significantly."
    assert gradients == ("One training step reveals the image exactly.", "8 of 8", "images recovered byte for byte")
    assert lock[2] == "channels of the key found" and lock[1].endswith(" of 64")
    assert order[:2] == ("A server that sees only shuffled tokens can restore their order.", "100 %")


@pytest.mark.parametrize(
    ("right", "after", "owner", "falls"),
    [(64, 0.5, 0.5, True), (3, 0.5, 0.5, True), (3, 0.2, 0.5, False), (64, 0.1, 0.1, True)],  # of a poor model, too
)
def test_a_lock_falls_only_where_an_attacker_got_what_the_key_is_worth(
    right: int, after: float, owner: float, falls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {"right": right, "residual_sizes": ((64, right),)}
    got = KeyRecovery("images", 64, before=0.1, after=after, owner=owner, **known)
    none = replace(got, attacker="public-base", right=2, residual_sizes=((64, 2),), after=0.1)
    said = type("Audit", (), {"attacks": (got, none), "verdict": "so.", "summary": lambda _: Tabled()})()
    monkeypatch.setattr(findings.situs, "lock", lambda *_, **__: None)
    monkeypatch.setattr(findings.situs, "audit_lock", lambda *_, **__: said)
    found = findings.find_lock(Stage(0, quick=True, runs=tmp_path))
    bars = (
        f"with the key: {100 * owner:.1f} %; without: 10.0 %; attacker with 24 unlabelled images: {100 * after:.1f} %"
    )
    assert bars in "".join(map(str, found.picture.blocks))
    assert ('"bad"' in "".join(found.picture.blocks)) == falls
    assert ("An attacker with 24 unlabelled images opens the lock" in found.title) == falls
    assert ("better attack" in found.title) != falls


class Tabled:
    """A summary with one table."""

    tables = (Table("t", ["a"], [["b"]]),)


def test_what_needs_an_extra_that_is_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    here = Stage(0, quick=True, runs=tmp_path, page=Page("p"))
    found = findings.find_lock(here)
    assert (found.number, found.of) == ("left out", "needs cryptography: pip install 'situs[locks]'")
    assert "Skipped: needs cryptography" in html.unescape(here.page.render())
    demo._finish(here, [found], 3.0)
    assert "Findings skipped because an extra is missing: 1." in here.page.render()


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.4, "in 0 s,"), (59.4, "in 59 s,"), (59.6, "in 1 min 0 s,"), (3725.0, "in 62 min 5 s,")]
)
def test_the_page_says_how_long_it_took(seconds: float, said: str, tmp_path: Path) -> None:
    here = Stage(3, quick=False, runs=tmp_path, page=Page("p"))
    here.page.section("Details").text("of a finding")
    demo._finish(here, [], seconds)
    assert said in here.page.lead and "skipped" not in here.page.lead
    assert here.page.notice == "" and "situs demo --seed 3" in here.page.render()
    first, second, *_ = here.page.sections  # what to try stands before the details of the findings
    assert (first.title, first.look) == ("Next, with your own data and model", "")
    assert (second.title, second.look) == ("Details", "fold")


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["demo", "--out", str(taken / "below")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("situs: out=") and said.endswith("(--out)\n")


def test_flags_are_known_before_torch_is_imported() -> None:
    code = "import sys, situs.cli.demo.run; print(sorted({'torch', 'timm', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


HERE: Any = {"quick": True, "runs": Path("nowhere")}


@pytest.mark.parametrize(
    ("alone", "points", "helped"), [(50.0, 3.1, False), (50.0, 3.2, True), (50.0, -9.0, False), (96.0, 1.3, True)]
)
def test_few_labels_are_saved_only_by_more_than_twice_the_spread(
    alone: float, points: float, helped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two shares of 2,000 images each vary by chance; around 50 %, their difference by 1.6 points."""
    after, trained, drawn = alone + points, list[str](), list[Any]()

    def log(path: Path, **_: Any) -> Any:
        best = after if path.name == stage.AFTER else alone
        rows = [{"epoch": 0.999, "val_top1": 0.1}, {"step": 7}, {"epoch": 2.0, "val_top1": best / 100}]
        return SimpleNamespace(records=lambda: rows)

    monkeypatch.setattr(findings, "classify", lambda _, run: trained.append(run))
    monkeypatch.setattr(findings.RunFolder, "open", log)
    curves = findings.figures.curves
    monkeypatch.setattr(findings.figures, "curves", lambda *given: drawn.append(given) or curves(*given))
    found = findings.find_labels(Stage(0, **HERE))
    assert (found.title == "Pretraining on position saves labels.") == helped
    assert found.number == f"{points:+.1f}".replace("-", "−")
    assert trained == [stage.AFTER, stage.ALONE]
    assert [*drawn[0][0].values()] == [([1, 2], pytest.approx([10.0, best])) for best in (after, alone)]
    bars = "".join(map(str, found.picture.blocks))
    assert f"100 labels: {after:.1f} %" in bars and f"100 labels: {alone:.1f} %" in bars
    assert ('"good"' in bars) == helped


@pytest.mark.parametrize(
    ("psnr", "proved", "title", "number"),
    [
        ((60.0, 60.0), (0, 1), "One training step reveals the image exactly.", "2 of 2"),
        ((60.0, 60.0), (0,), "One training step reveals much of the image.", "1 of 2"),
        ((10.0, 20.1), (), "One training step reveals much of the image.", "0 of 2"),
        ((10.0, 20.0), (), "This attack recovered little from one training step.", "0 of 2"),
    ],
)
def test_a_step_reveals_as_much_as_was_recovered(
    psnr: tuple[float, ...], proved: tuple[int, ...], title: str, number: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = torch.rand(2, 1, 8, 8)
    facts = [{"bytes": at in proved} for at in range(2)]
    pair = outcome("patchembed", "none", None, None, {"psnr": [*psnr]}, facts, images)
    said = SimpleNamespace(findings=[pair], images=images, summary=lambda: SimpleNamespace(sentence="so."))
    monkeypatch.setattr(findings.situs, "audit_gradients", lambda *_, **__: said)
    found = findings.find_gradients(Stage(0, **HERE))
    assert (found.title, found.number, found.of) == (title, number, "images recovered byte for byte")
    none = SimpleNamespace(**{**vars(said), "findings": [outcome("patchembed", "none", "no table")]})
    monkeypatch.setattr(findings.situs, "audit_gradients", lambda *_, **__: none)
    refused = findings.find_gradients(Stage(0, **HERE))
    assert (refused.title, refused.number, refused.of) == ("No training step was attacked.", "–", "no table")


@pytest.mark.parametrize("quick", [False, True])
def test_every_epoch_of_a_classifier_sees_all_labelled_images_and_the_last_one_is_evaluated(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training drops the rest of an epoch that fills no batch, and the page names the number of labelled images."""
    asked: list[Any] = []
    monkeypatch.setattr(stage, "train", lambda _, name, images, **how: asked.append((images, how)))
    place = Stage(0, **HERE | {"quick": quick})
    stage.classify(place, stage.AFTER)
    [(images, how)] = asked
    assert images == place.length.labelled and images % how["batch"] == 0
    assert how["probe_every"] * place.length.evaluations == how["epochs"] == place.length.finetune_epochs


@pytest.mark.parametrize(("places", "restored"), [(1.0, True), (0.951, True), (0.95, False), (0.1, False)])
def test_an_order_is_restored_where_nearly_every_token_is_placed(
    places: float, restored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above are the pictures that the server found, in another order; below are the client's own."""
    drawn: list[Any] = []
    shown, own = torch.rand(2, 4, 1, 28, 28)
    figures = {"places": places, "channels": 1.0, "psnr": 30.0}
    last = SimpleNamespace(findings=[SimpleNamespace(figures=figures, shown=shown)])
    audit = SimpleNamespace(settings=[None, last], pictures=own, samples=50, guess=lambda _: 12.0)
    monkeypatch.setattr(findings, "audit_split", lambda *_, **__: audit)
    draw = findings.pixel_rows
    monkeypatch.setattr(findings, "pixel_rows", lambda rows, **how: drawn.append(rows) or draw(rows, **how))
    found = findings.find_order(Stage(0, **HERE))
    assert (found.title == "A server that sees only shuffled tokens can restore their order.") == restored
    assert found.number == f"{100 * places:.0f} %"
    [(mixed, recovered, client)] = drawn
    assert torch.equal(recovered, shown[:3]) and torch.equal(client, own[:3])
    parts, real = (
        sorted(each.unfold(2, 7, 7).unfold(3, 7, 7).reshape(3 * 16, 49).tolist()) for each in (mixed, shown[:3])
    )
    assert parts == real and not torch.equal(mixed, recovered)


@pytest.mark.parametrize(("right", "learned"), [(0.25, False), (0.26, True)])
def test_places_are_learned_at_more_than_four_times_chance(
    right: float, learned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the curve of the training stands the line of chance: one of 16 places."""
    torch.manual_seed(0)
    method = small_method("mp3", small_vit(28, depth=1, patch_size=7, in_chans=1)).eval()
    batch = Batch(torch.rand(5, 1, 28, 28), torch.arange(5))
    solved = study(method, [batch], [PuzzleRatios(0.0)], lambda images: images, show=5, pairs=1)  # type: ignore[arg-type]
    scores = {PuzzleRatios(0.0): solved.scores[PuzzleRatios(0.0)]._replace(right=right)}
    history = [{"step": 2, "position_accuracy": 0.125}, {"epoch": 1}, {"step": 4, "position_accuracy": 0.5}]
    monkeypatch.setattr(findings, "pretrain", lambda _: history)
    monkeypatch.setattr(findings, "analyze_reconstruct", lambda *_, **__: replace(solved, scores=scores))
    drawn: list[Any] = []
    curves = findings.figures.curves
    monkeypatch.setattr(findings.figures, "curves", lambda *given: drawn.append(given[0]) or curves(*given))
    found = findings.find_places(Stage(0, **HERE))
    assert (found.title == "A model can learn where patches belong, without labels.") == learned
    assert found.number == f"{16 * right:.1f} of 16"
    assert drawn == [{"MP3": ([2, 4], [12.5, 50.0]), "chance": ([2, 4], [6.25, 6.25])}]
