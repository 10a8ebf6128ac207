"""The pages of locks: what a model obeys, and the attacks on a lock."""

from __future__ import annotations

from collections import Counter

from situs.locks.attacks import LockAudit
from situs.locks.attacks.audit import ATTACKS
from situs.locks.equivariance import Verification
from situs.report import figures
from situs.report.html import Page, Section, Tone


def audit_page(found: LockAudit) -> Page:
    """What each attacker got, and over the drift of the base where several were tried."""
    said = found.summary()
    strength, opened = found.strength, [each.attacker for each in found.attacks if each.bits == 0]
    page = Page(f"Attacks on a lock: {found.model}, locked{found.withheld}")
    if opened:
        page.lead = f"The lock is open to {' and '.join(opened[:2])}. {said.sentence}"
        page.judge("bad", "Open to these attackers")
    else:
        if found.attacks and strength is None:
            first = "Whether this lock holds is not known."
        else:
            unknown = any(each.bits is None for each in found.attacks)
            tried = f"opened this lock here{', as far as they could be judged' if unknown else ''}"
            first = f"No attacker {tried if found.attacks else 'was tried'}, which is no proof."
        page.lead = f"{first} {said.sentence}"
        page.judge("unsure", "No strength can be given" if strength is None else "Not opened by these attackers")
    by = "; ".join(each.attacker for each in found.attacks if each.bits is not None)
    if strength is None:
        page.number("no strength", "inconclusive, which is no pass")
    else:
        page.number(f"{strength:.0f} of 256", f"bits left at most, by {by}")
    page.number(", ".join(found.untried) or "none", "attackers not tried")
    if found.judged:
        page.opening.bars(_accuracies(found), "%", "Accuracy: with the key, without it, and after each attack.")
    else:
        known = {each.attacker: 100 * each.share for each in found.attacks if each.share is not None}
        shares = dict(sorted(known.items(), key=lambda each: -each[1]))
        page.opening.bars({name: (share, "bad") for name, share in shares.items()}, "%", "Key recovered, by attacker.")
    section = page.section("What each attacker got")
    section.table(said.tables[0].header, said.tables[0].rows)
    told = {name: f"{attack.about}." for name, attack in ATTACKS.items()}
    section.fold("Who the attackers are", Section("").facts(told))
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
        "where accuracy came back without the key, if the test set tells the locked model from that with its key by "
        "two standard errors. J tells how well the two sides agree, which needs no key: a search "
        "that failed ends where those from random hints do. Inner groups (MLP units, heads, their channels) never "
        "count: moving them leaves the function as it was."
    )
    return page


def _accuracies(found: LockAudit) -> dict[str, tuple[float, Tone]]:
    first = found.attacks[0] if found.attacks else None
    bars: dict[str, tuple[float, Tone]] = {}
    if first is not None and first.owner is not None:
        bars["with the key"] = (100 * first.owner, "good")
    if first is not None and first.before is not None:
        bars["locked"] = (100 * first.before, "")
    for each in sorted(found.attacks, key=lambda each: -(each.after or 0.0)):
        if each.after is not None:
            bars[f"attacker {each.attacker}"] = (100 * each.after, "bad" if each.broken else "")
    return bars


def verify_page(found: Verification) -> Page:
    """The laws on the whole and around it, and module by module."""
    said = found.summary()
    page = Page("Permutations that a model obeys", lead=f"{found.model}: {said.sentence}")
    states = Counter(each.status for each in found.findings)
    whole = [each for each in found.findings if each.part == "blocks"]
    held = {each.law for each in whole if each.status == "holds"} == {"row", "column"}
    page.judge("good" if held else "unsure", "The blocks obey both laws" if held else "Not both laws hold as they are")
    page.number(f"{states['holds']} of {sum(states.values())}", "laws that hold as they are")
    page.opening.bars(states, "findings", "What was found of every part and law.")
    section = page.section("Rows and columns")
    section.text(
        "Row: the order of the tokens. Column: the order of the channels, with keyed weights. Each law is run forward, "
        "backward and through optimiser steps, clear and permuted; the numbers are the largest relative differences."
    )
    for table in said.tables:
        section.table(table.header, table.rows, table.title)
    section.note(" ".join(said.notes))
    return page
