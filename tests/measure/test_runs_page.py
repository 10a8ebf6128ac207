"""The page of runs: what may not be compared is said, and only what a reader needs is shown."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from situs.measure.runs import Run, Runs
from situs.pages import make_page as page

pytestmark = pytest.mark.usefixtures("undrawn")

OTHER = "These runs use different methods, so their losses cannot be compared."
BEST = "Best values and their steps"


def run(name: str, method: str = "mp3", accuracy: tuple[float, ...] = (0.25, 0.5), **config: Any) -> Run:
    lines = [
        {"step": step, "epoch": step / 2, "loss": 3 / step, "val_top1": share} for step, share in enumerate(accuracy, 1)
    ]
    return Run(name, {"method": {"name": method}, **config}, lines, {"total_steps": len(accuracy)}, False)


def text_of(*runs: Run) -> str:
    return page(Runs(runs)).render()


def rows(text: str) -> list[list[str]]:
    """The cells of every row of every table."""
    return [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)]


@pytest.mark.parametrize(
    ("methods", "said"),
    [(["mp3"], False), (["mp3", "mp3"], False), (["mp3", "mae"], True), (["mp3", "mae", "droppos"], True)],
)
def test_losses_of_different_methods_are_not_to_be_compared(methods: list[str], said: bool) -> None:
    assert (OTHER in text_of(*(run(f"run {number}", name) for number, name in enumerate(methods)))) is said


def test_a_page_is_named_for_its_run_or_for_how_many_they_are() -> None:
    assert "<title>Report: alone</title>" in text_of(run("alone"))
    assert "<title>Report: 2 runs compared</title>" in text_of(run("one"), run("two"))


def test_the_best_stands_there_only_where_it_is_not_the_last() -> None:
    assert BEST not in text_of(run("rising"), run("also rising"))
    text = text_of(run("rising"), run("falling", accuracy=(0.75, 0.5, 0.25)))
    assert BEST in text
    assert ["0.5 (epoch 1, step 2)", "0.75 (epoch 0.5, step 1)"] in [row[1:] for row in rows(text)]


def test_the_best_epoch_of_each_held_out_metric_is_marked() -> None:
    peaked = run("peaked", accuracy=(0.25, 0.75, 0.5))
    probed = [
        {**line, "knn_accuracy": 0.9 - line["loss"] / 10, "position_accuracy": 0.1, "val_perplexity": line["step"]}
        for line in peaked.records
    ]
    held_out, training = Runs([replace(peaked, records=probed)]).figures()
    assert [*held_out.values[0]] == ["val top1", "knn accuracy", "val perplexity"]
    assert held_out.options["marks"] == {
        "val top1": {"peaked": (1.0, 0.75)},
        "knn accuracy": {"peaked": (1.5, 0.8)},
        "val perplexity": {"peaked": (0.5, 1)},  # the lowest
    }
    assert [*training.values[0]] == ["loss", "position accuracy"] and "marks" not in training.options


def test_configs_show_where_they_differ_and_then_the_rest() -> None:
    same = {"data": {"batch": 64}, "seed": 3}
    cells = rows(text_of(run("one", lr=0.1, **same), run("two", lr=0.2, **same)))
    assert ["<code>lr</code>", "0.1", "0.2"] in cells and ["<code>seed</code>", "3"] in cells
    assert ["<code>data.batch</code>", "64"] in cells
    assert "Fields in which the runs differ" not in text_of(run("one", **same), run("two", **same))


def test_a_run_without_a_log_and_without_checkpoints_says_so() -> None:
    waiting = Run("new", {"method": {"name": "mp3"}}, [], {}, False)
    assert "has logged nothing yet" in text_of(run("old"), waiting)
    assert "has logged nothing yet" not in text_of(run("old"))
