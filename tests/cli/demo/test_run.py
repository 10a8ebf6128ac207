from __future__ import annotations

import io
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.cli.demo import learned
from situs.cli.demo import run as demo
from situs.cli.demo.learned import _followed
from situs.cli.demo.sections import Stage
from situs.cli.main import main
from situs.errors import SitusError
from situs.evaluate import hooks


_measure = hooks.measure_accuracy


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, undrawing: Callable[[pytest.MonkeyPatch], None]) -> tuple[str, str]:
    """One whole `situs demo --quick` in a folder that is not there yet: (what it printed, the page)."""
    out = tmp_path_factory.mktemp("demo") / "new" / "folder"
    said, complained = io.StringIO(), io.StringIO()
    with redirect_stdout(said), redirect_stderr(complained), pytest.MonkeyPatch.context() as patch:
        undrawing(patch)
        # A few of the test images are enough here, for the classifiers and for every section.
        patch.setattr(learned, "QUICK", replace(learned.QUICK, looked_at=16))
        patch.setattr(hooks, "measure_accuracy", lambda model, images, **how: _measure(model, islice(images, 3), **how))
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
    assert sorted(found) == ["after-MP3", "droppos", "from-random-weights", "mp3", "split"]
    assert len(found["after-MP3"].classes or ()) == 10


def test_a_folder_of_runs_that_is_not_the_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "runs" / "precious").mkdir(parents=True)
    with pytest.raises(SitusError, match=r"runs: is there and not of an earlier demo") as stop:
        demo.run(demo.Args(out=tmp_path))
    assert stop.value.field == "out"
    assert [each.name for each in tmp_path.iterdir()] == ["runs"]
    assert (tmp_path / "runs" / "precious").is_dir()


def test_progress_is_plain_lines_where_nobody_watches(ran: tuple[str, str]) -> None:
    from situs.cli.demo.learned import SECTIONS

    printed, _ = ran
    for number, name in enumerate(SECTIONS, start=1):
        assert re.search(rf"^{number}/{len(SECTIONS)} {re.escape(name)}: done in \d+\.\d s$", printed, re.MULTILINE)
    assert "\x1b" not in printed


def test_the_printed_table_says_what_the_page_says(ran: tuple[str, str]) -> None:
    from situs.cli.demo.sections import QUICK_NOTE

    printed, page = ran
    table = printed.partition("What the demo found\n")[2]
    lines = [re.split(r"\s{2,}", line.strip()) for line in table.splitlines() if line.startswith("  ")]
    assert len(lines) >= 7
    for what, found in lines:
        assert f"<td>{what}</td><td>{found}</td>" in page
    assert "NOT" not in table
    assert QUICK_NOTE in printed


def test_the_page_shows_each_section_with_pictures(ran: tuple[str, str]) -> None:
    _, page = ran
    sections = re.findall(r"<section.*?</section>", page, re.DOTALL)
    titles = [re.search(r"<h2>(.*?)</h2>", section)[1] for section in sections]  # pyright: ignore[reportOptionalSubscript]
    assert titles[0] == "At a glance"
    assert titles[-1] == "How this page was made"
    assert [section.count("<figure>") > 0 for section in sections] == [False, *[True] * (len(sections) - 2), False]
    assert "situs demo --quick --seed 0" in page
    assert "Zalando SE" in page
    assert "After the few steps of --quick the models know next to nothing" in page


def test_the_title_claims_only_what_was_found(ran: tuple[str, str]) -> None:
    printed, page = ran
    tops = [float(found) for found in re.findall(r"top-1 (?:after MP3|from random weights) +([\d.]+) %", printed)]
    assert len(tops) == 2
    if tops[0] != tops[1]:  # as printed, to a tenth
        assert ("and that helps" in page) == (tops[0] > tops[1])


def test_the_page_carries_a_reconstruction_a_projection_a_grid_and_attention(ran: tuple[str, str]) -> None:
    """Each with numbers of its own, below in the printed table too."""
    printed, page = ran
    sections = dict(re.findall(r"<h2>(.*?)</h2>(.*?)</section>", page, re.DOTALL))
    assert sections["Jigsaw puzzles"].count("<figure>") == 3
    assert sections["Who knows where a patch was"].count("<figure>") == 3
    assert "principal components" in sections["Position embeddings and their PCA"]
    assert "principal components" in sections["A map of the image that nobody drew"]
    assert sections["Where the classifier looks"].count("<figure>") == 2
    assert sections["What the server of split learning sees"].count("<figure>") == 1
    for line in (
        r"MP3, puzzles without a mask\s+\d+\.\d % of patches right",
        r"DropPos, mean of the position grid\s+\d+\.\d % \(chance 2\.0 %\)",
        r"row and column read off MP3's position head\s+error \d\.\d\d patches",
        r"sharpest head of the classifier\s+\d\.\d\d nats of 3\.91",
    ):
        assert re.search(line, printed), line


def test_the_server_of_split_learning_gets_the_images_back(ran: tuple[str, str]) -> None:
    """Its model is wider than a patch has pixels: an attack that works reads them to rounding, and finds every row."""
    line = r"what its server got back\s+(\S+) % of places, (\S+) % of channels, (\S+) dB \(mean image (\S+) dB"
    found = re.search(line, ran[0])
    assert found is not None
    places, channels, quality, blind = map(float, found.groups())
    assert min(places, channels) > 95
    assert quality > 60 > 20 > blind


def test_equivariance_holds_and_the_control_fails(ran: tuple[str, str]) -> None:
    printed, _ = ran
    errors = dict(re.findall(r"equivariance, (.*?)\s{2,}error (\S+)", printed))
    assert float(errors["with positions"]) < 1e-12
    assert float(errors["without positions"]) < 1e-12
    assert float(errors["control: positions stay"]) > 1e-2


def test_equivariance_section_sees_a_broken_encoder(tmp_path: Path) -> None:
    """A block that looks at a token's place is caught, so the small errors above mean something."""
    from situs.cli.demo.sections import Stage, show_equivariance

    stage = Stage(seed=0, quick=True, say=print, runs=tmp_path)
    ramp = torch.linspace(0, 1, 50 * 64, dtype=torch.float64).reshape(50, 64)  # CLS and 49 places, 64 channels
    ramp[:, ::2] *= -1  # a ramp equal in all channels would vanish in the next norm
    stage.backbone.model.blocks[0].mlp.register_forward_hook(lambda module, inputs, output: output + ramp)
    errors = {what: float(found.removeprefix("error ")) for what, found in show_equivariance(stage)}
    assert len(errors) == 3
    assert min(errors.values()) > 1e-3


def test_the_same_seed_gives_the_same_page(tmp_path: Path) -> None:
    from situs.cli.demo.sections import Stage, show_equivariance, show_masks

    def page(seed: int) -> str:
        stage = Stage(seed, quick=True, say=print, runs=tmp_path)
        show_masks(stage)
        show_equivariance(stage)
        return stage.page.render()

    state = torch.get_rng_state()
    first = page(3)
    torch.rand(1)  # whatever happened before in the process does not matter
    assert page(3) == first != page(4)
    torch.set_rng_state(state)


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert main(["demo", "--out", str(taken / "below")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("situs: out=") and said.endswith("(--out)\n")


def test_a_terminal_gets_a_spinner(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress = demo._Progress()
    with progress.step("1/2 a step"):
        progress.say("half way")
    assert re.search(r"✓.* 1/2 a step .*0\.\d s", capsys.readouterr().out)


def test_without_a_terminal_words_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    progress = demo._Progress()
    with progress.step("1/2 a step"):
        progress.say("half way")
    assert re.fullmatch(r"1/2 a step: half way\n1/2 a step: done in 0\.\d s\n", capsys.readouterr().out)


def test_flags_are_known_before_torch_is_imported() -> None:
    code = "import sys, situs.cli.demo.run; print(sorted({'torch', 'timm', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


class Log:
    """A file that counts how often it was read."""

    text, reads = "", 0

    def read_text(self, encoding: str) -> str:
        self.reads += 1
        return self.text


def test_a_long_training_says_how_far_it_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its log, at each quarter; a line that is only half written is passed over."""
    said: list[str] = []
    log: Any = Log()
    monkeypatch.setattr("situs.cli.demo.learned._LOOK", 0.001)
    with _followed(Stage(0, quick=True, say=said.append, runs=tmp_path), "pretraining", log, 8):
        for log.text in ('{"epoch": 1.5}\n', '{"epoch": 2.0}\n{"epo', '{"epoch": 2.0}\n{"epoch": 2.5}\n'):
            seen, until = log.reads, time.monotonic() + 60
            while log.reads < seen + 2 and time.monotonic() < until:
                time.sleep(0.001)
    assert said == ["pretraining, epoch 2 of 8"]
