"""The findings' tables and sentences, and what is told from errors that are given: no model is run."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from situs.locks.equivariance import Finding, Verification
from situs.locks.equivariance import findings as made
from situs.locks.equivariance.experiment import Experiment, Part, merged
from situs.locks.equivariance.findings import COVER

ROW = Finding("blocks", "row", "holds", "", {"forward": 1e-15, "backward": 3e-14, "steps": 2e-13}, {"forward": 1e-6})
COLUMN = Finding("blocks", "column", "needs keyed weights", "by the key", {"forward": 4e-12}, {"a": 2e-6, "b": 5e-6})
LEAVES = (
    Finding("blocks.*.norm", "row", "holds", "", {"forward": 1e-16}),
    Finding("blocks.*.norm", "column", "refused", "it does more", {"forward": 0.5}),
    Finding("blocks.*.mlp", "column", "needs keyed weights", "used elsewhere"),
    Finding("blocks.*.act", "row", "refused", "a", {"forward": 0.25}),
    Finding("blocks.*.act", "column", "holds", "b", {"forward": 1e-3}),
)
EMBED = Finding("embed", "column", "refused", "it is clear")
WHOLE = Verification("m", "bfloat16", 1e-10, 5e-2, 2, 0.25, (EMBED, ROW, COLUMN, *LEAVES))


def test_a_row_for_each_finding_around_and_for_each_module_inside() -> None:
    around, inside = WHOLE.summary().tables
    assert around.header == ("part", "law", "verdict", "forward", "backward", "2 steps", "bfloat16", "why")
    assert [*around.rows] == [
        ("embed", "column", "refused", "", "", "", "", "it is clear"),
        ("blocks", "row", "holds", "1e-15", "3e-14", "2e-13", "1e-06", ""),
        ("blocks", "column", "needs keyed weights", "4e-12", "", "", "5e-06", "by the key"),
    ]
    assert [*inside.rows] == [
        ("blocks.*.norm", "holds", "refused", "5e-01", "it does more"),
        ("blocks.*.mlp", "", "needs keyed weights", "", "used elsewhere"),
        ("blocks.*.act", "refused", "holds", "2e-01", "a; b"),
    ]
    inner = replace(COLUMN, part="blocks, heads")
    assert [row[0] for row in replace(WHOLE, findings=(ROW, inner)).summary().tables[0].rows] == [
        "blocks",
        "blocks, heads",
    ]
    assert len(replace(WHOLE, findings=(ROW, COLUMN)).summary().tables) == 1


def test_what_holds_is_counted_and_its_largest_error_named() -> None:
    said = WHOLE.summary()
    assert WHOLE.worst == 1e-3 and "error of all laws that hold is 1.0e-03 (tolerance" in said.sentence
    assert "In bfloat16" in said.sentence and "1e-10" in said.sentence and "5e-02" in said.sentence
    assert said.numbers == (("3 of 8", "checks in which the law holds without keyed weights"),)
    assert (WHOLE.tone, WHOLE.mark) == ("good", "The blocks obey the row law and the column law")
    for gone, laws in (((ROW,), "row law"), ((COLUMN,), "column law"), ((ROW, COLUMN), "row law, column law")):
        left = replace(WHOLE, findings=tuple(each for each in WHOLE.findings if each not in gone))
        assert (left.tone, left.mark) == ("unsure", f"Not shown to hold for the blocks: {laws}")
        refused = [replace(each, status="refused") if each in gone else each for each in WHOLE.findings]
        assert replace(WHOLE, findings=tuple(refused)).mark == left.mark
    numbers = WHOLE.numbers()
    assert "provenance" not in numbers and numbers["worst"] == 1e-3
    assert numbers["findings"][2]["own"] == {"a": 2e-6, "b": 5e-6} and "native" not in numbers["findings"][2]


def part(name: str, row: float | None, column: float | None, turn: int, **more: Any) -> Part:
    return Part(name, "Linear", **{"keyed": False, "moves": False, **more}, row=row, column=column, turn=turn)


def test_of_a_kind_at_all_depths_the_worst_counts() -> None:
    found = merged(
        [
            part("blocks.0.norm", 1e-16, 0.5, 3, moves=True), part("blocks.11.norm", 1e-3, None, 9, keyed=True),
            part("blocks.0.mlp.0", None, None, 1), part("blocks.1.mlp.1", None, 0.25, 2), part("norm2", 0.1, 0.1, 0),
        ]
    )  # fmt: skip
    assert [(each.name, each.row, each.column, each.keyed, each.moves) for each in found] == [
        ("blocks.*.norm", 1e-3, 0.5, True, True), ("blocks.*.mlp.*", None, 0.25, False, False),
        ("norm2", 0.1, 0.1, False, False),
    ]  # fmt: skip


LIMITS = (1e-10, 1e-3)


@pytest.mark.parametrize(
    ("exact", "own", "said"),
    [
        (
            1e-10,
            1.1e-3,
            "the law holds in float64, but in the model's dtype rounding errors grow to 1e-03, above 1e-03",
        ),
        (1.1e-10, 0.0, "the law first fails in late: Linear"),
        (math.nan, 0.0, "the law first fails in late: Linear"),
    ],
)
def test_why_a_law_is_refused(exact: float, own: float, said: str) -> None:
    parts = [part("early", 1e-10, 0.5, 1), part("later", 0.5, 0.0, 3), part("late", math.nan, None, 2)]
    errors = {"forward": 0.0, "backward": exact}, {"forward": own}
    assert made._why(errors, LIMITS, parts, "row") == said
    if exact > 1e-10:
        assert made._why(errors, LIMITS, parts, "column") == "the law first fails in early: Linear"
        assert made._why(errors, LIMITS, parts[1:], "column").endswith("in the operations between the modules")


@pytest.mark.parametrize(
    ("column", "clear", "control", "status", "reason"),
    [
        (1e-10, 0.5, 2e-10, "needs keyed weights", "with unlocked weights the error is 0.5"),
        (1e-10, 1.1e-10, 0.5, "needs keyed weights", "with unlocked weights the error is 1e-10"),
        (1e-10, 1e-10, 0.5, "holds", "even with unlocked weights"),
        (
            0.0,
            0.5,
            1e-10,
            "refused",
            "a key that leaves one axis of a tensor unpermuted also passes the test, so the test proves nothing",
        ),
        (0.0, 0.5, None, "refused", "there is no negative control, so the test proves nothing"),
        (
            1.1e-10,
            0.5,
            0.5,
            "refused",
            "the law holds in each tested module, but fails in the operations between the modules",
        ),
    ],
)
def test_the_verdict_on_columns_at_its_bounds(
    column: float, clear: float, control: float | None, status: str, reason: str
) -> None:
    measured: Any = {"column": ({"forward": column}, {}), "unkeyed": ({"forward": clear}, {})}
    found = made._columns(measured, control, "", [], LIMITS)
    assert (found.part, found.law, found.status, found.reason) == ("blocks", "column", status, reason)
    assert found.errors == {"forward": column}


def test_inner_groups_are_cover_or_have_nothing_to_move_or_belong_to_a_rotation() -> None:
    def group(kind: str) -> Any:
        return SimpleNamespace(kind=kind, size=1)

    measured: Any = {"hidden": ({"f": 1e-10}, {"f": 1e-3}), "heads": ({"f": 0.0}, {"f": 1.1e-3})}
    found = made._inner([group("value"), group("hidden")], measured, LIMITS)
    assert [(each.part, each.status) for each in found] == [
        ("blocks, MLP units", "needs keyed weights"), ("blocks, heads", "refused"),
        ("blocks, value channels", "holds"), ("blocks, query and key channels", "refused"),
    ]  # fmt: skip
    assert (
        found[0].reason == COVER
        and "permutation changes what" in found[1].reason
        and "only one entry" in found[2].reason
    )
    assert "RoPE" in found[3].reason and made._inner([], {}, LIMITS) == []
    assert [each.part for each in made._inner([group("query")], {}, LIMITS)] == ["blocks, query and key channels"]
    assert made._inner([group("query")], {}, LIMITS)[0].status == "holds"


@pytest.mark.parametrize(
    ("column", "keyed", "moves", "status", "reason"),
    [
        (None, True, False, "needs keyed weights", "its weights are used by another module"),
        (1e-10, True, True, "needs keyed weights", "its output is permuted by the key"),
        (1e-10, False, True, "holds", "its output is permuted by the key"),
        (0.0, True, False, "needs keyed weights", "reads permuted channels, but its output is unchanged"),
        (0.0, False, False, "holds", "sees no key"),
        (1.1e-10, True, True, "refused", "Linear: the key does more than permute its output"),
        (math.nan, False, False, "refused", "Linear: the key does more than permute its output"),
    ],
)
def test_the_verdict_on_a_module(column: float | None, keyed: bool, moves: bool, status: str, reason: str) -> None:
    one = part("blocks.0.x", None, column, 0, keyed=keyed, moves=moves)
    (found,) = made._inside([one], columns=True)
    assert (found.status, found.reason) == (status, reason) and made._inside([one], columns=False) == []
    for row, good in ((1e-10, True), (1.1e-10, False), (math.nan, False)):
        (rows,) = made._inside([replace(one, row=row)], columns=False)
        assert (rows.status == "holds", rows.reason == "") == (good, good) and rows.law == "row"


@pytest.mark.parametrize(
    ("dtype", "own"), [(torch.float64, 1e-10), (torch.float32, 1e-3), (torch.bfloat16, 5e-2), (torch.complex64, 5e-2)]
)
def test_the_tolerance_is_that_of_the_models_dtype(dtype: torch.dtype, own: float) -> None:
    assert made._tolerances(dtype) == (1e-10, own)


def test_padding_is_compared_only_where_prefix_tokens_leave_no_mask_of_it() -> None:
    experiment = object.__new__(Experiment)
    one = torch.tensor([[[1.0], [2.0]], [[4.0], [8.0]]])
    other = one.clone()
    other[0, 1] = 5.0  # beyond the end of the first text
    mask = torch.tensor([[True, False], [True, True]])
    for given, prefix, error in ((mask, 0, 0.0), (None, 0, 3 / 8), (mask, 1, 3 / 8)):
        experiment.sample, experiment.backbone = SimpleNamespace(mask=given), SimpleNamespace(num_prefix=prefix)  # type: ignore[assignment]  # pyright: ignore[reportAttributeAccessIssue]
        assert experiment._error(one, other) == error
