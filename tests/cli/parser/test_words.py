"""A wrong word on the command line is answered in one sentence."""

from __future__ import annotations

import re

import pytest

from situs.cli.main import main

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
