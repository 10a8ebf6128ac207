"""Rules for values beside their type, as in `Annotated[float, Within("[0, 1)")]`.

`situs.config.Checked` checks a config's fields; `check_value` checks an argument that is in no config.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

from situs.errors import SitusError


class Rule(NamedTuple):
    """allowed: what a value must be, in words. holds: whether it is. Used in `Annotated[type, rule]`."""

    allowed: str
    holds: Callable[[Any], bool]


def Within(ends: str) -> Rule:  # noqa: N802  (an annotation of a type)
    """A number's limits: "[0, 1)", "(0, 1]", "> 0", ">= 1", "< 2". A NaN is never within."""
    if ends[0] in "[(":
        low, high = map(float, ends[1:-1].split(","))
        above, below = _ORDER[">=" if ends[0] == "[" else ">"], _ORDER["<=" if ends[-1] == "]" else "<"]
        return Rule(f"in {ends}", lambda value: above(value, low) and below(value, high))
    sign, end = ends.split()
    return Rule(ends, lambda value: _ORDER[sign](value, float(end)))


_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}

Share = Annotated[float, Within("[0, 1]")]
Count = Annotated[int, Within(">= 1")]
Natural = Annotated[int, Within(">= 0")]
Positive = Annotated[float, Within("> 0")]
NotNegative = Annotated[float, Within(">= 0")]


def check_value(name: str, value: float, ends: str) -> None:
    """Raises `ratio=1.2: must be in [0, 1)` unless an argument is within the limits."""
    rule = Within(ends)
    if not rule.holds(value):
        raise SitusError(field=name, value=value, allowed=rule.allowed)


def check_values(name: str, values: Sequence[float], ends: str) -> None:
    """The same for several numbers, at least one."""
    for value in values:
        check_value(name, value, ends)
    if not values:
        raise SitusError(field=name, value=values, allowed="one number or more")
