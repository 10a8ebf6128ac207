"""The pages of evaluations: a classifier's accuracy, ensembles, neighbours, position accuracy, probes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from situs.errors import counted
from situs.measure.accuracy import LISTED, ClassAccuracy, class_table
from situs.measure.adapt import Adapted
from situs.measure.by_class import TOP5_FROM, ByClass, by_class
from situs.measure.ensemble import Ensemble
from situs.measure.knn import POOLS, LayerKnn
from situs.measure.multi_label import LabelAccuracy
from situs.measure.perplexity import Perplexity
from situs.measure.position.dropped import PositionProbes
from situs.measure.position.head import PositionCurve, PositionGrid
from situs.measure.probe.classes import ClassProbes
from situs.measure.probe.linear import Probe, Probes
from situs.report import figures
from situs.report.html import Page, Section
from situs.results import percent

ACCURACY = """
Top-1 is the share of the samples whose own class the model puts first, top-5 the share whose class is among its first
five (told where there are more than ten classes). Naming the largest class every time is right as often as that class
is large: a model that does no better knows nothing. Balanced accuracy is the mean of the classes' own shares, in which
a small class counts as much as a large one; one that names a single class for everything has 100 % divided by the
number of classes. The interval is Wilson's: in 95 of 100 tests like this one it holds the share that is right of all
such samples. Loss is the mean cross entropy: low where the model is right and sure, high where it is sure and wrong.
"""
_DRAWN, _LISTED, _LEVEL = 30, 10, 6
_FIRST = 2

Row = TypeVar("Row")


def accuracy(found: ClassAccuracy) -> Page:
    """The numbers, every class where they are few, and the weakest."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: accuracy", lead=said.sentence)
    whole = found.accuracy
    page.number(percent(whole.top1, 2), f"top-1; naming the largest class: {percent(whole.majority, 2)}")
    page.number(percent(whole.balanced, 2), "balanced accuracy")
    section = page.section("How often it is right")
    section.table(*said.tables[0][1:], f"{found.provenance.counted(whole.count)}.")
    shares = {"top-1": whole.top1, "balanced": whole.balanced, "largest class": whole.majority}
    if len(found.classes) >= TOP5_FROM:
        shares["top-5"] = whole.top5
    _classes(page, found.answers, found.classes, found.provenance.things, shares)
    return page.end(found.provenance.facts, ACCURACY)


def _classes(
    page: Page, answers: Tensor, classes: Sequence[str], things: str, shares: Mapping[str, float], of: str = ""
) -> None:
    """Every class and what it is taken for, where they are few; else the weakest. shares: drawn where they are many."""
    rows = by_class(answers, classes)
    there = [row for row in rows if row["top1"] is not None]
    if len(classes) > LISTED:
        page.opening.bars({name: 100 * share for name, share in shares.items()}, "%")
        weakest = sorted(there, key=lambda row: row["top1"])[:_LISTED]
        page.section("The classes it knows least").table(*class_table(weakest, things))
        return
    drawn = figures.bars({row["class"]: 100 * row["top1"] for row in there}, f"{things} of the class recognised, %",
                         digits=".1f")  # fmt: skip
    page.opening.figure(drawn, f"Share of each class that is recognised{of}.", name="classes")
    section = page.section("Class by class").table(*class_table(rows, things))
    counts = [row["count"] for row in rows]
    share = 100 * answers.double() / answers.sum(dim=1, keepdim=True)  # NaN, a dash, where a class has no sample
    names = [f"{name} ({count:,})" for name, count in zip(classes, counts, strict=True)]
    most = 12 if len(classes) <= _LEVEL else 24
    short = [name if len(name) <= most else f"{name[: most - 1]}…" for name in classes]
    grid = figures.value_grids(
        {"": (share, f"{things} of the class, %")},
        names,
        short,
        "taken for",
        "class",
        limits=(0, 100),
        digits=".0f",
        cell=(0.95, 0.62 if len(classes) <= 12 else 0.3),
    )
    if len(classes) > _LEVEL:
        grid.axes[0].tick_params(axis="x", rotation=90)
    caption = f"What each class is taken for, in percent of its {things}; right answers stand on the diagonal{of}."
    section.figure(grid, caption, name="confusion")


ADAPT = """
Every way was tried by cross-validation on the training labels alone: one fold is left out, the way is fitted to the
others, and the images of that fold are classified. A way that trains may have had fewer folds; it is compared with the
others on the images of its own folds. The ways stand in order, the simplest first. A later way is chosen over an
earlier one where its balanced accuracy is higher by more than one standard error (±) of the difference; below that the
difference may be chance. Neighbours (kNN) are shown for comparison and never chosen: no head can hold them. A training
was stopped after the update at which it did best on the folds. The chosen way was then fitted to all labels. The test
images played no part in any of this. "Largest class" is the accuracy of naming the most frequent class every time.
"""


def adapt(found: Adapted) -> Page:
    """What was tried, what was taken, what it is worth on the test images."""
    summary = found.summary()
    page = Page(f"{found.provenance.name}: adapted to your images", lead=summary.sentence)
    for table in summary.tables:
        page.section(table.title[0].upper() + table.title[1:]).table(*table[1:])
    if found.test is not None and found.start is not None and found.answers is not None:
        page.number(percent(found.test.top1, 2), f"top-1; naming the largest class: {percent(found.test.majority, 2)}")
        page.number(percent(found.start.top1, 2), "top-1 of the frozen start")
        shares = {"top-1": found.test.top1, "balanced": found.test.balanced, "largest class": found.test.majority}
        _classes(page, found.answers, found.classes, found.provenance.things, shares)
    return page.end(found.provenance.facts, ADAPT + ACCURACY)


PERPLEXITY = """
Each word but the first of its block is guessed from those before it there; the perplexity is the exponential of the
mean of -log p, the model's probability of the word that stands there. A longer block and another tokeniser give another
perplexity of the same text.
"""


def perplexity(found: Perplexity) -> Page:
    """The scores."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: perplexity", lead=said.sentence)
    page.number(f"{found.scores.perplexity:.2f}", "perplexity")
    page.opening.bars({"next words guessed right": 100 * found.scores.accuracy}, "%")
    page.section("How well it knows the next word").table(
        *said.tables[0][1:], f"{counted(found.scores.words, 'words')}."
    )
    return page.end(found.provenance.facts, PERPLEXITY)


LABELS = """
A sample has any number of the classes. A class's average precision is the area under its curve of precision over
recall, the samples ordered by the model's probability: 100 % where all that have the class come before all that have it
not, and in a random order about the share that has it. Accuracy counts a class as told where its probability passes a
half; the mean over the classes stands beside that of always giving each class's more frequent answer. F1 is the
harmonic mean of precision and recall at that half. Unknown labels are left out of every number.
"""


def label_accuracy(found: LabelAccuracy) -> Page:
    """The means, every class where they are few, and the weakest."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: accuracy", lead=said.sentence)
    page.number(percent(found.scores.mean_ap, 2), "mean average precision")
    section = page.section("How well it tells the classes")
    section.table(*said.tables[0][1:], " ".join([f"{found.provenance.counted(found.scores.count)}.", *said.notes]))
    rows = [row for row in found.rows() if row["average_precision"] is not None]
    if len(found.classes) <= _DRAWN:
        shares = {row["class"]: 100 * row["average_precision"] for row in rows}
        drawn = figures.bars(shares, "average precision, %", digits=".1f")
        page.opening.figure(drawn, "Average precision of each class.", name="classes")
    else:
        page.opening.bars({"mean average precision": 100 * found.scores.mean_ap}, "%")
    weakest = sorted(rows, key=lambda row: row["average_precision"])[:_LISTED]
    shown = ("average_precision", "accuracy", "f1")
    page.section("The classes it tells worst").table(
        ["class", f"{found.provenance.things} with it", "of", "average precision, %", "accuracy, %", "F1, %"],
        [[row["class"], row["positives"], row["count"], *(f"{100 * row[name]:.2f}" for name in shown)]
         for row in weakest],
    )  # fmt: skip
    return page.end(found.provenance.facts, LABELS)


ENSEMBLE = """
Every model answers each sample, prepared as that model was trained to see it; their probabilities (or logits) are
averaged and the heaviest class is the ensemble's answer. Models that err on different samples gain most from one
another: the less they agree, the further the ensemble can pass its best member. A sample that no member has right is
out of reach for any choice among their answers, though an average can still find it.
"""


def ensemble(found: Ensemble) -> Page:
    """Alone and together, and who agrees with whom."""
    said, names = found.summary(), list(found.alone)
    page = Page(f"{len(names)} classifiers as one", lead=said.sentence)
    shares = {name: 100 * score.top1 for name, score in found.alone.items()}
    shares |= {f"together ({found.average})": 100 * found.together.top1, "any of them right": 100 * found.any_right}
    page.number(percent(found.together.top1, 2), "top-1 together")
    page.number(percent(max(score.top1 for score in found.alone.values()), 2), "the best alone")
    section = page.section("Alone and together")
    page.opening.figure(
        figures.bars(shares, f"top-1, % of the {found.provenance.things}", digits=".2f"),
        "Top-1 of each model, of their average, and the share any of them has right.",
        name="top1",
    )
    section.table(*said.tables[0][1:], f"{found.provenance.counted(found.together.count)}.")
    agreement = [[100 * share for share in row] for row in found.agreement]
    alike = {"": (agreement, f"same answer, % of the {found.provenance.things}")}
    page.section("How alike they answer").figure(
        figures.value_grids(alike, names, names, "model", "model", limits=(0, 100)),
        f"Share of the {found.provenance.things} on which two models give the same answer, right or wrong.",
        name="agreement",
    )
    members = {
        name: f"{facts.get('method') or 'unknown method'} on {facts['model']}" for name, facts in found.members.items()
    }
    return page.end({**members, **found.provenance.facts}, ENSEMBLE)


NEIGHBOURS = """
Every sample becomes one vector after each block, through the model's final norm: its CLS token, or the mean of its
patches. A test sample gets the class that weighs most among its k nearest training samples by cosine similarity.
Nothing is trained, so this measures how the representation itself groups the samples.
"""


def knn(found: LayerKnn) -> Page:
    """The curve over the layers and its table."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: nearest neighbours", lead=said.sentence)
    best = max(found.rows, key=lambda row: row.accuracy)
    page.number(
        percent(best.accuracy, 2), f"at best, after block {best.layer}; largest class {percent(found.majority)}"
    )
    section = page.section("Layer by layer")
    if found.why_last is None:
        caption = "Share of test samples whose class the neighbours name, after each block."
        page.opening.figure(knn_curves(found), caption, name="layers")
    else:
        page.opening.bars({POOLS[row.pool]: 100 * row.accuracy for row in found.rows}, "%")
        section.note(f"Only the last layer: {found.why_last}.")
    tau = found.temperature
    weight = "every neighbour counts as one" if tau is None else f"weights exp(similarity / {tau:g})"
    caption = f"{found.provenance.counted(found.count)}, k = {found.k} of {found.bank:,} for training, {weight}."
    section.table(*said.tables[0][1:], caption)
    table = page.section("Class by class, after the last block")
    rows = by_class(found.answers, found.classes)
    if len(rows) > LISTED:
        rows = sorted((row for row in rows if row["count"]), key=lambda row: row["top1"])[:_LISTED]
        table.text("The classes that the neighbours know least.")
    table.table(*class_table(rows, found.provenance.things))
    return page.end(found.provenance.facts, NEIGHBOURS)


def knn_curves(found: LayerKnn) -> figures.Figure:
    """One line a pool over the layers, and the largest class's share."""
    series = {}
    for row in found.rows:
        x, y = series.setdefault(POOLS[row.pool], ([], []))
        x.append(row.layer)
        y.append(100 * row.accuracy)
    layers = sorted({row.layer for row in found.rows})
    series["largest class"] = layers, [100 * found.majority] * len(layers)
    figure = figures.curves(series, "after block", "test samples named right, %")
    figure.axes[0].set_xticks(layers if len(layers) <= 16 else layers[::2])
    return figure


GRID = """
The encoder is shown a share 1 − γ of the patches of a sample; of those, a share γ_pos has lost its place and carries
the one vector that the run learned for lost places. The run's own position head says for each of them which of the N
places it came from. The numbers are plain top-1 over those patches alone: no weights, and no patch that was told its
place.

The larger γ_pos, the fewer anchors there are to go by; the larger γ, the less of the picture there is. The mean counts
every cell once, as the paper does.
"""

CURVE = """
No patch is told its place. A share η of the patches serve only as queries: they look at the others, and nothing looks
at them. The run's own position head says for every patch, context included, which of the N places it came from. The
weights are the same at every η; only the evaluation changes.
"""


def position_grid(grid: PositionGrid) -> Page:
    """The page of DropPos's grid."""
    said, (gamma, gamma_pos) = grid.summary(), grid.trained
    page = Page(f"{grid.provenance.name}: position accuracy", lead=said.sentence)
    trained = f"The run was trained at γ = {gamma:g} and γ_pos = {gamma_pos:g}."
    caption = f"Share of dropped places guessed right, in percent. {trained}"
    page.opening.figure(position_map(grid), caption, name="grid")
    page.number(percent(grid.mean), f"mean of the grid; chance {percent(1 / grid.places)}")
    section = page.section("Numbers")
    if reasons := [cell.reason for cell in grid.cells if cell.reason is not None]:
        section.note(f"Some cells cannot be measured: {reasons[0]}.")
    caption = f"Over {grid.provenance.counted(grid.count)} of {grid.places} patches."
    section.table(*said.tables[0][1:], caption)
    return page.end(grid.provenance.facts, GRID)


def position_curve(found: PositionCurve) -> Page:
    """The page of MP3's curve."""
    said = found.summary()
    page = Page(f"{found.provenance.name}: position accuracy", lead=said.sentence)
    best = max(found.accuracy, key=lambda eta: found.accuracy[eta])
    page.number(percent(found.accuracy[best]), f"at η = {best:g}; chance {percent(1 / found.places)}")
    caption = f"Share of all patches whose place is guessed right. Trained at η = {found.trained:g}."
    page.opening.figure(position_lines(found), caption, name="curve")
    section = page.section("Over the share of patches that are no keys")
    caption = f"Over {found.provenance.counted(found.count)} of {found.places} patches."
    section.table(*said.tables[0][1:], caption)
    section.note(*said.notes)
    return page.end(found.provenance.facts, CURVE)


def position_lines(found: PositionCurve) -> figures.Figure:
    """Accuracy over η, and chance."""
    etas, places = list(found.accuracy), found.places
    series = {
        "this run": (etas, [100 * value for value in found.accuracy.values()]),
        f"chance, 1 / {places}": (etas, [100 / places] * len(etas)),
    }
    return figures.curves(series, "η at evaluation, share of patches that are no keys", "places guessed right, %")


def position_map(grid: PositionGrid) -> figures.Figure:
    """γ down, γ_pos across; a dash where a cell cannot be measured."""
    gammas = list(dict.fromkeys(cell.mask_ratio for cell in grid.cells))
    positions = list(dict.fromkeys(cell.position_mask_ratio for cell in grid.cells))
    held = {(cell.mask_ratio, cell.position_mask_ratio): cell.accuracy for cell in grid.cells}
    values = [
        [math.nan if (value := held[row, column]) is None else 100 * value for column in positions] for row in gammas
    ]
    highest = max(value for row in values for value in row if not math.isnan(value))
    return figures.value_grids(
        {"": (values, "places guessed right, %")},
        [f"{ratio:g}" for ratio in gammas],
        [f"{ratio:g}" for ratio in positions],
        "γ_pos, share of seen patches whose place is dropped",
        "γ, share of patches not seen",
        limits=(0.0, max(10.0, 10.0 * math.ceil(highest / 10))),
    )


POSITION_PROBE = """
Every patch is seen, but most have lost their position. From the final feature of each patch without a position, a
linear classifier names the place it came from. The backbone is frozen; the classifier is a logistic regression fitted
to the training split, its weight decay chosen on a part of that split, and the numbers are those of the other split.

A model that scores high rebuilds places from what the patches show and from the few that know where they stand.
DropPos's Table 7 compares this before and after fine-tuning with labels: where the number rises, the task itself
wanted places.
"""

CLASS_PROBE = """
The backbone is frozen and every sample becomes one vector. A logistic regression on top is fitted to the training
split, its weight decay chosen on a part of that split, and the numbers are those of the other split. Nothing of the
backbone is trained, so this measures what the representation already separates.
"""


def position_probe(found: PositionProbes) -> Page:
    """Places read off frozen features, of each model and at each place."""
    said = found.summary()
    page = Page(f"{found.first[0]}: linear position probe", lead=said.sentence)
    page.number(percent(found.first[1].score.accuracy, 2), "places named right")
    caption = "Share of patches without a position whose place a linear classifier names."
    page.opening.figure(_probe_bars(found), caption, name="accuracy")
    section = page.section("Places read off frozen features")
    section.figure(_probe_maps(found), "The same share for each true place, in the input's own layout.", name="places")
    caption = (
        "On samples that the classifier was not fitted to; beside the error, that of always naming the one best place."
    )
    section.table(*said.tables[0][1:], caption)
    for name, probe in found.probes.items():
        section.note(f"In {name}, a patch that lost its position gets {probe.unknown}.")
    return finish_probe(page, found, POSITION_PROBE)


def class_probe(found: ClassProbes) -> Page:
    """Classes read off frozen features, of each model; the classes of the first where they are few."""
    said, (name, first) = found.summary(), found.first
    page = Page(f"{name}: linear classification probe", lead=said.sentence)
    beside = ByClass.of(first.score.answers)
    top1 = f"top-1; naming the largest class: {percent(beside.majority, 2)}"
    page.number(percent(first.score.accuracy, 2), top1)
    page.number(percent(beside.balanced, 2), "balanced accuracy")
    section = page.section("Classes read off frozen features")
    section.table(*said.tables[0][1:], "On samples that the classifier was not fitted to.")
    shares = {each: probe.score.accuracy for each, probe in found.probes.items()}
    _classes(page, first.score.answers, found.classes, found.provenance.things, shares, f", in {name}")
    return finish_probe(page, found, CLASS_PROBE)


def worst_images(page: Page, rows: Sequence[Row], draw: Callable[[Sequence[Row]], Figure], caption: str) -> Section:
    """The section of the worst images. The page opens with the first of them, few enough to be seen there."""
    section, all_there = page.section("The worst images first"), len(rows) <= _FIRST
    name = "worst" if all_there else "worst-first"
    page.opening.figure(draw(rows[:_FIRST]), f"The worst images first. {caption}", name=name)
    return section if all_there else section.figure(draw(rows), caption, name="worst")


def finish_probe(page: Page, found: Probes[Any], meaning: str) -> Page:
    """The last sections of a probe's page: the weight decay, what the numbers mean, how they were made."""
    section, tried = page.fold("How the weight decay was chosen"), found.tried()
    if tried.rows:
        section.text("On a fifth of the training split, by accuracy; the classifier was then fitted to all of it.")
        section.table(tried.header, tried.rows)
    else:
        section.text("Only one was given, so there was nothing to choose.")
    facts = {  # those of a second model bear its name
        key if number == 0 else f"{key} ({name})": value
        for number, (name, made) in enumerate(found.made.items())
        for key, value in made.facts.items()
    }
    return page.end(facts, meaning)


def _shares(probe: Probe) -> Any:
    """The share of each class that is named."""
    return probe.score.hits.double() / probe.score.counts.clamp(min=1)


def _probe_bars(found: PositionProbes) -> figures.Figure:
    shares, places = {name: 100 * probe.score.accuracy for name, probe in found.probes.items()}, np.prod(found.grid)
    return figures.bars(shares | {f"chance, 1 / {places}": 100 / places}, "places named right, %", digits=".2f")


def _probe_maps(found: PositionProbes) -> figures.Figure:
    panels = {name: 100 * np.asarray(_shares(probe)).reshape(found.grid) for name, probe in found.probes.items()}
    return figures.heatmaps(panels, "column of the patch", "row of the patch", "places named right, %")
