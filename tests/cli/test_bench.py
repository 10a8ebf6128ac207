"""`situs bench` from the command line, on a model of nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from situs.cli.main import main

SMALL = ["--models", "vit_tiny_patch16_224", "--img-size", "8,16", "--patch-size", "4", "--model-args.depth", "1",
         "--batches", "2", "--warmup", "1", "--steps", "1", "--repeats", "2", "--device", "cpu"]  # fmt: skip


def test_a_table_is_printed_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "step.json").touch()
    assert main(["bench", "supervised", "mp3:0.5,batch=3", *SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "step.html and .json exist and will be replaced" in printed.err
    assert [line.split()[0] for line in printed.out.splitlines()[1:4]] == ["case", "supervised", "mp3:mask_ratio=0.5"]
    assert "mp3:mask_ratio=0.5, vit_tiny_patch16_224, px 8×16, patch 4, depth 1, batch 3: " in printed.err
    found = json.loads((tmp_path / "step.json").read_text())
    assert [(row["name"], row["case"]["batch"]) for row in found["rows"]] == [
        ("supervised", 2), ("mp3:mask_ratio=0.5", 3),
    ]  # fmt: skip
    assert all(row["flops"] > 0 and row["ceiling_share"] > 0 for row in found["rows"])
    assert "The cost of a training step" in (tmp_path / "step.html").read_text()


def test_a_case_that_fails_is_told_by_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "mp3:model=nosuch", "supervised", *SMALL, "--out", str(tmp_path)]) == 1
    assert "failed: mp3, nosuch" in capsys.readouterr().out
    found = json.loads((tmp_path / "step.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["supervised"] and len(found["failed"]) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mp3:2.0"], "mp3:2.0: mask_ratio=2.0: must be in [0, 1)"),
        (["--batches", "0"], "batches[0]=0: must be >= 1 (--batches)"),
        (["--device", "tpu"], "device='tpu': must be cpu, cuda, cuda:N or mps (--device)"),
    ],
)
def test_a_mistake_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err == f"situs: {said}\n"


@pytest.mark.parametrize("verb", [[], ["--compare", "none.json,none.json"]])
def test_a_place_that_is_no_folder_is_told_before_anything_is_measured(
    verb: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for place in ("file", "look.json"):
        assert main(["bench", *verb, "--out", str(tmp_path / place)]) == 2
        assert capsys.readouterr().err == f"situs: out={str(tmp_path / place)!r}: must be a folder (--out)\n"
