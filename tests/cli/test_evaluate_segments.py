"""`situs finetune --preset ade20k-upernet` and `situs evaluate accuracy` on ADE20K's folders, and their faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from masked import write_ade
from PIL import Image

from situs.cli.main import main

QUICK = ["--device", "cpu", "--batch", "4", "--data.workers", "0", "--steps", "2", "--optim.warmup-steps", "0"]
SMALL = """
[backbone]
patch_size = 4
[method]
name = "segmentation"
width = 8
auxiliary_width = 8
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_ade(tmp_path / "ade", {"training": 4, "validation": 3})


def tune(data: Path, tmp_path: Path, *more: str, out: str = "ft") -> int:
    (tmp_path / "small.toml").write_text(SMALL)
    words = ["--preset", "ade20k-upernet", "--config", str(tmp_path / "small.toml"), "--data", str(data)]
    return main(["finetune", *words, "--data.img-size", "16", *QUICK, "--out", str(tmp_path / out), *more])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr().err
    assert said.startswith("situs: ") and said.count("\n") == 1
    return said.removeprefix("situs: ").rstrip("\n")


def test_a_run_is_fine_tuned_judged_exported_and_looked_at(
    trained: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(data, tmp_path, "--from", str(trained.mp3)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("ade (training): 4 images of 2 classes, streamed")
    assert "val miou" in lines[-2]
    assert lines[-1].startswith(f"next: situs evaluate accuracy {tmp_path / 'ft'}, or situs export")
    config = json.loads((tmp_path / "ft" / "config.json").read_text())
    assert config["data"]["masks"] == {"first": 1, "void": [0], "classes": ["ground", "disc"]}
    look = ["--device", "cpu", "--out", str(tmp_path / "look"), "--show", "2"]
    assert main(["evaluate", "accuracy", str(tmp_path / "ft"), *look]) == 0
    assert "% on 3 images of 2 classes" in capsys.readouterr().out
    held = json.loads((tmp_path / "look" / "segments.json").read_text())
    assert len(held["worst"]) == 2 and (tmp_path / "look" / "segments.html").is_file()
    assert main(["export", str(tmp_path / "ft"), "--out", str(tmp_path / "exported")]) == 0
    assert tune(data, tmp_path, "--from", str(tmp_path / "exported"), out="again") == 0
    again = ["evaluate", "accuracy", str(tmp_path / "exported"), "--data", str(data), "--mode", "whole", *look[:2]]
    assert main([*again, "--out", str(tmp_path / "other")]) == 0
    assert main(["evaluate", "consistency", str(tmp_path / "ft"), "--device", "cpu"]) == 2
    assert "classifies pixels, not whole images" in capsys.readouterr().err
    probe = ["--kind", "segments", "--classes", "far,near"]
    assert main(["evaluate", "probe", str(trained.one), "--data", str(data), *probe, *look[:4]]) == 0
    assert (tmp_path / "look" / "probe-segments.html").is_file()
    [found] = json.loads((tmp_path / "look" / "probe-segments.json").read_text())["models"].values()
    assert [row["class"] for row in found["classes"]] == ["far", "near"]


def spoil(data: Path, fault: str) -> None:
    for file in sorted((data / "annotations" / "training").iterdir()):
        if fault == "missing":
            file.unlink()
        else:
            with Image.open(file) as mask:
                array = np.array(mask)
            made = {"size": array[:9], "range": array + 7, "empty": array * 0}[fault]
            Image.fromarray(made.astype(np.uint8)).save(file)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "has no mask of the same name in"),
        ("size", "and its mask 9 × "),
        ("range", "its mask contains the class number"),
        ("empty", "no pixel of its mask has a class"),
    ],
)
def test_a_fault_is_one_sentence(
    trained: Any, data: Path, tmp_path: Path, fault: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(data, fault)
    assert tune(data, tmp_path, "--from", str(trained.mp3), "--data.strict") == 2
    assert said in refused(capsys)
    assert not (tmp_path / "ft").exists()


def test_one_fault_is_skipped_and_nothing_but_faults_is_refused(
    trained: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, *others = sorted((data / "annotations" / "training").iterdir())
    first.unlink()
    assert tune(data, tmp_path, "--from", str(trained.mp3)) == 0
    told = capsys.readouterr().out
    assert (
        "1 of 4 images of ade (training) could not be read and was replaced by the next readable one; the first: "
        in told
    )
    assert f"{first.name}: has no mask of the same name in" in told
    for file in others:
        file.unlink()
    assert tune(data, tmp_path, "--from", str(trained.mp3), out="none") == 2
    assert "none of its 4 images can be read; " in refused(capsys)


def test_methods_and_targets_that_do_not_fit_are_one_sentence(
    trained: Any, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tune(trained.data, tmp_path, "--from", str(trained.mp3)) == 2
    assert "must contain a folder of images" in refused(capsys)
    words = ["--from", str(trained.mp3), "--data", str(data), "--data.target", "mask", *QUICK]
    assert main(["finetune", *words, "--out", str(tmp_path / "x")]) == 2
    assert refused(capsys).startswith(
        "supervised learns a class of each sample, but the target of the data is masks (--data.target"
    )
