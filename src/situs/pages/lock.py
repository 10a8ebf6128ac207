"""The pages of locks: what a model obeys, the attacks on a lock, and the fine-tuning of a locked model."""

from __future__ import annotations

from situs.locks.attacks import LockAudit
from situs.locks.attacks.recovery import ATTACKERS
from situs.locks.equivariance import Verification
from situs.locks.tuning.finetune import LockTuning
from situs.report import figures
from situs.report.html import Page


def audit_page(found: LockAudit) -> Page:
    """What each attacker got, and over the drift of the base where several were tried."""
    said = found.summary()
    page = Page("Attacks on a lock", lead=f"{found.model}, locked{found.kept}: {said.sentence}")
    section = page.section("What each attacker got")
    section.table(said.tables[0].header, said.tables[0].rows)
    section.facts({name: f"{text}." for name, text in ATTACKERS.items()})
    drifted = [(r.attacker, r.share) for r in found.attacks if r.attacker.startswith("drifted") and r.share is not None]
    if len(drifted) > 1:
        amounts = [float(name.split(", ")[1].removesuffix(" ×")) for name, _ in drifted]
        line = {"key recovered": (amounts, [100 * share for _, share in drifted])}
        labels = "noise on the base, in standard deviations", "residual channels recovered, %"
        drawn = figures.curves(line, *labels, y_limits=(0, 100))
        section.figure(drawn, "Linear assignment against a base that drifted.")
    section.note(
        "Bits left, at most the seed's 256: log2 of the orders of the channels that are still wrong, the attacker "
        "being taken to know which; where most are right, log2 of the exchanges that put one after the other right; 0 "
        "where accuracy came back without the key. J tells how well the two sides agree, which needs no key: a search "
        "that failed ends where those from random hints do. Inner groups (MLP units, heads, their channels) never "
        "count: moving them leaves the function as it was."
    )
    return page


def verify_page(found: Verification) -> Page:
    """The laws on the whole and around it, and module by module."""
    said = found.summary()
    page = Page("Permutations that a model obeys", lead=f"{found.model}: {said.sentence}")
    section = page.section("Rows and columns")
    section.text(
        "Row: the order of the tokens. Column: the order of the channels, with keyed weights. Each law is run forward, "
        "backward and through optimiser steps, clear and permuted; the numbers are the largest relative differences."
    )
    for table in said.tables:
        section.table(table.header, table.rows, table.title)
    section.note(" ".join(said.notes))
    return page


def tuning_page(found: LockTuning) -> Page:
    """The four ways at the last step, and their curves."""
    said = found.summary()
    page = Page("Fine-tuning a locked model", lead=f"With its key, without it, and from scratch: {found.about}.")
    section = page.section("Who can use a locked model")
    section.text(
        "The lock permutes the channels between the blocks. Its owner permutes the stream along, so that training with "
        "the key is training in another order of the channels; a thief has blocks whose weights do not fit the "
        "embedding and the head, and can only train on from there."
    )
    section.table(said.tables[0].header, said.tables[0].rows, "After the last step.")
    section.note(" ".join([said.sentence, *said.notes]))
    for title, unit, name, scale in (
        ("Validation loss", "cross entropy", "loss", 1),
        ("Validation accuracy", "images classified right, %", "accuracy", 100),
    ):
        lines = {way: (c.steps, [scale * v for v in getattr(c, name)]) for way, c in found.curves.items()}
        drawn = figures.curves(lines, "update", unit, title=title)
        section.figure(drawn, f"{title} of the four ways.")
    section.text(
        "What the unauthorised have over training from scratch is what the lock does not take away: embedding, "
        "positions, and the statistics of the weights. `situs audit lock` measures how far a thief gets by attacking "
        "the key instead."
    )
    return page
