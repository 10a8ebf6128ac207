"""Pages of what a step costs."""

from __future__ import annotations

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
    section = page.section("Steps").table(table.header, table.rows, table.title)
    for note in said.notes:
        section.note(note)
    section.text(MEANING)
    for each in kernels:
        page.section(each.title).table(each.header, each.rows)
    return page.end({**found.provenance.facts, **found.machine})
