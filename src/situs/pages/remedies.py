"""The page of a search for defences: the chosen settings, their costs, and all trials."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.sweep.ladder import UNTUNED, Remedies, cost_table, exposures_by_metric, remedy_table, verdict
from situs.gate import SCOPE
from situs.pages.gradients import described
from situs.report.html import Page, Section, Tone

READ = (
    "A setting passes the gate of an audit only if five conditions hold. (1) The upload contains noise. (2) A "
    "closed-form attack that knows the defence solved every image. (3) The errors of the attack's equations are no "
    "larger than the given noise and rounding explain. (4) No recovered image exceeds the limit, or is better than "
    "blind guesses by more than the gate's margins. (5) The oracle (a bound that is computed with the true image) also "
    f"stays within the limit and the margins. The pass holds {SCOPE}. An inconclusive gate is not a pass."
)

PAID = (
    "The cosine compares the upload with the undefended gradient, at the audited batch size. ε is given only for "
    "defences that clip the gradient of each sample and add noise. ε is valid only if batches are drawn at random "
    "(Poisson sampling)."
)


def page(search: Remedies) -> Page:
    """The settings that keep the limit, their costs, and a table of all trials."""
    page = Page(f"Defences of {search.model}", verdict(search))
    if search.with_setting:
        page.judge(
            "good" if search.stopped is None else "unsure",
            f"Some settings stay within {search.limit} against these attackers",
        )
    elif search.stopped:
        page.judge("unsure", "Stopped before any result")
    else:
        page.judge("bad", "No defence found")
    facts = dict(search.provenance.facts)
    attacks = Section("").facts(described(search.attacks))
    page.box("Threat model").facts({**THREAT, **search.notes}).fold("How the attacks work", attacks)
    if not search.remedies:  # no trial was finished, as the page's lead says
        return page.end(facts)
    page.number(
        f"{len(search.with_setting)} of {len(search.remedies)}",
        f"defences with a setting within the limit {search.limit}",
    )
    caption = "The most exposed image at the chosen setting, or at the last tested setting if no setting was chosen."
    for metric, settings in exposures_by_metric(search).items():
        bars: dict[str, tuple[float, Tone]] = {
            name: (value, "good" if named else "bad") for name, (value, named) in settings.items()
        }
        page.opening.bars(bars, metric, caption)
    section = page.section("Settings within the limit")
    section.table(*remedy_table(search), READ)
    if search.with_setting:
        section.table(*cost_table(search), PAID)
        section.note(UNTUNED)
    if search.stopped is not None and search.with_setting:  # otherwise the lead says so
        section.note(f"The search was stopped by {search.stopped}.")
    header = ["defence", "setting", "images", "unseen", "most exposed image", "by", "gate", "why"]
    rows = [
        [remedy.defence, t.setting, t.images, t.unseen, t.exposed, t.by or None, t.answer, t.reason]
        for remedy in search.remedies
        for t in (*remedy.tried, *([] if remedy.unseen is None else [remedy.unseen]))
    ]
    page.section("All trials").table(header, rows)
    return page.end(facts)
