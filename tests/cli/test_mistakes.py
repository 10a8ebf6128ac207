"""A wrong word on the command line is answered in one sentence, whatever the parser prints."""

from __future__ import annotations

import pytest

from situs.cli.main import main
from situs.cli.mistakes import sentence

GRADIENTS = "audit gradients x --images y"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{GRADIENTS} --precision fp8", "--precision fp8: must be fp32, bf16 or fp16"),
        (f"{GRADIENTS} --labels", "--labels: needs a value"),
        (f"{GRADIENTS} --count 1.5", "--count 1.5: must be a whole number"),
        (f"{GRADIENTS} --count=many --seed 3", "--count many: must be a whole number"),
        (f"{GRADIENTS} --img-size 3 4 5", "--img-size 3 4 5: must be SIDE or HEIGHT WIDTH"),
        (f"{GRADIENTS} z", "z: more than situs audit gradients takes"),
        ("audit gradients x", "--images FOLDER: must be given"),
        ("evaluate accuracy", "MODEL_OR_RUN: must be given"),
        ("pretrain --epoch 3", "--epoch 3: situs pretrain has no such flag; perhaps --epochs, "),
        ("pretrain --epochs three", "--epochs three: must be a whole number"),
        ("pretrain --augment.scale 1", "--augment.scale: needs 2 values"),
        ("pretrain --optim.lr fast", "--optim.lr fast: must be a number"),
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
    assert told.rstrip().endswith("--help)")


def test_the_terminals_width_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.delenv("COLUMNS", raising=False)
    assert main([*GRADIENTS.split(), "--precision", "fp8"]) == 2
    assert "COLUMNS" not in os.environ


FRAME = """\
╭─ Unrecognized options ───────────────────────╮
│ Unrecognized options: --epoch, 3             │
│ ──────────────────────────────────────────── │
│ Perhaps you meant:                           │
│     --epochs N                               │
│         Passes over the data.                │
│ ──────────────────────────────────────────── │
│ For full helptext, run situs pretrain --help │
╰──────────────────────────────────────────────╯
"""
PLAIN = """\
 Unrecognized options
 --------------------------------------------
  Unrecognized options: --epoch, 3
  --------------------------------------------
  Perhaps you meant:
      --epochs N
          Passes over the data.
"""


@pytest.mark.parametrize("frame", [FRAME, PLAIN], ids=["drawn", "plain"])
def test_both_frames_are_read(frame: str) -> None:
    said = sentence(frame, ["--epoch", "3"], "situs pretrain")
    assert said == "--epoch 3: situs pretrain has no such flag; perhaps --epochs (see situs pretrain --help)"


def test_a_complaint_of_another_form_is_passed_on() -> None:
    assert sentence("something else\nis wrong", [], "situs x") == "something else is wrong (see situs x --help)"
