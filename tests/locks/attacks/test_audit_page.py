"""The page of attacks on a lock: every attacker in its row, and the line of those whose base drifted alone."""

from __future__ import annotations

from typing import Any

import pytest

from situs.locks.attacks import LockAudit
from situs.locks.attacks.recovery import KeyRecovery
from situs.pages import make_page
from situs.report import figures


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, undrawn: None) -> list[dict[str, Any]]:
    """The lines of every figure of curves that is made."""
    found: list[dict[str, Any]] = []
    made = figures.curves

    def curves(lines: Any, *labels: str, **fields: Any) -> Any:
        found.append(lines)
        return made(lines, *labels, **fields)

    monkeypatch.setattr(figures, "curves", curves)
    return found


def attack(name: str, right: int | None) -> KeyRecovery:
    return KeyRecovery(name, 8, right, 0.5, "a cost")


def test_the_line_has_the_bases_that_drifted_and_were_judged(drawn: list[dict[str, Any]]) -> None:
    blind = [attack("blind", 1), attack("base", 8)]
    drifted = [attack("drifted-base, 0.01 ×", 8), attack("drifted-base, 0.5 ×", 6)]  # two make a line
    text = make_page(LockAudit("m", (8,), 0, (*blind, *drifted, attack("drifted-base, 4 ×", None)))).render()
    assert drawn == [{"key recovered": ([0.01, 0.5], [100.0, 75.0])}]
    assert all(f"<td>{each.attacker}</td>" in text for each in (*blind, *drifted))


@pytest.mark.parametrize("more", [[], [attack("drifted-base, 1 ×", 4)], [attack("drifted-base, 1 ×", None)] * 2])
def test_one_point_makes_no_line(more: list[KeyRecovery], drawn: list[dict[str, Any]]) -> None:
    text = make_page(LockAudit("m", (8,), 0, (attack("blind", 1), attack("base", 8), *more))).render()
    assert drawn == [] and "base that drifted" not in text
