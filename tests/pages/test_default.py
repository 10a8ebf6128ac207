"""The page of any result: what stands on its first screen, and under which heading each table and figure goes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from kinds import RESULTS

from situs.pages import PAGES, make_page
from situs.results import Figure, Provenance, Result, Summary, Table


@pytest.mark.parametrize("name", sorted({*RESULTS} - {*PAGES}))
def test_the_first_screen_has_the_verdict_and_the_numbers_of_the_summary(name: str, undrawn: None) -> None:
    result = RESULTS[name][0]()
    page, said = make_page(result), result.summary()
    assert [*page.numbers] == [(value, of) for value, of in said.numbers]
    assert (page.title, page.tone or None, page.mark) == (result.title, result.tone, result.mark if result.tone else "")
    assert page.opening.blocks == [] or len(page.opening.blocks) == 1
    assert bool(page.opening.blocks) == bool(result.figures())


@dataclass(frozen=True)
class Made(Result):
    """A result of our own."""

    file: ClassVar[str] = "made"
    meaning: ClassVar[str] = "What it means."
    drawn: tuple[Figure, ...] = ()

    def summary(self) -> Summary:
        tables = (
            Table("First", ["a"], [["1"]]),
            Table("Curves", ["b"], [["2"]], "of curves"),
            Table("Last", ["c"], [["3"]]),
        )
        return Summary("It is so.", tables, ("a note",))

    def details(self) -> list[Table]:
        return [Table("Curves", ["d"], [["4"]], "more"), Table("Parts", ["e"], [["5"]])]

    def figures(self) -> tuple[Figure, ...]:
        return self.drawn

    def numbers(self) -> dict[str, Any]:
        return {}


def test_tables_and_figures_of_a_heading_stand_together(undrawn: None) -> None:
    curve: Any = ({"l": ([1, 2], [3, 4])}, "x", "y")
    drawn = (
        Figure("first", "the opening", "figures.curves", curve), Figure("", "as bars", "bars", ({"a": 1.0}, "%")),
        Figure("more", "below", "figures.curves", curve, {"y_limits": (0, 1)}, "Curves"),
    )  # fmt: skip
    page = make_page(Made(drawn, provenance=Provenance({"seed": 3})))
    assert [section.title for section in page.sections][:3] == ["Numbers", "Curves", "Parts"]
    inside = {section.title: "".join(map(str, section.blocks)) for section in page.sections}
    cells = {title: re.findall(r"<t[dh](?: [^>]*)?>(.*?)</t", text) for title, text in inside.items()}
    assert cells["Numbers"] == ["a", "1", "c", "3"] and cells["Curves"] == ["b", "2", "d", "4"]
    assert "First" in inside["Numbers"] and "Last" in inside["Numbers"] and "a note" in inside["Numbers"]
    assert "as bars" in inside["Numbers"] and "of curves" in inside["Curves"] and "below" in inside["Curves"]
    assert set(page.pictures) == {"first", "more"} and "the opening" in page.opening.blocks[0]
    assert [section.title for section in page.sections][3:] == ["What the numbers mean", "How this page was made"]
    bare = make_page(Made())
    assert bare.opening.blocks == [] and (bare.tone, bare.mark) == ("", "")
    assert [section.title for section in bare.sections] == ["Numbers", "Curves", "Parts", "What the numbers mean"]
