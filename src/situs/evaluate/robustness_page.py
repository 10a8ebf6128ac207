"""Robustness as a page, a table and JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from situs.evaluate.corruptions import CORRUPTIONS, GROUPS
from situs.evaluate.corruptions_severity import describe
from situs.evaluate.robustness import ALEXNET, score
from situs.evaluate.robustness_run import Robustness
from situs.report import figures
from situs.report.html import Page, Section
from situs.report.mosaic import mosaic
from situs.report.value_grid import value_grid
from situs.results import Cell, percent

IMAGENET_CLASSES, IMAGENET_SIDE = 1000, 224

MEANING = """
The raw mCE is the mean top-1 error over corruptions, each the mean over its severities. The AlexNet-normalised mCE
divides each corruption's error by that of AlexNet on ImageNet-C before the mean, so that 100 % is as bad as AlexNet.
The second is larger by a quarter to a third on ImageNet, and neither compares with the other. The relative mCE does
the same with what corruption adds to the error on clean images.
"""

MADE_HERE = """
These images were made here from the clean ones, as the model sees them (cropped and resized), with the published
strengths. They are not the published files: the noise is another, frost is drawn and not photographed, and they are
not compressed as JPEG of quality 85 on top. Numbers compare between models measured this way; they are not comparable
figure for figure with published ones.
"""


def to_json(found: Robustness, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Every number, without pictures."""
    result: dict[str, Any] = {**facts, "outputs": found.outputs, "skipped": list(found.skipped)}
    if found.cells:
        scores = score(found.cells, found.clean)
        result |= {
            "images": "made here" if found.given is None else found.given,
            "clean": None if found.clean is None else asdict(found.clean),
            "corruptions": {
                name: {
                    "severities": {str(severity): asdict(cell) for severity, cell in row.items()},
                    "error": scores.errors[name],
                    "alexnet_error": ALEXNET[name],
                }
                for name, row in found.cells.items()
            },
            "mce_raw": scores.raw,
            "mce_alexnet_normalised": scores.normalised,
            "mce_alexnet_relative": scores.relative,
            "error_added": scores.added,
            "mce_note": caveat(found, facts),
        }
    if found.natural is not None:
        result["imagenet_a"] = asdict(found.natural)
    if found.anomalies is not None:
        result["imagenet_o"] = {**asdict(found.anomalies), "chance": found.anomalies.chance}
    return result


def caveat(found: Robustness, facts: Mapping[str, Any]) -> str | None:
    """Why the mCE is not a published model's neighbour, in one sentence; None where it is."""
    side = min(int(part) for part in str(facts["img_size"]).split("x"))
    reasons = []
    if found.outputs != IMAGENET_CLASSES or side != IMAGENET_SIDE:
        reasons.append(f"AlexNet's errors are for ImageNet at 224 pixels, this is {found.outputs} classes at {side}")
    if found.given is None:
        reasons.append("the corrupted images were made here and frost is drawn")
    if len(found.cells) < len(CORRUPTIONS):
        reasons.append(f"it is over {len(found.cells)} of the 15 corruptions")
    return "; ".join(reasons) or None


def finding(found: Robustness) -> str:
    """The result in words."""
    said = []
    if found.cells:
        scores = score(found.cells, found.clean)
        ranked = sorted(scores.errors, key=scores.errors.__getitem__)
        best, worst = ranked[0], ranked[-1]
        beside = "" if found.clean is None else f" instead of {percent(found.clean.top1)} on clean ones"
        said.append(f"It answers {percent(1 - scores.raw)} of corrupted images rightly{beside}: a raw mCE of "
                    f"{percent(scores.raw)}.")  # fmt: skip
        if worst != best:
            said.append(
                f"{_name(worst)[0].upper()}{_name(worst)[1:]} hurts most ({percent(1 - scores.errors[worst])} right), "
                f"{_name(best)} least ({percent(1 - scores.errors[best])})."
            )
    if (natural := found.natural) is not None:
        said.append(f"On {natural.name} it is right on {percent(natural.accuracy)} (AURRA {percent(natural.aurra)}).")
    if (strange := found.anomalies) is not None:
        said.append(f"It tells {strange.name} apart with an AUPR of {percent(strange.aupr)}, chance being "
                    f"{percent(strange.chance)}.")  # fmt: skip
    return " ".join(said)


def cells_table(found: Robustness) -> tuple[list[str], list[list[Cell]]]:
    """Header, and a row a corruption: accuracy at each severity, mean error, error over AlexNet's."""
    scores = score(found.cells, found.clean)
    severities = list(next(iter(found.cells.values())))
    normal = scores.normalised is not None
    header = ["top-1 at severity", *map(str, severities), "mean error"]
    rows: list[list[Cell]] = []
    if found.clean is not None:
        blank: list[Cell] = [None] * len(severities)
        rows.append(["clean", *blank, _points(1 - found.clean.top1), *([None] if normal else [])])
    for name, row in found.cells.items():
        over = [_points(scores.errors[name] / ALEXNET[name])] if normal else []
        rows.append([_name(name), *(_points(cell.top1) for cell in row.values()), _points(scores.errors[name]), *over])
    return header + (["error / AlexNet's"] if normal else []), rows


def _errors_table(found: Robustness) -> tuple[list[str], list[list[Cell]]]:
    """Header, and a row a corruption: kind, error, AlexNet's, the one over the other."""
    scores = score(found.cells, found.clean)
    kinds = {name: kind for kind, members in GROUPS.items() for name in members}
    rows: list[list[Cell]] = [
        [_name(name), kinds[name], _points(error), _points(ALEXNET[name]), _points(error / ALEXNET[name])]
        for name, error in scores.errors.items()
    ]
    header = ["corruption", "kind", "error", "AlexNet's on ImageNet-C", "error / AlexNet's"]
    if scores.normalised is not None:
        return header, rows
    return header[:3], [row[:3] for row in rows]


def summary(found: Robustness, facts: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """(measure, value, what to know of it)."""
    rows: list[tuple[str, str, str]] = []
    if found.clean is not None:
        rows.append(("top-1, clean", percent(found.clean.top1), f"{found.data}, {found.clean.count:,} images"))
    if found.cells:
        scores = score(found.cells, found.clean)
        count = next(iter(next(iter(found.cells.values())).values())).count
        several = f"{len(found.cells)} corruptions, {count:,} images each"
        rows.append(("mCE, raw", percent(scores.raw), f"mean error over {several}"))
        note = caveat(found, facts) or "as published models are compared"
        if scores.normalised is None:
            rows.append(("mCE, AlexNet-normalised", "–", "needs all five severities, as AlexNet's errors do"))
        else:
            rows.append(("mCE, AlexNet-normalised", percent(scores.normalised), note))
        if scores.relative is not None:
            added = "the same of what corruption adds to the clean error"
            rows.append(("relative mCE, AlexNet-normalised", percent(scores.relative), added))
    if (natural := found.natural) is not None:
        kind = f"{natural.name}, {natural.count:,} images, among its {natural.classes} classes"
        rows += [("ImageNet-A, top-1", percent(natural.accuracy), kind)]
        rows += [("ImageNet-A, AURRA", percent(natural.aurra), "accuracy over response rates, most confident first")]
    if (strange := found.anomalies) is not None:
        kind = f"{strange.anomalies:,} anomalies against {strange.normal:,} of {strange.normal_name}"
        rows.append(("ImageNet-O, AUPR", percent(strange.aupr), f"{kind}; chance {percent(strange.chance)}"))
    return rows


def make_page(found: Robustness, name: str, facts: Mapping[str, Any]) -> tuple[Page, dict[str, bytes]]:
    """The page and its pictures."""
    page = Page(f"{name}: robustness", lead=finding(found))
    pictures: dict[str, bytes] = {}
    section = page.section("What was found")
    section.table(["measure", "value", "of what"], [list(row) for row in summary(found, facts)])
    for said in found.skipped:
        section.note(said)
    if found.cells:
        _corruption_sections(page, found, facts, pictures)
    if (natural := found.natural) is not None:
        pictures["response"] = figures.png(
            figures.curves(
                {natural.name: (range(1, 101), [100 * value for value in natural.curve])},
                "response rate, % (most confident first)",
                "accuracy of what is answered, %",
            )
        )
        section = page.section("Natural adversarial examples")
        section.figure(
            pictures["response"],
            "Accuracy when only the most confident answers are given; its mean is AURRA. A falling curve means that "
            "confidence knows something about being right.",
        )
    page.section("How this page was made").facts({key: _fact(value) for key, value in facts.items()})
    return page, pictures


def _corruption_sections(page: Page, found: Robustness, facts: Mapping[str, Any], pictures: dict[str, bytes]) -> None:
    severities = list(next(iter(found.cells.values())))
    values = [[100 * cell.top1 for cell in row.values()] for row in found.cells.values()]
    names = [_name(name) for name in found.cells]
    chance = 100 / found.outputs
    pictures["accuracy"] = figures.png(
        value_grid(
            values,
            names,
            [str(each) for each in severities],
            "severity",
            "",
            "top-1 accuracy, %",
            limits=(0.0, 100.0),
            cell_height=0.36,
        )
    )
    section = page.section("Accuracy at every corruption and severity")
    beside = "" if found.clean is None else f", {percent(found.clean.top1)} on clean images"
    section.figure(
        pictures["accuracy"], f"Top-1 accuracy in percent{beside}; chance is {chance:.3g} %. {_error_bar(found)}"
    )
    if len(severities) > 1:
        pictures["severity"] = figures.png(_severity_curves(found, severities))
        section.figure(pictures["severity"], "The mean accuracy of each kind of corruption, over severity.")
    section.table(*_errors_table(found), "Top-1 error in percent, the mean over the severities.")
    section.text(MEANING)
    if (note := caveat(found, facts)) is not None:
        section.note(f"Not to be compared with published mCE: {note}.")
    _picture_section(page.section("What the corruptions look like"), found, facts, severities, pictures)


def _picture_section(
    section: Section, found: Robustness, facts: Mapping[str, Any], severities: list[int], pictures: dict[str, bytes]
) -> None:
    shown = found.pictures
    assert shown is not None
    if shown.shape[2] not in (1, 3):
        shown = shown[:, :, :1]
    titles = [f"severity {severity}" for severity in severities]
    titles = ["clean", *titles] if found.given is None else titles
    pictures["corruptions"] = figures.png(mosaic(shown, [_name(name) for name in found.cells], titles))
    if found.given is not None:
        section.figure(pictures["corruptions"], f"The first image of each folder of {found.given}.")
        return
    side = min(int(part) for part in str(facts["img_size"]).split("x"))
    section.text(f"Strengths: {describe(side)}.")
    section.text(MADE_HERE)
    section.figure(pictures["corruptions"], "The first image of the set, corrupted as the model saw it.")


def _severity_curves(found: Robustness, severities: list[int]) -> Any:
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
    count = next(iter(next(iter(found.cells.values())).values())).count
    return f"With {count:,} images a cell is known to within ± {100 * 1.96 * 0.5 / math.sqrt(count):.1f} points (95 %)."


def _fact(value: Any) -> Cell:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value


def _name(name: str) -> str:
    return name.replace("_", " ").replace("jpeg", "JPEG").replace("gaussian", "Gaussian")


def _points(share: float) -> str:
    return f"{100 * share:.1f}"
