"""`situs predict` and `situs.predict`: every sample has its row, by a slow forward of each alone."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_vit

import situs
from situs.cli.main import main
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.measure.predict import Prediction, Predictions
from situs.models import Model
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run

HEADER = ["path", "class", "probability"]


def read(path: Path) -> list[list[str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def slow(run: Path) -> list[tuple[str, float]]:
    """Class and probability of each image of the val split, one forward each."""
    loaded, rows = load_run(run), []
    for batch in make_eval_loader(loaded.config, batch=1):
        with torch.no_grad():
            shares = loaded.method.backbone(batch.inputs).double().softmax(-1)[0]
        assert loaded.classes is not None
        rows.append((loaded.classes[int(shares.argmax())], float(shares.max())))
    return rows


def test_every_image_has_its_class_and_probability(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "predictions.csv"
    assert main(["predict", str(trained.one), "--split", "val", "--batch", "4", "--out", str(out)]) == 0
    assert f"{out}: 15 rows with a class (" in capsys.readouterr().out
    header, *rows = read(out)
    assert header == HEADER
    assert [row[0] for row in rows] == [f"{name}/{n}.png" for name in ("dark", "light", "middle") for n in range(5)]
    for row, (name, share) in zip(rows, slow(trained.one), strict=True):
        assert row[1] == name
        assert float(row[2]) == pytest.approx(share, abs=2e-6)
    assert not [path for path in out.parent.iterdir() if path != out]  # nothing half-written stays

    whole = tmp_path / "all.csv"
    assert main(["predict", str(trained.one), "--out", str(whole)]) == 0
    every = read(whole)[1:]
    assert len(every) == 24 + 15 and every[0][0] == "train/dark/0.png"
    assert [[row[0].removeprefix("val/"), *row[1:]] for row in every[24:]] == rows


def test_broken_files_have_a_row_and_are_counted(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat = tmp_path / "unsorted"  # no labels, no splits
    flat.mkdir()
    for number, file in enumerate(sorted((trained.data / "val").rglob("*.png"))):
        shutil.copy(file, flat / f"{number:02}.png")
    for number in (3, 11):
        (flat / f"{number:02}.png").write_bytes(b"no image")
    (flat / "notes.txt").write_text("no image either")
    out = tmp_path / "x.csv"
    assert main(["predict", str(trained.one), "--data", str(flat), "--out", str(out), "--json"]) == 0
    printed = capsys.readouterr()
    told = json.loads(printed.out)
    assert (told["rows"], told["broken"]) == (15, ["03.png", "11.png"])
    assert "2 of 15 images of unsorted could not be read and were skipped" in printed.err
    rows = read(out)[1:]
    assert [row[0] for row in rows if not row[1]] == ["03.png", "11.png"]
    assert all((row[1] == "") == (row[2] == "") for row in rows)
    expected = [name for number, (name, _) in enumerate(slow(trained.one)) if number not in (3, 11)]
    assert [row[1] for row in rows if row[1]] == expected

    for file in flat.glob("*.png"):
        file.write_bytes(b"no image")
    before = out.read_bytes()
    assert main(["predict", str(trained.one), "--data", str(flat), "--out", str(out)]) == 2
    assert out.read_bytes() == before  # nothing to tell is no table
    capsys.readouterr()
    found = situs.predict(trained.one, trained.data, split="val")
    assert [(row.name, row.path) for row in found.rows[:1]] == [(slow(trained.one)[0][0], "dark/0.png")]
    assert (found.broken, found.classes, sum(found.counts.values())) == ([], ("dark", "light", "middle"), 15)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["MP3", "--out", "x.csv"], "has no trained classifier; fine-tune it first"),
        (["ONE", "--out", "x.txt"], "must be a file ending in .csv"),
        (["ONE", "--data", "nowhere", "--out", "x.csv"], "nowhere: no such folder or file"),
        (["ONE", "--split", "other", "--out", "x.csv"], "split='other'"),
        (["ONE", "--text.column", "words", "--out", "x.csv"], "applies only to models of sentences"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: list[str], sentence: str, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    named = [{"MP3": str(trained.mp3), "ONE": str(trained.one)}.get(word, word) for word in words]
    assert main(["predict", *named]) == 2
    assert sentence in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_features_of_all_splits(trained: Any, tmp_path: Path) -> None:
    parts = {split: situs.measure.extract_features(trained.one, split=split) for split in ("train", "val", "all")}
    joined = torch.cat([parts["train"].features, parts["val"].features])
    torch.testing.assert_close(parts["all"].features, joined)
    assert parts["all"].labels.tolist() == [*parts["train"].labels.tolist(), *parts["val"].labels.tolist()]
    assert parts["all"].names[0] == "train/dark/0.png" and parts["all"].names[24] == "val/dark/0.png"
    assert main(["evaluate", "knn", str(trained.one), "--split", "all", "--out", str(tmp_path)]) == 2


def counted(monkeypatch: pytest.MonkeyPatch, names: list[str | None], classes: int = 9) -> None:
    """Predictions of these classes, whatever the model."""
    rows = tuple(Prediction(f"{n}.png", name, None if name is None else 0.5) for n, name in enumerate(names))
    found = Predictions(rows, tuple(f"c{n}" for n in range(classes)))
    monkeypatch.setattr(sys.modules["situs.measure.predict"], "predict", lambda *_, **__: found)
    monkeypatch.setattr("situs.cli.evaluate.open_from", lambda *_, **__: None)


@pytest.mark.parametrize(
    ("names", "classes", "lines"),
    [
        (["a", "b", "a"], 9, ["3 rows with a class (a 2, b 1)"]),
        ([*"aabcde"], 9, ["6 rows with a class (a 2, b 1, c 1, d 1, e 1)"]),
        ([*"aabcdef"], 9, ["7 rows with a class (a 2, b 1, c 1, d 1, e 1, and 1 more class)"]),
        ([*"aabcdefg"], 9, ["8 rows with a class (a 2, b 1, c 1, d 1, e 1, and 2 more classes)"]),
        (["a", "a"], 9, ["2 rows with a class (a 2)", "every row has the same class, a"]),
        (["a", "a"], 1, ["2 rows with a class (a 2)"]),  # there is no other
        (["a"], 9, ["1 row with a class (a 1)"]),
        (["a", None, "b"], 9, ["2 rows with a class (a 1, b 1)", "1 row has no class, 1.png"]),
        (["a", *[None] * 3, "b"], 9, ["2 rows with a class (a 1, b 1)", "3 rows have no class, 1.png, 2.png, 3.png"]),
        (
            ["a", *[None] * 4, "b"],
            9,
            ["2 rows with a class (a 1, b 1)", "4 rows have no class, 1.png, 2.png, 3.png, …"],
        ),
    ],
)
def test_the_classes_are_counted_and_five_named(
    names: list[str | None], classes: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    counted(monkeypatch, names, classes)
    out = tmp_path / "p.csv"
    assert main(["predict", "m", "--out", str(out)]) == 0
    shown = capsys.readouterr().out.replace("because these files could not be read: ", "")
    assert shown.splitlines() == [f"{out}: {lines[0]}", *lines[1:]]
    assert [row[1:] for row in read(out)[1:]] == [["", ""] if name is None else [name, "0.500000"] for name in names]
    assert main(["predict", "m", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["rows"], document["broken"]) == (
        len(names),
        [f"{n}.png" for n, name in enumerate(names) if not name],
    )
    assert document["named"] == {name: names.count(name) for name in names if name}


def test_what_cannot_be_predicted_or_written_is_one_sentence(tmp_path: Path) -> None:
    model = Model("m", small_vit(8, num_classes=3), input=DataConfig(img_size=8, workers=0), classes=("a", "b", "c"))
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "1.png").write_bytes(b"nothing")
    (tmp_path / "reviews.csv").write_text("sentence,label\na good film,1\na bad film,0\n")
    for data, out, said, field in (
        ("samples", tmp_path / "folder.csv", "must be a file ending in .csv, but is a folder", "out"),
        ("samples", tmp_path / "p.txt", "must be a file ending in .csv", "out"),
        (None, None, "m: is not a run, so its data is not known; give the images to classify", "data"),
        (str(tmp_path / "broken"), None, "broken: its only image cannot be read", None),
        (str(tmp_path / "reviews.csv"), None, "reviews.csv: contains sentences, but m takes images", "data"),
    ):
        with pytest.raises(SitusError, match=re.escape(said)) as caught:
            situs.predict(model, data, out=out)
        assert field is None or caught.value.field == field
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "folder.csv", "reviews.csv"]
