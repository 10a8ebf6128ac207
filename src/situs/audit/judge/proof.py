"""When a closed form that gets little of an image says that nobody gets more: only then may it pass a gate.

A search that finds nothing proves nothing. A closed form proves something where its equations hold for the model, fit
as well as the stated noise and precision predict, and have one solution. Noise hides from the residual that equations
are wrong, and that they have too few directions. So there is a control: the same attack on the first upload as it is
without noise and in float32. What does not hold there is not the defence's doing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from situs.audit.attacks.base import Fact
from situs.audit.attacks.patchembed.equations import FIT

Facts = Sequence[dict[str, Fact]]


def doubt_of(caveat: str | None, facts: Facts, noise: float, control: Callable[[], Facts] | None) -> str | None:
    """Why the result of a closed form proves nothing of privacy; None where it does.

    caveat: why it is not exact here. noise: deviation of the noise that was stated. control: makes the facts of the
    upload without noise and in float32; None where the uploads themselves are such.
    """
    if caveat is not None:
        return f"it is not exact here ({caveat})"
    if wrong := [fact for fact in facts if fact.get("fits") is not True]:
        if wrong[0].get("verdict") and _as_expected(wrong[0]):  # the equations fit, and do not tell the image
            return str(wrong[0]["verdict"])
        return f"its equations do not fit for {len(wrong)} of {len(facts)} images{_residual(wrong[0])}"
    if any(int(_number(fact, "hidden")) > 1 for fact in facts):
        return "the gradients do not say in which order the hidden patches stand, and another order may come closer"
    if control is not None and not all(fact.get("fits") is True and _is_unique(fact) for fact in control()):
        return (
            "its equations do not hold, or have more than one solution, on the same model without noise and in float32"
        )
    if noise == 0 and (loose := [fact for fact in facts if not _is_unique(fact)]):
        return f"its equations have more than one solution for {len(loose)} of {len(facts)} images"
    return None


def _is_unique(fact: dict[str, Fact]) -> bool:
    """Whether a linear system has as many directions as unknowns; where none was solved there is none to miss."""
    return "rank" not in fact or _number(fact, "rank") >= _number(fact, "unknowns")


def _as_expected(fact: dict[str, Fact]) -> bool:
    return "expected_residual" in fact and _number(fact, "residual") <= FIT * _number(fact, "expected_residual")


def _residual(fact: dict[str, Fact]) -> str:
    if "residual" not in fact or "expected_residual" not in fact:
        return ""
    found, expected = _number(fact, "residual"), _number(fact, "expected_residual")
    return f" (residual {found:.2g}, where noise and precision predict {expected:.2g})"


def _number(fact: dict[str, Fact], name: str) -> float:
    value: Any = fact.get(name)
    return float(value or 0)
