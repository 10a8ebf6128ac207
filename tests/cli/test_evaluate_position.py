"""`situs evaluate position`: DropPos's grid, MP3's curve, and one sentence for who has no position head."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.cli import evaluate
from situs.cli.main import main


@pytest.fixture(scope="module")
def droppos(trained: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DropPos run on 16 patches."""
    from situs.config import from_dict
    from situs.train.run import RunConfig, train_run

    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    method = {"name": "droppos", "decoder_width": 16, "decoder_heads": 2, "decoder_depth": 1, "affinity": "visible"}
    config = {
        "method": method,
        "backbone": {
            "name": "vit_tiny_patch16_224", "patch_size": 2, "positions": "sincos", "model_args": shape,
        },
        "data": {"path": str(trained.data), "img_size": 8, "batch": 12, "workers": 0},
        "train": {"epochs": 1, "precision": "fp32"},
    }  # fmt: skip
    out = tmp_path_factory.mktemp("runs") / "droppos"
    train_run(from_dict(RunConfig, config), out=out, device="cpu")
    return out


def test_droppos_gives_the_grid(
    outline: Any, droppos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", "position", str(droppos), "--device", "cpu", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1] == str(tmp_path / "position.html")
    numbers = json.loads((tmp_path / "position.json").read_text())
    assert (len(numbers["cells"]), numbers["count"], numbers["places"]) == (16, 15, 16)
    # Of 4 seen patches int(.95 * 4) = 3 places are dropped; at γ_pos = .25 one is.
    assert [cell["dropped"] for cell in numbers["cells"][-4:]] == [1, 2, 3, 3]
    found = [cell["accuracy"] for cell in numbers["cells"]]
    assert numbers["mean"] == pytest.approx(sum(found) / 16)
    page = (tmp_path / "position.html").read_text()
    assert outline(page) == [
        "First screen, 1 figure",
        "Numbers, 16 rows, 1 fold",
        "What the numbers mean, 2 texts",
        "How this page was made, facts",
    ]
    assert "(val)" in page.partition("How this page was made")[2]
    assert f"over the 16 cells is {100 * numbers['mean']:.2f} %" in page
    assert (tmp_path / "position-grid.png").is_file()
    again = ["--ratios", ".5", "--position-ratios", ".25,.5", "--out", str(tmp_path / "b")]
    assert main(["evaluate", "position", str(droppos), "--device", "cpu", *again]) == 0
    cells = json.loads((tmp_path / "b" / "position.json").read_text())["cells"]
    assert cells == numbers["cells"][8:10]


def test_mp3_gives_the_curve(trained: Any, tmp_path: Path) -> None:
    words = [str(trained.mp3), "--ratios", "0,0.5", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["evaluate", "position", *words]) == 0
    numbers = json.loads((tmp_path / "position.json").read_text())
    assert [row["ratio"] for row in numbers["accuracy"]] == [0.0, 0.5]
    assert numbers["count"] == 15
    assert all(0 <= row["accuracy"] <= 1 for row in numbers["accuracy"])
    assert (tmp_path / "position-curve.png").is_file()
    assert (numbers["told"], numbers["told_in_training"]) == (0.0, 0.0)
    assert main(["evaluate", "position", *words, "--anchor-ratio", "0.5"]) == 0
    told = json.loads((tmp_path / "position.json").read_text())
    assert (told["told"], told["told_in_training"]) == (0.5, 0.0)
    assert "here 50 % keep them. The accuracy also counts these patches" in (tmp_path / "position.html").read_text()


def test_mistakes_are_one_sentence(trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = tmp_path / "export"
    assert main(["export", str(trained.mp3), "--out", str(export)]) == 0
    (tmp_path / "empty").mkdir()
    capsys.readouterr()
    for words, said in (
        ([str(trained.one)], "one: was trained by Supervised, which has no position head"),
        ([str(export)], "export: is not a run, and only a run has a position head"),
        (["test_resnet", "--weights", "random"], "test_resnet: is not a run"),
        ([str(trained.mp3), "--data", str(tmp_path / "empty")], "empty"),
        ([str(trained.mp3), "--ratios", "1"], "must be in [0, 1)"),
        ([str(trained.mp3), "--anchor-ratio", "1"], "anchor_ratio=1.0: must be in [0, 1) (--anchor-ratio)"),
    ):
        assert main(["evaluate", "position", *words, "--device", "cpu", "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ([], {"count": None, "batch": 256, "ratios": None, "position_ratios": None, "anchor_ratio": None}),
        (["--batch", "7", "--count", "9"], {"count": 9, "batch": 7}),
        (["--kind", "all"], {"count": 64, "batch": 16, "equivariance": True}),
        (["--kind", "all", "--batch", "7", "--count", "9", "--ratios", ".5"],
         {"count": 9, "batch": 7, "ratios": (0.5,)}),
    ],
)  # fmt: skip
def test_the_kinds_have_defaults_of_their_own(
    words: list[str], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the help gives; without --ratios, the function chooses them."""
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(evaluate, "open_from", lambda *_: None)
    monkeypatch.setattr(evaluate, "present", lambda *_: None)
    for name in ("situs.audit.positions.audit_positions", "situs.measure.position.head.evaluate_position"):
        monkeypatch.setattr(name, lambda _, **options: calls.append(options))
    assert main(["evaluate", "position", "m", *words]) == 0
    assert {name: calls[0][name] for name in asked} == asked
    assert ("ratios" in calls[0]) == ("all" not in words or "--ratios" in words)
