"""Linear probes of frozen models: classes from one vector per sample; and the call for all three kinds of probe
(`probe_position`, `probe_segments`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Unpack

from situs.backbones.base import Backbone
from situs.data.open import addressed
from situs.errors import SitusError
from situs.measure.accuracy import hard, headline
from situs.measure.by_class import ByClass, class_figures, class_table
from situs.measure.features import Pool, extract
from situs.measure.position.dropped import RATIO, PositionProbes, follow, probe_position
from situs.measure.probe.linear import WEIGHT_DECAYS, Probe, Probes, fit_probe, score
from situs.measure.probe.segments import SegmentProbes, probe_segments
from situs.methods.base import Batch
from situs.models.data import AnyData, AnyModel, Chosen, check_labels, load_bank, made_with, opened
from situs.progress import tracked
from situs.results import Cell, Figure, Provenance, Summary, Table, percent, points

MEANING = """
The backbone is frozen and every sample becomes one vector. A logistic regression on these vectors is fitted to the
training split, with a weight decay chosen on a part of that split; the numbers are those of the other split. The
backbone is not trained, so this measures what the representation already separates.
"""


@dataclass(frozen=True)
class ClassProbe(Probe):
    """pool: what a sample's vector is."""

    pool: Pool

    def numbers(self) -> dict[str, Any]:
        """The scores, and how it was fitted."""
        score = self.score
        numbers = {"pool": self.pool, "accuracy": score.accuracy, "loss": score.loss, "count": score.count}
        return {**numbers, **ByClass.of(score.answers).numbers(), **super().numbers()}


@dataclass(frozen=True)
class ClassProbes(Probes[ClassProbe]):
    """Classes read off frozen features. classes: their names."""

    file: ClassVar[str] = "probe-class"
    subject: ClassVar[str] = "linear classification probe"
    meaning: ClassVar[str] = MEANING
    classes: Sequence[str] = field(kw_only=True)

    def summary(self) -> Summary:
        """The accuracy on each model; a row for each."""
        (name, first), *rest = self.probes.items()
        things = self.provenance.things
        words = {"mean": "the mean of its patches", "cls": "its CLS token"}[first.pool]
        samples, rows_of = self.provenance.counted(first.score.count), ByClass.of
        text = (
            f"A linear classifier on {words} recognises {percent(first.score.accuracy, 2)} of {samples} with {name}. "
            f"{rows_of(first.score.answers).words(self.classes, samples)}"
        )
        text += "".join(f" With {other} it is {percent(probe.score.accuracy, 2)}." for other, probe in rest)
        header = ["model", "pool", "top-1, %", "balanced, %", "largest class, %", "loss", things,
                  f"{things} fitted to", "weight decay"]  # fmt: skip
        rows: list[list[Cell]] = [
            [name, probe.pool, points(probe.score.accuracy),
             points(rows_of(probe.score.answers).balanced),
             points(rows_of(probe.score.answers).majority), probe.score.loss, probe.score.count,
             probe.train_count, f"{probe.fitted.weight_decay:g}"]
            for name, probe in self.probes.items()
        ]  # fmt: skip
        return Summary(text, (Table(self.data, header, rows),), numbers=headline(rows_of(first.score.answers)))

    def figures(self) -> tuple[Figure, ...]:
        """The classes of the first model."""
        name, first = self.first
        shares = {model: probe.score.accuracy for model, probe in self.probes.items()}
        return class_figures(first.score.answers, self.classes, self.provenance.things, shares, f", in {name}")

    def details(self) -> list[Table]:
        """The classes of the first model, and how it was fitted."""
        return [class_table(self.first[1].score.answers, self.classes, self.provenance.things), *super().details()]


def evaluate_probe(
    model: AnyModel,
    data: AnyData = None,
    *,
    kind: Literal["position", "class", "segments"] = "position",
    after: AnyModel | None = None,
    train_count: int = 2000,
    ratio: float = RATIO,
    pool: Pool = "mean",
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
    precision: str = "fp32",
    seed: int = 0,
    **chosen: Unpack[Chosen],
) -> ClassProbes | PositionProbes | SegmentProbes:
    """Linear probes of frozen features: for the place of patches without a position, the class, or masks.

    model, after: whatever `open_model` takes; the second stands beside the first, on the same samples. data: a path;
    None for the samples that a run was trained on. train_count: the most samples of the training split to fit to.
    ratio: share of the patches whose position is removed. pool: how a sample becomes one vector. chosen: see
    `load_set`; among them masks, how masks are read.
    """
    if kind not in ("position", "class", "segments"):
        raise SitusError(field="kind", value=kind, allowed="position, class or segments")
    first = opened(model, seed).holding_out(chosen.pop("held_out", None))
    models = {first.name: first}
    if after is not None:
        second = opened(after, seed).holding_out(first.data.held_out)
        models[second.name if second.name not in models else f"{second.name} (after)"] = second
    unknown = follow(models) if kind == "position" else {}
    grids = {opened_model.backbone.out_grid for opened_model in models.values()}
    if kind == "position" and len(grids) > 1:
        listed = " and ".join(map(str, sorted(grids)))
        raise SitusError(f"the two models have grids of {listed} places", field="after")
    shared = {"seed": seed, "precision": precision, "weight_decays": tuple(weight_decays)}
    probes: dict[str, Any] = {}
    origins, classes = {}, ()
    for name, opened_model in tracked([*models.items()], "models"):
        target = "mask" if kind == "segments" else "class"
        source = addressed(data) or first.data.path or None
        train, test = load_bank(opened_model, source, train_count=train_count, target=target, **chosen)
        options = {**shared, "positions": opened_model.positions}
        if kind == "class":
            classes = check_labels(test)
            probes[name] = probe_class(opened_model.backbone, train, test, len(classes), pool=pool, **options)
        elif kind == "segments":
            classes = check_labels(test)
            probes[name] = probe_segments(opened_model.backbone, train, test, len(classes), **options)
        else:
            probes[name] = probe_position(opened_model.backbone, train, test, unknown[name], ratio=ratio, **options)
        more = {"fitted_to": train.source.name}
        origins[name] = made_with(opened_model, test, seed, precision, beside=[train], more=more)
    provenance = Provenance.joint(origins.values())
    if kind == "class":
        return ClassProbes(probes, origins, classes=classes, provenance=provenance)
    if kind == "segments":
        return SegmentProbes(probes, origins, classes=classes, provenance=provenance)
    return PositionProbes(probes, origins, grid=grids.pop(), ratio=ratio, provenance=provenance)


def probe_class(
    backbone: Backbone,
    train: Iterable[Batch],
    test: Iterable[Batch],
    classes: int,
    *,
    pool: Pool = "mean",
    seed: int = 0,
    precision: str = "fp32",
    positions: bool = True,
    weight_decays: Sequence[float] = WEIGHT_DECAYS,
) -> ClassProbe:
    """Fits to the pooled features of `train` and scores on those of `test`.

    pool: the mean of the patches or CLS. positions: whether the backbone uses its own.
    """
    backbone.require("tokens")
    sets = []
    for batches in (train, test):
        features = extract(backbone, batches, pool, positions=positions, precision=precision)
        if features.labels is None:
            raise SitusError("a classification probe needs labels, and the data has none", field="data")
        sets.append((features.features, hard(features.labels)))
    (inputs, labels), test_set = sets
    fitted = fit_probe(inputs, labels, classes, weight_decays=weight_decays, seed=seed)
    return ClassProbe(score(fitted.linear, [test_set], classes), fitted, len(labels), pool)
