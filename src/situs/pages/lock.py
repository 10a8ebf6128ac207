"""The pages of locks: a model's equivariances, and the attacks on a lock."""

from __future__ import annotations

from collections import Counter

from situs.locks.attacks import LockAudit
from situs.locks.attacks.audit import ATTACKS
from situs.locks.equivariance import Verification
from situs.report import figures
from situs.report.html import Page, Section, Tone


def audit_page(audit: LockAudit) -> Page:
    """Results of each attacker, and a curve over the drift of the base if several drifts were tried."""
    summary = audit.summary()
    strength, openers = audit.strength, [attack.attacker for attack in audit.attacks if attack.bits == 0]
    page = Page(f"Attacks on a lock: {audit.model}, locked{audit.withheld}")
    if openers:
        page.lead = f"Opened by the attacker{'s' * (len(openers) > 1)} {' and '.join(openers[:2])}. {summary.sentence}"
        page.judge("bad", "Opened by these attackers")
    else:
        if audit.attacks and strength is None:
            first = "It is not known whether this lock is secure."
        else:
            unknown = any(attack.bits is None for attack in audit.attacks)
            tried = f"opened this lock in this audit{', as far as the attackers could be judged' if unknown else ''}"
            first = (
                f"No attacker {tried if audit.attacks else 'was tried'}; this does not prove that the lock is secure."
            )
        page.lead = f"{first} {summary.sentence}"
        page.judge("unsure", "No strength can be given" if strength is None else "Not opened by these attackers")
    judged = "; ".join(attack.attacker for attack in audit.attacks if attack.bits is not None)
    if strength is None:
        page.number("no strength", "inconclusive (not a pass)")
    else:
        page.number(f"{strength:.0f} of 256", f"bits left at most, after the attacks {judged}")
    page.number(", ".join(audit.untried) or "none", "attackers not tried")
    if audit.judged:
        page.opening.bars(_accuracies(audit), "%", "Accuracy with the key, without the key, and after each attack.")
    else:
        shares = {attack.attacker: 100 * attack.share for attack in audit.attacks if attack.share is not None}
        bars = sorted(shares.items(), key=lambda bar: -bar[1])
        page.opening.bars(
            {name: (share, "bad") for name, share in bars}, "%", "Percentage of the key that each attacker recovered."
        )
    section = page.section("Results of each attacker")
    section.table(summary.tables[0].header, summary.tables[0].rows)
    about = {name: f"{attack.about}." for name, attack in ATTACKS.items()}
    section.fold("What each attacker knows", Section("").facts(about))
    drifted = [(a.attacker, a.share) for a in audit.attacks if a.attacker.startswith("drifted") and a.share is not None]
    if len(drifted) > 1:
        amounts = [float(name.split(", ")[1].removesuffix(" ×")) for name, _ in drifted]
        line = {"key recovered": (amounts, [100 * share for _, share in drifted])}
        labels = "noise on the base, in standard deviations", "residual channels recovered, %"
        drawn = figures.curves(line, *labels, y_limits=(0, 100))
        section.figure(drawn, "Share of the key recovered by linear assignment, for each amount of noise on the base.")
    section.note(
        "Bits left (at most 256, the length of the key) is the log2 of the number of possible orders of the channels "
        "that are still wrong, for an attacker who knows which channels are wrong. If most channels are right, bits "
        "left is the log2 of the number of swaps that repair the wrong channels one after another. Bits left is 0 if "
        "two conditions hold: the attack restored the accuracy without the key, and on the test set the accuracies of "
        "the locked and the unlocked model differ by two standard errors or more. J measures, without the key, how "
        "well the locked and the unlocked part agree. If a search fails, J is as low as for searches from random "
        "starts. Inner groups (MLP units, heads and their channels) are not counted, because their permutation does "
        "not change the function."
    )
    return page


def _accuracies(audit: LockAudit) -> dict[str, tuple[float, Tone]]:
    first = audit.attacks[0] if audit.attacks else None
    bars: dict[str, tuple[float, Tone]] = {}
    if first is not None and first.owner is not None:
        bars["with the key"] = (100 * first.owner, "good")
    if first is not None and first.before is not None:
        bars["locked"] = (100 * first.before, "")
    for attack in sorted(audit.attacks, key=lambda attack: -(attack.after or 0.0)):
        if attack.after is not None:
            bars[f"attacker {attack.attacker}"] = (100 * attack.after, "bad" if attack.broken else "")
    return bars


def verify_page(verification: Verification) -> Page:
    """The equivariances of the whole model and of its parts, module by module."""
    summary = verification.summary()
    page = Page("Permutations that a model obeys", lead=f"{verification.model}: {summary.sentence}")
    states = Counter(finding.status for finding in verification.findings)
    blocks = [finding for finding in verification.findings if finding.part == "blocks"]
    failed = {"row", "column"} - {finding.law for finding in blocks if finding.status != "refused"}
    mark = f"Not shown to hold for the blocks: {', '.join(f'{law} law' for law in sorted(failed, reverse=True))}"
    page.judge("unsure" if failed else "good", mark if failed else "The blocks obey the row law and the column law")
    page.number(f"{states['holds']} of {sum(states.values())}", "checks in which the law holds without keyed weights")
    page.opening.bars(states, "findings", "Number of checks by result, over all parts and laws.")
    section = page.section("Rows and columns")
    section.text(
        "Row law: if the tokens are permuted, the output is permuted in the same way. Column law: if a key "
        "permutes the channels and the weights, the output is permuted in the same way. Each law is tested in the "
        "forward pass, in the backward pass and over optimiser steps, with and without the permutation. The numbers "
        "are the largest relative differences."
    )
    for table in summary.tables:
        section.table(table.header, table.rows, table.title)
    section.note(" ".join(summary.notes))
    return page
