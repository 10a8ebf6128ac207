"""Probes as pages: one model, or a model before and after fine-tuning, side by side."""

from __future__ import annotations

from typing import Any

import numpy as np

from situs.evaluate.linear import Probe, Probes
from situs.evaluate.probe import ClassProbes
from situs.evaluate.probe_position import PositionProbes
from situs.report import figures
from situs.report.html import Page

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


def position_page(found: PositionProbes) -> Page:
    """Places read off frozen features, of each model and at each place."""
    said = found.summary()
    page = Page(f"{found.first[0]}: linear position probe", lead=said.sentence)
    section = page.section("Places read off frozen features")
    caption = "Share of patches without a position whose place a linear classifier names."
    section.figure(_bars(found), caption, name="accuracy")
    section.figure(_maps(found), "The same share for each true place, in the image's own layout.", name="places")
    caption = (
        "On images that the classifier was not fitted to; beside the error, that of always naming the one best place."
    )
    section.table(said.tables[0].header, said.tables[0].rows, caption)
    for name, probe in found.probes.items():
        section.note(f"In {name}, a patch that lost its position gets {probe.unknown}.")
    return _finish(page, found, POSITION_MEANING)


def class_page(found: ClassProbes) -> Page:
    """Classes read off frozen features, of each model; the classes of the first where they are few."""
    said, (name, first) = found.summary(), found.first
    page = Page(f"{name}: linear classification probe", lead=said.sentence)
    section = page.section("Classes read off frozen features")
    if len(found.classes) <= 30:
        values = dict(zip(found.classes, (100 * _shares(first)).tolist(), strict=True))
        drawn = figures.bars(values, "images of the class recognised, %", digits=".1f")
        section.figure(drawn, f"Share of each class that is recognised, in {name}.", name="classes")
    caption = "On images that the classifier was not fitted to."
    section.table(said.tables[0].header, said.tables[0].rows, caption)
    return _finish(page, found, CLASS_MEANING)


def _finish(page: Page, found: Probes[Any], meaning: str) -> Page:
    section, tried = page.section("How the weight decay was chosen"), found.tried()
    if tried.rows:
        section.text("On a fifth of the training split, by accuracy; the classifier was then fitted to all of it.")
        section.table(tried.header, tried.rows)
    else:
        section.text("Only one was given, so there was nothing to choose.")
    page.section("What the numbers mean").text(meaning)
    facts = {  # those of a second model bear its name
        key if number == 0 else f"{key} ({name})": value
        for number, (name, made) in enumerate(found.made.items())
        for key, value in made.facts.items()
    }
    page.section("How this page was made").facts(facts)
    return page


def _shares(probe: Probe) -> Any:
    """The share of each class that is named."""
    return probe.score.hits.double() / probe.score.counts.clamp(min=1)


def _bars(found: PositionProbes) -> figures.Figure:
    shares, places = {name: 100 * probe.score.accuracy for name, probe in found.probes.items()}, np.prod(found.grid)
    return figures.bars(shares | {f"chance, 1 / {places}": 100 / places}, "places named right, %", digits=".2f")


def _maps(found: PositionProbes) -> figures.Figure:
    panels = {name: 100 * np.asarray(_shares(probe)).reshape(found.grid) for name, probe in found.probes.items()}
    return figures.heatmaps(panels, "column of the patch", "row of the patch", "places named right, %")
