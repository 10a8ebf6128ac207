"""The glossary: one definition of each term, found on pages and listed in the docs."""

from __future__ import annotations

from pathlib import Path

import pytest

from situs.pages.glossary import TITLE, add_words, glossary_page, terms
from situs.report.html import Page

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_terms_are_few_short_and_in_order() -> None:
    names = [term.name for term in terms()]
    assert names == sorted(names, key=str.lower) and 40 <= len(names) <= 45
    assert all(len(term.meaning) < 200 and term.meaning.endswith(".") for term in terms())


def test_the_docs_have_the_same_glossary() -> None:
    """python docs/make_reference.py glossary > docs/glossary.md"""
    assert (DOCS / "glossary.md").read_text(encoding="utf-8") == glossary_page()


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("The gate is inconclusive.", ["gate", "inconclusive"]),
        ("All at 20 dB, by the most exposed image", ["most exposed image", "PSNR"]),
        ("It dispatches an investigator's blockage.", []),
        ("γ_pos = 0.75", ["DropPos"]),
    ],
)
def test_a_page_defines_the_words_that_occur_on_it(text: str, names: list[str]) -> None:
    page = Page("p")
    page.section("Results").text(text)
    add_words(page)
    fold = [section for section in page.sections if section.title == TITLE]
    assert len(fold) == bool(names) and all(section.look == "fold" for section in fold)
    assert all(f">{term.name}</dt>" in page.render() for term in terms() if term.name in names)
    assert sum(page.render().count(f">{term.name}</dt>") for term in terms()) == len(names)
