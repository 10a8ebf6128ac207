"""The page of an audit of positions: the verdict in words first, then what it stands on."""

from __future__ import annotations

from situs.measure.position.knowledge import PositionAudit, at_a_glance
from situs.measure.position.readers import OWN, REMOVED, SHUFFLED
from situs.report import figures, places
from situs.report.html import Page, Section
from situs.results import Cell, percent

CONDITIONS = {
    OWN: "as it is",
    REMOVED: "positions removed: what contents tell",
    SHUFFLED: "patches shuffled: what positions tell",
}

SHORT = {OWN: "own:", REMOVED: "removed:", SHUFFLED: "shuffled:"}


def page(audit: PositionAudit) -> Page:
    """The verdict, and each of the looks that it stands on."""
    page = Page(f"What {audit.name} knows of position", lead=audit.summary().sentence)
    own = audit.probed.readings[OWN]
    page.number(percent(own[0].right, 0), "of tokens that enter the blocks tell their place")
    page.number(percent(own[-1].right, 0), f"after the last norm (chance {percent(own[-1].blind_right)})")
    page.section("Verdict").facts(at_a_glance(audit))
    _readings(page, audit)
    _vectors(page.section("The vectors of the places"), audit)
    _shuffled(page.section("What shuffled patches do"), audit)
    _law(page.section("Whether the blocks mind the order"), audit)
    _meaning(page.section("What follows"), audit)
    return page.end(audit.provenance.facts)


def _readings(page: Page, audit: PositionAudit) -> None:
    section, probed = page.section("Where a patch is, read off its features"), audit.probed
    section.text(
        f"Linear readers are fitted on the patch features of {probed.fitted} images and read {probed.tested} others, "
        "at every depth: a ridge regression to row and column, and a linear discriminant over all places. Unlike the "
        "regression on the places' vectors below, they have seen every place before, in other images."
        + (
            " With the positions removed only what the patches show is left; with the patches shuffled under their "
            "positions, only the positions are."
            if len(probed.readings) > 1
            else ""
        )
    )
    for key, label, name, caption in (
        ("error", "mean error, patches", "error", "How far off a patch's row and column are read, mean of both; low"),
        (
            "right",
            "patches whose place is named, %",
            "named",
            "How often the very place is named, of all there are; high",
        ),
    ):
        scale = 100 if key == "right" else 1
        series, names = {}, []
        for condition, readings in probed.readings.items():
            names = [each.depth.replace("embedding", "embed") for each in readings]
            values = [scale * (each.error if key == "error" else each.right) for each in readings]
            series[CONDITIONS[condition]] = (range(len(names)), values)
        last = next(iter(probed.readings.values()))[-1]
        level = ("blind", scale * (last.blind_error if key == "error" else last.blind_right))
        drawn = figures.curves(series, "after block", label, x_names=names, level=level)
        (page.opening if name == "named" else section).figure(drawn, f"{caption}: it is known.", name=name)
    rows: list[list[Cell]] = []
    header = ["after"]
    for condition in probed.readings:
        header += [f"{SHORT[condition]} error", *["R²"] * (condition == OWN), "named"]
    for group in zip(*probed.readings.values(), strict=True):
        row: list[Cell] = [group[0].depth]
        for condition, each in zip(probed.readings, group, strict=True):
            row += [f"{each.error:.2f}", *[f"{each.r2:.3f}"] * (condition == OWN), percent(each.right)]
        rows.append(row)
    section.table(header, rows, "Error in patches, mean of row and column; R² of both; named: the very place, of all.")
    if audit.hierarchical:
        section.note("This model gives its blocks no row of their own, and its end has a coarser grid than its start.")


def _vectors(section: Section, audit: PositionAudit) -> None:
    if not audit.looks:
        section.text(f"There is nothing to see: {audit.no_vectors}.")
        return
    for number, look in enumerate(audit.looks, start=1):
        section.text(
            f"{look.table.kind.capitalize()} of {look.shape}: 3, 5 and 7 principal components hold "
            f"{percent(look.spectrum.explained_by(3))}, {percent(look.spectrum.explained_by(5))} and "
            f"{percent(look.spectrum.explained_by(7))} of its variance, and {look.spectrum.components_for(0.9)} hold "
            f"90 %. Cross-validated regression reads row and column with a mean error of {look.decoded.two.mean:.3f} "
            f"patches (blind: {look.decoded.chance_two:.2f}). `situs evaluate position` (vectors) shows more."
        )
        labels, guesses = places.component_labels(look.components.shares[:2]), look.decoded.guesses[:, ::-1]
        panels = [
            places.Sheet("principal components", look.components.points[:, :2], labels),
            places.Sheet("read off by regression", guesses, ("guessed column", "guessed row"), as_image=True),
        ]
        name = "vectors" if number == 1 else f"vectors-{number}"
        caption = "The places with neighbours joined; lines along a row share a colour."
        section.figure(places.sheets(panels, look.table.grid), caption, name=name)
        shares = [100 * share for share in look.spectrum.explained[:20]]
        numbers = [str(number) for number in range(1, len(shares) + 1)]
        series = {look.table.kind: (range(len(shares)), shares)}
        drawn = figures.curves(series, "principal component", "share of the variance, %", x_names=numbers)
        caption = "The spectrum: how much each principal component holds."
        section.figure(drawn, caption, name=name.replace("vectors", "spectrum"))


def _shuffled(section: Section, audit: PositionAudit) -> None:
    section.text(
        f"A share γ of the patches, in a block mask, is shuffled. Diff.Norm is how far the {audit.reads} moves, as a "
        "mean over the images. Not told: every place keeps its position and holds a wrong patch. Told: the masked "
        "places are forgotten. `situs evaluate consistency` shows more."
    )
    answers = any(row.consistency is not None for row in audit.shuffled)
    header = ["γ", "mask", "patches", "Diff.Norm", "of its length"] + ["answers that stay"] * answers
    rows: list[list[Cell]] = []
    for row in audit.shuffled:
        share = row.diff_norm / row.clean_norm if row.clean_norm else None
        cells: list[Cell] = [f"{row.ratio:g}", "told" if row.told else "not told", row.masked, f"{row.diff_norm:.3g}"]
        cells.append(None if share is None else percent(share))
        rows.append(cells + ([None if row.consistency is None else percent(row.consistency)] if answers else []))
    section.table(header, rows)
    if not answers:
        section.note("It has no trained classifier, so there are no answers to compare.")


def _law(section: Section, audit: PositionAudit) -> None:
    if audit.rows is None:
        section.text("Not measured.")
        return
    section.text(
        "`blocks(P s) = P blocks(s)`: permute the tokens that enter the blocks, their rotation with them, and the same "
        "tokens must come out permuted, forward and in the gradients of every weight."
    )
    facts: dict[str, Cell] = {"verdict": audit.rows["status"]}
    if audit.rows["reason"]:
        facts["reason" if audit.rows["status"] == "refused" else "but"] = audit.rows["reason"]
    facts |= {f"error in float64, {check}": f"{error:.1e}" for check, error in audit.rows["errors"].items()}
    section.facts(facts)


def _meaning(section: Section, audit: PositionAudit) -> None:
    first = audit.probed.readings[OWN][0]
    if audit.rows is not None and audit.rows["status"] == "holds" and first.right > 10 * first.blind_right:
        section.text(
            "Permuting the tokens (split learning) hides their order from the blocks and not from who runs them: with "
            f"{audit.probed.fitted} images of one's own and this embedding, a linear reader names the place of "
            f"{percent(first.right, 0)} of the tokens that are sent."
        )
    if any(look.table.kind == "learned table" for look in audit.looks):
        section.text(
            "A learned table has a gradient of its own, from which the pixels of a training step can be solved for: "
            "`situs audit gradients` measures it."
        )
    section.text(
        "A linear reader gives a lower bound: what it cannot read, another may. Few images give it little to learn "
        "from; with more of them it reads no worse."
    )
