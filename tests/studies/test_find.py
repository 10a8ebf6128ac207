"""A figure is found by its path, or what is there instead is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from situs.errors import SitusError
from situs.studies.find import check_path, find, numbers_of
from situs.studies.form import Job

NUMBERS = {
    "top1": 0.5,
    "numbers": [1, 2],
    "settings": [{"setting": "noise=0.2", "x": 3}, {"setting": "noise", "x": 4}],
    "from scratch": {"accuracy": [0.1, 0.9]},
    "models": {"run.0": {"accuracy": 0.7}},
    "both": {"run-0": {"accuracy": 0.1}, "run-tuned-0": {"accuracy": 0.2}},
    "rows": [
        {"ratio": 0.15, "told": True, "name": "a", "consistency": 0.8},
        {"ratio": 0.15, "told": False, "name": "b", "consistency": 0.6},
        {"ratio": 0, "told": False, "name": "c", "consistency": 1.0},
    ],
}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("top1", 0.5),
        ("accuracy|top1", 0.5),
        ("models.absent|run*.accuracy", 0.7),
        ("from scratch.accuracy[-1]", 0.9),
        ("models.*.accuracy", 0.7),
        ("both.run-?.accuracy", 0.1),
        ("rows[1].name", "b"),
        ("rows[ratio=0.15,told=true].consistency", 0.8),
        ("rows[ratio=0.0].consistency", 1.0),
        ("rows[ratio=0.1500000001,told=true].name", "a"),
        ("rows[-3].name", "a"),
        ("settings[setting=noise=0.2].x", 3),
        ("settings[setting=noise].x", 4),
        ("rows[2].name", "c"),
        ("rows[name=b].ratio", 0.15),
        ("rows[name=b*,ratio=0.15].ratio", 0.15),
        ("rows[*].consistency", [0.8, 0.6, 1.0]),
    ],
)
def test_what_a_path_finds(path: str, value: Any) -> None:
    assert find(NUMBERS, path) == value


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("top5", "there is no top5 among the keys top1, numbers, settings, from scratch"),
        ("both.run-*.accuracy", r"there is no run-\* among the keys run-0, run-tuned-0"),
        ("top1.x", "there is no x in the value 0.5"),
        ("rows[3].name", r"there is no \[3\] in a list of 3"),
        ("rows[-4].name", r"there is no \[-4\] in a list of 3"),
        ("top1[0]", r"there is no \[0\] in the value 0.5"),
        ("rows[ratio=x].name", r"\[ratio=x\] must match one entry, but matches 0 of 3"),
        ("rows[ratio=0.1501,told=true].name", r"\] must .* 0 of 3"),
        ("rows[ratio=0.0001].name", r"\] must .* 0 of 3"),
        ("rows[told=a].name", r"\[told=a\] must .* 0 of 3"),
        ("rows[ratio=0.15].name", r"\[ratio=0.15\] must match one entry, but matches 2 of 3"),
        ("rows[ratio=0.9].name", r"\[ratio=0.9\] must .* 0 of 3"),
        ("numbers[a=1]", r"\[a=1\] must match one entry, but matches 0 of 2"),
        ("a..b", "must be a path"),
        ("top1[*]", r"there is no \[\*\] in the value 0.5"),
    ],
)
def test_what_it_does_not_find_is_said(path: str, said: str) -> None:
    with pytest.raises(SitusError, match=said):
        find(NUMBERS, path)


def test_of_many_keys_the_nearest_is_told_as_well() -> None:
    with pytest.raises(SitusError, match=r"there is no acuracy among the keys k0, .*, k11, …, accuracy$"):
        find({**{f"k{number}": 0 for number in range(20)}, "accuracy": 1}, "acuracy")
    two = {"accuracies": 1, "accuracy": 1}
    with pytest.raises(SitusError, match=r"there is no acuracy among the keys k0, .*, k11, …, accuracy$"):
        find({**{f"k{number}": 0 for number in range(20)}, **two}, "acuracy")
    with pytest.raises(SitusError, match=r"there is no acuracy among the keys accuracy$"):
        find({"accuracy": 1}, "acuracy")


def test_what_holds_numbers_is_told_first() -> None:
    origin = {f"said{number}": "vit" for number in range(12)} | {"ema": False, "of": ["a"], "empty": {}}
    with pytest.raises(SitusError, match=r"there is no rows among the keys accuracy, count, deep, said0, .*, said8$"):
        find({**origin, "accuracy": [{"ratio": 0.5}], "count": 3, "deep": {"a": {"b": 1.0}}}, "rows")


def test_the_log_of_a_training(tmp_path: Path) -> None:
    lines = [{"step": 1, "epoch": 1.0, "loss": 2.0}, {"step": 2, "epoch": 2.0, "val_top1": 0.3}]
    lines += [{"step": 3, "epoch": 3.0, "loss": 1.5}, {"step": 4, "epoch": 4.0, "loss": 1.0, "val_top1": 0.4}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    numbers = numbers_of(Job("pretrain"), tmp_path)
    assert (find(numbers, "loss"), find(numbers, "val_top1")) == (1.0, 0.4)
    assert find(numbers, "log.val_top1[epoch=2].value") == 0.3
    assert find(numbers, "log.val_top1[*].epoch") == [2.0, 4.0]


def test_a_measurement_leaves_one_file(tmp_path: Path) -> None:
    job = Job("evaluate accuracy", after="a")
    with pytest.raises(SitusError, match="one JSON file with results, but contains 0"):
        numbers_of(job, tmp_path)
    (tmp_path / "accuracy.json").write_text('{"top1": 0.25}')
    assert numbers_of(job, tmp_path) == {"top1": 0.25}


@pytest.mark.parametrize("path", ["rows[told]", "rows[]", "rows[a=1,b]", "rows[1.5]", "rows[", "a..b"])
def test_what_is_no_path_is_seen_before_anything_is_found(path: str) -> None:
    with pytest.raises(SitusError, match=r"must be"):
        check_path(path)


@pytest.mark.parametrize("path", ["", "a.b[*].c[-1]", "s[setting=noise=0.2 + rows].x", "c[a=0.75,b=x*].d"])
def test_what_is_a_path_passes(path: str) -> None:
    check_path(path)
