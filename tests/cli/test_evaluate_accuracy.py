"""`situs evaluate accuracy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.cli.main import main
from situs.train.assemble import make_eval_loader
from situs.train.run import load_run


def slow_accuracy(run: Path) -> float:
    loaded = load_run(run)
    right = count = 0
    for batch in make_eval_loader(loaded.config, batch=4):
        for image, label in zip(batch.inputs, batch.targets["label"], strict=True):  # type: ignore[arg-type]
            with torch.no_grad():
                right += int(loaded.method.backbone(image[None]).argmax() == label)
            count += 1
    assert count == 15
    return right / count


def test_of_a_run_and_of_its_export(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "deep" / "look"
    assert main(["evaluate", "accuracy", str(trained.one), "--batch", "4", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data (val), 15 images"
    written = json.loads((out / "accuracy.json").read_text())
    assert written["top1"] == slow_accuracy(trained.one)
    assert written["top5"] is None  # among five of three classes every answer is right
    assert (written["majority"], written["count"], written["ema"], written["step"]) == (1 / 3, 15, True, 6)
    assert f"{100 * written['top1']:.2f} %" in lines[2]
    assert lines[-1] == str(out / "accuracy.html")
    assert [row["class"] for row in written["classes"]] == ["dark", "light", "middle"]
    assert sum(row["top1"] * row["count"] for row in written["classes"]) == pytest.approx(15 * written["top1"])
    page = (out / "accuracy.html").read_text()
    assert "data (val)" in page.partition("How this page was made")[2]
    assert str(trained.data.parent) not in page + json.dumps(written)

    assert main(["export", str(trained.one), "--out", str(tmp_path / "x")]) == 0
    words = ["--data", str(trained.data), "--out", str(tmp_path / "b")]
    assert main(["evaluate", "accuracy", str(tmp_path / "x"), *words]) == 0
    again = json.loads((tmp_path / "b" / "accuracy.json").read_text())
    assert (again["top1"], again["count"]) == (written["top1"], 15)
    assert again["loss"] == pytest.approx(written["loss"], rel=1e-5)


def test_of_a_part_and_of_a_name_with_weights(trained: Any, tmp_path: Path) -> None:
    words = ["--data", str(trained.data), "--count", "7", "--out", str(tmp_path)]
    assert main(["evaluate", "accuracy", str(trained.one), *words]) == 0
    assert json.loads((tmp_path / "accuracy.json").read_text())["count"] == 7
    name = ["test_vit", "--img-size", "32", *words]
    assert main(["evaluate", "accuracy", *name, "--weights", "random"]) == 2  # its head was never trained


def test_a_locked_model_is_called_locked_and_its_key_opens_it(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained.one), "--out", str(tmp_path / "x")]) == 0
    assert main(["keygen", "--out", str(tmp_path / "key.json")]) == 0
    key = ["--key", str(tmp_path / "key.json")]
    assert main(["lock", str(tmp_path / "x"), *key, "--out", str(tmp_path / "locked")]) == 0
    capsys.readouterr()
    found = {}
    for name, words in {"open": ["x"], "shut": ["locked"], "opened": ["locked", *key]}.items():
        out = ["--data", str(trained.data), "--out", str(tmp_path / name)]
        assert main(["evaluate", "accuracy", str(tmp_path / words[0]), *words[1:], *out]) == 0
        said = capsys.readouterr()
        assert ("locked (locked): without the key, its blocks stay permuted" in said.err) is (name == "shut")
        assert ("locked (locked)  " in said.out) is (name == "shut")
        assert ("locked (locked)" in (tmp_path / name / "accuracy.html").read_text()) is (name == "shut")
        found[name] = json.loads((tmp_path / name / "accuracy.json").read_text())
    assert found["opened"]["loss"] == pytest.approx(found["open"]["loss"], rel=1e-5)
    assert found["shut"]["loss"] != pytest.approx(found["open"]["loss"], rel=1e-3)
    assert found["shut"]["locked"] == "yes, opened without its key"
    out = ["--data", str(trained.data), "--out", str(tmp_path / "none")]
    assert main(["evaluate", "accuracy", str(tmp_path / "x"), *key, *out]) == 2
    assert "x: is not locked, so it needs no key (--key)" in capsys.readouterr().err


@pytest.mark.thin(2)
@pytest.mark.parametrize("flags", [["--withhold", "embedding,blocks=1"], ["--seal"]], ids=["withheld", "sealed"])
def test_the_owner_looks_at_a_lock_that_is_no_whole_model(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    pytest.importorskip("cryptography")
    assert main(["export", str(trained.one), "--out", str(tmp_path / "x")]) == 0
    assert main(["keygen", "--out", str(tmp_path / "key.json")]) == 0
    key = ["--key", str(tmp_path / "key.json")]
    assert main(["lock", str(tmp_path / "x"), *key, "--out", str(tmp_path / "locked"), *flags]) == 0
    second = [] if "--seal" in flags else ["--withheld", str(tmp_path / "locked.withheld.safetensors")]
    capsys.readouterr()
    found = {}
    for name, words in {"x": [], "locked": [*key, *second]}.items():
        out = ["--data", str(trained.data), "--out", str(tmp_path / f"of-{name}")]
        assert main(["evaluate", "accuracy", str(tmp_path / name), *words, *out]) == 0
        assert "stay permuted" not in capsys.readouterr().err
        found[name] = json.loads((tmp_path / f"of-{name}" / "accuracy.json").read_text())
    assert found["locked"]["loss"] == found["x"]["loss"] and found["locked"]["name"] == "locked"
    out = ["--data", str(trained.data), "--out", str(tmp_path / "none")]
    for name, words, said in (
        ("locked", [], "is sealed" if "--seal" in flags else "lacks the parts that were withheld"),
        ("locked", [*key] if second else [*key, "--withheld", str(tmp_path / "key.json")], "withheld"),
        ("x", ["--withheld", str(tmp_path / "key.json")], "is not a locked model"),
    ):
        assert main(["evaluate", "accuracy", str(tmp_path / name), *words, *out]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    for split in ("train", "val"):
        for old, new in (("dark", "noir"), ("light", "clair"), ("middle", "gris")):
            (other / split / new).mkdir(parents=True)
            (other / split / new / "0.png").write_bytes((trained.data / split / old / "0.png").read_bytes())
    for words, said in (
        ([str(trained.mp3)], "no trained classifier"),
        ([str(trained.one), "--data", str(other)], "is 'dark' in the model, but 'clair' in the data"),
        ([str(trained.one), "--data", str(trained.data / "val" / "dark")], "has no labels"),
        ([str(trained.one), "--data", str(trained.data / "val" / "dark"), "--split", "val"], "split"),
        ([str(trained.one), "--out", str(tmp_path / "a.json")], "a.json': must be a folder (--out)"),
        ([str(trained.one), "--out", "/proc/none/a"], "could not be written"),
    ):
        assert main(["evaluate", "accuracy", *words]) == 2
        printed = capsys.readouterr().err
        assert printed.startswith("situs: ")
        assert printed.count("\n") == 1
        assert said in printed
