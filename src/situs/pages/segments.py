"""The pages of segmentation: a model's own, and what a linear layer reads off frozen features."""

from __future__ import annotations

from collections.abc import Sequence

from situs.errors import counted
from situs.measure.probe.segments import SegmentProbes
from situs.measure.segments.measure import Segments, by_class
from situs.measure.segments.scores import SegmentScores
from situs.pages.evaluate import finish_probe, worst_images
from situs.report import figures
from situs.report.html import Page, Section
from situs.report.masks import MaskRow, mask_rows
from situs.results import Cell, percent

MEANING = """
A class's intersection over union is the number of pixels that are of the class and are said to be, over the number that
are either: 100 % where the two areas are one. mIoU is its mean over the classes that are there or are said, over the
whole split and not image by image. Pixel accuracy is the share of pixels whose class is right, class accuracy the mean
over the classes of that share. Pixels without a class (void) are left out of every number. Images are judged at the
size of their masks.
"""
PROBE = """
The model is frozen. One linear layer, the same for every patch, gives each patch a number for each class; these are
upsampled to the image (bilinear), and the highest is the class of a pixel. So it measures what the patches' features
themselves tell of what lies where.
"""
_DRAWN, _LISTED = 40, 20
_CROSSED = 12


def segments(found: Segments) -> Page:
    """The numbers, the classes, which are taken for which, and the worst images."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: segmentation", lead=said.sentence)
    page.number(percent(found.scores.miou, 2), "mIoU").number(percent(found.scores.accuracy, 2), "pixels right")
    section = page.section("How right it is")
    section.table(*said.tables[0][1:], f"{found.provenance.counted(found.count)}, {found.how.mode}.")
    _classes(section if found.worst else page.opening, found.scores, found.classes)
    if found.worst:
        rows = [
            MaskRow(f"{percent(each.iou, 0)}", each.picture, {"truth": each.truth, "predicted": each.said})
            for each in found.worst
        ]
        caption = "Left of each image the mean IoU of its own classes. Where no colour is, there is no class (void)."
        section = worst_images(page, rows, lambda some: mask_rows(some, found.classes), caption)
        section.table(["image", "IoU, %"], [[each.name, f"{100 * each.iou:.2f}"] for each in found.worst])
    _confusion(page.section("Which classes are taken for which"), found.scores, found.classes)
    return page.end(found.provenance.facts, MEANING)


def segment_probe(found: SegmentProbes) -> Page:
    """The numbers of each model, and the classes of the first."""
    said, (name, first) = found.summary(), found.first
    page = Page(f"{name}: linear segmentation probe", lead=said.sentence)
    page.number(percent(first.scores.miou, 2), f"mIoU, {name}")
    section = page.section("Masks read off frozen features")
    section.table(*said.tables[0][1:], "On images that the layer was not fitted to.")
    for number, (model, probe) in enumerate(found.probes.items(), start=1):
        place, picture = (page.opening, "classes") if number == 1 else (section, f"classes-{number}")
        _classes(place, probe.scores, found.classes, f", in {model}", picture)
    _confusion(page.section(f"Which classes are taken for which, in {name}"), first.scores, found.classes)
    return finish_probe(page, found, PROBE + MEANING)


def _classes(
    section: Section, scores: SegmentScores, classes: Sequence[str], of: str = "", name: str = "classes"
) -> None:
    rows = [row for row in by_class(scores, classes) if row["iou"] is not None]
    if len(rows) <= _DRAWN:
        drawn = figures.bars({row["class"]: 100 * row["iou"] for row in rows}, "IoU, %", digits=".1f")
        section.figure(drawn, f"Intersection over union of each class{of}.", name=name)
        return
    weakest = sorted(rows, key=lambda row: row["iou"])[:_LISTED]
    section.table(
        ["class", "pixels", "IoU, %", "taken most often for"],
        [[row["class"], row["pixels"], f"{100 * row['iou']:.2f}", row["taken_for"] or "none"] for row in weakest],
        f"The {counted(len(weakest), 'classes')} with the lowest IoU{of}.",
    )


def _confusion(section: Section, scores: SegmentScores, classes: Sequence[str]) -> None:
    shares = 100 * scores.answers.double() / scores.answers.sum(dim=1, keepdim=True)
    if len(classes) <= _CROSSED:
        grid = {"": (shares.numpy(), "% of the class's pixels")}
        drawn = figures.value_grids(grid, classes, classes, "said", "true", limits=(0, 100))
        section.figure(drawn, "Share of each class's pixels that are said to be of each class.", name="confusion")
        return
    mixed = scores.answers.clone().fill_diagonal_(0)
    order = mixed.flatten().argsort(descending=True)[:_LISTED].tolist()
    pairs = [divmod(place, len(classes)) for place in order if int(mixed.flatten()[place])]
    rows: list[list[Cell]] = [
        [str(classes[a]), str(classes[b]), int(mixed[a, b]), f"{float(shares[a, b]):.1f}"] for a, b in pairs
    ]
    section.table(["class", "said to be", "pixels", "of the class, %"], rows, "The pairs that take most pixels.")
