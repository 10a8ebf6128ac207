"""An ensemble as a page: what its members gain from each other, and how alike they answer."""

from __future__ import annotations

from situs.evaluate.ensemble import Ensemble
from situs.report import figures
from situs.report.html import Page
from situs.report.value_grid import value_grid

MEANING = """
Every model answers each image, prepared as that model was trained to see it; their probabilities (or logits) are
averaged and the heaviest class is the ensemble's answer. Models that err on different images gain most from each other:
the less they agree, the further the ensemble can pass its best member. An image that no member has right is out of
reach for any choice among their answers, though an average can still find it.
"""


def page(found: Ensemble) -> Page:
    """Alone and together, and who agrees with whom."""
    said, names = found.summary(), list(found.alone)
    page = Page(f"{len(names)} classifiers as one", lead=said.sentence)
    shares = {name: 100 * score.top1 for name, score in found.alone.items()}
    shares |= {f"together ({found.average})": 100 * found.together.top1, "any of them right": 100 * found.any_right}
    section = page.section("Alone and together")
    section.figure(
        figures.bars(shares, "top-1, % of the images", digits=".2f"),
        "Top-1 of each model, of their average, and the share any of them has right.",
        name="top1",
    )
    section.table(said.tables[0].header, said.tables[0].rows, f"{found.together.count:,} images.")
    agreement = [[100 * share for share in row] for row in found.agreement]
    page.section("How alike they answer").figure(
        value_grid(agreement, names, names, "model", "model", "same answer, % of the images", limits=(0, 100)),
        "Share of the images on which two models give the same answer, right or wrong.",
        name="agreement",
    )
    page.section("What the numbers mean").text(MEANING)
    members = {
        name: f"{facts.get('method') or 'unknown method'} on {facts['model']}" for name, facts in found.members.items()
    }
    page.section("How this page was made").facts({**members, **found.provenance.facts})
    return page
