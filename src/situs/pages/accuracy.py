"""A classifier's accuracy as a page: the three numbers, and which classes it knows."""

from __future__ import annotations

from situs.evaluate.accuracy import ClassAccuracy
from situs.report import figures
from situs.report.html import Page

MEANING = """
Top-1 is the share of the images whose own class the model puts first, top-5 the share whose class is among its first
five. Loss is the mean cross entropy: low where the model is right and sure, high where it is sure and wrong.
"""
_DRAWN, _LISTED = 30, 10


def page(found: ClassAccuracy) -> Page:
    """The numbers, every class where they are few, and the weakest."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: accuracy", lead=said.sentence)
    section = page.section("How often it is right")
    section.table(said.tables[0].header, said.tables[0].rows, f"{found.accuracy.count:,} images.")
    rows = [row for row in found.by_class() if row["top1"] is not None]
    if len(found.classes) <= _DRAWN:
        shares = {row["class"]: 100 * row["top1"] for row in rows}
        drawn = figures.bars(shares, "images of the class recognised, %", digits=".1f")
        section.figure(drawn, "Share of each class that is recognised.", name="classes")
    weakest = sorted(rows, key=lambda row: row["top1"])[:_LISTED]
    page.section("The classes it knows least").table(
        ["class", "images", "right, %", "taken most often for"],
        [[row["class"], row["count"], f"{100 * row['top1']:.2f}", row["taken_for"] or "none"] for row in weakest],
    )
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(found.provenance.facts)
    return page
