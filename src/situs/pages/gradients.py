"""The page of a gradient audit: verdict and picture, threat model, what would help, attacks × defences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from situs.audit import ATTACKS
from situs.audit.cases import EXACT, ImageFinding
from situs.audit.defences import THREAT
from situs.audit.engine import Leak
from situs.audit.gradients import Audit, findings, grid, opening, reasons, seen, steps_of, strength, table
from situs.audit.oracle import Oracle
from situs.audit.run import finished
from situs.audit.scores.exposure import METRICS, blind_at
from situs.audit.scores.metrics import BEST_PSNR
from situs.audit.sweep.remedies import Remedies, verdict
from situs.audit.tables import REFUSED, alone, measured, unmeasured
from situs.errors import counted, verb
from situs.gate import ABOVE, BLIND, SCOPE, Ruling
from situs.report import figures
from situs.report.html import Page, Section
from situs.report.pixels import pixel_rows
from situs.results import Cell

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXACTLY = (
    f"Exactly means a PSNR of {EXACT:g} dB or more: the mean error is below half a grey level of 255, which no eye "
    f"sees; {BEST_PSNR:g} dB stands for no error at all. Where every pixel was read to its exact byte, the attacker "
    "knows it without the original: his equations fit these bytes and no others."
)

ALONE = "not defined for one image, which is the nearest to whatever is found."

GATE = (
    f"The gate, by the most exposed image, {SCOPE}. Above: an image came back closer than blind guesses by more than "
    f"{METRICS['aligned_psnr'].margin:g} dB (PSNR up to gain, offset, flips, shifts and two levels) or "
    f"{METRICS['ssim'].margin:g} (SSIM), with more patches at their place, found again among the others more often "
    "than by chance, or above the limit that was asked for. Passed: none did, not even under the least likely labels; "
    "there is noise in what is sent, a closed form solved every image and its equations fit as noise and precision "
    "predict; and the oracle, a bound that is told the image, stays within those margins too. Everything else is "
    "inconclusive, which is no pass; a search can only fail a gate."
)

ONLY = "Only against the attacks of this page, which is no proof against others"
"""What a pass is worth, beside its scope."""

NEXT = """
Ask again whenever something changes: other weights (each release, each round), other labels, other images, more local
steps or another batch. Another head alone has turned a pass into pictures that anyone recognises. The audit ends with
status 0 only where it passes, so that CI can stop on the rest:
"""

FURTHER = """
Give as many images as you can: the most exposed one decides. Try a search as well (the attack matching): it can only
fail the gate. What holds against every attack is a small ε of differential privacy, which an audit does not measure.
"""

BRIEF = ("psnr", "ssim", "mse", "fft2d", "lpips")

TIME = " Time runs from left to right, and the numbers of a frame from the bottom up."

CERTAIN = ("psnr", "patch_psnr", "order_accuracy", "reidentified")
"""The metrics of the table of means, and of the one with intervals: all of them in one are too wide for a page."""

NO_REMEDY = f"""
Keeping back the gradient of the position table, freezing it, and fixed (sin-cos) or rotary positions are no remedies:
the patches stand in the gradients of the first block as well, and the attack tokens reads them there. Nor are local
steps (FedAvg): the inputs of the first step lie in the row spaces of their sum. Where this page says "{REFUSED}",
nothing is known.
"""

REMEDIES = """
Aggregate securely over many images, so that only sums over a large batch are seen. patchembed and april fail from two
images on, but a small batch is no remedy: with fewer tokens than channels the gradients of the first block still hold
every patch, and gradient matching takes any batch and only gets harder with every image. A batch of one is always
exposed, and several local steps on one image do not help.

Train with differential privacy and a noise multiplier that means something (0.5 and more), not with clipping alone:
clipping multiplies all gradients of a step on one image by one number, and the solution does not change.
"""
"""What would reduce the leak, each with its limit, and what would not."""


SEARCH = (
    "It was not searched for here. The weakest setting of each defence that keeps a limit, tested on images that the "
    "search did not see, and what it costs: `audit sweep` with the flag `find` and a limit, as psnr=20, or "
    "in Python `situs.audit.find_defences(model, images, 'psnr=20')`."
)
SHOWN = 6
"""Images in the first picture."""


def page(audit: Audit) -> Page:
    """The page, with the images and what was recovered of them where the audit has them."""
    page = Page(f"Gradient audit of {audit.model}", _lead(audit))
    _first_screen(page, audit)
    defences = {f"defence {name}": said for name, said in audit.about.items()}
    attacks = dict.fromkeys(finding.attack for finding in audit.findings)
    bounds = {f"bound {Oracle.name}": Oracle.about} if any(each.bound for each in audit.findings) else {}
    works = Section("").facts({**described(attacks), **bounds, **defences})
    page.box("Threat model").facts({"model": audit.threat.name, **THREAT, **audit.notes}).fold(
        "How the attacks and defences work", works
    )
    section, ruling = page.section("Verdict"), audit.ruling
    if said := opening(audit):
        section.note(said)
    if audit.attacked:
        section.note(_headline(audit)).facts(findings(audit)).text(EXACTLY)
    if audit.undone:
        left = ", ".join(f"{attack} against {defence}" for attack, defence in audit.undone)
        section.text(f"These were not attacked before the stop: {left}.")
    if ruling is not None:
        section.note(ruling.sentence).table(*ruling.table()).text(GATE)
    if audit.tone == "good":
        command = str(audit.provenance.facts.get("command", f"situs audit gradients MODEL (fail_above: {audit.limit})"))
        page.box("What to do next").text(NEXT).code(command).text(FURTHER)
    more = Section("").text(REMEDIES).text(NO_REMEDY)
    box = _would_help(page.box("What would help"), audit.remedies)
    box.fold("What would reduce the leak, and what would not", more)
    _tables(page, audit)
    _pictures(page, audit)
    searched = any("distance" in fact for pair in audit.pairs for fact in pair.facts)
    return page.end(made(audit, () if searched else ("labels", "search")))


def _would_help(box: Section, found: Remedies | None) -> Section:
    """A row for each defence that was searched: the setting that is named, or else the last one tried, and its cost."""
    if found is None:
        return box.text(SEARCH)
    rows: list[list[Cell]] = []
    for each in found.remedies:
        trial = each.unseen or (each.tried[-1] if each.tried else None)
        above = [(other.answer == "above", other.unseen) for other in each.tried]
        fails = not each.cut and (all(high for high, _ in above) or (True, True) in above)
        setting = each.named or (each.defence if trial is None else f"{each.defence}, as {trial.setting}")
        worst = "not attacked" if trial is None else trial.exposed
        price = None if each.cost is None else f"cosine {each.cost.cosine:.2f} with the gradient"
        failed = "✗ no defence"
        if each.untried_from is not None:
            failed = f"✗ none up to {each.untried_from}; nothing stronger was tried"
        said = "✓ keeps the limit" if each.named else failed if fails and above else "? inconclusive"
        rows.append([setting, worst, price, said])
    header = ["defence", "most exposed image", "cost", f"against {', '.join(found.attacks)}"]
    said = verdict(found)
    if found.stopped is not None and found.with_setting:  # else the verdict says so
        said = f"{said} Stopped by {found.stopped}: what has no row was not searched."
    box = box.table(header, rows) if rows else box
    return box.text(f"{said} All that was tried stands in `defences.html` beside this.")


def _worst(audit: Audit) -> ImageFinding | None:
    return max((pair for pair in audit.attacked), key=strength, default=None)


def _lead(audit: Audit) -> str:
    """The most that was found, in plain words, as the headline; then what the gate said, and what is not as it should
    be. Of a pass neither an attack nor a number stands there: it holds against these attacks alone."""
    worst, things = _worst(audit), audit.provenance.things
    if worst is None:
        return " ".join([opening(audit), *([audit.ruling.sentence] if audit.ruling else [])])
    if audit.tone == "good" and audit.ruling is not None:
        closer = f"The attacks tried here got hardly more of any {things.removesuffix('s')} than a blind guess."
        return f"{closer} {ONLY}, and {SCOPE}. What hardly means stands under Verdict, what to do next below it."
    step, at_least = steps_of(worst, audit.step), "At least " * (worst.why("lower_bound") is not None)
    if worst.exact:
        to_the_byte = worst.to_the_byte == worst.exact
        how = "byte for byte" if to_the_byte else "exactly"
        rebuilt = f"{verb(worst.exact, 'were')} rebuilt {how} from {step} of training"
        first = f"{at_least}{worst.exact} of {counted(worst.count, things)} {rebuilt}."
    else:
        best = f"the most exposed one came back at {worst.worst_psnr:.1f} dB"
        first = f"No {things.removesuffix('s')} was rebuilt exactly from {step} of training; {best}."
    against = "no defence added" if worst.defence == "none" else f"against {worst.defence}"
    said = [first, f"By {worst.attack}, {against}.", opening(audit), _gate(audit.ruling)]
    return " ".join(filter(None, said))


def _gate(ruling: Ruling | None) -> str:
    """What the gate says; of one that failed the reasons stand further down."""
    if ruling is None or ruling.status != ABOVE:
        return "" if ruling is None else ruling.sentence
    wish = "" if ruling.limit == BLIND else f", and {ruling.limit.metric} {ruling.limit.bound:g} or less"
    return f"The gate asked for no image closer than blind guesses, but for its margins{wish}: failed."


def _first_screen(page: Page, audit: Audit) -> None:
    """The audit's own tone in words, the numbers of its strongest pair and its pictures."""
    worst = _worst(audit)
    unsure = "Not attacked, which is not private" if worst is None else "Not proved private"
    marks = {"bad": "Not private", "good": "The gate is passed, against these attacks", "unsure": unsure}
    page.judge(audit.tone, marks[audit.tone])
    if worst is None:
        page.number("0", "attacks made")
        return
    page.number(f"{worst.exact} of {worst.count}", f"{audit.provenance.things} exact")
    page.number("no error" if worst.worst_psnr >= BEST_PSNR else f"{worst.worst_psnr:.1f} dB", "the most exposed image")
    if (guess := _blind(audit, worst)) is not None:
        page.number(f"{guess:.1f} dB", "the same image guessed blind")
    page.number(*finished(audit.findings))
    if worst.shown is None or worst.shown.shape[1] not in (1, 3):
        pairs = sorted(audit.attacked, key=lambda pair: -pair.worst_psnr)
        shown = {f"{pair.attack}, {pair.defence}": pair for pair in pairs}
        page.opening.bars(
            {name: (pair.worst_psnr, "bad" if pair.exact else "") for name, pair in shown.items()},
            "dB",
            "The image that came back best, by attack and defence.",
        )
        return
    values = (worst.scores["psnr"] or [])[: len(worst.shown)]
    order = sorted(range(len(values)), key=lambda which: -values[which])[:SHOWN]
    rows = [seen_from(part[order].cpu(), audit) for part in (audit.images, worst.shown)]
    page.opening.figure(
        pixel_rows(rows),
        "Above: private images, the most exposed first. Below: rebuilt from what the client would send.",
        "Private images, and under each what was recovered of it.",
    )


def _blind(audit: Audit, pair: ImageFinding) -> float | None:
    """PSNR in dB of the best blind guess at the most exposed image of a pair, such as an average picture."""
    values = pair.scores.get("psnr") or [0.0]
    place = max(range(len(values)), key=values.__getitem__)
    return blind_at(audit.baselines, "psnr", pair.numbers[place])


def made(result: Leak, without: Sequence[str] = ()) -> dict[str, Cell]:
    """How a result was made, by names as people write them."""
    facts = result.provenance.facts
    return {name.replace("_", " "): fact for name, fact in facts.items() if name not in without}


def _headline(audit: Audit) -> str:
    """The most that was found, in one sentence. No defence is added where a run brings its own method, too."""
    worst = max(audit.attacked, key=strength)
    things = audit.provenance.things
    found = f"{worst.exact} of {counted(worst.count, things)} recovered exactly from {steps_of(worst, audit.step)}"
    if worst.to_the_byte:
        found += f", {'all' if worst.to_the_byte == worst.count else worst.to_the_byte} to the last byte"
    if not worst.exact:
        found = f"no {things.removesuffix('s')} recovered exactly from {steps_of(worst, audit.step)}; {seen(worst)}"
    defence = "no defence added" if worst.defence == "none" else f"against {worst.defence}"
    return f"The most that was found: {found} ({worst.attack}, {defence})."


def described(attacks: Iterable[str]) -> dict[str, Cell]:
    """What the attacks of these names do, for the threat model."""
    return {f"attack {name}": ATTACKS[name].about for name in attacks if name in ATTACKS}


def _searched(pair: ImageFinding, batch: int) -> str | None:
    """What an optimisation attack can say of its search and of the labels it inferred."""
    facts = pair.facts[::batch]  # one an upload: they are searched in groups, and the last may have been stopped
    if not facts or "distance" not in facts[0]:
        return None
    values: list[Any] = [fact["distance"] for fact in facts if fact["distance"] is not None]
    distance = f"{sum(values) / len(values):.2g}" if values else "unknown"
    counts: list[Any] = [fact["iterations"] for fact in facts]
    done = dict.fromkeys((min(counts), max(counts)))
    rights: list[Any] = [fact["labels_right"] for fact in facts if "labels_right" in fact]
    told = f"{sum(rights)} of {len(rights) * batch} labels inferred rightly" if rights else "labels given"
    return (
        f"{pair.attack} against {pair.defence}: {' to '.join(f'{n:,}' for n in done)} iterations from "
        f"{counted(int(str(facts[0]['restarts'])), 'starts')}, mean distance of the gradients "
        f"{distance}, {told}."
    )


def _tables(page: Page, audit: Audit) -> None:
    section = page.section("Attacks and defences")
    if audit.attacked:
        _results(section, audit)
    else:
        section.text(f"No attack {'was made' if audit.undone else 'applies'}, so there is no table of results.")
    if said := reasons(audit):
        section.table(["attack and defences", "why it does not apply, or is not exact"], said)


def _results(section: Section, audit: Audit) -> None:
    """At a glance, then every metric, intervals, the systems that were solved, and how the searches went."""
    count = len(audit.names)
    fewer = any(0 < pair.count < count for pair in audit.pairs)
    some = " Of a pair that saw fewer they are over those it saw." if fewer else ""
    section.table(
        *grid(audit),
        "At a glance: PSNR in dB, the mean and that of the most exposed image (which came back best), and how many "
        "images were recovered exactly.",
    )
    header, rows = table(audit, measured(BRIEF, audit.pairs), alone)
    section.table(
        header[:-2],
        [row[:-2] for row in rows if row[2] != REFUSED],
        f"Means over {counted(count, 'images')}.{some} MSE, FFT2D and LPIPS are distances: low is a leak; of "
        f"PSNR and SSIM high is one. Baselines saw no gradient.{unmeasured(audit.pairs)}",
    )
    header, rows = table(audit, CERTAIN)
    section.table(
        [*header[:2], *header[4:-2]],
        [[*row[:2], *row[4:-2]] for row in rows if row[2] != REFUSED],
        "Means and their 95 % intervals. Best-match PSNR compares each patch with the recovered one that fits it, "
        "wherever that stands. Order: the share of patches at their own place. Re-identified: "
        + (f"the share of images whose nearest of the {count} originals is the right one." if count > 1 else ALONE),
    )
    if solved := [[*row[:2], *row[-2:]] for row in rows if row[-2] is not None]:
        section.table(
            [*header[:2], *header[-2:]],
            solved,
            "The linear systems: G is the gradient of the position table. With its full rank the pixels have one "
            "solution; the lower its condition, the less rounding spoils it. Least rank, median condition.",
        )
    for pair in audit.pairs:
        if said := _searched(pair, pair.case.defence.step(audit.step).batch):
            section.text(said)


def _pictures(page: Page, audit: Audit, most: int = 4) -> None:
    if not audit.private:
        return
    section = page.section("Pictures")
    for pair in audit.pairs:
        if pair.shown is None:
            continue
        values = (pair.scores["psnr"] or [])[:most]
        real, found = (seen_from(part[: len(values)], audit) for part in (audit.images, pair.shown))
        titles = ["no error" if value >= BEST_PSNR else f"{value:.1f} dB" for value in values]
        strips = [("original", real), ("recovered", found), ("difference", (real - found).abs())]
        section.figure(
            picture_rows(strips, len(values), titles),
            f"{pair.attack} against {pair.defence}: originals, what was recovered from the gradients, and the absolute "
            f"difference (black: none); over each its PSNR.{TIME * (audit.provenance.things == 'clips')}"
            f"{'' if (cut := pair.why('stopped')) is None else f' Stopped after {cut}.'}",
        )


def seen_from(pictures: Tensor, audit: Leak) -> Tensor:
    """Pictures [n, C, H, W] as people look at them: spectrograms with their low numbers at the bottom."""
    return pictures.flip(-2) if audit.provenance.things == "clips" else pictures


def picture_rows(strips: Sequence[tuple[str, Tensor]], count: int, titles: Sequence[str] = ()) -> Figure:
    """Rows of so many pictures [·, C, H, W] with their names, white where a row has fewer.

    Of channels that are neither 1 nor 3 the first is shown.
    """
    rows = [images[:count].cpu() for _, images in strips]
    whole = torch.cat([torch.cat([row, row.new_ones(count - len(row), *row.shape[1:])]) for row in rows])
    whole = whole if whole.shape[1] in (1, 3) else whole[:, :1]
    return figures.image_grid(whole, titles, columns=count, row_titles=tuple(name for name, _ in strips))
