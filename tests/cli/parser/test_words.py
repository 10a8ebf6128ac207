"""A wrong word on the command line is answered in one sentence."""

from __future__ import annotations

import re
from typing import Any, Literal

import pytest

from situs.cli.main import main
from situs.cli.parser.arguments import parse_flags
from situs.cli.parser.flags import Flag
from situs.cli.parser.words import _shown
from situs.errors import SitusError

GRADIENTS = "audit gradients x --data y"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{GRADIENTS} --labels guessed", "--labels guessed: must be known or inferred"),
        (f"{GRADIENTS} --labels", "--labels: needs a value"),
        (f"{GRADIENTS} --img-size 3 4", "4: too many arguments for situs audit gradients; write a list with commas"),
        (f"{GRADIENTS} z", "z: too many arguments for situs audit gradients"),
        ("evaluate knn", "MODEL: must be given"),
        (
            "pretrain photos --out x",
            "photos: situs pretrain takes no argument without a flag; did you mean --data ",
        ),
        (
            "finetune runs/a --out x",
            "runs/a: situs finetune takes no argument without a flag; did you mean --from ",
        ),
        ("keygen my.key", "--out: must be given"),
        (
            "pretrain --model vit_tiny_patch16_224",
            "--model: situs pretrain has no such flag; did you mean --backbone? (",
        ),
        ("pretrain --lr 0.1", "--lr: situs pretrain has no such flag; did you mean --optim.lr? ("),
        ("pretrain --batch-size 4", "--batch-size: situs pretrain has no such flag; did you mean --batch? ("),
        (
            "pretrain --mask-ratio .5",
            "--mask-ratio: situs pretrain has no such flag; did you mean --method.mask-rat",
        ),
        ("evaluate runs/x", "situs evaluate: a verb is missing before runs/x; verbs: accuracy, knn,"),
        (f"{GRADIENTS} --fail-above 20", "fail_above='20': must be METRIC=NUMBER, "),
        (
            "pretrain --preset speech-mp3 --data samples --out x",
            "samples: contains images, but clips are expected (--data)",
        ),
        (
            "pretrain --preset samples-mp3 --data.held-out .1 --out x",
            "held_out=0.1: samples has its own evaluation split",
        ),
        ("info x --model-args depth=2", "--model-args depth=2: give its values one by one, as --model-args.depth 2 ("),
        ("info x --model-args 2", "--model-args 2: give its values one by one, as --model-args.NAME VALUE ("),
        ("pretrain --epoch 3", "--epoch: situs pretrain has no such flag; did you mean --epochs? ("),
        ("pretrain --optim.lx=3", "--optim.lx: situs pretrain has no such flag; did you mean --optim.lr? ("),
        (
            "pretrain --train.precision fp33",
            "--train.precision fp33: must be auto, bf16, fp16 or fp32; did you mean fp",
        ),
    ],
)
def test_one_sentence(
    line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # however narrow the terminal
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"situs: {said}")
    assert told.count("\n") == 1
    assert re.search(r"\((see )?[\w ]*--[\w.-]+\)\n$", told)  # the flag that mends it, or where to read on


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("audit gradients x", "data: give the images to attack (--data)"),
        (f"{GRADIENTS} --count 1.5", "count=1.5: must be an integer >= 1 or none (--count)"),
        (f"{GRADIENTS} --count=many --seed 3", "count='many': must be an integer >= 1 or none (--count)"),
        (
            f"{GRADIENTS} --img-size 3,4,5",
            "img_size=[3, 4, 5]: must be an integer or a list of 2: ",
        ),
        ("pretrain --epochs three", "train.epochs='three': must be an integer >= 1 or none (--epochs)"),
        ("pretrain --augment.scale 1", "augment.scale=[1]: must be a list of 2: "),
        ("pretrain --optim.lr fast", "optim.lr='fast': must be a finite number > 0 or none (--optim.lr)"),
        ("pretrain --seed -1", "train.seed=-1: must be >= 0 (--seed)"),
        ("pretrain --epochs 2 --train.epochs 3", "--epochs and --train.epochs set the same field: give only one"),
    ],
)
def test_a_value_is_refused_as_one_in_a_file_would_be(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"situs: {said}")
    assert told.count("\n") == 1


def given(flag: Flag, *words: str) -> list[Any]:
    return [value for _, value in parse_flags([flag], words, "situs x")]


def test_none_is_a_word_of_a_choice_where_it_takes_something_back() -> None:
    kind = Literal["a", "b"] | None
    assert given(Flag("--kind", ("kind",), kind, "a", "", "NAME"), "--kind", "none") == [None]
    assert given(Flag("--kind", ("kind",), kind, None, "", "NAME"), "--kind=b") == ["b"]
    for flag in (
        Flag("--kind", ("kind",), kind, None, "", "NAME"),
        Flag("--kind", ("kind",), Literal["a"], "a", "", ""),
    ):
        with pytest.raises(SitusError, match=r"^--kind none: must be "):
            given(flag, "--kind", "none")


@pytest.mark.parametrize(
    ("in_args", "default", "twin"),
    [(True, False, False), (True, True, True), (False, False, True), (False, True, True)],
)
def test_what_a_verb_has_off_by_default_cannot_be_turned_off(in_args: bool, default: bool, twin: bool) -> None:
    flag = Flag("--show", ("show",), bool, default, "", "", in_args=in_args)
    assert given(flag, "--show") == [True]
    if twin:
        assert given(flag, "--no-show") == [False]
        assert given(flag, "--no-show", "--show") == [True]  # the last one counts
    else:
        with pytest.raises(SitusError, match=r"^--no-show: situs x has no such flag"):
            given(flag, "--no-show")


@pytest.mark.parametrize(
    ("default", "shown"),
    [
        (1 / 3, "0.3333"), (5e-4, "0.0005"), ((0.9, 0.999), "0.9,0.999"), ((2, 2), "2,2"), (True, "yes"), (False, "no"),
        (3, True), ("mean", True), (None, False), ("", False), ((), False), ({"a": 1}, False),
    ],
)  # fmt: skip
def test_a_default_is_shown_as_it_would_be_written(default: Any, shown: str | bool) -> None:
    told = _shown(Flag("--x", ("x",), Any, default, "", ""))
    assert (told(default) if callable(told) else told) == shown


def test_that_a_verb_does_not_do_something_is_not_shown() -> None:
    assert _shown(Flag("--x", ("x",), bool, False, "", "", in_args=True)) is False
