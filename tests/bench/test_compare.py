"""Two tables beside each other: changed only beyond the spread, and nothing compared that does not compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from situs.bench.cases import StepCase, Timing
from situs.bench.clock import Times
from situs.bench.compare import compare_steps
from situs.bench.measure import StepRow
from situs.bench.step import StepTable
from situs.errors import SitusError

MACHINE = {"kind": "cuda", "device": "H200", "torch": "2.11", "cores": 16}


def row(*ms: float, gib: float | None = None, **case: Any) -> StepRow:
    told = {"method": "mp3", "precision": "bf16", **case}
    return StepRow(StepCase(**told), Times(tuple(each / 1e3 for each in ms), 1.0, gib), 10**9)


def table(*rows: StepRow, **machine: Any) -> StepTable:
    return StepTable(rows, {"bf16": 1e14}, MACHINE | machine, Timing(repeats=3))


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        ((10, 11, 12), (8, 9, 9.9), "faster"),
        ((10, 11, 12), (8, 9, 10), "same"),  # the slowest of one is as fast as the fastest of the other
        ((10, 11, 12), (5, 6, 30), "same"),
        ((10, 11, 12), (12.1, 13, 14), "slower"),
        ((10, 11, 12), (12, 13, 14), "same"),
        ((10, 11), (1, 2, 3), "undecided"),
        ((10,), (1,), "undecided"),
    ],
)
def test_a_row_has_changed_only_beyond_the_spread(before: Any, after: Any, verdict: str) -> None:
    [pair] = compare_steps(table(row(*before)), table(row(*after))).pairs
    assert pair.verdict == verdict
    back = {"faster": "slower", "slower": "faster"}
    assert compare_steps(table(row(*after)), table(row(*before))).pairs[0].verdict == back.get(verdict, verdict)


def test_the_ratio_is_that_of_the_medians() -> None:
    found = compare_steps(table(row(10, 12, 11, gib=4.0)), table(row(5, 5.5, 6, gib=3.0)))
    assert found.pairs[0].ratio == pytest.approx(0.5)
    assert found.summary().sentence.startswith("after against before, one case: 1 faster.")
    [made] = found.summary().tables
    assert list(made.rows[0])[3:] == ["11.00", "5.50", "0.500", "faster", "4.00", "3.00"]
    assert found.to_json()["pairs"][0]["ms"] == pytest.approx([11.0, 5.5])
    assert found.differs == {} and found.summary().notes == ()


def test_what_differs_in_machine_versions_and_settings_is_said() -> None:
    one = table(row(1, 1, 1), row(1, 1, 1, batch=8))
    two = replace(table(row(2, 2, 2, graph=False), device="A100", torch="2.14"), timing=Timing(repeats=3, steps=5))
    found = compare_steps(one, two)
    assert found.differs == {
        "machine: device": ("H200", "A100"),
        "machine: torch": ("2.11", "2.14"),
        "timing: steps": (20, 5),
        "cases: graph": ("True", "False"),
    }
    notes = found.summary().notes
    different = "The two tables come from different machines (device)"
    assert notes[0] == f"{different}, so the ratios do not show the effect of the code alone."
    assert notes[1:] == ("only in before: mp3, vit_base_patch16_224, batch 8",)
    json.dumps(found.to_json())


def test_cases_meet_those_of_the_same_means_where_there_are_several() -> None:
    graphs = [row(1, 1, 1), row(4, 4, 4, graph=False)]
    found = compare_steps(table(*graphs), table(*graphs[::-1]))
    assert [pair.ratio for pair in found.pairs] == [1.0, 1.0]
    assert compare_steps(table(*graphs), table(graphs[0])).alone == ("before: mp3, vit_base_patch16_224, batch 256",)
    with pytest.raises(SitusError, match="have no case in common"):  # which of the two would it be?
        compare_steps(table(*graphs), table(row(1, 1, 1, precision="fp16")))


def test_what_does_not_compare_is_one_sentence() -> None:
    one = table(row(1, 1, 1))
    with pytest.raises(SitusError, match="before was measured on cuda, but after on cpu"):
        compare_steps(one, table(row(1, 1, 1), kind="cpu"))
    for other in (dict(batch=8), dict(img_size=32), dict(settings={"mask_ratio": 0.5}), dict(model_args={"depth": 1})):
        with pytest.raises(SitusError, match="before and after have no case in common"):
            compare_steps(one, table(row(1, 1, 1, **other)))


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (("a.json", "b.json"), ("a", "b")),
        (("one/step.json", "two/step.json"), ("one", "two")),
        (("x/one/step.json", "y/one/step.json"), ("x/one/step.json", "y/one/step.json")),
    ],
)
def test_files_have_short_names(
    paths: tuple[str, str], names: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(table(row(1, 2, 3)).to_json()))
    assert compare_steps(*paths).names == names
