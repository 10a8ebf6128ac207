"""--print-config: every value with the layer it comes from, as a file that gives the same run back; and what a flag
that gives the length of a training overrides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.api import layered
from situs.cli.main import main
from situs.cli.parser.arguments import parse
from situs.cli.train import Finetune as FinetuneArgs
from situs.cli.train import Pretrain as Args
from situs.presets import one_length

FILE = """
[method]
name = "droppos"

[backbone.model_args]
depth = 2
"odd key" = "none"

[optim]
betas = [0.8, 0.9]
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.toml").write_text(FILE)
    return str(tmp_path / "own.toml")


@pytest.mark.parametrize(
    "words",
    [
        "--preset samples-mp3",
        "--preset samples-mp3 --config OWN --method.mask-ratio .25 --optim.ema .9 --steps 7",
        "--preset cifar100-mjp --method mae --backbone.model-args.name ö --data /a/b --init x.safetensors",
        "--preset speech-mp3 --epochs 3",
        "--config OWN --data.img-size 32,64 --backbone.positions none --train.trackers wandb,trackio",
    ],
)
def test_the_file_gives_the_same_config_back(
    words: str, own: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = words.replace("OWN", own).split()
    config = parse(Args, given, "situs pretrain").config
    capsys.readouterr()
    assert main(["pretrain", *given, "--print-config"]) == 0
    (tmp_path / "whole.toml").write_text(capsys.readouterr().out)
    assert parse(Args, ["--config", str(tmp_path / "whole.toml")], "situs pretrain").config == config


def test_each_value_tells_its_layer(own: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--preset", "samples-mp3", "--config", own, "--method.mask-ratio", ".25", "--seed", "4", "--steps", "7"]
    assert main(["pretrain", *words, "--print-config"]) == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    for line in (
        f'name = "droppos"  # {own}',
        "mask_ratio = 0.25  # --method.mask-ratio",
        "patch_size = 4  # preset samples-mp3",
        f"model_args.depth = 2  # {own}",
        "model_args.embed_dim = 96  # preset samples-mp3",
        f"betas = [0.8, 0.9]  # {own}",
        "weight_decay = 0.05  # default",
        "max_steps = 7  # --steps",
        'epochs = "none"  # --steps',
        "# init is not set  # default",
    ):
        assert line in lines
    assert lines.count("seed = 4  # --seed") == 2
    assert printed.err == "situs: --steps overrides train.epochs=12 of preset samples-mp3\n"
    assert main(["pretrain", *words, "--print-config", "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["config"]["train"]["max_steps"] == 7
    assert whole["sources"]["optim.betas"] == own


def test_another_method_forgets_what_was_said_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--preset", "samples-mp3", "--method", "mae", "--print-config"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert 'name = "mae"  # --method' in lines and "mask_ratio = 0.75  # default" in lines


def test_it_takes_no_run_and_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "--print-config", "--out", str(tmp_path / "run")]) == 0
    assert 'name = "supervised"' in capsys.readouterr().out and not (tmp_path / "run").exists()


def test_what_the_file_cannot_hold_is_named_and_given_again(
    trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--from", str(trained.one), "--positions", "sincos", "--key", str(tmp_path / "owner.key")]
    assert main(["finetune", *words, "--print-config", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.endswith("--config FILE with the same --key and --from and --positions gives the same run.")
    assert main(["finetune", *words, "--print-config", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["beside"] == ["--key", "--from", "--positions"]
    assert main(["pretrain", "--preset", "samples-mp3", "--print-config"]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("; --config FILE gives the same run.")


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
    train = parse(Args, given, "situs pretrain").config.train
    assert (train.epochs, train.max_steps) == length
    assert parse(FinetuneArgs, given, "situs finetune").config.train == train


def test_a_layer_with_both_or_neither_stays_as_it_is(tmp_path: Path) -> None:
    for tables in ({}, {"train": {"epochs": 1, "max_steps": 2}}, {"train": {"keep": 3}}, {"optim": {}}):
        assert one_length(tables) == tables
    assert one_length({"train": {"epochs": 1}}) == {"train": {"epochs": 1, "max_steps": None}}
    assert one_length({"train": {"epochs": "none", "max_steps": 2}}) == {"train": {"epochs": "none", "max_steps": 2}}
    assert [*layered(None, None)] == []
