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


def logged(name: str, *lines: dict[str, Any], method: str = "mp3", **state: Any) -> Run:
    told = [{"step": step, "epoch": step / 2, **line} for step, line in enumerate(lines, 1)]
    return Run(name, {"method": {"name": method}}, told, {"total_steps": len(lines), **state}, None)


@pytest.mark.parametrize(
    ("lines", "number"),
    [
        ([{"loss": 3.0}, {"loss": 2.0}], ("2", "last loss, r")),
        ([{"loss": 3.0, "knn_accuracy": 0.5}], ("0.5", "last knn accuracy, r")),
        ([{"val_loss": 1.5, "val_top1": 0.25}], ("0.25", "last val top1, r")),  # before any other
        ([{"val_top1": 0.75, "val_majority": 0.4}], ("0.75", "last val top1, r (largest class 0.4)")),
        ([{"lr": 0.1}], None),
    ],
)
def test_the_first_screen_has_the_last_value_that_a_run_is_judged_by(
    lines: list[dict[str, Any]], number: tuple[str, str] | None
) -> None:
    found = Runs([logged("r", *lines)]).summary().numbers
    assert found == (() if number is None else (number,))
    five = Runs([logged(f"r{n}", *lines) for n in range(5)]).summary().numbers
    assert len(five) == (0 if number is None else 4)


@pytest.mark.parametrize(
    ("top1", "largest", "said"),
    [
        (0.5, 0.4, " A model that always predicts the largest class has a top-1 of 0.4."),
        (
            0.4,
            0.4,
            " A model that always predicts the largest class has a top-1 of 0.4. The run's top-1 is not higher.",
        ),
        (
            0.3,
            0.4,
            " A model that always predicts the largest class has a top-1 of 0.4. The run's top-1 is not higher.",
        ),
        (0.5, None, ""),
    ],
)
def test_a_run_that_is_no_better_than_the_largest_class_is_told_so(
    top1: float, largest: float | None, said: str
) -> None:
    more = {} if largest is None else {"val_majority": largest}
    one = logged("r", {"loss": 3.0, "val_top1": 0.1, "grad": 9.0}, {"loss": 1.5, "val_top1": top1, "grad": 1.0, **more})
    words = f"mp3: finished, 2 steps. Loss went from 3 to 1.5. Val top1 went from 0.1 to {top1:g}.{said}"
    assert Runs([one]).summary().sentence == words
    assert Runs([logged("r", {"loss": 3.0})]).summary().sentence == "mp3: finished, 1 step."  # one value went nowhere
    held_out, *_ = Runs([one]).figures()
    panel = held_out.values[0]["val top1"]
    assert set(panel) == {"r"} | ({"largest class, r"} if largest is not None else set())
    assert largest is None or panel["largest class, r"] == ([1.0], [largest])
    assert "val majority" not in held_out.values[0]


def test_of_runs_of_one_method_the_ends_are_named_and_of_others_only_held_out_ones() -> None:
    one = [logged(name, {"loss": 1.0, "val_top1": share, "position_accuracy": share}) for name, share in
           (("a", 0.2), ("b", 0.4), ("c", 0.3))]  # fmt: skip
    said = Runs(one).summary().sentence
    assert said.startswith("All 3 runs are finished. Val top1 is best in b (0.4) and worst in a (0.2).")
    assert "Position accuracy is best in b (0.4) and worst in a (0.2)." in said and "Loss" not in said
    other = [*one[:2], replace(one[2], config={"method": {"name": "mae"}})]
    said = Runs(other).summary().sentence
    assert "Val top1 is best in b (0.4) and worst in a (0.2)." in said
    assert "Position accuracy (each method on its own task): 0.2 in a, 0.4 in b, 0.3 in c." in said
    lacks = [*one[:2], logged("c", {"loss": 1.0})]
    assert Runs(lacks).summary().sentence == "All 3 runs are finished."
    falling = [logged(name, {"val_loss": loss}) for name, loss in (("a", 0.5), ("b", 0.25))]
    assert "Val loss is best in b (0.25) and worst in a (0.5)." in Runs(falling).summary().sentence
    going = replace(one[0], state={"total_steps": 9})
    assert Runs([going, *one[1:]]).summary().sentence.startswith("2 of 3 runs are finished.")


@pytest.mark.parametrize(
    ("config", "state", "total", "finished"),
    [
        ({}, {"total_steps": 4}, 4, True),
        ({}, {"total_steps": 5}, 5, False),
        ({"max_steps": 4}, {}, 4, True),
        ({"epochs": 4}, {}, 8, False),  # two steps an epoch
        ({"epochs": 4, "max_steps": 6}, {}, 6, False),
        ({"epochs": 2, "max_steps": 6}, {}, 4, True),
        ({}, {}, None, False),
    ],
)
def test_where_a_run_ends(config: dict[str, int], state: dict[str, int], total: int | None, finished: bool) -> None:
    run = replace(logged("r", *[{"loss": 1.0}] * 4), config={"train": config}, state=state)
    assert (run.total, run.finished, run.step) == (total, finished, 4)
    end = "" if total is None else f" of {total}"
    assert run.status == ("finished, 4 steps" if finished else f"not finished: step 4{end} (running or stopped)")
    stopped = replace(run, bad_step=5)
    assert stopped.stopped and not stopped.finished and stopped.status == "ended after step 4: the loss was not finite"
    assert not replace(run, bad_step=4).stopped  # it went on behind that step


def test_speed_and_last_numbers_stand_run_by_run() -> None:
    machine = {"device": "H200", "precision": "bf16", "torch": "2.11"}
    lines = [{"loss": 4.0, "lr": 0.5, "seconds": 30.0, "images_per_second": rate, "memory_gib": memory}
             for rate, memory in ((10.0, 1.5), (40.0, 2.5), (20.0, 1.0))]  # fmt: skip
    one = logged("one", *lines, machine=machine, world=2, global_batch=64)
    two = logged("two", {"loss": 2.0, "val_top1": 0.5}, {"loss": 3.0})
    tables = {table.title: table for table in Runs([one, two]).details()}
    assert [list(row) for row in tables["Final numbers"].rows] == [["loss", 4.0, 3.0], ["val top1", None, 0.5]]
    cells = {row[0]: list(row)[1:] for row in tables["Machine and speed"].rows}
    assert cells["largest memory"] == ["2.50 GiB", None] and cells["batch"] == [64, None]
    assert cells["time"] == ["0:30", None] and cells["processes"] == [2, None] and cells["device"] == ["H200", None]
    assert "20" in str(cells["images per second (median)"][0]) and "waiting for data (median)" not in cells
    assert "Best numbers" not in tables and "Configs" not in tables
    assert [list(row) for row in tables["Settings"].rows] == [["`method.name`", "mp3"]]
    numbers = Runs([one, two]).numbers()["runs"]
    assert numbers[1]["best"]["loss"] == {"value": 2.0, "step": 1, "epoch": 0.5} and "lr" not in numbers[0]["best"]
    assert numbers[0]["last"] == {"loss": 4.0, "lr": 0.5} and numbers[0]["total_steps"] == 3
