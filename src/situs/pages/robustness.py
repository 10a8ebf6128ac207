"""Robustness as a page."""

from __future__ import annotations

import math

from situs.errors import counted
from situs.measure.corruptions import GROUPS
from situs.measure.corruptions.severity import describe
from situs.measure.robustness.measures import ALEXNET, Robustness, points, spoken
from situs.report import figures
from situs.report.html import Page, Section
from situs.results import Cell, percent

MEANING = """
The raw mCE is the mean top-1 error over corruptions, each the mean over its severities. The AlexNet-normalised mCE
divides each corruption's error by that of AlexNet on ImageNet-C before the mean, so that 100 % is as bad as AlexNet.
The second is larger by a quarter to a third on ImageNet, and neither compares with the other.
"""

MADE_HERE = """
These images were made here from the clean ones, as the model sees them (cropped and resized), with the published
strengths. They are not the published files: the noise is another, frost is drawn and not photographed, and they are
not compressed as JPEG of quality 85 on top. Numbers compare between models measured this way; they are not comparable
figure for figure with published ones.
"""


def page(found: Robustness) -> Page:
    """What was found, every corruption and severity, and how confidence answers to ImageNet-A."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: robustness", lead=said.sentence)
    for measure, value, of in said.tables[-1].rows[:4]:
        page.number(value, f"{measure}, {of}" if of else str(measure))
    page.section("What was found").table(["measure", "value", "of what"], said.tables[-1].rows).note(*said.notes)
    if found.cells:
        _corruptions(page, found)
        _pictures(page.section("What the corruptions look like"), found)
    if (natural := found.natural) is not None:
        curve = {natural.name: (range(1, 101), [100 * value for value in natural.curve])}
        labels = "response rate, % (most confident first)", "accuracy of what is answered, %"
        (page.section("Natural adversarial examples") if found.cells else page.opening).figure(
            figures.curves(curve, *labels),
            "Accuracy when only the most confident answers are given; its mean is AURRA. A falling curve means that "
            "confidence knows something about being right.",
            name="response",
        )
    if not page.opening.blocks and (odd := found.anomalies) is not None:
        page.opening.bars({f"AUPR of {odd.name}": 100 * odd.aupr, "chance": 100 * odd.chance}, "%")
    return page.end(found.provenance.facts)


def _corruptions(page: Page, found: Robustness) -> None:
    section = page.section("Accuracy at every corruption and severity")
    severities = list(next(iter(found.cells.values())))
    values = [[100 * cell.top1 for cell in row.values()] for row in found.cells.values()]
    names, across = [spoken(name) for name in found.cells], list(map(str, severities))
    panel = {"": (values, "top-1 accuracy, %")}
    drawn = figures.value_grids(panel, names, across, "severity", "", limits=(0.0, 100.0), cell=(0.95, 0.36))
    beside = "" if found.clean is None else f", {percent(found.clean.top1)} on clean images"
    chance = f"chance is {100 / found.outputs:.3g} %"
    place = section if len(severities) > 1 else page.opening
    place.figure(drawn, f"Top-1 accuracy in percent{beside}; {chance}. {_error_bar(found)}", name="accuracy")
    if len(severities) > 1:
        caption = "The mean accuracy of each kind of corruption, over severity."
        page.opening.figure(_severity_curves(found, severities), caption, name="severity")
    section.table(*_errors(found), "Top-1 error in percent, the mean over the severities.")
    section.text(MEANING)
    if (note := found.caveat) is not None:
        section.note(f"Not to be compared with published mCE: {note}.")


def _errors(found: Robustness) -> tuple[list[str], list[list[Cell]]]:
    """Header, and a row a corruption: kind, error, AlexNet's, the one over the other."""
    kinds = {name: kind for kind, members in GROUPS.items() for name in members}
    rows: list[list[Cell]] = [
        [spoken(name), kinds[name], points(error), points(ALEXNET[name]), points(error / ALEXNET[name])]
        for name, error in found.scores.errors.items()
    ]
    header = ["corruption", "kind", "error", "AlexNet's on ImageNet-C", "error / AlexNet's"]
    if found.scores.normalised is not None:
        return header, rows
    return header[:3], [row[:3] for row in rows]


def _pictures(section: Section, found: Robustness) -> None:
    shown = found.pictures
    assert shown is not None
    if shown.shape[2] not in (1, 3):
        shown = shown[:, :, :1]
    titles = [f"severity {severity}" for severity in next(iter(found.cells.values()))]
    titles = ["clean", *titles] if found.given is None else titles
    caption = "The first image of the set, corrupted as the model saw it."
    if found.given is None:
        section.text(f"Strengths: {describe(found.side)}.").text(MADE_HERE)
    else:
        caption = f"The first image of each folder of {found.given}."
    section.figure(figures.mosaic(shown, [spoken(name) for name in found.cells], titles), caption, name="corruptions")


def _severity_curves(found: Robustness, severities: list[int]) -> figures.Figure:
    series = {}
    for kind, members in GROUPS.items():
        rows = [found.cells[name] for name in members if name in found.cells]
        if not rows:
            continue
        means = [100 * sum(row[severity].top1 for row in rows) / len(rows) for severity in severities]
        start = [] if found.clean is None else [(0, 100 * found.clean.top1)]
        points = [*start, *zip(severities, means, strict=True)]
        series[kind] = ([x for x, _ in points], [y for _, y in points])
    label = "severity" if found.clean is None else "severity (0: clean)"
    return figures.curves(series, label, "top-1 accuracy, %")


def _error_bar(found: Robustness) -> str:
    """How far a cell may be off by the choice of images: a 95 % interval at its widest, accuracy one half."""
    off = 100 * 1.96 * 0.5 / math.sqrt(found.count)
    return f"With {counted(found.count, 'images')} a cell is known to within ± {off:.1f} points (95 %)."
