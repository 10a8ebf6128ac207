"""The command as it was given, to be given again."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest

from situs.cli.audit import Gradients, command_of
from situs.cli.parser.arguments import parse
from situs.cli.parser.flags import POSITIONAL


@dataclass(frozen=True)
class Few:
    model: Annotated[str, POSITIONAL]
    size: tuple[int, int] | None = None
    loud: bool = False
    pictures: bool = True
    out: Path = Path("audit")


def test_what_is_not_a_default_is_in_the_command() -> None:
    assert command_of("audit x", Few("m")) == "situs audit x m"
    full = Few("a b", (3, 4), True, False, Path("deep") / "er")
    assert command_of("audit x", full) == "situs audit x 'a b' --size 3,4 --loud --no-pictures --out er"


def test_paths_lose_their_folders_and_names_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert command_of("v", Few("runs/mine")) == "situs v mine"
    assert command_of("v", Few("hf:someone/model")) == "situs v hf:someone/model"
    assert command_of("v", Few(str(tmp_path / "absent"))) == "situs v absent"


def test_the_command_means_the_same_when_it_is_given_again() -> None:
    words = ["m", "--data", "x", "--img-size", "3,4", "--count", "2", "--fail-above", "psnr=20", "--no-pictures"]
    args = parse(Gradients, words, prog="situs audit gradients")
    command = shlex.split(command_of("audit gradients", args))
    assert command[:3] == ["situs", "audit", "gradients"]
    assert parse(Gradients, command[3:], prog="situs audit gradients") == args
