"""How numbers are written for people, on pages and in the terminal alike."""

from __future__ import annotations

from typing import SupportsFloat


def percent(share: SupportsFloat, digits: int | None = 1) -> str:
    """A share as "65.6 %", the unit apart from its number (SI). digits: behind the point; None: as many as it has.

    >>> percent(0.656), percent(0.9, 0), percent(0.125, None)
    ('65.6 %', '90 %', '12.5 %')
    """
    value = 100 * float(share)
    return f"{value:g} %" if digits is None else f"{value:.{digits}f} %"
