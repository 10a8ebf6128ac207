"""A folder a class and no splits, as a new user has it, through every verb by the defaults: what is held out of the
training with labels is what every judgement is of."""

from __future__ import annotations

import csv
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from memory_kinds import KINDS, SIDE, pictures, write_folder
from PIL import Image

import situs
from situs.cli.main import main
from situs.data.open import open_source
from situs.data.sources.images import decode
from situs.errors import SitusError
from situs.measure import evaluate_knn, evaluate_probe
from situs.models.data import load_any

TINY = """
[backbone]
name = "vit_tiny_patch16_224"
patch_size = 8
model_args = {depth = 1, embed_dim = 16, num_heads = 2}

[data]
img_size = 16
batch = 8
workers = 0

[optim]
warmup_epochs = 0
lr = 1e-3

[train]
precision = "fp32"
"""
COUNT = 36
SHAPE = {"name": "vit_tiny_patch16_224", "patch_size": 8, "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2}}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """36 pictures of three classes, and one of a fourth."""
    root = write_folder(tmp_path_factory.mktemp("folders") / "my photos", *pictures(COUNT))
    (root / "one fox").mkdir()
    Image.fromarray(np.full((SIDE, SIDE, 3), 7, np.uint8)).save(root / "one fox" / "a.png")
    return root


def names(source: Any) -> set[str]:
    return {source.key(index) for index in range(len(source))}


def sides(path: Any) -> tuple[set[str], set[str]]:
    """What is trained on, and what is held out of it by itself."""
    train, val = (names(open_source(path, split, held_out=0.2)) for split in ("train", "val"))
    assert train.isdisjoint(val)
    return train, val


def held_out_of(run: Path | str) -> float:
    return json.loads((Path(run) / "config.json").read_text())["data"]["held_out"]


@pytest.mark.usefixtures("undrawn")
def test_the_command_line_goes_from_a_folder_to_predictions(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    train, val = sides(photos)

    def told(*words: str) -> tuple[str, str]:
        capsys.readouterr()
        assert main([*words, "--device", "cpu"] if words[0] != "export" else list(words)) == 0
        said = capsys.readouterr()
        return said.out, said.err

    out, _ = told("pretrain", "--data", str(photos), "--config", "tiny.toml", "--steps", "2", "--out", "mp3")
    assert "my photos: 37 images of" in out and "held" not in out  # no label is learned, and all of them are taken
    assert held_out_of("mp3") == 0
    out, _ = told("finetune", "--from", "mp3", "--steps", "2", "--out", "ft")
    line = f"my photos: has no split for evaluation, so {len(val)} of its 37 images are held out and never"
    assert f"{line} trained on (data.held_out sets the fraction; 0 trains on all)" in out
    assert "1 of its 4 classes has only one image ('one fox'); the only sample of a class stays in training" in out
    assert "val top1" in out and held_out_of("ft") == 0.2
    for judged in ("accuracy", "knn", "probe"):
        more = {"knn": ["--k", "2"], "probe": ["--kind", "class"]}.get(judged, [])
        for model in ("ft", "mp3") if judged != "accuracy" else ("ft",):
            _, err = told("evaluate", judged, model, "--out", f"look/{model}", *more)
            fifth = "so a fraction of 0.2 of the samples is held out, chosen by their names; held_out sets the fraction"
            assert (fifth in err) == (model == "mp3")  # the tuned run has its own part
    accuracy = json.loads(next(Path("look/ft").glob("*accuracy.json")).read_text())
    assert accuracy["count"] == len(val) and accuracy["data"] == "my photos, held-out fraction 0.2"
    told("export", "ft", "--out", "exported")
    _, err = told("evaluate", "accuracy", "exported", "--data", str(photos), "--out", "look/export")
    again = json.loads(next(Path("look/export").glob("*accuracy.json")).read_text())
    assert (again["count"], again["top1"]) == (accuracy["count"], accuracy["top1"])
    assert f"so {len(val)} of its 37 images were used (the fraction that exported holds out)" in err
    told("predict", "exported", "--data", str(photos), "--out", "all.csv")
    told("predict", "ft", "--split", "val", "--out", "val.csv")
    for name, wanted in (("all.csv", train | val), ("val.csv", val)):
        assert {row["path"] for row in csv.DictReader(Path(name).read_text().splitlines())} == wanted


def test_python_does_the_same_with_a_folder_and_with_what_is_in_memory(photos: Path, tmp_path: Path) -> None:
    quick: dict[str, Any] = {"steps": 2, "batch": 8, "device": "cpu", "quiet": True}
    memory = KINDS["torch dataset"](*pictures(COUNT))
    for number, data in enumerate((photos, memory)):
        run = situs.pretrain({"path": data, "img_size": 16}, backbone=SHAPE, out=tmp_path / f"{number}", **quick)
        tuned = situs.finetune(run, data=data, out=tmp_path / f"{number}t", **quick)
        near = [evaluate_knn(model, data, k=2) for model in (tuned, run)]
        evaluate_probe(run, data, kind="class")
        train, val = (names(load_any(situs.open_model(tuned), data, split=split).source) for split in ("train", "val"))
        assert train.isdisjoint(val) and len(train | val) == COUNT + (number == 0)
        judged: Any = situs.evaluate_accuracy(tuned, data)
        counts = [judged.accuracy.count, *(each.count for each in near)]
        assert counts == [len(val)] * 3
        exported = situs.export(tuned, tmp_path / f"{number}e")
        assert len(situs.predict(exported, data).rows) == COUNT + (number == 0)


def test_the_tutorial_runs_on_a_folder_without_splits(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = Path(__file__).parents[1] / "examples" / "pretrain_on_my_images.py"
    words = ["--data", str(photos), "--steps", "1", "--labels", "20", "--out", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert f"of {len(sides(photos)[1])} test images, with 20 labels" in said
    assert held_out_of(tmp_path / "runs" / "tuned") == held_out_of(tmp_path / "runs" / "scratch") == 0.2


def test_who_wants_all_images_gets_them_and_what_was_learned_whole_is_not_judged_as_new(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(TINY)
    quick = ["--steps", "1", "--device", "cpu"]
    base = ["--data", str(photos), "--config", "tiny.toml", *quick]
    for out, flag in (("zero", ["--data.held-out", "0"]), ("tenth", ["--data.held-out", "0.1"])):
        assert main(["pretrain", "--method", "supervised", *base, *flag, "--out", out]) == 0
    said = capsys.readouterr().out
    assert "my photos: 37 images" in said and "never trained on" not in said
    assert (held_out_of("zero"), held_out_of("tenth")) == (0, 0.1)
    # Its labels were all learned: a fifth of the same folder would flatter what goes on from there.
    assert main(["finetune", "--from", "zero", *quick, "--out", "on"]) == 0
    said = capsys.readouterr().out
    assert held_out_of("on") == 0 and "val top1" not in said
    assert main(["finetune", "--from", "tenth", *quick, "--out", "after"]) == 0
    assert held_out_of("after") == 0.1
    assert main(["finetune", "--from", "tenth", "--validate-every", "0", *quick, "--out", "silent"]) == 0
    assert held_out_of("silent") == 0.1
    assert main(["finetune", "--from", "tenth", "--data", str(photos.parent), *quick, "--out", "above"]) == 2
    assert "has only one class, 'my photos', so there is nothing to classify" in capsys.readouterr().err
    assert not Path("above").exists()
    assert main(["evaluate", "knn", "zero", "--k", "1", "--device", "cpu"]) == 0
    assert "is held out, chosen by their names; the training has already seen the labels" in capsys.readouterr().err


def test_classes_of_one_image_each_cannot_be_judged_and_that_is_said(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.full((SIDE, SIDE, 3), 7, np.uint8)).save(tmp_path / name / "x.png")
    said = "each class has only one image, so no image can be held out; held_out=0 trains on all images"
    with pytest.raises(SitusError, match=said):
        open_source(tmp_path, "val", held_out=0.2)


@pytest.mark.parametrize(
    "how", [{"resident": "always"}, {"resident": "never", "workers": 0}, {"resident": "never", "workers": 2}], ids=str
)
def test_transparent_images_are_said_to_be_laid_over_white_once(
    how: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_folder(tmp_path / "photos", *pictures(24))
    for name in ("cat", "dog"):
        Image.new("RGBA", (SIDE, SIDE), (9, 9, 9, 99)).save(root / name / "cut out.png")
    data = {"path": root, "img_size": SIDE, **how}
    decode((root / "cat" / "cut out.png").read_bytes(), "of nobody", 3)  # what was met before does not count
    run = situs.pretrain(data, backbone=SHAPE, epochs=2, batch=8, device="cpu", out=tmp_path / "run")
    line = "some images are transparent and get a white background"
    said = capsys.readouterr()
    assert (said.out + said.err).count(line) == 1
    assert any(line in each for each in evaluate_knn(run, held_out=0.3).provenance.left_out)
    opaque = write_folder(tmp_path / "opaque", *pictures(24))
    Image.new("RGBA", (SIDE, SIDE), (9, 9, 9, 255)).save(opaque / "cat" / "whole.png")
    decode((root / "cat" / "cut out.png").read_bytes(), "of nobody", 3)
    assert not any(line in each for each in evaluate_knn(run, opaque).provenance.left_out)
