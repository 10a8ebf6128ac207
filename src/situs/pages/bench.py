"""Pages of what a step costs."""

from __future__ import annotations

from situs.bench.compare import StepComparison
from situs.bench.step import StepTable
from situs.report.html import Page

MEANING = """
A step is all that a run does but its data: draws, forward, backward, clipping, the optimiser. The ceiling is the rate
of one large matrix product in the same arithmetic, measured in the same run; a step's operations are its matrix
products, attention among them, and nothing that is computed twice. Busy is the share of a step in which the GPU runs a
kernel: the union of the kernels that the profiler saw over the time of a step without it. The first step holds the
compiling.
"""


def steps(found: StepTable) -> Page:
    """The table, the kernels where they are wanted, and what failed."""
    said = found.summary()
    page = Page("What a training step costs", lead=said.sentence)
    *kernels, table = said.tables
    page.opening.bars({f"{row.case.label}, batch {row.case.batch}": 1e3 * row.times.median for row in found.rows}, "ms")
    if found.rows:
        fastest = max(found.rows, key=lambda row: row.images_per_second)
        page.number(f"{fastest.images_per_second:,.0f}", f"samples a second, {fastest.case.label}")
    section = page.section("Steps").table(table.header, table.rows, table.title)
    for note in said.notes:
        section.note(note)
    for each in kernels:
        page.section(each.title).table(each.header, each.rows)
    return page.end({**found.provenance.facts, **found.machine}, MEANING)


def comparison(found: StepComparison) -> Page:
    """What differs besides, and the pairs."""
    said = found.summary()
    page = Page(f"Steps of {' and '.join(found.names)}", lead=said.sentence)
    for pair in found.pairs[:4]:
        page.opening.bars(
            {name: 1e3 * row.times.median for name, row in zip(found.names, pair, strict=True)},
            "ms",
            f"A step of {pair.after.case.label}.",
        )
    for pair in found.pairs[:1]:
        page.number(f"{pair.ratio:.2f} ×", f"time of a step, {pair.after.case.label}")
    for table in said.tables:
        page.section(table.title).table(table.header, table.rows)
    for note in said.notes:
        page.sections[-1].note(note)
    return page.end(found.provenance.facts)
