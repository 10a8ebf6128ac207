"""The page of any result: verdict, headline numbers, tables, figures, and how it was made."""

from __future__ import annotations

from importlib import import_module

from situs.report.html import Page, Section
from situs.results import Figure, Result


def page(result: Result) -> Page:
    """The first figure opens the page; then the summary's tables and notes, the details, and the other figures."""
    summary = result.summary()
    page = Page(result.title, lead=summary.sentence)
    if result.tone is not None:
        page.judge(result.tone, result.mark)
    for value, of in summary.numbers:
        page.number(value, of)
    figures = result.figures()
    for figure in figures[:1]:
        draw(page.opening, figure)
    sections: dict[str, Section] = {}

    def under(title: str) -> Section:
        if title not in sections:
            sections[title] = page.section(title)
        return sections[title]

    titles = {figure.section for figure in figures}
    for table in summary.tables:
        title = table.title if table.title in titles else "Numbers"
        under(title).table(table.header, table.rows, table.caption or (table.title if title == "Numbers" else ""))
    under("Numbers").note(*summary.notes)
    for table in result.details():
        under(table.title).table(table.header, table.rows, table.caption)
    for figure in figures[1:]:
        draw(under(figure.section), figure)
    return page.end(result.provenance.facts, result.meaning)


def draw(section: Section, figure: Figure) -> Section:
    """Adds a result's figure to a section."""
    if figure.draw == "bars":
        return section.bars(*figure.values, caption=figure.caption)
    module, function = figure.draw.split(".")
    drawn = getattr(import_module(f"situs.report.{module}"), function)(*figure.values, **figure.options)
    return section.figure(drawn, figure.caption, name=figure.name)
