"""`situs evaluate robustness`: generated and given corruptions, ImageNet-A and -O, one sentence for each mistake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from situs.cli.main import main
from situs.measure.robustness.measures import aupr, aurra
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def run(*words: object) -> int:
    return main(["evaluate", "robustness", *map(str, words)])


def pictures(folder: Path, classes: dict[str, int], each: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    for name, grey in classes.items():
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = np.clip(chance.normal(grey, 30, (8, 8, 3)), 0, 255).astype("uint8")
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def logits_of(run: Path, folder: Path) -> tuple[torch.Tensor, list[str]]:
    """The slow way: file after file through the run's own normalisation."""
    loaded = load_run(run)
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in loaded.config.data.normalisation)
    found, names = [], []
    for file in sorted(folder.glob("*/*.png")):
        image = torch.from_numpy(np.asarray(Image.open(file)).copy()).permute(2, 0, 1).float() / 255
        with torch.no_grad():
            found.append(loaded.method.backbone(((image - mean) / std)[None])[0])
        names.append(file.parent.name)
    return torch.stack(found), names


CLASSES = ("dark", "light", "middle")


def test_generated_corruptions(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--corruptions", "noise,contrast", "--severities", "1,5", "--batch", 4)
    assert run(trained.one, *words, "--out", tmp_path / "a") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == str(tmp_path / "a" / "robustness.html")
    assert printed.err == ""  # no terminal, and quick
    numbers = json.loads((tmp_path / "a" / "robustness.json").read_text())
    assert list(numbers["corruptions"]) == ["gaussian_noise", "shot_noise", "impulse_noise", "contrast"]
    cells = [cell for each in numbers["corruptions"].values() for cell in each["severities"].values()]
    assert len(cells) == 8 and all(cell["count"] == 15 for cell in cells)
    assert numbers["mce_raw"] == pytest.approx(1 - sum(cell["top1"] for cell in cells) / 8)
    assert numbers["mce_alexnet_normalised"] is None and "over 4 of ImageNet-C's 15" in numbers["mce_note"]
    loaded = load_run(trained.one)
    right = sum(
        int((loaded.method.backbone(batch.inputs).argmax(1) == batch.targets["label"]).sum())
        for batch in make_eval_loader(loaded.config, batch=4)
    )
    assert numbers["clean"]["top1"] == pytest.approx(right / 15)
    # Contrast 0.15 of what it was moves every class towards the middle grey; noise of 0.1 does not.
    assert numbers["corruptions"]["contrast"]["severities"]["5"]["top1"] <= numbers["clean"]["top1"]
    # The same numbers again with another batch, and every picture is there.
    assert run(trained.one, *words[:4], "--batch", 15, "--out", tmp_path / "b") == 0
    again = json.loads((tmp_path / "b" / "robustness.json").read_text())
    for name, each in again["corruptions"].items():
        for severity, cell in each["severities"].items():
            assert cell["top1"] == numbers["corruptions"][name]["severities"][severity]["top1"]
    files = {file.name for file in (tmp_path / "a").iterdir()}
    shown = {"robustness-accuracy.png", "robustness-severity.png", "robustness-corruptions.png"}
    assert files == {"robustness.json", "robustness.html", *shown}
    assert str(tmp_path) not in (tmp_path / "a" / "robustness.json").read_text()


def test_given_folders_and_arrays(trained: Any, tmp_path: Path) -> None:
    root = tmp_path / "c"
    for severity, shift in ((1, 0), (2, 40)):
        values = {"dark": 60 + shift, "light": 190, "middle": 125 + shift}
        pictures(root / "brightness" / str(severity), values, 4, severity)
    words = ("--imagenet-c", root, "--corruptions", "brightness", "--severities", "1,2")
    assert run(trained.one, *words, "--out", tmp_path / "x") == 0
    numbers = json.loads((tmp_path / "x" / "robustness.json").read_text())
    assert numbers["images"] == "c" and numbers["clean"]["count"] == 15
    for severity in ("1", "2"):
        logits, names = logits_of(trained.one, root / "brightness" / severity)
        right = np.mean([CLASSES[best] == name for best, name in zip(logits.argmax(1).tolist(), names, strict=True)])
        cell = numbers["corruptions"]["brightness"]["severities"][severity]
        assert (cell["top1"], cell["count"]) == (pytest.approx(right), 12)

    arrays = tmp_path / "arrays"
    arrays.mkdir()
    whole = [np.asarray(Image.open(file)) for file in sorted((root / "brightness" / "2").glob("*/*.png"))]
    np.save(arrays / "brightness.npy", np.stack(whole * 5))
    np.save(arrays / "labels.npy", np.array([0, 1, 2]).repeat(4).tolist() * 5)
    assert run(trained.one, "--imagenet-c", arrays, *words[2:], "--out", tmp_path / "y") == 0
    other = json.loads((tmp_path / "y" / "robustness.json").read_text())
    same = numbers["corruptions"]["brightness"]["severities"]["2"]
    assert other["corruptions"]["brightness"]["severities"]["1"] == pytest.approx(same)


def test_natural_examples_and_anomalies(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    natural, strange = tmp_path / "imagenet-a", tmp_path / "imagenet-o"
    pictures(natural, {"dark": 90, "middle": 110}, 6, 1)
    pictures(strange, {"light": 150, "dark": 95}, 4, 2)
    words = ("--imagenet-a", natural, "--imagenet-o", strange, "--corruptions", "none")
    assert run(trained.one, *words, "--out", tmp_path / "x") == 0
    numbers = json.loads((tmp_path / "x" / "robustness.json").read_text())
    assert "corruptions" not in numbers

    logits, names = logits_of(trained.one, natural)
    kept = logits[:, [0, 2]]  # dark and middle: its own classes alone
    hits = torch.tensor([("dark", "middle")[best] == name for best, name in zip(kept.argmax(1), names, strict=True)])
    found = numbers["imagenet_a"]
    assert (found["accuracy"], found["count"], found["classes"]) == (pytest.approx(hits.float().mean().item()), 12, 2)
    assert found["aurra"] == pytest.approx(aurra(kept.softmax(1).max(1).values, hits), abs=1e-6)

    outside, _ = logits_of(trained.one, strange)
    inside, names = logits_of(trained.one, trained.data / "val")
    usual = inside[[name in ("dark", "light") for name in names]]  # only images of its classes stand against it
    scores = [-each[:, [0, 1]].softmax(1).max(1).values for each in (outside, usual)]
    found = numbers["imagenet_o"]
    assert (found["anomalies"], found["normal"], found["chance"]) == (8, 10, 8 / 18)
    assert found["aupr"] == pytest.approx(aupr(*scores), abs=1e-6)
    assert "ImageNet-O, AUPR" in capsys.readouterr().out
    page = (tmp_path / "x" / "robustness.html").read_text()
    assert "How this page was made" in page
    assert "response rate" in page and (tmp_path / "x" / "robustness-response.png").is_file()


def test_an_export_without_names_takes_a_class_list(trained: Any, tmp_path: Path) -> None:
    natural = tmp_path / "a"
    pictures(natural, {"n00000003": 60, "n00000001": 190}, 3, 1)
    names = tmp_path / "names.txt"
    names.write_text("n00000003 dark\nn00000001 light\nn00000002 middle\n", encoding="utf-8")
    words = ("--imagenet-a", natural, "--corruptions", "none", "--out", tmp_path / "x")
    assert run(trained.one, *words, "--class-list", names) == 0
    numbers = json.loads((tmp_path / "x" / "robustness.json").read_text())
    logits, found = logits_of(trained.one, natural)
    order = ["n00000001", "n00000003"]
    hits = [order[best] == name for best, name in zip(logits[:, [1, 0]].argmax(1).tolist(), found, strict=True)]
    assert numbers["imagenet_a"]["accuracy"] == pytest.approx(np.mean(hits))


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, natural, empty = tmp_path / "c", tmp_path / "a", tmp_path / "empty"
    pictures(given / "fog" / "1", {"dark": 60, "noir": 60}, 1, 0)
    pictures(natural, {"dark": 60, "gris": 60}, 1, 0)
    empty.mkdir()
    (tmp_path / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "flat" / "0.png")
    one, none = trained.one, ("--corruptions", "none")
    short = tmp_path / "short.txt"
    short.write_text("dark\nlight\n", encoding="utf-8")
    for words, said in (
        ([trained.mp3], "has no trained classifier; fine-tune it first"),
        ([one, "--corruptions", "rain"], "unknown corruption 'rain'; choose from: all, none, noise,"),
        ([one, "--severities", "1,7"], "severities=7: must be one or more of 1, 2, 3, 4, 5 (--severities)"),
        ([one, *none], "nothing to measure"),
        ([one, "--count", "0"], "count=0: must be >= 1 (--count)"),
        ([one, "--imagenet-c", tmp_path / "no"], "no: no such folder (--imagenet-c)"),
        (
            [one, "--imagenet-c", empty],
            "has no folder 'gaussian_noise'; choose corruptions that have a folder there (--corruptions)",
        ),
        (
            [one, "--imagenet-c", given, "--corruptions", "fog"],
            "has no class 'noir'",
        ),
        (
            [one, "--imagenet-c", given, "--corruptions", "fog", "--severities", "2"],
            "fog: has no folder for severity 2; choose severities that have a folder there (--severities)",
        ),
        ([one, "--imagenet-a", natural, *none], "has no class 'gris'"),
        ([one, "--imagenet-a", empty, *none], "contains no images"),
        ([one, "--imagenet-a", empty, *none], "(--imagenet-a)"),
        ([one, "--imagenet-a", tmp_path / "flat", *none], "flat: has no labels"),
        ([one, "--imagenet-o", empty, *none], "(--imagenet-o)"),
        ([one, "--imagenet-o", tmp_path / "flat", *none, "--in-distribution", tmp_path / "no"], "no such folder"),
        ([one, "--imagenet-a", natural, *none, "--class-list", short], "2 class names are given"),
        ([one, "--imagenet-a", natural, *none, "--class-list", empty], "cannot be read"),
        ([one, "--data", empty], "empty: contains no images"),
    ):
        assert run(*words, "--out", tmp_path / "x") == 2, words
        printed = capsys.readouterr().err.strip().splitlines()[-1]
        assert printed.startswith("situs: ") and said in printed, (words, printed)
    assert not (tmp_path / "x").exists()
