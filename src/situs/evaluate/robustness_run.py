"""Measuring robustness: a classifier on corrupted images made here or given, on ImageNet-A and on ImageNet-O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.data.augment.recipes import normalise
from situs.data.loader import Loader, make_loader
from situs.data.sources.base import Source
from situs.data.sources.subset import Rows, Subset
from situs.errors import SitusError
from situs.evaluate.accuracy import Accuracy, Classifier, Tally, labels_of
from situs.evaluate.corruptions import CORRUPTIONS, corrupt
from situs.evaluate.corruptions_severity import SEVERITIES
from situs.evaluate.inference import evaluating
from situs.evaluate.robustness import Anomalies, Cells, Natural, Robustness, aupr, aurra, response_curve
from situs.evaluate.robustness_sets import (
    class_numbers,
    match_classes,
    open_corrupted,
    open_folder,
    open_normal,
    row_numbers,
)
from situs.limits import check_value
from situs.models import Model
from situs.models.data import load_set
from situs.models.model import check_classifier
from situs.train.step import autocast

Progress = Callable[[int, int, str], None]
"""(steps done, steps in all, what is measured)."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and on which images. names: the classes of the outputs where the model does not know them."""

    data: str | None = None
    split: str | None = None
    count: int | None = None
    batch: int = 256
    seed: int = 0
    precision: str = "fp32"
    corruptions: tuple[str, ...] = tuple(CORRUPTIONS)
    severities: tuple[int, ...] = SEVERITIES
    imagenet_c: Path | None = None
    imagenet_a: Path | None = None
    imagenet_o: Path | None = None
    in_distribution: str | None = None
    names: tuple[str, ...] | None = None


def evaluate_robustness(model: Model, plan: Plan, progress: Progress | None = None) -> Robustness:
    """Everything the plan asks for."""
    check_classifier(model)
    if plan.count is not None:
        check_value("count", plan.count, ">= 1")
    if not plan.corruptions and plan.imagenet_a is None and plan.imagenet_o is None:
        raise SitusError("there is nothing to measure: corruptions, ImageNet-A or ImageNet-O", field="corruptions")
    tell = progress or (lambda *_: None)
    bench = _Bench(model, plan)
    natural = None if plan.imagenet_a is None else bench.natural(plan.imagenet_a, tell)
    anomalies = None if plan.imagenet_o is None else bench.anomalies(plan.imagenet_o, tell)
    clean, cells, pictures, loader = None, {}, None, None
    if plan.corruptions:
        # Corrupted files speak for themselves; the clean set stands beside them where it is known.
        needed = plan.imagenet_c is None or plan.data is not None or bool(model.data.path)
        loader = bench.load(plan.data, plan.split) if needed else None
        if plan.imagenet_c is None:
            assert loader is not None
            clean, cells, pictures = bench.generated(loader, tell)
        else:
            clean = None if loader is None else bench.plain(loader, tell)
            cells, pictures = bench.given(plan.imagenet_c, tell)
    return Robustness(
        data=None if loader is None else loader.source.name,
        given=None if plan.imagenet_c is None or not plan.corruptions else plan.imagenet_c.resolve().name,
        clean=clean,
        cells=cells,
        pictures=pictures,
        natural=natural,
        anomalies=anomalies,
        outputs=bench.outputs,
        skipped=tuple(bench.skipped),
        side=min(model.data.size),
    )


def corrupted_accuracy(
    model: Classifier,
    loader: Loader,
    corruptions: tuple[str, ...],
    severities: tuple[int, ...] = SEVERITIES,
    *,
    index: Tensor | None = None,
    seed: int = 0,
    precision: str = "fp32",
    progress: Progress | None = None,
) -> tuple[Accuracy, dict[str, dict[int, Accuracy]]]:
    """The accuracy on the loader's images, and on each of its corruptions, made as they are needed.

    Images are corrupted as the model sees them, cropped and resized, before they are normalised. index: [classes], the
    output that each label means; by default the label itself.
    """
    tell = progress or (lambda *_: None)
    plain, tallies = Tally(), {(name, severity): Tally() for name in corruptions for severity in severities}
    steps, done = loader.steps_per_epoch * len(tallies), 0
    rows = row_numbers(loader.source)
    rows = None if rows is None else rows.to(loader.device)
    with evaluating(model):
        for batch in loader:
            labels = labels_of(batch) if index is None else index[labels_of(batch)]
            ids = batch.ids if rows is None else rows[batch.ids]
            images = seen(batch.inputs, loader)
            plain.add(_logits(model, batch.inputs, precision), labels)
            for (name, severity), tally in tallies.items():
                tell(done, steps, f"{name} {severity}")
                changed = normalise(corrupt(images, name, severity, ids, seed=seed), loader.mean, loader.std)
                tally.add(_logits(model, changed, precision), labels)
                done += 1
    tell(steps, steps, "corruptions")
    found = {name: {severity: tallies[name, severity].result() for severity in severities} for name in corruptions}
    return plain.result(), found


def answers(
    model: Classifier, loader: Loader, outputs: Tensor, precision: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of every image, among the `outputs` [k] alone: confidence (largest softmax), answer in 0 … k − 1, and label.

    [n] each; no labels where the set has none.
    """
    confidence, answer, labels = [], [], []
    with evaluating(model):
        for batch in loader:
            best = _logits(model, batch.inputs, precision).float()[:, outputs].softmax(dim=-1).max(dim=-1)
            confidence.append(best.values)
            answer.append(best.indices)
            labels += [batch.targets["label"]] if "label" in batch.targets else []
    if not confidence:
        raise SitusError(f"{loader.source.name}: none of its images can be read")
    return torch.cat(confidence), torch.cat(answer), torch.cat(labels) if labels else None


def seen(images: Tensor, loader: Loader) -> Tensor:
    """Normalised images as they were before, on 256 levels in [0, 1]."""
    plain = images * loader.std.view(-1, 1, 1) + loader.mean.view(-1, 1, 1)
    return (plain.clamp(0.0, 1.0) * 255.0).round() / 255.0


def _logits(model: Classifier, images: Tensor, precision: str) -> Tensor:
    with autocast(images.device, precision):
        return model(images)


class _Bench:
    """A model, a plan, and the sets as the model sees them."""

    def __init__(self, model: Model, plan: Plan) -> None:
        self.model, self.plan, self.device = model, plan, model.device
        self.names = plan.names or model.classes
        self.skipped: list[str] = []
        with evaluating(model.backbone):
            blank = torch.zeros(1, model.data.channels, *model.data.size, device=self.device)
            self.outputs = model.backbone(blank).shape[-1]

    def load(self, path: str | None, split: str | None) -> Loader:
        return load_set(self.model, path, split=split, batch=self.plan.batch, count=self.plan.count)

    def wrap(self, source: Source, **data: Any) -> Loader:
        """A source that is open already, prepared as the model wants it."""
        if self.plan.count is not None and len(source) > self.plan.count:
            source = Subset(source, self.plan.count)
        config = replace(self.model.data, batch=self.plan.batch, **data)
        return make_loader(config, None, self.device, source=source)

    def index(self, loader: Loader, what: str) -> Tensor:
        """The output that each class of the loader means."""
        return torch.tensor(match_classes(loader.classes, self.names, self.outputs, what), device=self.device)

    def note(self, loader: Loader) -> None:
        self.skipped += [said for said in loader.source.left_out() if said not in self.skipped]

    def plain(self, loader: Loader, tell: Progress) -> Accuracy:
        tell(0, 1, "clean images")
        found, _ = self._cells(loader, (), None)
        self.note(loader)
        return found

    def generated(self, loader: Loader, tell: Progress) -> tuple[Accuracy, Cells, Tensor]:
        clean, cells = self._cells(loader, self.plan.corruptions, tell)
        self.note(loader)
        return clean, cells, self._pictures(loader)

    def _cells(self, loader: Loader, corruptions: tuple[str, ...], tell: Progress | None) -> tuple[Accuracy, Any]:
        return corrupted_accuracy(
            self.model.backbone,
            loader,
            corruptions,
            self.plan.severities,
            index=self.index(loader, loader.source.name),
            seed=self.plan.seed,
            precision=self.plan.precision,
            progress=tell,
        )

    def _pictures(self, loader: Loader) -> Tensor:
        """The first image, clean and corrupted."""
        batch = next(iter(loader))
        rows = row_numbers(loader.source)
        ids = batch.ids[:1] if rows is None else rows.to(self.device)[batch.ids[:1]]
        image = seen(batch.inputs[:1], loader)
        strips = []
        for name in self.plan.corruptions:
            changed = [corrupt(image, name, level, ids, seed=self.plan.seed) for level in self.plan.severities]
            strips.append(torch.cat([image, *changed]))
        return torch.stack(strips).cpu()

    def given(self, root: Path, tell: Progress) -> tuple[Cells, Tensor]:
        """The published files, one folder after the other."""
        cells: dict[str, dict[int, Accuracy]] = {name: {} for name in self.plan.corruptions}
        strips: list[Tensor] = []
        places = [(name, severity) for name in self.plan.corruptions for severity in self.plan.severities]
        for done, (name, severity) in enumerate(places):
            tell(done, len(places), f"{name} {severity}")
            source, numbered = open_corrupted(root, name, severity, self.model.data.channels)
            # Their publishers have cropped them already.
            loader = self.wrap(source, crop_share=1.0)
            cells[name][severity] = self._given(loader, f"{root.name}/{name}/{severity}", numbered)
            strips.append(seen(next(iter(loader)).inputs[:1], loader).cpu())
            self.note(loader)
        tell(len(places), len(places), "corruptions")
        return cells, torch.cat(strips).unflatten(0, (len(cells), -1))

    def _given(self, loader: Loader, what: str, numbered: bool) -> Accuracy:
        if not numbered:
            index = self.index(loader, what)
        elif len(loader.classes or ()) <= self.outputs:
            index = torch.arange(self.outputs, device=self.device)
        else:
            raise SitusError(f"{what}: its labels go up to {len(loader.classes or ()) - 1}, the outputs to "
                             f"{self.outputs - 1}", field="imagenet_c")  # fmt: skip
        tally = Tally()
        with evaluating(self.model.backbone):
            for batch in loader:
                tally.add(_logits(self.model.backbone, batch.inputs, self.plan.precision), index[labels_of(batch)])
        return tally.result()

    def natural(self, root: Path, tell: Progress) -> Natural:
        """ImageNet-A: among its own classes, how often right, and whether confidence knows it."""
        tell(0, 1, "ImageNet-A")
        loader = self.wrap(open_folder(root, self.model.data.channels, "imagenet_a"))
        outputs = self.index(loader, root.name)
        confidence, answer, truth = answers(self.model.backbone, loader, outputs, self.plan.precision)
        assert truth is not None  # it has classes
        self.note(loader)
        correct = answer == truth
        curve = response_curve(confidence, correct)
        shown = [curve[max(0, round(len(curve) * share / 100) - 1)] for share in range(1, 101)]
        return Natural(
            loader.source.name,
            float(correct.double().mean()),
            aurra(confidence, correct),
            len(correct),
            len(outputs),
            tuple(torch.stack(shown).tolist()),
        )

    def anomalies(self, root: Path, tell: Progress) -> Anomalies:
        """ImageNet-O against the images of the same classes from the classifier's own distribution."""
        tell(0, 1, "ImageNet-O")
        strange = self.wrap(open_folder(root, self.model.data.channels, "imagenet_o"))
        # Without folders of classes there is nothing to restrict the softmax to.
        outputs = torch.arange(self.outputs) if strange.classes is None else self.index(strange, root.name).cpu()
        normal = self._normal(set(outputs.tolist()))
        backbone, precision = self.model.backbone, self.plan.precision
        anomalous, usual = (
            -answers(backbone, each, outputs.to(self.device), precision)[0] for each in (strange, normal)
        )
        self.note(strange)
        self.note(normal)
        names = strange.source.name, normal.source.name
        return Anomalies(*names, aupr(anomalous, usual), len(anomalous), len(usual), len(outputs))

    def _normal(self, outputs: set[int]) -> Loader:
        """The images of the in-distribution set whose class is among the outputs."""
        path = self.plan.in_distribution or self.plan.data
        if path is None and not self.model.data.path:
            raise SitusError(
                "ImageNet-O needs images of the classifier's own classes beside it", field="in_distribution"
            )
        data = self.model.data
        source = open_normal(path or data.path, self.plan.split, data.channels, data.held_out)
        meant = match_classes(source.classes, self.names, self.outputs, source.name)
        labels = class_numbers(source)
        rows = [row for row, label in enumerate(labels) if label is not None and meant[label] in outputs]
        if not rows:
            raise SitusError(f"{source.name}: has no image of ImageNet-O's classes", field="in_distribution")
        return self.wrap(Rows(source, rows))
