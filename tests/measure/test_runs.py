"""Run folders written by hand: finished, going on, broken off, empty and broken ones."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from situs.errors import SitusError
from situs.measure.runs import (
    MAJORITY,
    Runs,
    analyze_runs,
    best,
    curve,
    is_judged,
    last,
    metric_names,
    read_runs,
    short_names,
    speed,
    split_configs,
)
from situs.pages import make_page
from situs.train.checkpoint.files import FORMAT, with_checksum

CONFIG: dict[str, Any] = {
    "method": {"name": "mp3", "mask_ratio": 0.5},
    "data": {"path": "samples", "batch": 8},
    "train": {"epochs": 4, "max_steps": None},
    "init": None,
}
MACHINE = {"device": "NVIDIA H200", "precision": "bf16", "torch": "2.9.0"}


def write_run(
    folder: Path,
    records: list[dict[str, Any]] | str | None,
    config: dict[str, Any] | None = None,
    state: dict[str, Any] | None = None,
) -> Path:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text(with_checksum(config or CONFIG, "config.json"))
    text = ""
    if records is not None:
        text = records if isinstance(records, str) else "".join(json.dumps(record) + "\n" for record in records)
        (folder / "metrics.jsonl").write_text(text)
    if state is not None:
        place = folder / "checkpoints" / f"step-{state['step']:08d}"
        place.mkdir()
        log = {"bytes": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()}
        (place / "state.json").write_text(
            with_checksum({"format": FORMAT, "files": {}, "metrics": log, **state}, "state.json")
        )
    return folder


def records(steps: int, *, every: int = 10, top: float = 0.5) -> list[dict[str, Any]]:
    """A run of 10 steps an epoch whose loss falls and whose accuracy is best in the middle."""
    found: list[dict[str, Any]] = []
    for step in range(every, steps + 1, every):
        loss = {
            "loss": 100 / step,
            "position_accuracy": step / 100,
            "lr": 1e-3 / step,
            "images_per_second": 50.0 + step,
        }
        aside = {"data_wait": 0.25, "memory_gib": 1.0 + step / 100, "seconds": 2.0 * step}
        found.append({"step": step, "epoch": step / 10, **loss, **aside})
        found.append({"step": step, "epoch": step / 10, "val_top1": top - abs(step - 20) / 100})
    return found


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    other = {**CONFIG, "method": {"name": "mp3", "mask_ratio": 0.75}, "train": {"epochs": 4, "max_steps": 30}}
    state = {"step": 40, "total_steps": 40, "global_batch": 8, "world": 2, "machine": MACHINE}
    return [
        write_run(tmp_path / "whole", records(40), state=state),
        write_run(tmp_path / "going", records(20, top=0.75), other),
    ]


def test_how_far_runs_came(runs: list[Path]) -> None:
    whole, going = read_runs(runs)
    assert (whole.name, whole.step, whole.total, whole.finished) == ("whole", 40, 40, True)
    assert whole.status == "finished, 40 steps"
    # No checkpoint yet: the end follows from the config and the steps an epoch has, 30 before 4 epochs of 10.
    assert (going.step, going.total, going.finished) == (20, 30, False)
    assert going.status == "not finished: step 20 of 30 (running or stopped)"
    (runs[1] / "nan").mkdir()
    assert read_runs(runs)[1].status == "ended after step 20: the loss was not finite"
    for folder, step in zip(runs, (25, 24), strict=True):  # the first went on behind that step, and to its end
        (folder / "nan").mkdir(exist_ok=True)
        (folder / "nan" / "state.json").write_text(with_checksum({"format": FORMAT, "step": step}, "state.json"))
    assert [run.stopped for run in read_runs(runs)] == [False, True]
    assert read_runs(runs)[0].status == "finished, 40 steps"
    assert Runs([whole]).summary().tables[0].rows[0] == ["whole", "mp3", "finished, 40 steps", "1:20", 2.5]


def test_a_line_that_is_being_written_is_left_out(runs: list[Path]) -> None:
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 30, "epo')
    assert read_runs(runs)[1].step == 20


def test_curves_and_ends(runs: list[Path]) -> None:
    whole, going = read_runs(runs)
    assert metric_names([whole, going]) == ["loss", "position_accuracy", "val_top1", "lr"]
    assert curve(whole, "val_top1") == ([1.0, 2.0, 3.0, 4.0], [0.4, 0.5, 0.4, 0.3])
    assert curve(whole, "loss", "step") == ([10, 20, 30, 40], [10.0, 5.0, 100 / 30, 2.5])
    assert (last(whole, "val_top1"), best(whole, "val_top1")) == (0.3, (0.5, 20, 2.0))
    assert best(whole, "loss") == (2.5, 40, 4.0)
    assert (last(whole, "nothing"), best(whole, "nothing")) == (None, None)


def test_a_value_that_was_not_finite_is_a_gap(tmp_path: Path) -> None:
    lines = records(30)
    lines[2]["loss"] = None
    (run,) = read_runs([write_run(tmp_path / "gap", lines)])
    assert curve(run, "loss", "step")[0] == [10, 30]


def test_speed_is_of_the_log_and_the_newest_checkpoint(runs: list[Path]) -> None:
    whole, going = read_runs(runs)
    assert speed(whole) == {
        "images_per_second": 75.0, "data_wait": 0.25, "memory_gib": 1.4, "seconds": 80.0, "global_batch": 8,
        "processes": 2, **MACHINE,
    }  # fmt: skip
    assert speed(going)["device"] is None
    torn = runs[0] / "checkpoints" / "step-00000050"
    torn.mkdir()
    (torn / "state.json").write_text("{")
    assert speed(read_runs(runs)[0])["processes"] == 2


def test_configs_are_split_in_what_differs_and_what_is_shared(runs: list[Path]) -> None:
    differing, shared = split_configs(read_runs(runs))
    assert differing == {"method.mask_ratio": [0.5, 0.75], "train.max_steps": [None, 30]}
    assert shared == {
        "method.name": "mp3", "data.path": "samples", "data.batch": 8, "train.epochs": 4, "init": None,
    }  # fmt: skip


def test_a_field_that_one_run_lacks_differs_even_where_it_is_none(tmp_path: Path) -> None:
    bare = {key: value for key, value in CONFIG.items() if key != "init"}
    found = read_runs([write_run(tmp_path / "a", records(10)), write_run(tmp_path / "b", records(10), bare)])
    assert split_configs(found)[0] == {"init": [None, None]}


def test_names_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    assert short_names(folders) == ["a/run", "b/run"]
    assert short_names(folders[:1]) == ["run"]
    for folder in folders:
        write_run(folder, records(10))
    assert [run.name for run in read_runs([*folders, folders[0]])] == ["a/run", "b/run"]


@pytest.mark.parametrize(
    ("name", "judged"),
    [
        ("loss", False), ("lr", False), ("mlp_norm", False), ("val_loss", True), ("val_accuracy", True),
        ("knn", True), ("position_accuracy", True), ("val_knn_accuracy", True), (MAJORITY, False),
    ],
)  # fmt: skip
def test_a_run_is_judged_by_what_it_does_on_held_out_data_and_by_accuracies(name: str, judged: bool) -> None:
    assert is_judged(name) == judged


def test_equal_runs_are_not_best_and_worst_at_once(tmp_path: Path) -> None:
    values = {"a": 0.30001, "b": 0.3, "c": 0.2}
    for name, value in values.items():
        write_run(tmp_path / name, [{"step": 10, "epoch": 1, "val_top1": value}])
    said = [Runs(read_runs([tmp_path / name for name in names])).summary().sentence for names in ("ab", "abc", "cb")]
    assert "Val top1 is 0.3 in each." in said[0] and "best" not in said[0] and "worst" not in said[0]
    assert "Val top1 is best in a, b (0.3) and worst in c (0.2)." in said[1]
    assert "Val top1 is best in b (0.3) and worst in c (0.2)." in said[2]


def test_page_says_what_the_numbers_say(runs: list[Path]) -> None:
    found = read_runs(runs)
    page = make_page(Runs(found))
    text = page.render()
    assert "1 of 2 runs are finished." in text
    assert "Val top1 is best in going (0.75) and worst in whole (0.3)." in text
    assert "not finished: step 20 of 30" in text
    assert "0.5 (epoch 2, step 20)" in text  # the best is not the last
    assert "Fields of the config that are the same in all runs" in text
    assert "<code>data.batch</code>" in text
    assert "NVIDIA H200" in text
    assert list(page.pictures) == ["held-out", "curves"]
    numbers = json.loads(json.dumps(Runs(found).to_json()))
    assert numbers["runs"][0]["last"]["val_top1"] == 0.3
    assert numbers["runs"][0]["best"]["val_top1"] == {"value": 0.5, "step": 20, "epoch": 2.0}
    assert "different methods" not in text


def test_one_run_and_runs_of_different_methods(runs: list[Path], tmp_path: Path) -> None:
    text = make_page(Runs(read_runs(runs[:1]), "step")).render()
    assert "Loss went from 10 to 2.5." in text
    other = write_run(tmp_path / "droppos", records(40), {**CONFIG, "method": {"name": "droppos"}})
    text = make_page(Runs(read_runs([runs[0], other]))).render()
    assert "so their losses cannot be compared" in text
    assert ": 0.4 in whole, 0.4 in droppos." in text


def test_an_added_loss_belongs_to_the_method(tmp_path: Path) -> None:
    records = [{"step": 1, "loss": 1.0}]
    plain = write_run(tmp_path / "plain", records)
    added = write_run(tmp_path / "added", records, {**CONFIG, "added": ["part:weight=0.1"]})
    report = analyze_runs([plain, added])
    assert [run.method for run in report.runs] == ["mp3", "mp3 + part:weight=0.1"]
    assert "use different methods" in make_page(report).render()


def test_an_empty_run_beside_another_is_told(runs: list[Path], tmp_path: Path) -> None:
    empty = write_run(tmp_path / "new", None)
    text = make_page(Runs(read_runs([runs[0], empty]))).render()
    assert "has logged nothing yet" in text


def test_a_log_without_a_finite_number_has_a_page(tmp_path: Path) -> None:
    broken = write_run(tmp_path / "broken", [{"step": 1, "epoch": 0.1, "loss": None}])
    assert not make_page(Runs(read_runs([broken]))).pictures
    with pytest.raises(SitusError) as caught:
        analyze_runs([broken], over="hour")
    assert caught.value.field == "over"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("", "this run has logged nothing yet \\(metrics.jsonl is empty\\)"),
        (None, "this run has logged nothing yet \\(metrics.jsonl is empty\\)"),
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "metrics.jsonl: line 2 is not JSON"),
        ('{"step": 1}\n[1, 2]\n', "metrics.jsonl: line 2 is not the record of a step"),
        ('{"loss": 1}\n', "metrics.jsonl: line 1 is not the record of a step"),
    ],
)
def test_a_broken_or_empty_log_is_one_sentence(tmp_path: Path, lines: str | None, said: str) -> None:
    with pytest.raises(SitusError, match=said) as caught:
        read_runs([write_run(tmp_path / "run", lines)])
    assert "\n" not in str(caught.value)


def test_what_is_no_run_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="is not a run: "):
        read_runs([tmp_path])
    with pytest.raises(SitusError, match="at least one run"):
        read_runs([])
    broken = write_run(tmp_path / "run", records(10))
    (broken / "config.json").write_text("{")
    with pytest.raises(SitusError, match=r"config\.json"):
        read_runs([broken])


def test_a_folder_that_stands_twice_has_its_whole_path(tmp_path: Path) -> None:
    here, there = tmp_path / "a", tmp_path / "b"
    assert short_names([here, there]) == ["a", "b"]
    assert short_names([here, there, tmp_path / "." / "a"]) == [str(here), str(there), str(here)]
