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
    assert found.summary().sentence.startswith("after against before, 2 cases: 2 same.")
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


def test_the_sentence_counts_the_verdicts_and_the_page_shows_the_first_pairs() -> None:
    times = [(10, 11, 12), (1, 2, 3), (10, 11, 12), (10, 11, 12), (4, 5), (10, 11, 12)]
    after = [(8, 9, 9.5), (7, 8, 9), (10, 11, 12), (5, 6, 7), (4, 5), (5, 5.5, 6)]
    one, two = (table(*(row(*ms, batch=at + 1) for at, ms in enumerate(each))) for each in (times, after))
    found = compare_steps(one, two)
    said = found.summary()
    assert said.sentence.startswith("after against before, 6 cases: 3 faster, 1 slower, 1 same, 1 undecided. A case")
    assert said.numbers == (("0.82 ×", "time of a step, mp3"),)
    assert [note for note in said.notes if "fewer than 3 repeats" in note]
    assert [figure.values[0] for figure in found.figures()] == [
        pytest.approx({"before": b, "after": a}) for b, a in ((11, 9), (2, 8), (11, 11), (11, 6))
    ]
    assert found.title == "Steps of before and after"


def test_other_differences_stand_first_and_differences_of_software_are_told_apart() -> None:
    one, two = table(row(1, 1, 1)), table(row(2, 2, 2), torch="2.14")
    said = compare_steps(one, two).summary()
    assert [list(each) for each in said.tables[0].rows] == [["machine: torch", "2.11", "2.14"]]
    assert said.notes == (
        "The code is not the only difference between the two measurements: see the table of other differences.",
    )
    for name in ("cores", "threads"):
        assert f"different machines ({name})" in compare_steps(one, table(row(2, 2, 2), **{name: 4})).summary().notes[0]
    listed = compare_steps(one, table(row(2, 2, 2), extra=[1, 2], cores=None)).summary().tables[0]
    assert [list(each) for each in listed.rows] == [["machine: cores", 16, None], ["machine: extra", None, "[1, 2]"]]


def test_what_both_tables_have_twice_is_compared_only_where_it_is_alike() -> None:
    """Two rows of the same work on one side, one on the other that is neither of them."""
    twice = table(row(1, 1, 1, precision="fp32"), row(2, 2, 2, precision="bf16"))
    with pytest.raises(SitusError, match="no case in common"):
        compare_steps(table(row(1, 1, 1, precision="fp16")), twice)
    found = compare_steps(table(row(4, 4, 4, precision="fp16")), table(row(1, 1, 1, precision="fp32")))
    assert found.pairs[0].ratio == 0.25 and found.differs == {"cases: precision": ("fp16", "fp32")}
