"""The pieces of a help page: what is asked for, the names of the flags in groups, the list of presets."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.cli.parser import helptext
from situs.cli.parser.flags import Flag, flags_of
from situs.cli.parser.helptext import help_topic, other_flags, presets_text
from situs.cli.train import Pretrain


@pytest.mark.parametrize(
    ("words", "topic"),
    [
        (["--out", "x"], None), (["--help"], ""), (["-h", "data"], "data"), (["x", "--help", "all", "y"], "all"),
        (["--help", "--out"], ""), (["--help=optim"], "optim"), (["--help="], ""), (["--helper"], None),
    ],
)  # fmt: skip
def test_the_word_after_help_is_its_topic(words: list[str], topic: str | None) -> None:
    assert help_topic(words) == topic


def flags(*names: str) -> list[Flag]:
    found = {flag.name: flag for flag in flags_of(Pretrain, None)}
    return [found[name] for name in names]


def test_flags_of_a_group_are_listed_by_their_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helptext, "_width", lambda: 70)
    chosen = flags("--train.seed", "--train.precision", "--train.epochs", "--data.mean", "--data.std")
    first, second, *lines = other_flags(chosen, ["train", "data", "x"], "situs pretrain", presets=True).splitlines()
    assert f"{first} {second}" == (
        "More flags: situs pretrain --help GROUP explains one group, and --help all explains every flag. --help "
        "presets lists the presets."
    ) or lines[0].endswith("presets.")
    assert lines[-3:] == [
        "  train  --train.seed, precision, epochs", "  data   --data.mean, std", "  x      none",
    ]  # fmt: skip
    plain = other_flags(chosen, ["train"], "situs pretrain", presets=False)
    assert "presets" not in plain
    monkeypatch.setattr(helptext, "_width", lambda: 30)
    assert other_flags(chosen, ["train"], "x", presets=False).splitlines()[-1] == "  train  --train.seed, …"


def test_every_preset_is_listed_with_its_description(monkeypatch: pytest.MonkeyPatch) -> None:
    headers = {"one": "About one,\nin two lines.\nsitus pretrain x\nmore", "two": "About two.\ntorchrun y\nsitus z"}
    monkeypatch.setattr(helptext, "preset_names", lambda: [*headers])
    monkeypatch.setattr(helptext, "preset_header", headers.__getitem__)
    monkeypatch.setattr(helptext, "_width", lambda: 24)
    first, empty, *lines = presets_text(None).splitlines()
    assert first.startswith("Presets. ") and first.endswith("--preset NAME --help presets") and empty == ""
    assert lines == ["one", "  About one, in two", "  lines.", "two", "  About two."]
    assert presets_text("two") == headers["two"]


def test_lines_are_at_most_120_columns_wide(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for columns, width in (("80", 80), ("120", 120), ("121", 120), ("300", 120)):
        monkeypatch.setenv("COLUMNS", columns)
        assert helptext._width() == width
