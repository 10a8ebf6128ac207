"""A mistake gets the flag that mends it, where the verb has one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from situs.cli.main import main
from situs.cli.parser.flags import flag_of, flags_of, metavar_of, texts_of, with_flags
from situs.cli.train import Adapt, Finetune
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
        ("method", "--method"),
        ("method.name", None),
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


def test_a_flag_with_another_name_than_its_field_is_found_by_both() -> None:
    assert [flag_of(field, Finetune) for field in ("source", "from")] == ["--from", "--from"]


@pytest.mark.parametrize(
    ("kind", "shown"),
    [
        (int, "INT"), (float | None, "FLOAT"), (int | tuple[int, int], "INT|INT,INT"), (tuple[float, ...], "FLOAT,…"),
        (list[int], "INT,…"), (tuple[int, float], "INT,FLOAT"), (Literal["mean", "cls"], "{mean,cls}"),
        (Annotated[int, "> 0"], "INT"), (Annotated[int, "> 0"] | None, "INT"), (dict[str, int], "VALUE"),
    ],
)  # fmt: skip
def test_what_a_flag_takes_is_shown(kind: Any, shown: str) -> None:
    assert metavar_of(kind) == shown


def test_only_a_path_is_shown_as_a_path() -> None:
    shown = {flag.name: flag.metavar for flag in flags_of(Args)}
    assert shown["--data.path"] == "PATH" and shown["--data.batch"] == "INT" and shown["--out"] == "FOLDER"
    assert shown["--method"] == "NAME"


@dataclass(frozen=True)
class Outer:
    @dataclass(frozen=True)
    class Inner:
        x: int = 0
        """Of one
        within."""

        y: int = 0

    a: int = 0
    """Of the outer."""


def test_the_words_under_a_field_are_found_wherever_its_class_is() -> None:
    @dataclass(frozen=True)
    class Local(Outer):
        b: Path = Path()
        """Of a function's own."""

        c: int = 0
        1 + 1  # noqa: B018  (no words)

    assert texts_of(Outer) == {"a": "Of the outer."} and texts_of(Outer.Inner) == {"x": "Of one within.", "y": ""}
    assert texts_of(Local) == {"a": "Of the outer.", "b": "Of a function's own.", "c": ""}
    nowhere = dataclass(type("Nowhere", (), {"__annotations__": {"z": int}, "__module__": "no.such.module"}))
    assert texts_of(nowhere) == {"z": ""}


def test_the_command_line_says_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pretrain", "--method.mask-ratio", "1.2"]) == 2
    assert capsys.readouterr().err.endswith(": method.mask_ratio=1.2: must be in [0, 1) (--method.mask-ratio)\n")
