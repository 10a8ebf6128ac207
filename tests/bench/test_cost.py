"""The line that operations predict, and the cases along each axis."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from situs.bench import cost
from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Times
from situs.bench.cost import CostConfig, bench_cost, cost_cases
from situs.bench.measure import StepRow
from situs.bench.step import StepTable
from situs.errors import SitusError

SMALL = CostConfig(
    model="vit_tiny_patch16_224", img_size=(16, 24), patch_size=8, batch=2, batches=(4, 2), img_sizes=(16, 32),
    depths=(1, 3), patch_sizes=(8, 4, 5), model_args={"depth": 1, "embed_dim": 12, "num_heads": 3},
)  # fmt: skip


def test_each_axis_changes_one_thing_of_the_reference() -> None:
    reference, axes = cost_cases("mp3:0.5", SMALL)
    assert (reference.img_size, reference.patch_size, reference.model_args["depth"]) == ((16, 24), 8, 1)
    assert {axis: list(cases) for axis, cases in axes.items()} == {
        "batch": [2, 4], "image size": [16, 32], "depth": [1, 3], "patches": [6, 24],
    }  # fmt: skip
    assert axes["batch"][2] == axes["depth"][1] == axes["patches"][6] == reference
    assert axes["batch"][4] == replace(reference, batch=4)
    assert axes["image size"][32] == replace(reference, img_size=(32, 32))
    assert axes["depth"][3] == replace(reference, model_args={**reference.model_args, "depth": 3})
    assert axes["patches"][24] == replace(reference, patch_size=4)


def measured(monkeypatch: pytest.MonkeyPatch, seconds_of: Any, fails: Any = lambda case: False) -> None:
    """Rows made by a rule: operations are batch · depth · 10⁹."""

    def measure(cases: list[StepCase], timing: Timing, *, progress: Any, **_: Any) -> StepTable:
        assert all(cases.count(case) == 1 for case in cases)
        rows, failed = [], []
        for case in cases:
            flops = case.batch * case.model_args["depth"] * 10**9
            times = Times((seconds_of(case, flops),), 1.0)
            told = replace(case, precision="fp32", compile=False, graph=False)
            failed += [(case, "no memory")] if fails(case) else []
            rows += [] if fails(case) else [StepRow(told, times, flops)]
        machine = {"kind": "cpu", "device": "CPU", "torch": "2"}
        table = StepTable(tuple(rows), {"fp32": 1e12}, machine, timing, tuple(failed))
        progress(replace(table, rows=table.rows[1:]), "without the reference")
        progress(table, "with it")
        return table

    monkeypatch.setattr(cost, "measure_cases", measure)


def test_on_a_machine_of_one_rate_every_point_lies_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda case, flops: flops / 4e11)
    kept = []
    found = bench_cost("supervised", SMALL, progress=lambda *told: kept.append(told))
    assert kept == [(None, "without the reference"), (found, "with it")]
    share = found.table.share(found.reference)
    assert share == pytest.approx(0.4)
    for points in found.axes.values():
        for point in points:
            assert found.predicted(point.row) == pytest.approx(point.row.flops / (share * 1e12))
            assert found.over(point.row) == pytest.approx(1.0)


def test_a_cost_that_does_not_shrink_lies_above_the_line_below_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond that every step takes besides: fewer operations a second where there are few, more where many."""
    measured(monkeypatch, lambda case, flops: 1e-3 + flops / 1e12)
    found = bench_cost("supervised", SMALL)
    at = {point.value: found.over(point.row) for point in found.axes["batch"]}
    assert at[2] == pytest.approx(1.0)
    # (1 + 4) ms measured; the reference makes 2 GFLOP in 3 ms, so 4 GFLOP are predicted to take 6.
    assert at[4] == pytest.approx(5 / 6)
    assert "takes from 0.78 times the line at depth 3 to 1.00 times" in found.summary().sentence
    assert found.provenance.left_out == ("patches of 5 pixels do not fill the images and are left out",)


def test_a_point_that_fails_is_told_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda case, flops: 1.0, fails=lambda case: case.batch == 4)
    found = bench_cost("supervised", SMALL)
    assert [point.value for point in found.axes["batch"]] == [2]
    assert any("batch 4: no memory" in note for note in found.summary().notes)
    assert found.to_json()["measures"] == "cost" and len(found.to_json()["axes"]["depth"]) == 2


def test_without_the_reference_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    measured(monkeypatch, lambda case, flops: 1.0, fails=lambda case: case.batch == 2)
    with pytest.raises(SitusError, match="the reference could not be measured: no memory"):
        bench_cost("supervised", SMALL)


def test_a_model_without_patches_is_refused() -> None:
    with pytest.raises(SitusError, match="test_resnet: has no patches of equal sides"):
        bench_cost("supervised", CostConfig(model="test_resnet"))
