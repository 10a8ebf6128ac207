"""`situs audit gradients`: table, files, gate, and what it says of a model that no attack fits."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from situs.cli.main import main

NAME = "test_vit"  # timm's own tiny model for tests: 160 pixels in patches of 16, 64 channels


def test_table_page_and_file(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    words = ["audit", "gradients", NAME, "--images", str(photographs), "--img-size", "64", "--out", str(out)]
    assert main([*words, "--count", "2"]) == 0
    shown = capsys.readouterr().out
    assert "none: 2 of 2 images recovered exactly from one step" in shown and "(best attack patchembed" in shown
    assert "model.pos_embed is not sent" in shown
    told = json.loads((out / "gradients.json").read_text())
    assert {(p["attack"], p["applies"]) for p in told["pairs"]} >= {("patchembed", True), ("patchembed", False)}
    assert len(told["pairs"]) == 8
    assert len(told["pairs"][0]["images"]) == 2
    page = (out / "report.html").read_text()
    assert page.index("Threat model") < page.index("Verdict") < page.index("What would reduce the leak")
    assert str(photographs.parent) not in page + json.dumps(told)


def test_the_gate_in_a_shell_script(photographs: Path, tmp_path: Path) -> None:
    verb = f"{sys.executable} -m situs audit gradients {NAME} --images {photographs} --img-size 64 --count 1"
    script = f"{verb} --attack patchembed --defence $1 --fail-above psnr=20 --out {tmp_path}/audit"
    for defence, status in (("none", 3), ("no-pe-gradient", 0)):
        command = ["sh", "-c", script, "sh", defence]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr
    assert (tmp_path / "audit" / "report.html").is_file()


@pytest.mark.parametrize(
    ("model", "reason"), [("resnet18", "convolutional"), ("vit_relpos_small_patch16_224", "bias between pairs")]
)
def test_a_model_without_an_attack(
    model: str, reason: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["audit", "gradients", model, "--images", str(photographs), "--count", "1", "--out", str(tmp_path)]
    assert main([*words, "--fail-above", "psnr=20"]) == 0
    shown = capsys.readouterr().out
    assert reason in shown
    assert "No attack of this audit applies" in shown
    assert "The gate psnr=20 is passed only because no attack applies" in shown
    assert reason in (tmp_path / "report.html").read_text()
    assert [p["applies"] for p in json.loads((tmp_path / "gradients.json").read_text())["pairs"]] == [False] * 8


def test_a_run_and_its_labels(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", str(trained.one), "--images", str(trained.data), "--count", "3"]
    assert main([*words, "--attack", "patchembed", "--defence", "none", "--out", str(tmp_path)]) == 0
    assert "3 of 3 images recovered exactly" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--attack", "magic"], "matching, patchembed"),
        (["--defence", "fog"], "no-pe-gradient"),
        (["--attack", ","], "attack=',': must name at least one (--attack)"),
        (["--defence", ""], "(--defence)"),
        (["--fail-above", "beauty=3"], "psnr"),
        (["--fail-above", "lpips=0.1"], "falls as an image leaks"),
        (["--count", "0"], "--count"),
        (["--images", "absent"], "absent: no such folder or file (--images)"),
        (["--setting", "a", "--fail-above", "psnr=20"], "(--fail-above, --setting)"),
        (["--setting", "a", "--batch", "2"], "(--batch, --setting)"),
        (["--lpips", "absent.safetensors"], "no such file"),
    ],
)
def test_mistakes(
    words: list[str], said: str, photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "audit"
    assert main(["audit", "gradients", NAME, "--images", str(photographs), "--out", str(out), *words]) == 2
    told = capsys.readouterr()
    assert said in told.err and not told.out  # refused before anything is attacked
    assert not out.exists()


def test_broken_images_are_said(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "broken.png").write_text("no picture")
    words = ["audit", "gradients", NAME, "--images", str(folder), "--img-size", "64", "--out", str(tmp_path / "audit")]
    assert main(words) == 2
    assert "holds no image that can be read: 1 of 1 images" in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()
    (folder / "whole.png").write_bytes((photographs / "0.png").read_bytes())
    assert main([*words, "--attack", "patchembed", "--defence", "none"]) == 0
    shown = capsys.readouterr()
    assert "1 of 2 images of images could not be read and were skipped" in shown.err
    assert "1 of 1 images recovered exactly" in shown.out


def test_a_file_is_no_folder(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "audit").write_text("mine")
    assert main(["audit", "gradients", NAME, "--images", str(photographs), "--out", str(tmp_path / "audit")]) == 2
    assert "must be a folder (--out)" in capsys.readouterr().err
    assert (tmp_path / "audit").read_text() == "mine"


def test_a_wrong_lpips_file(photographs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    save_file({"lin0.weight": torch.ones(1)}, tmp_path / "w.safetensors")
    words = ["audit", "gradients", NAME, "--images", str(photographs), "--lpips", str(tmp_path / "w.safetensors")]
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
    words = ["audit", "gradients", f"{own}:named", "--images", str(photographs), "--count", "2"]
    assert main([*words, "--defence", "none,mjp", "--attack", "patchembed"]) == 0
    shown = capsys.readouterr().out
    assert "none: 2 of 2 images recovered exactly" in shown
    assert "runs only as a whole" in shown
    told = json.loads(Path("audit/gradients.json").read_text())
    assert told["model"] == f"{own}:named" and told["weights"] == "its own"


def test_a_bare_module_is_matched(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:bare", "--images", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attack", "patchembed,matching", "--defence", "none", "--iterations", "2", "--img-size", "16"]
    assert main([*words, *settings]) == 0
    shown = capsys.readouterr()
    assert "matching: iteration 2 of 2" in shown.err
    first, second = json.loads(Path("audit/gradients.json").read_text())["pairs"]
    assert not first["images"][0]["fits"] and second["images"][0]["labels_right"] == 2
    assert "2 of 2 labels inferred rightly" in Path("audit/report.html").read_text()


@pytest.mark.parametrize(
    ("which", "words", "said"),
    [
        ("{own}:bare", [], "--img-size"),
        ("{own}:number", [], "gives int"),
        ("{own}:absent", [], "package.module:function"),
        ("no_such_package.module:make", [], "package.module:function"),
        ("{own}:named", ["--weights", "x.safetensors"], "--weights"),
        ("{own}:named", ["--img-size", "32"], "--img-size"),
        ("{own}:named", ["--count", "3", "--batch", "2"], "--batch"),
        ("{own}:named", ["--time-limit", "0"], "--time-limit"),
        ("{own}:named", ["--iterations", "0"], "--iterations"),
    ],
)
def test_mistakes_with_an_own_module(
    which: str, words: list[str], said: str, own: str, photographs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", "gradients", which.format(own=own), "--images", str(photographs), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_time_limit_leaves_a_whole_report(own: str, photographs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["audit", "gradients", f"{own}:named", "--images", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attack", "matching", "--defence", "none", "--iterations", "1000000", "--time-limit", "2"]
    assert main([*words, *settings, "--labels", "known"]) == 0
    assert "A partial result: stopped by the time limit of 2 s" in capsys.readouterr().out
    told = json.loads(Path("audit/gradients.json").read_text())
    assert told["partial"] and told["labels"] == "known"
    assert len(told["pairs"][0]["images"]) == 2
    assert "labels_right" not in told["pairs"][0]["images"][0]
    assert "of 1,000,000 iterations" in Path("audit/report.html").read_text()


def test_ctrl_c_leaves_a_whole_report(own: str, photographs: Path) -> None:
    """A real signal to a real process, once its search has begun."""
    words = ["audit", "gradients", f"{own}:named", "--images", str(photographs), "--count", "2", "--batch", "2"]
    settings = ["--attack", "patchembed,matching", "--defence", "none,noise", "--iterations", "10000"]
    command = [sys.executable, "-m", "situs", *words, *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None and process.stdout is not None
        while "matching: iteration" not in (line := process.stderr.readline()):
            assert line, "it ended before it began"
        process.send_signal(signal.SIGINT)
        shown = process.stdout.read()
        assert process.wait(60) == 130
    assert "A partial result: stopped by Ctrl-C, with 1 of 4 pairs" in shown
    told = json.loads(Path("audit/gradients.json").read_text())
    assert told["stopped"].startswith("Ctrl-C") and len(told["not_attacked"]) == 2
    assert [pair["attack"] for pair in told["pairs"]] == ["patchembed", "matching"]
    assert "stopped after" in Path("audit/report.html").read_text()


def test_a_locked_model_leaks_all_the_same(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lock permutes what lies between the blocks; embedding and positions, which the attack reads, are clear."""
    pytest.importorskip("cryptography")
    export, key, locked = (str(tmp_path / name) for name in ("export", "owner.key", "locked"))
    assert main(["export", str(trained.one), "--to", export]) == 0
    assert main(["key", "new", "--out", key]) == 0
    assert main(["lock", export, "--key", key, "--out", locked]) == 0
    words = ["audit", "gradients", locked, "--images", str(trained.data), "--count", "2", "--defence", "none"]
    capsys.readouterr()
    assert main([*words, "--attack", "patchembed", "--out", str(tmp_path / "audit")]) == 0
    assert "2 of 2 images recovered exactly" in capsys.readouterr().out
    assert "locked with the key" in (tmp_path / "audit" / "report.html").read_text()
    assert main(["lock", export, "--key", key, "--out", f"{locked}-sealed", "--seal"]) == 0
    assert main(["audit", "gradients", f"{locked}-sealed", "--images", str(trained.data)]) == 2
    assert "is sealed" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mjp_run(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    shape = {"depth": 2, "embed_dim": 32, "num_heads": 2}
    config = from_dict(
        RunConfig,
        {
            # Patches are shuffled from the second epoch on: at epoch 0 nothing is masked.
            "method": {"name": "mjp", "mask_ratio": 0.4, "start_epoch": 1, "unknown_std": 0.7},
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

    from situs.audit.threat import hidden_places, victim_gradients
    from situs.audit.victim import open_victim

    victim = open_victim(str(mjp_run))
    method: Any = victim.trains
    assert victim.epoch == 1 and "own method, mjp" in victim.notes["trained by"]
    assert method.unknown.std() > 0.3
    x, y = torch.randn(1, 3, 8, 8), torch.tensor([1])
    sent = victim_gradients(method, x, y, epoch=victim.epoch)
    mask = method.draw(torch.tensor([0]), seed=0, epoch=1)["mask"][0]
    assert mask.any()
    assert torch.equal(hidden_places(sent["model.pos_embed"][0, 1:]), mask)
    assert float(sent["unknown"].abs().sum()) > 0
    words = ["audit", "gradients", str(mjp_run), "--images", str(trained.data), "--count", "2"]
    assert main([*words, "--attack", "patchembed", "--defence", "none,mjp=0", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "none: at least" in shown  # MJP is at work although no defence is named
    assert "mjp γ=0: at least 2 of 2 images recovered exactly" in shown  # its own DAL, subtracted
    assert "own method, mjp" in (tmp_path / "report.html").read_text()


def test_an_mp3_run_is_asked_about_the_order(trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from situs.audit import adaptive
    from situs.methods.mp3 import MP3

    asked, order = [], adaptive.order_hidden
    monkeypatch.setattr(
        adaptive, "order_hidden", lambda *args, predictor: asked.append(predictor) or order(*args, predictor=predictor)
    )
    words = ["audit", "gradients", str(trained.one), "--images", str(trained.data), "--count", "1"]
    words += ["--attack", "adaptive-mjp", "--defence", "mjp=0.6", "--out", str(tmp_path / "audit")]
    assert main([*words, "--predictor", str(trained.mp3)]) == 0
    assert [type(each) for each in asked] == [MP3]
    assert not asked[0].training


@pytest.mark.parametrize(
    ("attack", "predictor", "said"),
    [
        ("patchembed", "mp3", "only adaptive-mjp asks it"),
        ("adaptive-mjp", "one", "must be a run of MP3, and is none (--predictor)"),
        ("adaptive-mjp", "mp3", "sees images of (8, 8) pixels in (2, 2) patches, and the model (64, 64) in (4, 4)"),
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
    words = ["audit", "gradients", model, "--images", str(photographs), *size, "--attack", attack]
    words += ["--predictor", str(getattr(trained, predictor)), "--out", str(tmp_path / "audit")]
    assert main(words) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()
