"""An ensemble as a page: what its members gain from each other, and how alike they answer."""

from __future__ import annotations

from collections.abc import Mapping

from situs.evaluate.ensemble import Ensemble
from situs.report import figures
from situs.report.html import Page
from situs.report.value_grid import value_grid
from situs.results import Cell, percent

MEANING = """
Every model answers each image, prepared as that model was trained to see it; their probabilities (or logits) are
averaged and the heaviest class is the ensemble's answer. Models that err on different images gain most from each other:
the less they agree, the further the ensemble can pass its best member. An image that no member has right is out of
reach for any choice among their answers, though an average can still find it.
"""


def make_page(found: Ensemble, average: str, facts: Mapping[str, Cell]) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures."""
    page = Page(f"{len(found.alone)} classifiers as one", lead=finding(found))
    shares = {name: 100 * score.top1 for name, score in found.alone.items()}
    shares |= {f"together ({average})": 100 * found.together.top1, "any of them right": 100 * found.any_right}
    names = list(found.alone)
    agreement = [[100 * share for share in row] for row in found.agreement]
    pictures = {
        "top1": figures.png(figures.bars(shares, "top-1, % of the images", digits=".2f")),
        "agreement": figures.png(
            value_grid(agreement, names, names, "model", "model", "same answer, % of the images", limits=(0, 100))
        ),
    }
    section = page.section("Alone and together")
    section.figure(pictures["top1"], "Top-1 of each model, of their average, and the share any of them has right.")
    section.table(*table(found, average), f"{found.together.count:,} images.")
    page.section("How alike they answer").figure(
        pictures["agreement"], "Share of the images on which two models give the same answer, right or wrong."
    )
    page.section("What the numbers mean").text(MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def finding(found: Ensemble) -> str:
    """The result in words."""
    name, best = max(found.alone.items(), key=lambda item: item[1].top1)
    gain = 100 * (found.together.top1 - best.top1)
    side = "above" if gain >= 0 else "below"
    return (
        f"Together {percent(found.together.top1, 2)} right, {abs(gain):.2f} points {side} the best alone ({name}, "
        f"{percent(best.top1, 2)}); at least one is right on {percent(found.any_right, 2)}."
    )


def table(found: Ensemble, average: str) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row a model, then all together."""
    scores = {**found.alone, f"together ({average})": found.together}
    rows: list[list[Cell]] = [
        [name, f"{100 * s.top1:.2f}", f"{100 * s.top5:.2f}", f"{s.loss:.4f}"] for name, s in scores.items()
    ]
    return ["", "top-1, %", "top-5, %", "loss"], rows
