"""The table of steps: what it says, what it keeps, and that a case that fails loses no other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.bench import step
from situs.bench.cases import StepCase, StepConfig, Timing
from situs.bench.clock import Kernels, Times
from situs.bench.measure import StepRow
from situs.bench.step import StepTable, bench_step, describe_machine, read_steps
from situs.errors import SitusError

KERNELS = Kernels(7.5, {"matmul": 6.0, "other": 2.0}, {"gemm": 6.0, "odd": 2.0}, 12.0, {"matmul": 9.0, "other": 3.0})
MACHINE = {"kind": "cuda", "device": "H200", "torch": "2.11"}


def table(*seconds: float, **case: Any) -> StepTable:
    row = StepRow(
        StepCase(method="mp3", precision="bf16", batch=64, **case), Times(seconds, 30.0, 1.5, KERNELS), 4 * 10**12
    )
    return StepTable((row,), {"bf16": 8e14}, MACHINE, Timing(repeats=len(seconds)))


def test_the_row_says_rate_share_and_busy() -> None:
    found = table(0.010, 0.012, 0.011)
    [made] = found.summary().tables
    assert dict(zip(made.header, made.rows[0], strict=True)) == {
        "case": "mp3", "model": "vit_base_patch16_224", "batch": 64, "ms": "11.00", "±": "1.00", "img/s": "5,818",
        "steps/s": "90.9", "GiB": "1.50", "of ceiling": "45.5 %", "busy": "68.2 %", "first step s": "30.0",
    }  # fmt: skip
    assert "bf16 800 TFLOP/s. mp3 comes closest" in found.summary().sentence and "45.5 %" in found.summary().sentence
    assert found.summary().notes == ()


def test_kernels_are_shown_where_they_are_asked_for() -> None:
    kernels, _ = replace(table(0.010), profile=True).summary().tables
    assert kernels.title.endswith("batch 64: 12 kernels in a step")
    assert [list(row) for row in kernels.rows] == [
        ["matmul", "6.000", "9"], ["other", "2.000", "3"], ["  gemm", "6.000", None], ["  odd", "2.000", None],
        ["union", "7.500", "12"],
    ]  # fmt: skip


def test_json_gives_the_same_table_back(tmp_path: Path) -> None:
    found = replace(table(0.010, 0.012), failed=((StepCase(method="mae"), "no memory"),))
    (tmp_path / "step.json").write_text(json.dumps(found.to_json()))
    assert read_steps(tmp_path / "step.json") == found
    assert replace(found, rows=()).summary().sentence == "No case could be measured."
    assert found.to_json()["rows"][0]["ceiling_share"] == pytest.approx(4e12 / 0.011 / 8e14)


@pytest.mark.parametrize("text", ['{"measures": "cost"}', "{}", '{"measures": "step", "rows": [{}]}'])
def test_a_file_that_is_no_table_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(SitusError, match=r"a.json: .*table of steps"):
        read_steps(tmp_path / "a.json")


@pytest.mark.parametrize("damage", [{"machine": {}}, {"machine": {"kind": "cpu"}}, [], [0.0], [0.1, -0.1]], ids=str)
def test_a_table_that_lacks_something_is_one_sentence(damage: Any, tmp_path: Path) -> None:
    """A part of it, or the times of a row."""
    held = table(0.010, 0.012).to_json()
    held |= {"rows": [{**held["rows"][0], "seconds": damage}]} if isinstance(damage, list) else damage
    (tmp_path / "a.json").write_text(json.dumps(held))
    with pytest.raises(SitusError, match=r"a.json: the table of steps is damaged"):
        read_steps(tmp_path / "a.json")


def test_a_case_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(case: StepCase, timing: Timing, device: Any) -> StepRow:
        if case.method == "mae":
            raise RuntimeError("CUDA out of\n memory")
        return StepRow(replace(case, precision="fp32", compile=False, graph=False), Times((0.5,), 1.0), 10**9)

    kept = []
    monkeypatch.setattr(step, "measure_case", measure)
    monkeypatch.setattr(step, "measure_ceiling", lambda *_: 1e10)
    monkeypatch.setattr(step, "measure_at_once", None)  # nobody asked for processes
    found = bench_step(
        ["mp3", "mae", "mjp"], StepConfig(batches=(8,)), device="cpu", progress=lambda *told: kept.append(told)
    )
    assert [row.case.method for row in found.rows] == ["mp3", "mjp"]
    assert [why for _, why in found.failed] == ["RuntimeError: CUDA out of memory"]
    assert [len(each.rows) + len(each.failed) for each, _ in kept] == [1, 2, 3]
    assert kept[0][1] == "mp3, vit_base_patch16_224, batch 8: 500.00 ms, 16 img/s"
    assert found.share(found.rows[0]) == pytest.approx(0.2)
    assert any("Busy share: not measured (there is no GPU)" in note for note in found.summary().notes)
    assert found.summary().notes[0].startswith("failed: mae, vit_base_patch16_224, batch 8: RuntimeError")


def test_rows_stand_in_the_order_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def backwards(cases: list[StepCase], timing: Timing, device: Any, ceilings: dict[str, float]) -> Any:
        ceilings["fp32"] = 1e10
        for number, case in [*enumerate(cases)][::-1]:
            yield number, StepRow(replace(case, precision="fp32", compile=False, graph=False), Times((0.5,), 1.0), 1)

    monkeypatch.setattr(step, "measure_at_once", backwards)
    found = bench_step(["mp3", "mae", "mjp"], device="cpu", at_once=True)
    assert [row.case.method for row in found.rows] == ["mp3", "mae", "mjp"]


def test_a_machine_is_described_by_device_and_versions() -> None:
    machine = describe_machine(torch.device("cpu"))
    assert machine["kind"] == "cpu" and machine["device"].startswith("CPU, ")
    assert machine["torch"] == torch.__version__.partition("+")[0] or machine["torch"] == torch.__version__
    assert machine["cuda"] is None and machine["cores"] >= 1


def many(*shares: float, **case: Any) -> StepTable:
    """Rows of one second each that come to these shares of the ceiling, in batches of 1, 2, 3, …"""
    rows = tuple(
        StepRow(StepCase(method="mp3", precision="bf16", batch=at + 1, **case), Times((1.0,), 9.0), int(share * 1e12))
        for at, share in enumerate(shares)
    )
    return StepTable(rows, {"bf16": 1e12, "fp32": 2.5e12}, {**MACHINE, "kind": "cpu"}, Timing(repeats=1, steps=7))


def test_the_sentence_names_the_ceilings_and_who_comes_closest() -> None:
    found = many(0.25, 0.5, 0.125)
    said = found.summary().sentence
    assert said.startswith(
        "3 cases. The ceiling is the speed of large matrix products on this machine: bf16 1, fp32 2.5 "
    )
    assert said.endswith("TFLOP/s. mp3 comes closest: it reaches 50.0 % of the ceiling.")
    assert many(0.25).summary().sentence.startswith("One case. ")
    assert many(0.25, 0.5).summary().sentence.startswith("2 cases. ")
    assert replace(found, ceilings={}).summary().sentence.endswith("TFLOP/s.")
    assert found.summary().numbers == (("3", "samples per second, mp3"),)  # of the largest batch
    assert replace(found, rows=()).summary().numbers == ()
    assert found.heading() == "H200, torch 2.11: medians of 1 repeats of 7 steps, ± half their spread"
    (bars,) = found.figures()
    assert bars.values == ({f"mp3, batch {batch}": 1000.0 for batch in (1, 2, 3)}, "ms")


@pytest.mark.parametrize(
    ("batch", "seconds", "rate"), [(99, 1.0, "99.00"), (100, 1.0, "100"), (1, 3.0, "0.33"), (5000, 1.0, "5,000")]
)
def test_rates_below_a_hundred_have_digits(batch: int, seconds: float, rate: str) -> None:
    row = StepRow(StepCase(method="mp3", precision="bf16", batch=batch), Times((seconds,), 1.0), 10**9)
    [table] = StepTable((row,), {}, MACHINE, Timing()).summary().tables
    assert dict(zip(table.header, table.rows[0], strict=True))["img/s"] == rate
    assert dict(zip(table.header, table.rows[0], strict=True))["of ceiling"] is None


def test_what_each_case_said_stands_in_the_notes() -> None:
    row = StepRow(StepCase(method="mp3", batch=4), Times((1.0,), 1.0), 1, ("one", "two"))
    found = StepTable((row,), {}, MACHINE, Timing())
    assert found.summary().notes == ("mp3, batch 4: one", "mp3, batch 4: two", "Busy share: not measured.")


def test_long_names_of_kernels_and_long_errors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = KERNELS._replace(top={"k" * 91: 1.0}, kinds={"matmul": 6.0}, counts={}, launches=1234.0)
    row = replace(table(0.010).rows[0], times=Times((0.01,), 1.0, 1.5, kernels))
    unprofiled = replace(row, times=Times((0.01,), 1.0, 1.5))
    shown, _ = replace(table(0.010), rows=(unprofiled, row), profile=True).summary().tables
    assert [list(each) for each in shown.rows] == [
        ["matmul", "6.000", None], ["  " + "k" * 90, "1.000", None], ["union", "7.500", "1,234"],
    ]  # fmt: skip
    told = []
    for error in (RuntimeError("x" * 301), SitusError("y" * 301), ValueError()):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        monkeypatch.setattr(step, "measure_case", fail)
        told.append(bench_step(["mp3"], device="cpu").failed[0][1])
    assert told == ["RuntimeError: " + "x" * 300, "y" * 301, "ValueError: ValueError"]


def test_the_ceiling_is_measured_once_for_each_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, float]] = []

    def measure(case: StepCase, *_: Any) -> StepRow:
        return StepRow(replace(case, precision=case.precision or "fp32"), Times((0.5,), 1.0), 10**9)

    monkeypatch.setattr(step, "measure_case", measure)
    monkeypatch.setattr(
        step, "measure_ceiling", lambda _, precision, seconds: asked.append((precision, seconds)) or 1e10
    )
    found = bench_step(["mp3", "mae", "mjp:precision=bf16"], device="cpu")
    assert asked == [("fp32", 0.2), ("bf16", 0.2)] and found.ceilings == {"fp32": 1e10, "bf16": 1e10}
    rows = step.measure_in_turn([StepCase()], Timing(), torch.device("cuda"), {})
    assert [row.case.method for _, row in rows if isinstance(row, StepRow)] == ["supervised"]
    assert asked[2:] == [("fp32", 1.0)]  # a GPU needs longer


def test_a_wrong_field_of_a_table_is_named_with_its_file(tmp_path: Path) -> None:
    damaged = table(0.010).to_json()
    damaged["timing"]["steps"] = "many"
    (tmp_path / "step.json").write_text(json.dumps(damaged))
    with pytest.raises(SitusError, match=rf"^{tmp_path / 'step.json'}: steps='many': must be") as caught:
        read_steps(tmp_path / "step.json")
    assert caught.value.field == "steps"


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step, "PACKAGES", ("torch", "no-such-package-of-anybody"))
    facts = step.describe_machine(torch.device("cpu"))
    assert facts["no-such-package-of-anybody"] is None and facts["torch"].startswith(torch.__version__.split("+")[0])
    assert facts["device"].startswith("CPU, ") and facts["cuda"] is None
    assert step.describe_machine(torch.device("meta"))["device"] == "meta"
