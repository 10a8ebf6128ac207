"""A mistake gets the flag that mends it, where the verb has one."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from situs.cli.main import main
from situs.cli.parser.flags import flag_of, with_flags
from situs.cli.train import Adapt
from situs.cli.train import Pretrain as Args
from situs.errors import SitusError


@pytest.mark.parametrize(
    ("field", "flag"),
    [
        ("method.mask_ratio", "--method.mask-ratio"),
        ("dal_weight", "--method.dal-weight"),  # a method says the name in its own config
        ("train.max_steps", "--steps"),
        ("data.path", "--data"),
        ("data.mean[1]", "--data.mean"),
        ("out", "--out"),
        ("config_file", "--config"),
        ("nosuch", None),
        ("decoder.heads", None),
    ],
)
def test_a_field_s_flag(field: str, flag: str | None) -> None:
    assert flag_of(field, Args) == flag


def test_a_verb_without_a_config_has_the_short_flag() -> None:
    fields = ("data.img_size", "data.held_out", "data.batch", "train.seed", "optim.lr")
    assert [flag_of(field, Adapt) for field in fields] == ["--img-size", "--held-out", "--batch", "--seed", None]


@dataclass(frozen=True)
class Small:
    ratio: float = 0.5


def test_only_flags_that_the_verb_has_are_named() -> None:
    error = SitusError("grey images are given", field=("channels", "ratio"))
    assert with_flags(error, Small) == "grey images are given (--ratio)"
    assert with_flags(SitusError("no such run", field="out"), Small) == "no such run"
    assert with_flags(SitusError("give --ratio", field="ratio"), Small) == "give --ratio"


def test_the_command_line_says_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--method.mask-ratio", "1.2"]) == 2
    assert capsys.readouterr().err.endswith(": method.mask_ratio=1.2: must be in [0, 1) (--method.mask-ratio)\n")
