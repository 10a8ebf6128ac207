"""The page of a search for defences: the chosen settings, their costs, and all trials."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.sweep.remedies import UNTUNED, Remedies, cost_table, remedy_table, verdict
from situs.gate import SCOPE
from situs.pages.gradients import described
from situs.report.html import Page, Section, Tone

READ = (
    f"A setting passes the gate of an audit, {SCOPE}, if there is noise; a closed-form attack that knows the defence "
    "solved every image; its equations fit as the stated noise and precision predict; and no recovered image, not even "
    "that of the oracle (a bound), is closer than blind guesses (within the gate's margins) or above the limit. "
    "Inconclusive is not a pass."
)

PAID = (
    "The cosine compares what is sent with the undefended gradient, over a batch of this size. ε is given only for "
    "per-sample clipping with noise, and holds for randomly drawn (Poisson) batches."
)


def page(search: Remedies) -> Page:
    """The settings that keep the limit, their costs, and a table of all trials."""
    page = Page(f"Defences of {search.model}", verdict(search))
    if search.found:
        page.judge("good" if search.stopped is None else "unsure", f"Keeps {search.limit} against these attackers")
    elif search.stopped:
        page.judge("unsure", "Stopped: nothing is known")
    else:
        page.judge("bad", "No defence found")
    facts = dict(search.provenance.facts)
    attacks = Section("").facts(described(search.attacks))
    page.box("Threat model").facts({**THREAT, **search.notes}).fold("How the attacks work", attacks)
    if not search.remedies:  # no trial was finished, as the page's lead says
        return page.end(facts)
    page.number(f"{len(search.found)} of {len(search.remedies)}", f"defences with a setting that keeps {search.limit}")
    caption = "The most exposed image, at the chosen setting or the last one tried."
    page.opening.bars(_worst(search), search.limit.metric, caption)
    section = page.section("What keeps the limit")
    section.table(*remedy_table(search), READ)
    if search.found:
        section.table(*cost_table(search), PAID)
        section.note(UNTUNED)
    if search.stopped is not None and search.found:  # otherwise the lead says so
        section.note(f"Stopped by {search.stopped}.")
    header = ["defence", "setting", "images", "unseen", "most exposed image", "by", "gate", "why"]
    rows = [
        [remedy.defence, t.setting, t.images, t.unseen, t.exposed, t.by or None, t.answer, t.said]
        for remedy in search.remedies
        for t in (*remedy.tried, *(trial for trial in (remedy.unseen, remedy.weaker_unseen) if trial is not None))
    ]
    page.section("All trials").table(header, rows)
    return page.end(facts)


def _worst(search: Remedies) -> dict[str, tuple[float, Tone]]:
    """The most exposed image of each defence by the limit's metric, at the chosen setting, else at the last tried."""
    bars: dict[str, tuple[float, Tone]] = {}
    for remedy in search.remedies:
        trial = remedy.unseen or remedy.seen or (remedy.tried[-1] if remedy.tried else None)
        if trial is not None and trial.worst is not None and trial.metric in ("", search.limit.metric):
            bars[remedy.named or f"{remedy.defence}, {trial.setting}"] = trial.worst, "good" if remedy.named else "bad"
    return dict(sorted(bars.items(), key=lambda bar: -bar[1][0]))
