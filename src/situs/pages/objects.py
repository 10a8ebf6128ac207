"""The page of detection: average precision, classes, the worst images, who is taken for what."""

from __future__ import annotations

from situs.errors import counted
from situs.measure.objects.measure import Detections, Drawn, by_class
from situs.measure.objects.scores import OVERLAP, SURE
from situs.pages.evaluate import worst_images
from situs.report import figures
from situs.report.html import Page, Section
from situs.report.objects import ObjectRow, Outlined, object_rows
from situs.results import Cell, percent

MEANING = f"""
Average precision (AP) as COCO means it, in hundredths: what was found is sorted by its score, each is right where it
overlaps an object of its class that no surer one has taken, and precision is averaged over recall from 0 to 1; AP is
the mean over overlaps (intersection over union) of .5, .55, … .95 and over the classes that have objects, AP50 and AP75
are at one overlap. Small objects have less than 32² pixels, large ones more than 96². At most 100 are judged an image.
What lies in a crowd counts neither as right nor as wrong. The comparison object by object takes what has a score of
{SURE} or more and gives each to the object that its mask overlaps most, by at least {OVERLAP}, of whatever class. F1 is
twice the number found under their class over those that are there and those that are said.
"""
_DRAWN, _LISTED, _CROSSED = 40, 20, 12


def page(found: Detections) -> Page:
    """The numbers, the classes, the worst images, and which classes are taken for which."""
    said = found.summary()
    made = Page(f"{found.provenance.name}: detection", lead=said.sentence)
    made.number(f"{100 * found.boxes.ap:.1f}", "AP of boxes").number(f"{100 * found.masks.ap:.1f}", "AP of masks")
    section = made.section("How right it is")
    section.table(*said.tables[0][1:], f"{found.provenance.counted(found.count)}. {said.notes[0]}")
    _classes(section if found.worst else made.opening, found)
    if found.worst:
        rows = [
            ObjectRow(percent(each.f1, 0), each.picture, each.sides, {"truth": _outlined(each.truth),
                                                                      "found": _outlined(each.said)})
            for each in found.worst
        ]  # fmt: skip
        caption = f"Left of each image its F1; found: what has a score of {SURE} or more, the score at each box."
        section = worst_images(made, rows, lambda some: object_rows(some, found.classes), caption)
        listed: list[list[Cell]] = [
            [each.name, f"{100 * each.f1:.1f}", len(each.truth.classes), len(each.said.classes)] for each in found.worst
        ]
        section.table(["image", "F1, %", "objects", "found"], listed)
    _confusion(made.section("Which classes are taken for which"), found)
    return made.end(found.provenance.facts, MEANING)


def _outlined(drawn: Drawn) -> Outlined:
    return Outlined(*drawn)


def _classes(section: Section, found: Detections) -> None:
    rows = [row for row in by_class(found) if row["boxes"] is not None]
    if len(rows) <= _DRAWN:
        for what in ("boxes", "masks"):
            drawn = figures.bars({row["class"]: 100 * row[what] for row in rows}, "AP", digits=".1f")
            section.figure(drawn, f"AP of each class that has objects, of {what}.", name=f"classes-{what}")
        return
    weakest = sorted(rows, key=lambda row: row["boxes"])[:_LISTED]
    listed: list[list[Cell]] = [
        [row["class"], row["objects"], f"{100 * row['boxes']:.2f}", f"{100 * row['masks']:.2f}", row["missed"],
         row["taken_for"] or "none"]
        for row in weakest
    ]  # fmt: skip
    header = ["class", "objects", "AP of boxes", "AP of masks", "missed", "taken most often for"]
    section.table(header, listed, f"The {counted(len(weakest), 'classes')} with the lowest AP of boxes.")


def _confusion(section: Section, found: Detections) -> None:
    table, names = found.answers.table, [*found.classes, "none"]
    if len(found.classes) <= _CROSSED:
        shares = 100 * table.double() / table.sum(dim=1, keepdim=True)
        grid = {"": (shares.numpy(), "% of the row")}
        drawn = figures.value_grids(grid, names, names, "said", "true", limits=(0, 100))
        caption = "Of each class's objects the share that is said to be of each class, or missed (none). The last row: "
        section.figure(drawn, caption + "what is said where no object is.", name="confusion")
        return
    mixed = table.clone().fill_diagonal_(0)
    order = mixed.flatten().argsort(descending=True, stable=True)[:_LISTED].tolist()
    pairs = [divmod(place, len(names)) for place in order if int(mixed.flatten()[place])]
    rows: list[list[Cell]] = [[names[true], names[said], int(mixed[true, said])] for true, said in pairs]
    section.table(["true", "said", "objects"], rows, "The pairs that take most objects; none: missed, or not there.")
