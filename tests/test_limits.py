"""Limits of numbers, as they are written and as they are said."""

from __future__ import annotations

import math

import pytest

from situs.errors import SitusError
from situs.limits import Within, check_value, check_values


@pytest.mark.parametrize(
    ("value", "ends", "allowed"),
    [
        (1.2, "[0, 1)", "in [0, 1)"),
        (1, "[0, 1)", "in [0, 1)"),
        (0, "(0, 1]", "in (0, 1]"),
        (math.nan, "[0, 1]", "in [0, 1]"),
        (0, ">= 1", ">= 1"),
        (0, "> 0", "> 0"),
        (3, "<= 2", "<= 2"),
        (2, "< 2", "< 2"),
    ],
)
def test_what_is_outside_is_refused(value: float, ends: str, allowed: str) -> None:
    with pytest.raises(SitusError) as caught:
        check_value("mask_ratio", value, ends)
    assert str(caught.value) == f"mask_ratio={value}: must be {allowed}"
    assert (caught.value.field, caught.value.allowed) == ("mask_ratio", allowed)


def test_of_several_each_is_checked_and_there_must_be_one() -> None:
    check_values("ratios", (0.0, 0.5), "[0, 1)")
    for values, said in (((0.5, 1.2), "ratios=1.2: must be in [0, 1)"), ((), "ratios=(): must be one number or more")):
        with pytest.raises(SitusError) as caught:
            check_values("ratios", values, "[0, 1)")
        assert str(caught.value) == said


def test_ends_that_belong_to_it() -> None:
    for value, ends in ((0, "[0, 1]"), (1, "[0, 1]"), (0.999, "[0, 1)"), (5, ">= 5"), (-3, "(-4, -2)")):
        assert Within(ends).holds(value)
        check_value("x", value, ends)
