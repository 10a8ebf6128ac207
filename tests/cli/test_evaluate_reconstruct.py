"""`situs evaluate reconstruct` on tiny runs of MP3 and DropPos, and on what has no position head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from situs.cli.main import main


def test_mp3_run(outline: Any, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--show", "2", "--pairs", "1", "--ratios", "0,0.5", "--out", str(tmp_path)]
    assert main(["evaluate", "reconstruct", str(trained.mp3), *words]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("mp3: puzzles of ")
    assert printed[-1] == str(tmp_path / "reconstruct.html")
    assert " of the tested patches of 15 images" in printed[-2]
    numbers = json.loads((tmp_path / "reconstruct.json").read_text())
    assert [(each["ratio"], each["images"]) for each in numbers["settings"]] == [(0.0, 15), (0.5, 15)]
    assert all(f"{100 * each['right']:.1f} %" in "\n".join(printed) for each in numbers["settings"])
    assert len(numbers["mixes"]) == 1
    assert outline((tmp_path / "reconstruct.html").read_text()) == [
        "First screen, 1 figure",
        "How many positions are predicted correctly, 2 rows",
        "One image, 1 text",
        "More images, 1 figure",
        "Two images in one, 1 text, 1 figure",
        "How this page was made, facts",
    ]
    pictures = {path.name for path in tmp_path.glob("*.png")}
    assert pictures == {"reconstruct-one.png", "reconstruct-placed.png", "reconstruct-mix-1.png"}


def test_droppos_run(trained, tmp_path: Path) -> None:
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    config = from_dict(
        RunConfig,
        {
            "method": {"name": "droppos", "mask_ratio": 0.5, "decoder_width": 16, "decoder_heads": 2},
            "backbone": {
                "name": "vit_tiny_patch16_224", "patch_size": 4, "positions": "sincos", "model_args": shape,
            },
            "data": {"path": str(trained.data), "img_size": 8, "batch": 12, "workers": 0},
            "train": {"epochs": 1, "precision": "fp32"},
        },
    )  # fmt: skip
    train_run(config, out=tmp_path / "run", device="cpu")
    words = ["--ratios", "0", "--position-ratios", "0.5", "--show", "2", "--out", str(tmp_path / "look")]
    assert main(["evaluate", "reconstruct", str(tmp_path / "run"), *words]) == 0
    numbers = json.loads((tmp_path / "look" / "reconstruct.json").read_text())
    assert [(each["ratio"], each["position_ratio"]) for each in numbers["settings"]] == [(0.0, 0.5)]
    assert "red edge" in (tmp_path / "look" / "reconstruct.html").read_text()
    assert "(val)" in (tmp_path / "look/reconstruct.html").read_text().partition("How this page was made")[2]


@pytest.mark.thin(2)
@pytest.mark.parametrize(("method", "channels"), [("mp3", 4), ("droppos", 6)])
def test_images_of_other_channels(method: str, channels: int, tmp_path: Path) -> None:
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    for split, count in (("train", 4), ("val", 3)):
        for number in range(count):
            (tmp_path / "data" / split).mkdir(parents=True, exist_ok=True)
            image = np.random.default_rng(number).random((channels, 8, 8), dtype=np.float32)
            np.save(tmp_path / "data" / split / f"{number}.npy", image)
    extra = {"decoder_width": 16, "decoder_heads": 2} if method == "droppos" else {}
    config = from_dict(
        RunConfig,
        {
            "method": {"name": method, "mask_ratio": 0.5, **extra},
            "backbone": {
                "name": "vit_tiny_patch16_224", "patch_size": 4, "positions": "sincos",
                "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
            },
            "data": {
                "path": str(tmp_path / "data"), "img_size": 8, "channels": channels, "batch": 4, "workers": 0,
            },
            "train": {"epochs": 1, "precision": "fp32"},
        },
    )  # fmt: skip
    train_run(config, out=tmp_path / "run", device="cpu")
    look = [str(tmp_path / "run"), "--out", str(tmp_path / "look"), "--device", "cpu"]
    assert main(["evaluate", "reconstruct", *look, "--show", "2", "--pairs", "1", "--ratios", "0.5"]) == 0
    assert f"The images have {channels} channels and are drawn" in (tmp_path / "look/reconstruct.html").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{one}"], "one: was trained by Supervised, which has no position head"),
        (["test_vit", "--weights", "random"], "is not a run, and only a run has a position head"),
        (
            ["{mp3}", "--position-ratios", "0.5"],
            "MP3 hides every position, so position_ratios does not apply (--position-ratios)",
        ),
        (["{mp3}", "--ratios", "1.5"], "ratios=1.5: must be in [0, 1) (--ratios)"),
        (["{mp3}", "--show", "0"], "show=0: must be >= 1 (--show)"),
        (["{mp3}", "--split", "odd"], "split='odd'"),
    ],
)
def test_what_has_no_puzzles_is_one_sentence(
    words: list[str], said: str, trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    filled = [word.format(one=trained.one, mp3=trained.mp3) for word in words]
    assert main(["evaluate", "reconstruct", *filled, "--out", str(tmp_path / "x")]) == 2
    complaint = capsys.readouterr().err
    assert complaint.count("\n") == 1
    assert said in complaint
    assert not (tmp_path / "x").exists()
