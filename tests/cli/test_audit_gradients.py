"""`situs audit gradients`: table, files, gate, and what it says of a model that no attack fits."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from situs.audit.defences import Step
from situs.cli.main import main
from situs.core.when import When
from situs.data.batch import Batch
from situs.gate import SCOPE

NAME = "test_vit"  # timm's own tiny model for tests: 160 pixels in patches of 16, 64 channels
SMALL = [NAME, "--model-args.depth", "1"]


@pytest.fixture(autouse=True)
def fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is asked about one image and not four, and the attacker with priors learns of four and not 40."""
    monkeypatch.setattr("situs.audit.oracle.IMAGES", 1)
    monkeypatch.setattr("situs.audit.attacks.prior.GRADIENTS", 4)


def test_table_page_and_file(
    photographs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schema_breaks: Callable[[Any], list[str]],
) -> None:
    out = tmp_path / "audit"
    words = ["audit", "gradients", *SMALL, "--data", str(photographs), "--img-size", "32", "--out", str(out)]
    assert main([*words, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert "none: 2 of 2 images recovered exactly from one step" in shown and "(best attack patchembed" in shown
    assert "model.pos_embed is not sent" in shown
    told = json.loads((out / "gradients.json").read_text())
    assert {(p["attack"], p["status"]) for p in told["pairs"]} >= {("patchembed", "done"), ("patchembed", "refused")}
    assert len(told["pairs"]) == 12
    assert [row["image"] for row in told["pairs"][0]["images"]] == ["0.png", "1.png"]
    page = (out / "gradients.html").read_text()
    assert page.index("Threat model") < page.index("Verdict") < page.index("Which defences reduce the leak")
    assert str(photographs.parent) not in page + json.dumps(told)
    assert schema_breaks(told) == []
    assert told["gate"] is None


def test_what_another_verb_or_model_left_is_not_lost_without_a_word(
    photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, others = tmp_path / "audit", ("report.html", "audit.html", "study.html", "texts.html")
    out.mkdir()
    for name in others:
        (out / name).write_text(name)
    words = ["audit", "gradients", *SMALL, "--data", str(photographs), "--img-size", "32", "--out", str(out)]
    more = ["--count", "1", "--attacks", "patchembed", "--defences", "none"]
    assert main([*words, *more]) == 0
    replaced = f"situs: {out / 'gradients'}.html and .json exist and will be replaced"
    assert replaced not in capsys.readouterr().err and all((out / name).read_text() == name for name in others)
    assert main([*words, *more]) == 0 and replaced in capsys.readouterr().err
    for wrong in (["--defences", "fog"], ["--attacks", "magic"], ["--fail-above", "psnr"]):  # refused before it is said
        assert main([*words, *wrong]) == 2 and replaced not in capsys.readouterr().err
    (out / "study.toml").touch()
    assert main([*words, "--settings", "a"]) == 2
    assert (
        "is the folder of a study, and a study has its own settings.json; choose another folder (--out)"
        in capsys.readouterr().err
    )


def test_a_page_is_evidence_and_private(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Date, command, versions and hashes; pictures for their owner's eyes alone, or none."""
    from situs.audit.victim import open_victim, weights_digest

    out = tmp_path / "audit"
    out.mkdir()
    (out / "gradients.html").write_text("the page before, for all to read")
    words = ["audit", "gradients", NAME, "--data", str(photographs), "--img-size", "32", "--out", str(out)]
    more = ["--count", "2", "--attacks", "patchembed", "--defences", "none"]
    assert main([*words, *more]) == 0
    path, told = out / "gradients.html", json.loads((out / "gradients.json").read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    page = path.read_text()
    assert page.index("This page shows private images") < page.index("Threat model") and "<img" in page
    victim = open_victim(NAME, img_size=(32, 32))
    assert told["weights_sha256"] == weights_digest(victim.trains) and told["weights_file_sha256"] is None
    command = f"situs audit gradients {NAME} --count 2 --img-size 32 --out audit --data {photographs.name}"
    assert told["command"] == f"{command} --attacks patchembed --defences none"
    assert abs(datetime.fromisoformat(told["made"]) - datetime.now(UTC)) < timedelta(minutes=5)
    for name in ("made", "command", "situs", "torch", "weights_sha256"):
        assert told[name] in page, name
    assert main([*words, *more, "--no-pictures"]) == 0
    bare = path.read_text()
    assert "private images" not in bare and "<img" not in bare and "--no-pictures" in bare
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_the_weights_file_is_hashed(photographs: Path, tmp_path: Path) -> None:
    import timm

    weights = tmp_path / "w.safetensors"
    save_file(timm.create_model(NAME, img_size=32).state_dict(), weights)
    words = ["audit", "gradients", NAME, "--data", str(photographs), "--img-size", "32", "--count", "1"]
    more = ["--weights", str(weights), "--attacks", "patchembed", "--defences", "none", "--no-pictures"]
    assert main([*words, *more, "--out", str(tmp_path / "audit")]) == 0
    told = json.loads((tmp_path / "audit" / "gradients.json").read_text())
    assert told["weights_file_sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    assert told["weights"] == "w.safetensors" and "--weights w.safetensors" in told["command"]


GATE = ["--attacks", "patchembed,april", "--fail-above", "psnr=20"]

CLIP, CLIPPED = "clip=1:1e3", "clip C=1, noise 1000·C"


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five small pictures of noise, the fewest that can pass."""
    folder, chance = tmp_path_factory.mktemp("five"), np.random.default_rng(0)
    for number in range(5):
        Image.fromarray(chance.integers(0, 256, (32, 32, 3), dtype="uint8")).save(folder / f"{number}.png")
    return folder


@pytest.mark.thin(3)
@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ([], 3, "none, above: 5 of 5 images exceed what the gate allows; most exposed: "),
        (
            ["--defences", CLIP],
            0,
            f"is passed, {SCOPE}. {CLIPPED}, passed: patchembed solved the equations of all 5 images",
        ),
        (["--defences", CLIP, "--fail-above", "blind"], 0, f"The gate blind is passed, {SCOPE}. {CLIPPED}, passed: "),
        (
            ["--defences", CLIP, "--count", "4"],
            4,
            "re-identification may be chance",
        ),
        (["--defences", "clip=1:0"], 3, "5 of 5 images exceed"),  # without noise it is the same picture
        (["--defences", CLIP, "--attacks", "april"], 4, "april proves nothing"),
        (
            ["--defences", CLIP, "--batch", "2", "--count", "4"],
            4,
            "proves nothing: it is not exact here",
        ),
        (["--defences", "mjp=0.5", "--attacks", "april"], 4, "april proves nothing: it is not exact here"),
        (["--defences", f"{CLIP},none"], 3, f"{CLIPPED}, passed: patchembed solved the equations of all 5 images"),
        (
            ["--defences", f"{CLIP},mjp=0.5", "--attacks", "april"],
            4,
            "is inconclusive (not a pass), for an honest server",
        ),
        (["--defences", CLIP, "--attacks", "matching", "--iterations", "2"], 4, "no closed form (an attack"),
    ],
)
def test_the_gate(
    more: list[str],
    status: int,
    said: str,
    five: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    schema_breaks: Callable[[Any], list[str]],
) -> None:
    file = tmp_path / "deep" / "junit.xml"
    words = ["audit", "gradients", *SMALL, "--data", str(five), "--img-size", "32", *GATE]
    assert main([*words, "--out", str(tmp_path / "audit"), "--no-pictures", "--junit", str(file), *more]) == status
    assert said in capsys.readouterr().out
    told = json.loads((tmp_path / "audit" / "gradients.json").read_text())
    assert schema_breaks(told) == []
    assert told["gate"]["status"] == status and told["gate"]["passed"] == (status == 0)
    suite = ET.parse(file).getroot().find("testsuite")
    assert suite is not None
    counts = [judged["status"] for judged in told["gate"]["defences"]]
    assert (suite.get("failures"), suite.get("errors")) == (str(counts.count(3)), str(counts.count(4)))
    assert suite.get("tests") == str(len(counts)) and suite.get("skipped") == "0"
    assert said in (tmp_path / "audit" / "gradients.html").read_text() + capsys.readouterr().out


def test_a_gate_judges_what_would_be_sent_and_nothing_else(photographs: Path, tmp_path: Path) -> None:
    words = ["audit", "gradients", *SMALL, "--data", str(photographs), "--img-size", "32", "--count", "1", *GATE]
    assert main([*words, "--no-pictures", "--out", str(tmp_path)]) == 3
    told = json.loads((tmp_path / "gradients.json").read_text())
    assert [judged["defence"] for judged in told["gate"]["defences"]] == ["none"]
    assert {pair["defence"] for pair in told["pairs"]} == {"none"}


def test_one_image_is_not_re_identified(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", *SMALL, "--data", str(photographs), "--img-size", "32", "--count", "1"]
    assert main([*words, "--defences", "noise=10", "--no-pictures", "--out", str(tmp_path / "audit")]) == 0
    told = json.loads((tmp_path / "audit" / "gradients.json").read_text())
    assert [pair["images"][0]["reidentified"] for pair in told["pairs"]] == [None] * 3
    assert "re-identified)" not in capsys.readouterr().out
    assert main([*words, "--fail-above", "reidentified=0.5", "--out", str(tmp_path / "gate")]) == 2
    assert "a single image is always re-identified; give two or more" in capsys.readouterr().err
    assert not (tmp_path / "gate").exists()


@pytest.mark.parametrize(
    ("model", "reason"), [("test_resnet", "convolutional"), ("vit_relpos_small_patch16_224", "position bias to pairs")]
)
def test_a_model_without_an_attack(
    model: str, reason: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", "gradients", model, "--data", str(photographs), "--count", "1", "--out", str(tmp_path)]
    assert main([*words, *["--model-args.depth", "1"] * ("vit" in model)]) == 0
    shown = capsys.readouterr().out
    assert reason in shown
    assert "No attack of this audit applies" in shown and "This does not prove privacy" in shown
    assert reason in (tmp_path / "gradients.html").read_text()
    assert [p["status"] for p in json.loads((tmp_path / "gradients.json").read_text())["pairs"]] == ["refused"] * 12


def test_a_run_and_its_labels(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", str(trained.one), "--data", str(trained.data), "--count", "3"]
    assert main([*words, "--attacks", "patchembed", "--defences", "none", "--out", str(tmp_path)]) == 0
    assert "3 of 3 images recovered exactly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attacks", "magic"], "matching, patchembed"),
        (["--defences", "fog"], "no-pe-gradient"),
        (["--attacks", ","], "must be one or more names (--attacks)"),
        (["--defences", ""], "(--defences)"),
        (["--fail-above", "beauty=3"], "psnr"),
        (["--fail-above", "lpips=0.1"], "means a good copy"),
        (["--count", "0"], "--count"),
        (["--data", "absent"], "absent: no such folder or file (--data)"),
        (["--settings", "a", "--fail-above", "psnr=20"], "(--fail-above, --settings)"),
        (["--settings", "a", "--batch", "2"], "(--batch, --settings)"),
        (["--junit", "x.xml"], "fail_above (--junit, --fail-above)"),
        (["--fail-above", "psnr=20", "--junit", "."], "must be a file that can be written (--junit)"),
        (["--lpips", "absent.safetensors"], "no such file"),
    ],
)
def test_mistakes(
    words: list[str], said: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    assert main(["audit", "gradients", NAME, "--data", str(photographs), "--out", str(out), *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out  # refused before anything is attacked
    assert not out.exists()


def test_broken_images_are_said(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "broken.png").write_text("no picture")
    words = ["audit", "gradients", *SMALL, "--data", str(folder), "--img-size", "32", "--out", str(tmp_path / "audit")]
    assert main(words) == 2
    assert "its only image cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()
    (folder / "whole.png").write_bytes((photographs / "0.png").read_bytes())
    assert main([*words, "--attacks", "patchembed", "--defences", "none"]) == 0
    shown = capsys.readouterr()
    assert "1 of 2 images of images could not be read and was skipped" in shown.err
    assert "1 of 1 image recovered exactly" in shown.out


def test_in_the_place_of_a_broken_image_comes_the_next(
    photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As many are attacked as were asked for, and all that was passed over is named, a pipe among it."""
    folder, out = tmp_path / "images", tmp_path / "audit"
    shutil.copytree(photographs, folder)
    (folder / "00-broken.png").write_text("no picture")
    (folder / "05-broken.png").write_text("no picture")
    os.mkfifo(folder / "06-pipe.png")
    words = ["audit", "gradients", *SMALL, "--data", str(folder), "--img-size", "32", "--out", str(out)]
    assert main([*words, "--count", "2", "--attacks", "patchembed", "--defences", "none"]) == 0
    shown = capsys.readouterr()
    assert "none: 2 of 2 images recovered exactly" in shown.out
    names = [image["image"] for image in json.loads((out / "gradients.json").read_text())["pairs"][0]["images"]]
    assert names == ["0.png", "1.png"]
    said = shown.err.splitlines()
    assert "situs: images: left out 1 (pipes, devices or broken links); the first: 06-pipe.png" in said
    [broken] = [line for line in said if "could not be read" in line]
    assert broken.startswith("situs: 2 of 5 images of images could not be read and were skipped; the first: ")
    assert "00-broken.png" in broken


def test_a_file_is_no_folder(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audit").write_text("mine")
    assert main(["audit", "gradients", NAME, "--data", str(photographs), "--out", str(tmp_path / "audit")]) == 2
    assert "must be a folder (--out)" in capsys.readouterr().err
    below = tmp_path / "audit" / "new"  # refused before anything is attacked
    assert main(["audit", "gradients", NAME, "--data", "no such", "--out", str(below)]) == 2
    said = f"situs: out={below}: cannot be written because {tmp_path / 'audit'} is not writable (--out)\n"
    assert capsys.readouterr().err == said
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, why in (("link", f"{tmp_path / 'link'} is not writable"), ("a" * 300, "file name too long")):
        assert main(["audit", "gradients", NAME, "--data", "no such", "--out", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(f"{why} (--out)\n")
    assert (tmp_path / "audit").read_text() == "mine"


def test_a_wrong_lpips_file(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    save_file({"lin0.weight": torch.ones(1)}, tmp_path / "w.safetensors")
    words = ["audit", "gradients", NAME, "--data", str(photographs), "--lpips", str(tmp_path / "w.safetensors")]
    assert main(words) == 2
    assert "sha256" in capsys.readouterr().err


MODULE = """
import torch
from torch import nn
from situs.audit import adapt


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch, self.table = nn.Conv2d(3, 24, 4, 4), nn.Parameter(torch.randn(1, 16, 24))
        self.block, self.out = nn.TransformerEncoderLayer(24, 2, 48, 0.0, batch_first=True), nn.Linear(24, 6)

    def forward(self, x):
        return self.out(self.block(self.patch(x).flatten(2).transpose(1, 2) + self.table).mean(dim=1))


def named():
    return adapt(Net(), 16, weight="patch.weight", table="table", normalisation=((0.5,) * 3, (0.25,) * 3))


def bare():
    return Net()


def plain():
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(392, 6))


def several():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))


def number():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of the user's own, importable from the folder the command is run in."""
    name = f"own_net_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_users_own_module(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:named", "--data", str(photographs), "--count", "2"]
    assert main([*words, "--defences", "none,mjp", "--attacks", "patchembed"]) == 0
    shown = capsys.readouterr().out
    assert "none: 2 of 2 images recovered exactly" in shown
    assert "runs only as a whole" in shown
    told = json.loads(Path("results/gradients.json").read_text())
    assert told["model"] == f"{own}:named" and told["weights"] == "its own"


def test_a_bare_module_is_solved_without_names(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It passed the gate once, while the same module with names gave every byte."""
    words = ["audit", "gradients", f"{own}:bare", "--data", str(photographs), "--count", "2", "--img-size", "16"]
    assert main([*words, "--attacks", "patchembed", "--fail-above", "psnr=20", "--no-pictures"]) == 3
    assert "none: 2 of 2 images recovered exactly" in capsys.readouterr().out


def test_a_module_without_a_table_is_matched(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:plain", "--data", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attacks", "patchembed,matching", "--defences", "none", "--iterations", "2", "--img-size", "16"]
    assert main([*words, *settings]) == 0
    shown = capsys.readouterr()
    assert "matching: iteration 2 of 2" in shown.err
    first, second = json.loads(Path("results/gradients.json").read_text())["pairs"]
    assert first["status"] == "refused" and "position table" in first["remarks"][0]["text"]
    assert second["images"][0]["labels_right"] == 2
    assert "2 of 2 labels were inferred correctly" in Path("results/gradients.html").read_text()


def test_where_nothing_closed_applies_matching_runs_by_itself(
    own: str, five: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a pass. Now it is one of two: above, or inconclusive."""
    from situs.audit.gradients import Fallback

    monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(images=2, iterations=100))
    words = ["audit", "gradients", f"{own}:plain", "--data", str(five), "--count", "3", "--img-size", "16"]
    assert main([*words, "--fail-above", "psnr=5", "--attacks", "patchembed", "--no-pictures"]) == 3
    shown = capsys.readouterr()
    said = (
        "no closed form applies, so the attack `matching` runs instead on 2 of 3 images (100 iterations, at most 120 s)"
    )
    assert said in shown.err and said in shown.out
    pairs = json.loads(Path("results/gradients.json").read_text())["pairs"]
    assert [(pair["attack"], pair["status"]) for pair in pairs] == [("patchembed", "refused"), ("matching", "done")]
    assert pairs[1]["remarks"][0]["kind"] == "fallback" and len(pairs[1]["images"]) == 2
    monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(images=2, seconds=0.05))
    assert main([*words, "--fail-above", "psnr=190", "--attacks", "patchembed", "--no-pictures"]) == 4
    shown = capsys.readouterr().out
    assert f"is inconclusive (not a pass), {SCOPE}. none, inconclusive: matching was stopped after" in shown
    assert "no closed form applies (patchembed: " in shown and "another attack may find more than matching" in shown
    told = json.loads(Path("results/gradients.json").read_text())
    assert not told["gate"]["passed"] and not told["partial"]
    monkeypatch.setattr("situs.audit.gradients.FALLBACK", Fallback(images=2))
    more = ["--fail-above", "psnr=190", "--attacks", "patchembed,matching", "--iterations", "2", "--no-pictures"]
    assert main([*words, *more]) == 4  # asked for, it is not run again
    assert len(json.loads(Path("results/gradients.json").read_text())["pairs"]) == 2


def test_a_time_limit_opens_no_gate(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:named", "--data", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attacks", "matching", "--iterations", "1000000", "--time-limit", "0.2", "--no-pictures"]
    assert main([*words, *settings, "--fail-above", "psnr=190"]) == 4
    shown = capsys.readouterr().out
    assert "inconclusive: matching was stopped after" in shown and "of 1,000,000 iterations" in shown
    told = json.loads(Path("results/gradients.json").read_text())
    assert not told["gate"]["passed"] and len(told["pairs"][0]["images"]) == 2  # whatever number of images it saw
    more = ["--attacks", "patchembed,matching", "--batch", "1", "--time-limit", "1", "--fail-above", "psnr=20"]
    assert main([*words, *settings, *more]) == 3  # above, also where another attack was stopped


@pytest.mark.parametrize(
    ("which", "words", "said"),
    [
        ("{own}:several", [], "--img-size"),
        ("{own}:number", [], "returns int"),
        ("{own}:absent", [], "package.module:name"),
        ("no_such_package.module:make", [], "package.module:name"),
        ("{own}:named", ["--weights", "x.safetensors"], "--weights"),
        ("{own}:named", ["--img-size", "32"], "--img-size"),
        ("{own}:named", ["--count", "3", "--batch", "2"], "--batch"),
        ("{own}:named", ["--time-limit", "0"], "--time-limit"),
        ("{own}:named", ["--iterations", "0"], "--iterations"),
        (
            "{own}:named",
            ["--iterations", "5"],
            "iterations=5: applies only to the attacks matching and april-optimisation, which this audit does not run",
        ),
        ("{own}:named", ["--iterations", "5", "--fail-above", "psnr=20"], "(--iterations, --attacks)"),
        ("{own}:named", ["--labels", "known"], "labels=known: applies only to the attacks matching"),
        (
            "{own}:named",
            ["--attacks", "april", "--search-seconds", "9"],
            "search_seconds=9.0: applies only to the attack tokens",
        ),
    ],
)
def test_mistakes_with_an_own_module(
    which: str, words: list[str], said: str, own: str, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "gradients", which.format(own=own), "--data", str(photographs), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_time_limit_leaves_a_whole_report(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:named", "--data", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attacks", "matching", "--defences", "none", "--iterations", "1000000", "--time-limit", "0.2"]
    assert main([*words, *settings, "--labels", "known"]) == 0
    assert "A partial result: stopped by the time limit of 0.2 s" in capsys.readouterr().out
    told = json.loads(Path("results/gradients.json").read_text())
    assert told["partial"] and told["labels"] == "known"
    assert len(told["pairs"][0]["images"]) == 2
    assert "labels_right" not in told["pairs"][0]["images"][0]
    assert "of 1,000,000 iterations" in Path("results/gradients.html").read_text()


@pytest.mark.slow
def test_ctrl_c_leaves_a_whole_report(own: str, photographs: Path) -> None:
    """A real signal to a real process, once its search has begun."""
    words = ["audit", "gradients", f"{own}:named", "--data", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attacks", "patchembed,matching", "--defences", "noise=1e3,noise=2e3", "--iterations", "600"]
    command = [sys.executable, "-m", "situs", *words, *settings, "--fail-above", "psnr=190"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        while "matching: iteration" not in (line := process.stderr.readline()):
            assert line, "it ended before it began"
        process.send_signal(signal.SIGINT)
        shown = process.stdout.read()
        assert process.wait(60) == 130
    assert "A partial result: stopped by Ctrl-C, with 1 of 4 attacks" in shown
    told = json.loads(Path("results/gradients.json").read_text())
    assert told["stopped"].startswith("Ctrl-C") and len(told["not_attacked"]) == 2
    assert [judged["status"] for judged in told["gate"]["defences"]] == [4, 4] and not told["gate"]["passed"]
    assert [pair["attack"] for pair in told["pairs"]] == ["patchembed", "matching"]
    assert "stopped after" in Path("results/gradients.html").read_text()


@pytest.mark.parametrize(("defence", "status"), [("none", 3), ("noise=1e3", 130)])
def test_ctrl_c_after_an_image_was_above_is_above(
    defence: str, status: int, own: str, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from situs.audit import Matching
    from situs.audit.attacks.base import Recovery

    def cut(*_: Any) -> Recovery:
        raise KeyboardInterrupt

    monkeypatch.setattr(Matching, "recover", cut)
    words = ["audit", "gradients", f"{own}:named", "--data", str(photographs), "--count", "2", "--no-pictures"]
    more = ["--attacks", "patchembed,matching", "--defences", defence, "--fail-above", "psnr=20", "--junit", "j.xml"]
    assert main([*words, *more]) == status
    told = json.loads(Path("results/gradients.json").read_text())
    assert told["stopped"].startswith("Ctrl-C") and not told["gate"]["passed"]
    assert told["gate"]["status"] == (3 if status == 3 else 4)
    [case] = ET.parse("j.xml").getroot().iter("testcase")
    assert [child.tag for child in case] == ["failure" if status == 3 else "error", "system-out"]


def test_a_locked_model_leaks_all_the_same(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock permutes what lies between the blocks; embedding and positions, which the attack reads, are clear."""
    pytest.importorskip("cryptography")
    export, key, locked = (str(tmp_path / name) for name in ("export", "owner.key", "locked"))
    assert main(["export", str(trained.one), "--out", export]) == 0
    assert main(["keygen", "--out", key]) == 0
    assert main(["lock", export, "--key", key, "--out", locked]) == 0
    words = ["audit", "gradients", locked, "--data", str(trained.data), "--count", "2", "--defences", "none"]
    capsys.readouterr()
    assert main([*words, "--attacks", "patchembed", "--out", str(tmp_path / "audit")]) == 0
    assert "2 of 2 images recovered exactly" in capsys.readouterr().out
    assert "locked with the key" in (tmp_path / "audit" / "gradients.html").read_text()
    assert main(["lock", export, "--key", key, "--out", f"{locked}-sealed", "--seal"]) == 0
    assert main(["audit", "gradients", f"{locked}-sealed", "--data", str(trained.data)]) == 2
    assert "is sealed" in capsys.readouterr().err
    assert main(["lock", export, "--key", key, "--out", f"{locked}-less", "--withhold", "embedding"]) == 0
    assert main(["audit", "gradients", f"{locked}-less", "--data", str(trained.data)]) == 2
    assert "lacks the parts that were withheld by the lock (embedding)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mjp_run(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    shape = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    config = from_dict(
        RunConfig,
        {
            "method": {"name": "mjp", "mask_ratio": 0.4},
            "backbone": {"name": "vit_tiny_patch16_224", "patch_size": 2, "model_args": shape},
            "data": {"path": str(trained.data), "img_size": 8, "batch": 12, "workers": 0},
            "optim": {"lr": 1e-2, "warmup_epochs": 0},
            "train": {"epochs": 2, "seed": 0, "precision": "fp32", "log_every": 2},
        },
    )
    out = tmp_path_factory.mktemp("mjp") / "run"
    train_run(config, out=out, device="cpu")
    return out


def test_a_run_of_mjp_is_audited_with_its_own_method(
    mjp_run: Path, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it trained (E_unk, DAL) makes the gradients, at its last epoch; no defence needs to be named for that."""
    import torch

    from situs.audit.client import hidden_places, victim_gradients
    from situs.audit.victim import open_victim

    victim = open_victim(str(mjp_run))
    method: Any = victim.trains
    assert victim.when.epoch == 1 and "method, mjp" in victim.notes["trained by"]
    x, y = torch.randn(1, 3, 8, 8), torch.tensor([1])
    sent = victim_gradients(method, x, y, step=Step(when=victim.when))
    mask = method.draw(Batch(torch.zeros(1), torch.tensor([0])), When(seed=0, epoch=1))["mask"][0]
    assert mask.any()
    assert torch.equal(hidden_places(sent["model.pos_embed"][0, 1:]), mask)
    assert float(sent["unknown"].abs().sum()) > 0
    words = ["audit", "gradients", str(mjp_run), "--data", str(trained.data), "--count", "2"]
    assert main([*words, "--attacks", "patchembed", "--defences", "none,mjp=0", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "none: at least" in shown  # MJP is at work although no defence is named
    assert "mjp γ=0: at least 2 of 2 images recovered exactly" in shown  # its own DAL, subtracted
    assert "method, mjp" in (tmp_path / "gradients.html").read_text()


def test_an_mp3_run_is_asked_about_the_order(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.audit.attacks import adaptive
    from situs.methods.mp3 import MP3

    asked, order = [], adaptive.order_hidden
    monkeypatch.setattr(
        adaptive, "order_hidden", lambda *args, predictor: asked.append(predictor) or order(*args, predictor=predictor)
    )
    words = ["audit", "gradients", str(trained.one), "--data", str(trained.data), "--count", "1"]
    words += ["--attacks", "adaptive-mjp", "--defences", "mjp=0.6", "--out", str(tmp_path / "audit")]
    assert main([*words, "--predictor", str(trained.mp3)]) == 0
    assert [type(each) for each in asked] == [MP3]
    assert not asked[0].training


@pytest.mark.parametrize(
    ("attack", "predictor", "said"),
    [
        ("patchembed", "mp3", "applies only to the attacks adaptive-mjp and tokens, which this audit does not run"),
        ("adaptive-mjp", "one", "must be an MP3 run (--predictor)"),
        (
            "adaptive-mjp",
            "mp3",
            "takes images of (8, 8) pixels in (2, 2) patches, but the model takes (64, 64) pixels in (4, 4) patches",
        ),
    ],
)
def test_a_predictor_that_cannot_be_asked_is_refused(
    trained: Any,
    photographs: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    attack: str,
    predictor: str,
    said: str,
) -> None:
    model = str(trained.one) if predictor == "one" else NAME
    size = [] if predictor == "one" else ["--img-size", "64"]
    words = ["audit", "gradients", model, "--data", str(photographs), *size, "--attacks", attack]
    words += ["--predictor", str(getattr(trained, predictor)), "--out", str(tmp_path / "audit")]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()


SCRIPT = r"""
audit() { "$PYTHON" -m situs audit gradients "$@" --data "$IMAGES" --fail-above psnr=20 --no-pictures --junit j.xml; }
audit test_vit --img-size 32 --attacks patchembed --defences clip=1:1e3 > passed.txt; echo "passed $?"
cp j.xml passed.xml
audit test_vit --img-size 32 --count 2 > above.txt; echo "above $?"; cp j.xml above.xml
audit OWN:named --attacks matching --iterations 1000000 --time-limit 1 --count 2 --defences noise=1e3 > stopped.txt
echo "stopped $?"; cp j.xml stopped.xml
audit OWN:plain --img-size 16 --count 2 --defences noise=1e3 > nothing.txt; echo "nothing applies $?"
cp j.xml nothing.xml
audit test_vit --img-size 64 --attacks magic --out none 2> wrong.txt; echo "wrong call $?"
"$PYTHON" -m situs audit gradients OWN:plain --img-size 16 --data "$IMAGES" --no-pictures --fail-above psnr=150 \
    --attacks matching --defences noise=1e3 --iterations 1000000 --junit j.xml > ctrl-c.txt 2> ctrl-c.err & pid=$!
until grep -q "matching: iteration" ctrl-c.err || ! kill -0 $pid; do sleep 0.2; done
kill -INT $pid; wait $pid; echo "Ctrl-C $?"; cp j.xml ctrl-c.xml
"""


@pytest.mark.slow
def test_the_gate_in_a_shell_script(own: str, five: Path) -> None:
    """Every exit status through the real command line, and each JUnit file read by the standard library's parser."""
    script = SCRIPT.replace("OWN", own)
    given = {**os.environ, "PYTHON": sys.executable, "IMAGES": str(five)}
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=False, env=given)
    assert done.stdout.splitlines() == [
        "passed 0",
        "above 3",
        "stopped 4",
        "nothing applies 4",
        "wrong call 2",
        "Ctrl-C 130",
    ], done.stderr
    found = {}
    for name in ("passed", "above", "stopped", "nothing", "ctrl-c"):
        root = ET.parse(f"{name}.xml").getroot()
        found[name] = [child.tag for case in root.iter("testcase") for child in case if child.tag != "system-out"]
    assert found == {
        "passed": [],
        "above": ["failure"],
        "stopped": ["error"],
        "nothing": ["error"],
        "ctrl-c": ["error"],
    }
    assert f"is passed, {SCOPE}. clip" in Path("passed.txt").read_text()
    assert "runs instead" in Path("nothing.txt").read_text()
    assert Path("wrong.txt").read_text().count("\n") == 1


# --- the settings of Table 5 ---------------------------------------------------------------------------------


def settings_words(photographs: Path, out: Path, *more: str) -> list[str]:
    return ["audit", "gradients", *SMALL, "--data", str(photographs), "--img-size", "64", "--out", str(out), *more]


def test_table_verdict_and_files(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One hidden patch of 16: nothing to search for, and nothing to order."""
    more = ("--settings", "a,c", "--defences", "mjp=0.1", "--count", "2", "--attacks", "patchembed")
    assert main(settings_words(photographs, tmp_path, *more)) == 0
    shown = capsys.readouterr().out
    assert "test_vit with MJP's step: MJP's privacy claim does not hold against" in shown
    assert "1 of 16 patches hidden (γ = 0.1)" in shown
    told = json.loads((tmp_path / "settings.json").read_text())
    rows = {(r["model"], r["setting"], r["attacker"]): r for r in told["rows"]}
    assert len(rows) == 2 * 2 * 2  # an informed attacker is always among them
    known = rows["test_vit with MJP's step", "c", "adaptive-mjp, informed"]
    static = rows["test_vit with MJP's step", "c", "patchembed, uninformed"]
    assert known["exact"] == 2 and static["exact"] == 0
    page = (tmp_path / "settings.html").read_text()
    assert "What the paper reports" in page
    assert page.index("This page shows private images") < page.index("Threat model") and "<img" in page
    assert (tmp_path / "settings.html").stat().st_mode & 0o777 == 0o600
    assert told["schema"] == "situs-audit-settings/2"
    for name in ("made", "command", "situs", "torch", "weights_sha256"):
        assert told[name] in page
    assert str(photographs.parent) not in page + json.dumps(told)


def test_an_unknown_setting_is_refused(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(settings_words(photographs, tmp_path, "--settings", "d", "--count", "1")) != 0
    assert "a, b, c" in capsys.readouterr().err


def test_no_pictures_where_none_are_wanted(photographs: Path, tmp_path: Path) -> None:
    more = ("--settings", "a", "--defences", "mjp=0.1", "--count", "1", "--attacks", "patchembed", "--no-pictures")
    assert main(settings_words(photographs, tmp_path, *more)) == 0
    page = (tmp_path / "settings.html").read_text()
    assert "<img" not in page and "private images" not in page
    told = json.loads((tmp_path / "settings.json").read_text())
    assert [row["images"][0]["reidentified"] for row in told["rows"]] == [None] * 4


def test_ctrl_c_before_the_first_remedy_keeps_the_audit(
    photographs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("situs.audit.sweep.weakest.open_audit", pressed)
    words = ["audit", "sweep", *SMALL, "--data", str(photographs), "--img-size", "32", "--out", str(tmp_path)]
    assert main([*words, "--count", "1", "--attacks", "patchembed", "--find", "psnr=20"]) == 130
    told = capsys.readouterr()
    assert "1 of 1 image recovered exactly" in told.out and str(tmp_path / "gradients.html") in told.out
    assert "before any defence was tried" in told.err
    assert "1 of 1 image was recovered" in (tmp_path / "gradients.html").read_text()


def test_remedies_are_searched_and_written_beside_their_page(photographs: Path, tmp_path: Path) -> None:
    out = tmp_path / "found"
    words = ["audit", "sweep", *SMALL, "--data", str(photographs), "--img-size", "32", "--out", str(out)]
    assert main([*words, "--count", "1", "--attacks", "april", "--find", "psnr=20"]) == 4  # it proves nothing
    told = json.loads((out / "defences.json").read_text())
    assert told["schema"] == "situs-audit-defences/1" and (told["searched"], told["held_out"]) == (1, 1)
    assert [each["named"] for each in told["defences"]] == [None] * 5
    assert all("not a pass" in each["said"] for each in told["defences"])
    page = (out / "defences.html").read_text()
    assert "No tested setting passes the gate psnr=20" in page and "to which no attack applies is inconclusive" in page
    today = (out / "gradients.html").read_text()  # the audit without a defence, and what was found in its box
    box = today[today.index("<h2>Defences that help</h2>") :].split("</section>")[0]
    assert box.count("? inconclusive") == 5 and "✓ within the limit" not in box and "defences.html" in box
    gate = json.loads((out / "gradients.json").read_text())["gate"]
    assert [each["defence"] for each in gate["defences"]] == ["none"] and not gate["passed"]
