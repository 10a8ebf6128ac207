"""The page of a search for remedies: the settings it names, what each costs, and all that was tried."""

from __future__ import annotations

from situs.audit.defences import THREAT
from situs.audit.remedies.result import UNTUNED, Remedies, cost_table, remedy_table, verdict
from situs.pages.gradients import described
from situs.report.html import Page

READ = (
    "A setting passes where a closed form that knows the defence solved every image, its equations fit as the stated "
    "noise and precision predict, and no image is above the limit; one that no attack applies to is not judged, which "
    "is no pass."
)

PAID = (
    "Accuracy is that of a short fine-tuning from what is sent under the setting, each image seen once, beside the "
    "same without a defence; ± is the 95 % interval of the difference over the images judged. The cosine is that of "
    "what is sent with the gradient itself, over a batch of this size. ε is said of clipping per sample with noise "
    "alone, and holds for batches that are drawn by chance (Poisson)."
)


def page(found: Remedies) -> Page:
    """The page."""
    lead = "How little of each defence keeps images from being had back, against attackers that know it."
    page = Page(f"Defences of {found.model}", lead)
    page.section("Threat model").facts({**THREAT, **found.notes, **described(found.attacks)})
    section = page.section("What keeps the limit")
    section.note(verdict(found)).table(*remedy_table(found), READ)
    if found.found:
        section.table(*cost_table(found), PAID)
        if not found.tuned:
            section.note(UNTUNED)
    if found.stopped is not None:
        section.note(f"Stopped by {found.stopped}.")
    header = ["defence", "setting", "images", "unseen", f"worst {found.limit.metric}", "by", "gate", "why"]
    rows = [
        [each.defence, t.setting, t.images, t.unseen, t.worst, t.by or None, t.answer, t.said]
        for each in found.remedies
        for t in (*each.tried, *(trial for trial in (each.unseen, each.weaker_unseen) if trial is not None))
    ]
    page.section("All that was tried").table(header, rows)
    page.section("How this page was made").facts(dict(found.provenance.facts))
    return page
