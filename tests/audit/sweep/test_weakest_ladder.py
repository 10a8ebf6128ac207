"""Climbing a ladder: the same as trying every rung from below, with few trials."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from situs.audit.sweep.ladder import Answer
from situs.audit.sweep.weakest import Climbed, climb

Ladder = list[Answer]


@given(above=st.integers(0, 30), open_=st.integers(0, 10), passed=st.integers(0, 30))
def test_it_finds_the_weakest_rung_that_passes_and_asks_each_once(above: int, open_: int, passed: int) -> None:
    ladder: Ladder = ["above"] * above + ["inconclusive"] * open_ + ["passed"] * passed
    if not ladder:
        return
    asked: list[int] = []

    def ask(rung: int) -> Answer:
        asked.append(rung)
        return ladder[rung]

    found = climb(len(ladder), ask)
    assert found.first_kept == next((i for i, said in enumerate(ladder) if said != "above"), None)
    assert found.named == next((i for i, said in enumerate(ladder) if said == "passed"), None)
    assert len(asked) == len(set(asked)) <= 2 * len(ladder).bit_length() + 2
    if found.named:
        assert {found.named, found.named - 1} <= {*asked}  # the rung below was tried too


def test_nothing_that_is_not_judged_is_ever_named() -> None:
    assert climb(3, lambda rung: "inconclusive") == Climbed(0, None)
    assert climb(4, lambda rung: ("above", "above", "inconclusive", "inconclusive")[rung]) == Climbed(2, None)
    assert climb(1, lambda rung: "passed") == Climbed(0, 0)
    assert climb(3, lambda rung: "above") == Climbed(None, None)


def test_a_rung_that_passed_on_the_way_is_not_lost_where_the_strongest_is_not_judged() -> None:
    ladder: Ladder = ["above", "passed", "passed", "passed", "inconclusive"]
    found = climb(5, ladder.__getitem__)
    assert found.first_kept == 1 and found.named is not None and ladder[found.named] == "passed"
