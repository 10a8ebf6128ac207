"""Probes as pages: one model, or a model before and after fine-tuning, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from situs.evaluate.probe import Fitted
from situs.evaluate.probe_class import ClassProbe
from situs.evaluate.probe_position import PositionProbe
from situs.methods.base import UnknownPosition
from situs.report import figures
from situs.report.html import Page
from situs.results import Cell, percent

POSITION_MEANING = """
Every patch is seen, but most have lost their position. From the final feature of each patch without a position, a
linear classifier names the place it came from. The backbone is frozen; the classifier is a logistic regression fitted
to the training split, its weight decay chosen on a part of that split, and the numbers are those of the other split.

A model that scores high rebuilds places from what the patches show and from the few that know where they stand.
DropPos's Table 7 compares this before and after fine-tuning with labels: where the number rises, the task itself
wanted places.
"""

CLASS_MEANING = """
The backbone is frozen and every image becomes one vector. A logistic regression on top is fitted to the training
split, its weight decay chosen on a part of that split, and the numbers are those of the other split. Nothing of the
backbone is trained, so this measures what the representation already separates.
"""


def position_page(
    probes: Mapping[str, tuple[PositionProbe, UnknownPosition]], grid: tuple[int, ...], facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """probes: by the model's name, in order; the second is the one after fine-tuning."""
    first = next(iter(probes))
    page = Page(f"{first}: linear position probe", lead=position_finding(probes))
    pictures = {"accuracy": figures.png(_bars(probes, grid)), "places": figures.png(_maps(probes, grid))}
    section = page.section("Places read off frozen features")
    section.figure(pictures["accuracy"], "Share of patches without a position whose place a linear classifier names.")
    section.figure(pictures["places"], "The same share for each true place, in the image's own layout.")
    caption = (
        "On images that the classifier was not fitted to; beside the error, that of always naming the one best place."
    )
    section.table(*position_table(probes), caption)
    for name, (_, unknown) in probes.items():
        section.note(f"In {name}, a patch that lost its position gets {unknown.words}.")
    _tried(page, {name: probe.fitted for name, (probe, _) in probes.items()})
    page.section("What the numbers mean").text(POSITION_MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def position_finding(probes: Mapping[str, tuple[PositionProbe, UnknownPosition]]) -> str:
    """The result in words."""
    names, found = list(probes), [probe for probe, _ in probes.values()]
    first, chance = found[0], 1 / len(found[0].score.counts)
    said = (
        f"A linear classifier names the place of {percent(first.score.accuracy, 2)} of the patches whose position was "
        f"taken away (chance {percent(chance, 2)}), and is {first.distance:.2f} patches off on average."
    )
    if len(found) > 1:
        last = found[-1]
        said += f" In {names[-1]} it is {percent(last.score.accuracy, 2)} and {last.distance:.2f} patches."
    return said


def position_table(
    probes: Mapping[str, tuple[PositionProbe, UnknownPosition]],
) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row a model."""
    header = ["model", "accuracy, %", "mean error, patches", "error of one guess", "patches asked", "images fitted to"]
    rows: list[list[Cell]] = [
        [name, f"{100 * probe.score.accuracy:.2f}", probe.distance, probe.guess, probe.score.count,
         probe.train_count]
        for name, (probe, _) in probes.items()
    ]  # fmt: skip
    return header, rows


def class_page(
    probes: Mapping[str, ClassProbe], classes: Sequence[str], facts: Mapping[str, Cell]
) -> tuple[Page, dict[str, bytes]]:
    """probes: by the model's name, in order. classes: their names."""
    first = next(iter(probes))
    page = Page(f"{first}: linear classification probe", lead=class_finding(probes))
    section = page.section("Classes read off frozen features")
    pictures = {}
    if len(classes) <= 30:
        pictures["classes"] = figures.png(_class_bars(probes[first], classes))
        section.figure(pictures["classes"], f"Share of each class that is recognised, in {first}.")
    section.table(*class_table(probes), "On images that the classifier was not fitted to.")
    _tried(page, {name: probe.fitted for name, probe in probes.items()})
    page.section("What the numbers mean").text(CLASS_MEANING)
    page.section("How this page was made").facts(facts)
    return page, pictures


def class_finding(probes: Mapping[str, ClassProbe]) -> str:
    """The result in words."""
    (name, first), *rest = probes.items()
    chance = 1 / len(first.score.counts)
    words = {"mean": "the mean of its patches", "cls": "its CLS token"}[first.pool]
    said = (
        f"A linear classifier on {words} recognises {percent(first.score.accuracy, 2)} of {first.score.count:,} images "
        f"in {name} (chance {percent(chance, 2)})."
    )
    return said + "".join(f" In {other} it is {percent(probe.score.accuracy, 2)}." for other, probe in rest)


def class_table(probes: Mapping[str, ClassProbe]) -> tuple[list[str], list[list[Cell]]]:
    """Header and a row a model."""
    header = ["model", "pool", "top-1, %", "loss", "images", "images fitted to", "weight decay"]
    rows: list[list[Cell]] = [
        [name, probe.pool, f"{100 * probe.score.accuracy:.2f}", probe.score.loss, probe.score.count,
         probe.train_count, f"{probe.fitted.weight_decay:g}"]
        for name, probe in probes.items()
    ]  # fmt: skip
    return header, rows


def tried_table(fitted: Mapping[str, Fitted]) -> tuple[list[str], list[list[Cell]]]:
    """Every weight decay on the held part of the training split."""
    header = ["model", "weight decay", "held-out accuracy, %", "held-out loss", "chosen"]
    rows: list[list[Cell]] = [
        [name, f"{each.weight_decay:g}", f"{100 * each.accuracy:.2f}", each.loss, each.weight_decay == fit.weight_decay]
        for name, fit in fitted.items()
        for each in fit.tried
    ]
    return header, rows


def _tried(page: Page, fitted: Mapping[str, Fitted]) -> None:
    header, rows = tried_table(fitted)
    section = page.section("How the weight decay was chosen")
    if rows:
        section.text("On a fifth of the training split, by accuracy; the classifier was then fitted to all of it.")
        section.table(header, rows)
    else:
        section.text("Only one was given, so there was nothing to choose.")


def _bars(probes: Mapping[str, tuple[PositionProbe, UnknownPosition]], grid: tuple[int, ...]) -> figures.Figure:
    shares = {name: 100 * probe.score.accuracy for name, (probe, _) in probes.items()}
    shares[f"chance, 1 / {grid[0] * grid[1]}"] = 100 / (grid[0] * grid[1])
    return figures.bars(shares, "places named right, %", digits=".2f")


def _maps(probes: Mapping[str, tuple[PositionProbe, UnknownPosition]], grid: tuple[int, ...]) -> figures.Figure:
    panels = {}
    for name, (probe, _) in probes.items():
        share = probe.score.hits.double() / probe.score.counts.clamp(min=1)
        panels[name] = 100 * np.asarray(share).reshape(grid)
    return figures.heatmaps(panels, "column of the patch", "row of the patch", "places named right, %")


def _class_bars(probe: ClassProbe, classes: Sequence[str]) -> figures.Figure:
    share = probe.score.hits.double() / probe.score.counts.clamp(min=1)
    values = dict(zip(classes, (100 * share).tolist(), strict=True))
    return figures.bars(values, "images of the class recognised, %", digits=".1f")
