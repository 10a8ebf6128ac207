"""Of two lengths of a training, epochs and steps, the one in the uppermost layer counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.api import layered
from situs.cli.parser.arguments import parse, report_length
from situs.cli.train import Finetune as FinetuneArgs
from situs.cli.train import Pretrain
from situs.presets import one_length


@pytest.mark.parametrize(
    ("words", "length"),
    [
        ("", (100, None)),
        ("--steps 5", (None, 5)),
        ("--epochs 2", (2, None)),
        ("--epochs 2 --steps 5", (2, 5)),
        ("--preset samples-mp3 --steps 5000", (None, 5000)),
        ("--preset samples-mp3 --epochs 3", (3, None)),
        ("--preset speech-mp3", (None, 10000)),
        ("--preset speech-mp3 --epochs 3", (3, None)),
        ("--preset speech-mp3 --steps 7", (None, 7)),
        ("--preset speech-mp3 --epochs 3 --steps 7", (3, 7)),
        ("--preset samples-mp3 --config FILE", (None, 9)),
        ("--preset samples-mp3 --config FILE --epochs 4", (4, None)),
    ],
)
def test_the_uppermost_length_alone_counts(words: str, length: tuple[int | None, int | None], tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text("train.max_steps = 9\n")
    given = words.replace("FILE", str(tmp_path / "file.toml")).split()
    train = parse(Pretrain, given, "situs pretrain").config.train
    assert (train.epochs, train.max_steps) == length
    assert parse(FinetuneArgs, given, "situs finetune").config.train == train


def test_a_layer_with_both_or_neither_stays_as_it_is(tmp_path: Path) -> None:
    for tables in ({}, {"train": {"epochs": 1, "max_steps": 2}}, {"train": {"keep": 3}}, {"optim": {}}):
        assert one_length(tables) == tables
    assert one_length({"train": {"epochs": 1}}) == {"train": {"epochs": 1, "max_steps": None}}
    assert one_length({"train": {"epochs": "none", "max_steps": 2}}) == {"train": {"epochs": "none", "max_steps": 2}}
    assert [*layered(None, None)] == []


def test_that_a_flag_overrides_the_other_length_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file.toml").write_text("train.max_steps = 9\n")
    for words, said in (
        ("--preset speech-mp3 --epochs 3", "situs: --epochs overrides train.max_steps=10000 of preset speech-mp3\n"),
        ("--config FILE --train.epochs 3", "situs: --train.epochs overrides train.max_steps=9 of FILE\n"),
        ("--config FILE --steps 3", ""),
        ("--config FILE", ""),
    ):
        parse(Pretrain, words.replace("FILE", str(tmp_path / "file.toml")).split(), "situs pretrain")
        assert capsys.readouterr().err.replace(str(tmp_path / "file.toml"), "FILE") == said


def test_of_several_layers_the_uppermost_that_has_a_length_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    low, high, none = {"train": {"epochs": 5}}, {"train": {"epochs": 7}}, {"train": {"epochs": None}}
    steps = {"train.max_steps": "--steps"}
    for layers, flags, said in (
        (
            {"low": low, "high": high, "other": {"optim": {}}},
            steps,
            "situs: --steps overrides train.epochs=7 of high\n",
        ),
        ({"low": low, "none": none}, steps, ""),
        ({"low": low, "none": {"train": {"epochs": "none"}}}, steps, ""),
        ({"low": low}, {**steps, "train.epochs": "--epochs"}, ""),
        ({"low": low}, {"train.epochs": "--epochs"}, ""),
    ):
        report_length(layers, flags)
        assert capsys.readouterr().err == said
    monkeypatch.setenv("RANK", "1")
    report_length({"low": low}, steps)
    assert capsys.readouterr().err == ""
