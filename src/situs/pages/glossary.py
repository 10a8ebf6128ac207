"""The glossary of `glossary.toml`: each term is defined once, for `docs/glossary.md` and for a fold on each page."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from html import unescape
from pathlib import Path
from typing import NamedTuple

from situs.report.html import Page

TITLE = "Words on this page"


class Term(NamedTuple):
    """A term: its definition, and a regular expression that finds it on a page."""

    name: str
    meaning: str
    pattern: str


@cache
def terms() -> tuple[Term, ...]:
    """Every term, by name."""
    table = tomllib.loads(Path(__file__).with_name("glossary.toml").read_text(encoding="utf-8"))
    return tuple(Term(name, *entry) for name, entry in table.items())


def words_on(page: Page) -> list[Term]:
    """The terms that occur in the text of a page."""
    parts = [page.title, page.lead, page.notice, page.mark, *(of for _, of in page.numbers)]
    parts += [part for finding in page.findings for part in (finding.title, finding.of, finding.text)]
    for section in (page.opening, *page.sections):
        parts += [section.title, *(unescape(re.sub(r"<[^>]*>", " ", block)) for block in section.blocks)]
    text = " ".join(parts)
    return [term for term in terms() if re.search(rf"(?<![\w-])(?:{term.pattern})(?![\w-])", text, re.IGNORECASE)]


def add_words(page: Page) -> Page:
    """Adds a fold with the definitions of the terms that occur on the page."""
    if occurring := words_on(page):
        page.fold(TITLE).facts({term.name: term.meaning for term in occurring})
    return page


def glossary_page() -> str:
    """The text of `docs/glossary.md`."""
    intro = f'The HTML pages that Situs writes also explain their terms, under "{TITLE}".'
    head = ["# Glossary", "", intro, "", "| term | meaning |", "|---|---|"]
    return "\n".join([*head, *(f"| {term.name} | {term.meaning} |" for term in terms()), ""])
