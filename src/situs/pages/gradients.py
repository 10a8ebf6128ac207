"""The page of a gradient audit: verdict, images, threat model, what would help, attacks × defences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from situs.audit import ATTACKS
from situs.audit.cases import EXACT, ImageFinding
from situs.audit.defences import threat_facts
from situs.audit.engine import Leak
from situs.audit.gradients import (
    REFUSED,
    Audit,
    alone,
    findings,
    grid,
    measured,
    opening,
    others_of,
    reasons,
    steps_of,
    strength,
    table,
    unmeasured,
)
from situs.audit.oracle import Oracle
from situs.audit.run import finished
from situs.audit.scores import BEST_PSNR, METRICS, blind_at
from situs.audit.sweep.ladder import Remedies, verdict
from situs.errors import counted, verb
from situs.findings import ACTIVE
from situs.gate import ABOVE, BLIND, Ruling, scope_of
from situs.report import figures
from situs.report.figures import pixel_rows
from situs.report.html import Page, Section, Tone
from situs.results import Cell

EXACTLY = (
    f"'Recovered exactly' means a PSNR of {EXACT:g} dB or more. The mean error is then less than half of one grey "
    f"level (of 255), which is invisible. A recovery without any error is shown as {BEST_PSNR:g} dB. If an image was "
    "recovered byte for byte, the attacker knows that the recovery is exact, because no other bytes fit the equations "
    "of the attack."
)

ALONE = "not defined for a single image."

GATE = (
    "The gate judges the most exposed image. Its verdict holds {scope}. An image counts as 'above' if one of four "
    "things is true. (a) Its recovery is better than a blind guess by more than {psnr:g} dB of PSNR or {ssim:g} of "
    "SSIM. (For this PSNR, the recovered image is changed to fit best: by gain, offset, flips, shifts and a reduction "
    "to two levels.) (b) "
    "More of its patches are at their true position than chance explains. (c) The image is re-identified more often "
    "than by chance. (d) It exceeds your limit. If an image is 'above', the gate fails. A pass has four conditions. "
    "(1) No image is 'above', neither with its true label nor with the least likely label. (2) The upload contains "
    "noise. (3) A closed-form attack solved every image, and the errors of its equations are no larger than noise and "
    "rounding explain. (4) The oracle (a bound that is computed with the true image) also stays within the margins. In "
    "all other cases the gate is inconclusive (not a pass). An attack that searches for the image (such as `matching`) "
    "can make the gate fail, but alone it never makes the gate pass."
)

ONLY = "and only against the attacks of this page. Other attacks may do better"
"""What a pass does not cover."""

NEXT = """
Repeat the audit when something changes: weights (each release, each round), labels, images, local steps or batch size.
Even a small change can make images recoverable: one model passed the gate, but after a change of its head alone, an
audit recovered recognisable images. Only a pass has the exit status 0, so CI stops in all other cases:
"""

FURTHER = """
Audit as many images as you can: the gate judges only the most exposed image of the audit, and a few images may not
include a very exposed one. Also try a search (the attack `matching`), which may recover more. Only differential privacy
with a small ε protects against every attack, and an audit does not measure ε.
"""

BRIEF = ("psnr", "ssim", "mse", "fft2d", "lpips")

TIME = " Time runs from left to right, and frequency from the bottom up."

CERTAIN = ("psnr", "patch_psnr", "order_accuracy", "reidentified")
"""Metrics of the table of means, and of the table with intervals: one table of all would be too wide."""

NO_REMEDY = f"""
These measures do not help: withholding the gradient of the position table, freezing the table, and fixed (sin-cos) or
rotary positions. The gradients of the first block also contain the patches, and the attack `tokens` recovers the
patches from these gradients. Local steps (FedAvg) do not help either: the row spaces of the summed gradients still
contain the inputs of the first step. The entry "{REFUSED}" in a table does not mean that the images are private.
"""

REMEDIES = """
Use secure aggregation over many images, so that the server sees only sums over a large batch. A small batch does not
protect. The attack `patchembed` fails for two or more images, but other attacks still work. If the batch has fewer
tokens than the model has channels, the gradients of the first block still contain every patch. Gradient matching works
for any batch, although it gets harder with every image. A batch of one image is always exposed, even after several
local steps.

Train with differential privacy and a noise multiplier of 0.5 or more. Clipping alone does not help: it multiplies all
gradients of an image by the same number. For a step on one image, the equations of the attack therefore keep the same
solution.
"""
"""Which defences reduce the leak, and which do not."""

AGAINST_CHOSEN = """
Secure aggregation does not help against a server that chooses the weights, because such a server reads single images
out of the sum. Large batches, or uploads of fewer gradients, only limit how many images the server can read per
round. Two defences help: differential privacy on the client (a noise multiplier of 0.5 or more), and weights that the
server cannot choose, such as published weights with a signature. Each client must then compare the weights that it
receives with the published weights.
"""
"""The same if the server chooses the weights."""

SEARCH = (
    "This audit did not search for a defence. To search, use `audit sweep` with the flag `find` and a limit such as "
    "psnr=20. For each defence, the search finds the weakest setting that stays within the limit, and the cost of this "
    "setting. It then tests the setting on images that the search did not use. In Python: "
    "`situs.find_defences(model, images, 'psnr=20')`."
)
SHOWN = 6
"""Images in the first picture."""


def page(audit: Audit) -> Page:
    """The page; with the images and their recoveries if the audit has them."""
    page = Page(f"Gradient audit of {audit.model}", _lead(audit))
    _first_screen(page, audit)
    defences = {f"defence {name}": about for name, about in audit.about.items()}
    attacks = dict.fromkeys(finding.attack for finding in audit.findings)
    bounds = {f"bound {Oracle.name}": Oracle.about} if any(finding.bound for finding in audit.findings) else {}
    works = Section("").facts({**described(attacks), **bounds, **defences})
    page.box("Threat model").facts({**threat_facts(audit.threat), **audit.notes}).fold(
        "How the attacks and defences work", works
    )
    section, ruling = page.section("Verdict"), audit.ruling
    if caveat := opening(audit):
        section.note(caveat)
    if audit.attacked:
        section.facts(findings(audit)).text(EXACTLY)
    if audit.undone:
        pairs = ", ".join(f"{attack} against {defence}" for attack, defence in audit.undone)
        section.text(f"The audit was stopped before these attacks: {pairs}.")
    if ruling is not None:
        section.note(ruling.sentence).table(*ruling.table()).text(_rule(audit))
    if audit.tone == "good":
        command = str(audit.provenance.facts.get("command", f"situs audit gradients MODEL (fail_above: {audit.limit})"))
        page.box("What to do next").text(NEXT).code(command).text(FURTHER)
    more = Section("").text(AGAINST_CHOSEN if audit.threat == ACTIVE else REMEDIES).text(NO_REMEDY)
    box = _would_help(page.box("Defences that help"), audit.remedies)
    box.fold("Which defences reduce the leak, and which do not", more)
    _tables(page, audit)
    _pictures(page, audit)
    searched = any("distance" in fact for pair in audit.pairs for fact in pair.facts)
    return page.end(facts_of(audit, () if searched else ("labels", "search")))


def _would_help(box: Section, search: Remedies | None) -> Section:
    """A row for each defence of the search: its chosen setting, or otherwise the last one tried, and its cost."""
    if search is None:
        return box.text(SEARCH)
    rows: list[list[Cell]] = []
    for remedy in search.remedies:
        trial = remedy.unseen or (remedy.tried[-1] if remedy.tried else None)
        above = [(other.answer == "above", other.unseen) for other in remedy.tried]
        fails = not remedy.cut and (all(high for high, _ in above) or (True, True) in above)
        setting = remedy.named or (remedy.defence if trial is None else f"{remedy.defence}, as {trial.setting}")
        worst = "not attacked" if trial is None else trial.exposed
        price = None if remedy.cost is None else f"cosine {remedy.cost.cosine:.2f} with the gradient"
        failed = "✗ no defence"
        if remedy.untried_from is not None:
            failed = f"✗ no setting up to {remedy.untried_from} passed; nothing stronger was tried"
        mark = "✓ within the limit" if remedy.named else failed if fails and above else "? inconclusive"
        rows.append([setting, worst, price, mark])
    header = ["defence", "most exposed image", "cost", f"against {', '.join(search.attacks)}"]
    sentence = verdict(search)
    if search.stopped is not None and search.with_setting:  # otherwise the verdict says so
        sentence = f"{sentence} The search was stopped by {search.stopped}, so defences without a row were not tried."
    box = box.table(header, rows) if rows else box
    return box.text(f"{sentence} `defences.html` in the same folder lists all trials.")


def _worst(audit: Audit) -> ImageFinding | None:
    return max(audit.attacked, key=strength, default=None)


def _lead(audit: Audit) -> str:
    """The lead: the strongest finding, caveats, and the gate's verdict. A pass names no attack and no number, since it
    holds only against these attacks."""
    worst, things = _worst(audit), audit.provenance.things
    if worst is None:
        return " ".join([opening(audit), audit.threat.assumed, *([audit.ruling.sentence] if audit.ruling else [])])
    if audit.tone == "good" and audit.ruling is not None:
        closer = f"With {audit.threat.server}, the attacks on this page recovered hardly more of any"
        closer = f"{closer} {things.removesuffix('s')} than a blind guess. This holds {scope_of(audit.threat)}, {ONLY}."
        return f"{closer} The section Verdict gives the exact margins and says what to do next."
    step, at_least = steps_of(worst, audit.step), "At least " * (worst.why("lower_bound") is not None)
    if worst.exact:
        to_the_byte = worst.to_the_byte == worst.exact
        how = "byte for byte" if to_the_byte else "exactly"
        rebuilt = f"{verb(worst.exact, 'were')} recovered {how} from {step} of training, by {audit.threat.server}"
        first = f"{at_least}{worst.exact} of {counted(worst.count, things)} {rebuilt}."
    elif worst.others:
        first = ""
    else:
        thing = things.removesuffix("s")
        best = f"the most exposed {thing} was recovered with a PSNR of {worst.worst_psnr:.1f} dB"
        server = audit.threat.server[0].upper() + audit.threat.server[1:]
        first = f"{server} recovered no {thing} exactly from {step} of training; {best}."
    against = "without a defence" if worst.defence == "none" else f"against {worst.defence}"
    by = f"The attack is {worst.attack}, {against}."
    others = f"{others_of(worst, things)}." if worst.others else ""
    return " ".join(filter(None, [first, others, by, opening(audit), _gate(audit.ruling)]))


def _rule(audit: Audit) -> str:
    """How the gate judges."""
    margins = {"psnr": METRICS["aligned_psnr"].margin, "ssim": METRICS["ssim"].margin}
    never = (
        f" Against {audit.threat.server}, the gate never passes: {audit.threat.unproved}."
        if audit.threat.unproved
        else ""
    )
    return GATE.format(scope=scope_of(audit.threat), **margins) + never


def _gate(ruling: Ruling | None) -> str:
    """The gate's verdict; the reasons of a failed one are further down."""
    if ruling is None or ruling.status != ABOVE:
        return "" if ruling is None else ruling.sentence
    limit = "" if ruling.limit == BLIND else f", and no image exceeds {ruling.limit.metric}={ruling.limit.bound:g}"
    return (
        "The gate failed. It passes only if every image is recovered no better than blind guesses, up to the gate's "
        f"margins{limit}."
    )


def _first_screen(page: Page, audit: Audit) -> None:
    """The mark, the numbers of the strongest attack, and its images."""
    worst = _worst(audit)
    unsure = "Not attacked, so not proved private" if worst is None else "Not proved private"
    marks = {"bad": "Not private", "good": "The gate passed, against these attacks", "unsure": unsure}
    page.judge(audit.tone, marks[audit.tone])
    if worst is None:
        page.number("0", "attacks run")
        return
    what = f"{audit.provenance.things} exact" + ", but not in the data" * (worst.others == worst.count)
    page.number(f"{worst.exact + worst.others} of {worst.count}", what)
    page.number("no error" if worst.worst_psnr >= BEST_PSNR else f"{worst.worst_psnr:.1f} dB", "the most exposed image")
    if (guess := _blind(audit, worst)) is not None:
        page.number(f"{guess:.1f} dB", "PSNR of a blind guess of the same image")
    page.number(*finished(audit.findings))
    if worst.shown is None or worst.shown.shape[1] not in (1, 3):
        pairs = sorted(audit.attacked, key=lambda pair: -pair.worst_psnr)
        bars: dict[str, tuple[float, Tone]] = {
            f"{pair.attack}, {pair.defence}": (pair.worst_psnr, "bad" if pair.exact else "") for pair in pairs
        }
        page.opening.bars(bars, "dB", "PSNR of the most exposed image, by attack and defence.")
        return
    values = (worst.scores["psnr"] or [])[: len(worst.shown)]
    order = sorted(range(len(values)), key=lambda which: -values[which])[:SHOWN]
    rows = [seen_from(part[order].cpu(), audit) for part in (audit.images, worst.shown)]
    page.opening.figure(
        pixel_rows(rows),
        "The upper row shows private images, the most exposed first. The lower row shows the images recovered from the "
        "upload.",
        "Private images. Below each image is its recovery.",
    )


def _blind(audit: Audit, pair: ImageFinding) -> float | None:
    """PSNR in dB of the best blind guess at the most exposed image of a pair, such as an average picture."""
    values = pair.scores.get("psnr") or [0.0]
    place = max(range(len(values)), key=values.__getitem__)
    return blind_at(audit.baselines, "psnr", pair.numbers[place])


def facts_of(result: Leak, without: Sequence[str] = ()) -> dict[str, Cell]:
    """How a result was made: facts by their names, with spaces."""
    facts = result.provenance.facts
    return {name.replace("_", " "): fact for name, fact in facts.items() if name not in without}


def described(attacks: Iterable[str]) -> dict[str, Cell]:
    """What the attacks of these names do, for the threat model."""
    return {f"attack {name}": ATTACKS[name].about for name in attacks if name in ATTACKS}


def _searched(pair: ImageFinding, batch: int) -> str | None:
    """A sentence about the search of an optimisation attack and the labels it inferred."""
    facts = pair.facts[::batch]  # one per upload; the last may have been stopped
    if not facts or "distance" not in facts[0]:
        return None
    values: list[Any] = [fact["distance"] for fact in facts if fact["distance"] is not None]
    distance = f"{sum(values) / len(values):.2g}" if values else "unknown"
    counts: list[Any] = [fact["iterations"] for fact in facts]
    iterations = " to ".join(f"{count:,}" for count in dict.fromkeys((min(counts), max(counts))))
    rights: list[Any] = [fact["labels_right"] for fact in facts if "labels_right" in fact]
    labels = f"{sum(rights)} of {len(rights) * batch} labels were inferred correctly" if rights else "labels were known"
    about = f"{iterations} iterations, mean distance of the gradients {distance}; {labels}"
    return f"{pair.attack} against {pair.defence}: {about}."


def _tables(page: Page, audit: Audit) -> None:
    section = page.section("Attacks and defences")
    if audit.attacked:
        _results(section, audit)
    else:
        section.text(f"No attack {'was run' if audit.undone else 'applies'}, so there is no table of results.")
    if rows := reasons(audit):
        section.table(["attack and defences", "why it does not apply, or is not exact"], rows)


def _results(section: Section, audit: Audit) -> None:
    """An overview, all metrics, intervals, the linear systems, and the searches."""
    count = len(audit.names)
    fewer = any(0 < pair.count < count for pair in audit.pairs)
    some = (
        " If an attack has results for only some of the images, its row shows the mean over these images."
        if fewer
        else ""
    )
    section.table(
        *grid(audit),
        "Overview: mean PSNR in dB, PSNR of the most exposed image, and the number of images recovered exactly.",
    )
    header, rows = table(audit, measured(BRIEF, audit.pairs), alone)
    section.table(
        header[:-2],
        [row[:-2] for row in rows if row[2] != REFUSED],
        f"The table shows means over {counted(count, 'images')}.{some} MSE, FFT2D and LPIPS are distances, so low "
        "values show a leak. For PSNR and SSIM, high values show a leak. Baselines use no "
        f"gradient.{unmeasured(audit.pairs)}",
    )
    header, rows = table(audit, CERTAIN)
    section.table(
        [*header[:2], *header[4:-2]],
        [[*row[:2], *row[4:-2]] for row in rows if row[2] != REFUSED],
        "Means and their 95 % intervals. Best-match PSNR compares each patch with the recovered patch that fits it "
        "best, at any position. Order: the fraction of patches at their true position. Re-identified: "
        + (
            f"the fraction of recovered images whose nearest original (of {count}) is the true original."
            if count > 1
            else ALONE
        ),
    )
    if solved := [[*row[:2], *row[-2:]] for row in rows if row[-2] is not None]:
        section.table(
            [*header[:2], *header[-2:]],
            solved,
            "These attacks solve linear equations for the pixels. The matrix G of these equations is the gradient "
            "of the position table. If G has full rank, the equations have only one solution. The lower "
            "the condition number of G, the less the solution suffers from rounding. The last columns show the "
            "smallest rank and the median condition number over the images.",
        )
    for pair in audit.pairs:
        if sentence := _searched(pair, pair.case.defence.step(audit.step).batch):
            section.text(sentence)


def _pictures(page: Page, audit: Audit, most: int = 4) -> None:
    if not audit.private:
        return
    section = page.section("Pictures")
    for pair in audit.pairs:
        if pair.shown is None:
            continue
        values = (pair.scores["psnr"] or [])[:most]
        real, recovered = (seen_from(part[: len(values)], audit) for part in (audit.images, pair.shown))
        titles = ["no error" if value >= BEST_PSNR else f"{value:.1f} dB" for value in values]
        strips = [("original", real), ("recovered", recovered), ("difference", (real - recovered).abs())]
        section.figure(
            figures.image_rows([(name, images.cpu()) for name, images in strips], titles),
            f"{pair.attack} against {pair.defence}: originals, recovered images, and their absolute difference (black: "
            f"no difference). The PSNR is above each column.{TIME * (audit.provenance.things == 'clips')}"
            f"{'' if (cut := pair.why('stopped')) is None else f' The attack was stopped after {cut}.'}",
        )


def seen_from(pictures: Tensor, audit: Leak) -> Tensor:
    """Images [n, C, H, W] as they are shown: spectrograms with low frequencies at the bottom."""
    return pictures.flip(-2) if audit.provenance.things == "clips" else pictures
