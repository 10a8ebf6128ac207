"""When a closed form proves something: each reason against it by itself, in the order they are asked."""

from __future__ import annotations

from typing import Any

import pytest

from situs.audit.judge.proof import doubt_of

FITS = {"fits": True, "rank": 4, "unknowns": 4, "residual": 1e-7, "expected_residual": 1e-7}
WRONG = {**FITS, "fits": False, "residual": 0.28}
LOOSE = {**FITS, "rank": 3}


def never() -> list[dict[str, Any]]:
    raise AssertionError("the control is made only where all else is well")


@pytest.mark.parametrize(
    ("facts", "noise", "control", "doubt"),
    [
        ([FITS, FITS], 0.0, None, None),
        ([FITS], 1e-3, [FITS], None),
        ([FITS], 0.0, [FITS], None),  # precision alone
        ([LOOSE], 1e-3, [FITS], None),  # noise drowned what is there without it
        ([{"fits": True}], 0.0, None, None),  # no linear system
        ([{**FITS, "hidden": 1}], 0.0, None, None),
        ([{**FITS, "hidden": None}], 0.0, None, None),
        ([FITS, LOOSE], 0.0, None, "its equations have more than one solution for 1 of 2 images"),
        ([LOOSE], 0.0, [FITS], "its equations have more than one solution for 1 of 1 images"),
        (
            [FITS, WRONG],
            1e-3,
            never,
            "its equations do not fit for 1 of 2 images (residual 0.28, where noise and precision predict 1e-07)",
        ),
        (
            [{**WRONG, "verdict": "up to gain"}],
            0.0,
            None,
            "its equations do not fit for 1 of 1 images (residual 0.28, where noise and precision predict 1e-07)",
        ),
        ([{**WRONG, "residual": 1e-7, "verdict": "solved up to gain"}], 0.0, None, "solved up to gain"),
        ([{"rank": 4, "unknowns": 4}], 0.0, None, "its equations do not fit for 1 of 1 images"),
        ([{"fits": "yes"}], 0.0, None, "its equations do not fit for 1 of 1 images"),
        (
            [{**FITS, "hidden": 2}],
            0.0,
            never,
            "the gradients do not say in which order the hidden patches stand, and another order may come closer",
        ),
        (
            [FITS],
            1e-3,
            [WRONG],
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32",
        ),
        (
            [LOOSE],
            1e-3,
            [LOOSE],
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32",
        ),
    ],
)
def test_doubts(facts: list[dict[str, Any]], noise: float, control: Any, doubt: str | None) -> None:
    made = control if control is None or callable(control) else lambda: control
    assert doubt_of(None, facts, noise, made) == doubt


def test_a_caveat_is_a_doubt_whatever_fits() -> None:
    assert doubt_of("a batch of 2", [FITS], 0.0, never) == "it is not exact here (a batch of 2)"
