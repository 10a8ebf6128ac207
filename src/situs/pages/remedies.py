"""The page of a search for remedies: the settings it names, what each costs, and all that was tried."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.sweep.remedies import UNTUNED, Remedies, cost_table, exposures_by_metric, remedy_table, verdict
from situs.gate import SCOPE
from situs.pages.gradients import described
from situs.report.html import Page, Section, Tone

READ = (
    f"A setting passes the gate of an audit, {SCOPE}: there is noise, a closed form that knows the defence solved "
    "every image, its equations fit as the stated noise and precision predict, no image came back closer than blind "
    "guesses (but for the gate's margins) or above the limit, and neither did the oracle, a bound. Inconclusive "
    "is no pass."
)

PAID = (
    "The cosine is that of what is sent with the gradient itself, over a batch of this size. ε is said of clipping per "
    "sample with noise alone, and holds for batches that are drawn by chance (Poisson)."
)


def page(found: Remedies) -> Page:
    """The page."""
    page = Page(f"Defences of {found.model}", verdict(found))
    whole = bool(found.with_setting) and found.stopped is None
    stopped = "Stopped: says nothing" if not found.with_setting and found.stopped else "No remedy found"
    if found.with_setting:
        page.judge("good" if whole else "unsure", f"{found.limit} is kept against these attackers")
    else:
        page.judge("unsure" if found.stopped else "bad", stopped)
    facts = dict(found.provenance.facts)
    attacks = Section("").facts(described(found.attacks))
    page.box("Threat model").facts({**THREAT, **found.notes}).fold("How the attacks work", attacks)
    if not found.remedies:  # nothing was tried to its end, and the page's first line says so
        return page.end(facts)
    page.number(
        f"{len(found.with_setting)} of {len(found.remedies)}", f"defences with a setting that keeps {found.limit}"
    )
    for metric, settings in exposures_by_metric(found).items():
        bars: dict[str, tuple[float, Tone]] = {
            name: (value, "good" if named else "bad") for name, (value, named) in settings.items()
        }
        page.opening.bars(bars, metric, "The most exposed image, at the setting named or tried last.")
    section = page.section("What keeps the limit")
    section.table(*remedy_table(found), READ)
    if found.with_setting:
        section.table(*cost_table(found), PAID)
        section.note(UNTUNED)
    if found.stopped is not None and found.with_setting:  # else said first
        section.note(f"Stopped by {found.stopped}.")
    header = ["defence", "setting", "images", "unseen", "most exposed image", "by", "gate", "why"]
    rows = [
        [each.defence, t.setting, t.images, t.unseen, t.exposed, t.by or None, t.answer, t.reason]
        for each in found.remedies
        for t in (*each.tried, *(trial for trial in (each.unseen, each.weaker_unseen) if trial is not None))
    ]
    page.section("All that was tried").table(header, rows)
    return page.end(facts)
