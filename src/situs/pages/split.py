"""The page of a split audit: threat model, verdict, every attacker, pictures, what a defence costs and hides."""

from __future__ import annotations

from situs.audit.split.attackers import ATTACKS
from situs.audit.split.result import (
    SCORES,
    THREAT,
    UTILITY,
    SplitAudit,
    paper_table,
    strengths,
    trade_off,
    utilities,
    who_was_tried,
)
from situs.audit.sweep.ladder import by_strength
from situs.locks.veil import Veil
from situs.pages.gradients import picture_rows
from situs.report import figures
from situs.report.html import Page, Section
from situs.results import Cell, Table, percent

SHOWN = 4
CURVES = {"psnr": "PSNR, dB", "ssim": "SSIM", "places": "patches in place, %"}
LIMITS = {"ssim": (0.0, 1.0), "places": (0.0, 100.0)}

Lines = dict[str, tuple[list[float], list[float]]]


def page(audit: SplitAudit) -> Page:
    """The page, with the samples and what was made of them where the audit has them."""
    said = audit.summary()
    page = Page(f"Split audit of {audit.name}", said.sentence)
    _judge(page, audit)
    does = {f"attacker {name}": _about(name) for name in audit.asked if name in ATTACKS}
    page.box("Threat model").facts(THREAT).fold("Who the attackers are", Section("").facts(does))
    if said.notes:
        page.section("Verdict").text("\n\n".join(said.notes))
    _table(page.section("Attackers and defences"), audit.tables[0], audit)
    if (six := paper_table(audit.settings)) in audit.tables:
        _tabled(page.section("The paper's Table 6"), six)
    if audit.private:
        _pictures(page.opening, audit)
    if strengths(audit.settings):
        _curves(page.section("What a defence hides, and what it costs"), audit)
    _tabled(page.section("Who was tried"), who_was_tried(audit.settings))
    return page.end(audit.provenance.facts)


def _judge(page: Page, audit: SplitAudit) -> None:
    """The audit's own tone in words, the best attacker's numbers, and bars where there are no pictures."""
    seen, placed, guess = audit.best("psnr"), audit.best("places"), audit.guess("psnr") or 0.0
    attacked = any(finding.figures for found in audit.settings for finding in found.findings)
    unsure = "Not proved private" if attacked else "Not attacked, which is not private"
    page.judge(audit.tone, "Not private" if audit.tone == "bad" else unsure)
    did = [f"rebuilt pictures at {seen:.1f} dB"] if seen is not None else []
    did += [f"put {percent(placed, 0)} of the patches in their places"] if placed is not None else []
    if did:
        page.lead = f"At best the server {' and '.join(did)}. {page.lead}"
    if seen is not None:
        page.number(f"{seen:.1f} dB", f"the best attacker's pictures, over all settings (blind guess {guess:.1f})")
    if placed is not None:
        page.number(percent(placed), "of patches put in their places, at best")
    if not audit.private and seen is not None:
        values = {str(found.veil): found.best("psnr") for found in audit.settings}
        shown = {name: value for name, value in values.items() if value is not None}
        shown = dict(sorted(shown.items(), key=lambda each: -each[1]))
        page.opening.bars(shown, "dB", "The best attacker's pictures, by what the client sends.")


def _about(name: str) -> Cell:
    attacker, knows = ATTACKS[name]
    does = (attacker.__doc__ or "").split("\n")[0].rstrip(".")
    return f"knows {knows}. {does}"


def _tabled(section: Section, drawn: Table) -> None:
    section.table(drawn.header, drawn.rows, drawn.title + ".")


def _table(section: Section, drawn: Table, audit: SplitAudit) -> None:
    told = list(drawn.header).index("knows")  # stands in the threat model already, and the table is wide
    header, *rows = ([*row[:told], *row[told + 1 :]] for row in (drawn.header, *drawn.rows))
    section.table(list(map(str, header)), rows, f"{drawn.title}. Guesses saw no token: what is near them says nothing.")
    kept: dict[str, Cell] = {
        name: f"{UTILITY[name][1]}: what the client's task keeps" for name in utilities(audit.settings)
    }
    section.facts({**kept, **{name: what for name, (_, what) in SCORES.items() if name in drawn.header}})


def _pictures(section: Section, audit: SplitAudit) -> None:
    """Originals beside the best attacker's pictures, setting by setting."""
    assert audit.pictures is not None
    strips = [("original", audit.pictures)]
    for found in audit.settings:
        best = found.pictured()
        if best is not None and best.shown is not None:
            strips.append((f"{found.veil}\n{best.attack}", best.shown.to(audit.pictures)))
    count = min(SHOWN, len(audit.pictures))
    drawn = picture_rows(strips, count)
    said = "The first samples, and what the attacker with the best PSNR made of them, by setting."
    section.figure(drawn, said, name="pictures")


def trade_offs(audit: SplitAudit) -> dict[str, dict[str, Lines]]:
    """score -> defence -> permutations -> (what the task keeps, the score), where there are several strengths.

    A line begins at no defence, where that was audited; what no attacker gave is left out of it.
    """
    of, _ = UTILITY[utilities(audit.settings)[0]]
    lines: dict[str, dict[str, Lines]] = {}
    for score in CURVES:
        for kind in strengths(audit.settings):
            for rows, columns in ((False, False), (True, False), (False, True), (True, True)):
                chosen = [
                    (found.veil, of(found.kept) or 0.0, value * (100 if score == "places" else 1))
                    for found in audit.settings
                    if (found.veil.rows, found.veil.columns) == (rows, columns)
                    and found.veil.kind in (kind, "none")
                    and (value := found.best(score)) is not None
                ]
                if sum(veil.kind == kind for veil, *_ in chosen) > 1:
                    chosen.sort(key=lambda point: by_strength(point[0]))
                    _, x, y = zip(*chosen, strict=True)
                    named = str(Veil(rows=rows, columns=columns)).replace("none", "as they are")
                    lines.setdefault(score, {}).setdefault(kind, {})[named] = (list(x), list(y))
    return lines


def _curves(section: Section, audit: SplitAudit) -> None:
    kept = utilities(audit.settings)[0]
    section.text(
        "Each line is one defence at several strengths: what the client's task keeps (right: most), and what the best "
        "attacker that was tried, who knows the defence, finds. A line that falls while it is still on the right is a "
        "defence that these attackers do not undo. Where lines lie on each other, a permutation hides nothing more."
    )
    for score, kinds in trade_offs(audit).items():
        guess = max((each[score] for each in audit.blind.values() if score in each), default=None)
        panels = {f"{kind}: {CURVES[score]}": dict(lines) for kind, lines in kinds.items()}
        for lines in panels.values():
            if guess is not None:
                every = [value for x, _ in lines.values() for value in x]
                lines["blind guess"] = [min(every), max(every)], [guess, guess]
        drawn = figures.curve_panels(panels, f"utility: {kept}", LIMITS.get(score), x_least=0.1)
        caption = f"{CURVES[score]}, by the best attacker that was tried, against {kept}: {UTILITY[kept][1]}."
        section.figure(drawn, caption, name=score)
    _tabled(section, trade_off(audit.settings))
