"""A classifier's accuracy as a page: the three numbers, and which classes it knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from situs.evaluate.accuracy import Accuracy
from situs.report import figures
from situs.report.html import Page
from situs.results import Cell, percent

MEANING = """
Top-1 is the share of the images whose own class the model puts first, top-5 the share whose class is among its first
five. Loss is the mean cross entropy: low where the model is right and sure, high where it is sure and wrong.
"""
_DRAWN, _LISTED = 30, 10


def make_page(
    name: str, found: Accuracy, answers: Tensor, classes: Sequence[str], facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures. answers: [C, C] counts by (true, said)."""
    page = Page(f"{name}: accuracy", lead=finding(name, found, len(classes)))
    section = page.section("How often it is right")
    section.table(*table(name, found), f"{found.count:,} images.")
    pictures = {}
    rows = by_class(answers, classes)
    if len(classes) <= _DRAWN:
        shares = {row["class"]: 100 * row["top1"] for row in rows if row["top1"] is not None}
        pictures["classes"] = figures.png(figures.bars(shares, "images of the class recognised, %", digits=".1f"))
        section.figure(pictures["classes"], "Share of each class that is recognised.")
    weakest = sorted((row for row in rows if row["top1"] is not None), key=lambda row: row["top1"])[:_LISTED]
    page.section("The classes it knows least").table(
        ["class", "images", "right, %", "taken most often for"],
        [[row["class"], row["count"], f"{100 * row['top1']:.2f}", row["taken_for"] or "none"] for row in weakest],
    )
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def finding(name: str, found: Accuracy, classes: int) -> str:
    """The result in words."""
    return (
        f"{name} recognises {percent(found.top1, 2)} of {found.count:,} images of {classes:,} classes "
        f"(a guess: {percent(1 / classes, 2)})."
    )


def table(name: str, found: Accuracy) -> tuple[list[str], list[list[Cell]]]:
    """Header and the one row."""
    return ["", "top-1", "top-5", "loss"], [[name, percent(found.top1, 2), percent(found.top5, 2), f"{found.loss:.4f}"]]


def by_class(answers: Tensor, classes: Sequence[str]) -> list[dict[str, Any]]:
    """A row a class: how many images, the share recognised, and the class the others are taken for most often.

    answers: [C, C] counts by (true, said). None where there is no image, or none that is taken for another class.
    """
    wrong = answers.clone().fill_diagonal_(0)
    most, which = wrong.max(dim=1)
    counts, hits = answers.sum(dim=1), answers.diagonal()
    return [
        {
            "class": name,
            "count": count,
            "top1": hit / count if count else None,
            "taken_for": classes[said] if often else None,
        }
        for name, count, hit, often, said in zip(
            classes, counts.tolist(), hits.tolist(), most.tolist(), which.tolist(), strict=True
        )
    ]
