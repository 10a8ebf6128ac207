"""Of two lengths of a training, epochs and steps, the one in the uppermost layer counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.api import layered
from situs.cli.parser.arguments import parse
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
