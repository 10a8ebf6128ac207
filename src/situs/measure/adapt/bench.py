"""Fitting one way: on the folds, then on all labels; and its accuracy on the test images."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.core.when import When
from situs.data.loader import Loader, default_batch, make_loader
from situs.data.sampler import sample_of
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.subset import Rows
from situs.errors import SitusError
from situs.measure.accuracy import Accuracy, Tally, hard, labels_of, logits_of, measure_accuracy
from situs.measure.adapt.ways import FOLDS, PARTS, Initial, TriedWay, Way, class_means
from situs.measure.finetune import finetune_config
from situs.measure.knn import knn_scores, small_k
from situs.measure.probe.linear import fit_linear, fold_in, head_inputs, head_of
from situs.methods import METHODS
from situs.methods.base import Method
from situs.models.inference import evaluating
from situs.progress import notes_to, silent
from situs.train.assemble import RunConfig, Start, make_method
from situs.train.checkpoint.state import seed_generators
from situs.train.optim import OptimConfig, gentle, peak_rate, rate_at, trains_few, warmup_steps
from situs.train.step import Stepper
from situs.train.tuning import TuningConfig, attach, freeze

LOOKS = 8
"""Evaluations on the held-out fold, during a training on the others."""
DECAYS = (1e-3, 1e-2, 1e-1, 1.0)
HEAD_RATE, BODY_RATE = 1e-3, 1e-6
"""Learning rates of a pretraining from public weights: of the method's new parts alone, then of all weights."""
SCALES = (5.0, 10.0, 20.0, 40.0, 80.0)
"""Factors from cosine to logit, of which the folds choose one: they change probabilities, not answers."""


@dataclass(frozen=True)
class Bench:
    """The data and settings of all ways. config: of the run, its backbone not resolved. train: labelled images that can
    all be read; labels: [n]. start: loads weights into a model."""

    config: RunConfig
    train: Source
    test: Source | None
    labels: Tensor
    classes: tuple[str, ...]
    device: torch.device
    start: Start

    def make(self, origin: Initial, way: Way, **optim: Any) -> tuple[RunConfig, Method]:
        """The config of a way from some weights, and its method with these weights, on the device."""
        kind = origin.positions if way in PARTS else origin.frozen
        config = finetune_config(self.config, origin.source, kind)
        config = replace(config, tuning=TuningConfig(PARTS.get(way, "head")))
        method = make_method(config, self.classes)
        batch = self.config.data.batch or default_batch(len(self.labels), 1, training=True)
        config = replace(config, optim=replace(rates_of(way, batch, method), **optim))
        self.start(config, method.backbone)
        freeze(attach(method, config.tuning), config.tuning, new_positions=not config.init_positions)
        return config, method.to(self.device)

    def loader(self, rows: Tensor | None = None, *, training: bool = False, test: bool = False) -> Loader:
        """A loader of training images (some rows or all), or of the test images."""
        source = self.test if test else self.train
        assert source is not None
        if rows is not None:
            source = part_of(source, rows)
        data = self.config.data
        if not training:
            data = replace(data, batch=min(1024, 4 * (data.batch or 64)))
        return make_loader(data, self.config.augment if training else None, self.device, source=source)

    def features(self, backbone: Backbone, *, test: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The classifier's inputs [n, D], labels [n] and image numbers [n], of the images that can be read."""
        return head_inputs(backbone, len(self.classes), self.loader(test=test))

    # --- one way on the folds

    def frozen(self, origin: Initial, features: Tensor, folds: Tensor) -> list[TriedWay]:
        """kNN, class means and the linear probe on the folds."""
        n, classes, labels = len(self.labels), len(self.classes), self.labels.to(features.device)
        k = small_k(len(labels), classes)
        logits = {name: torch.full((n, classes), torch.nan, device=features.device) for name in ("kNN", "class means")}
        probes = torch.full((len(DECAYS), n, classes), torch.nan, device=features.device)
        began = time.perf_counter()
        for fold in range(FOLDS):
            out = (folds == fold).to(features.device)
            if not out.any():
                continue
            bank = features[~out], labels[~out]
            options = {"classes": classes, "k": min(k, len(bank[1]))}
            logits["kNN"][out] = knn_scores(*bank, features[out], **options)
            logits["class means"][out] = class_means(*bank, classes)(features[out])
            start = None
            for at, decay in reversed([*enumerate(DECAYS)]):
                start = fit_linear(*bank, classes, decay, start=start)
                probes[at, out] = start(features[out])
        tested = (folds >= 0).to(features.device)

        def right(scores: Tensor) -> Tensor:
            hits = (scores.argmax(dim=-1) == labels).double()
            return torch.where(tested, hits, torch.nan).cpu()

        loss = [float(F.cross_entropy(scale * logits["class means"][tested], labels[tested])) for scale in SCALES]
        hits = torch.stack([right(logits_of) for logits_of in probes])
        decay = len(DECAYS) - 1 - int(hits.nansum(dim=1).flip(0).argmax())  # of equal ones the larger
        spent = time.perf_counter() - began
        scale = SCALES[min(range(len(SCALES)), key=loss.__getitem__)]
        return [
            TriedWay("kNN", origin, right(logits["kNN"]), k, seconds=spent),
            TriedWay("class means", origin, right(logits["class means"]), scale, seconds=spent),
            TriedWay("linear probe", origin, hits[decay], DECAYS[decay], seconds=spent),
        ]

    def trained(
        self,
        way: Way,
        origin: Initial,
        features: Tensor,
        decay: float | None,
        folds: Tensor,
        count: int,
        total: int,
        check: Callable[[], None] = lambda: None,
        **optim: Any,
    ) -> TriedWay:
        """A training on the first `count` folds, with early stopping: the step with the best accuracy over the folds.

        features: of these weights, frozen; decay: of the linear probe on them that initialises the head, or None: the
        head keeps its random weights, as random features make no good probe.
        """
        began = time.perf_counter()
        looks = sorted({round(total * at / LOOKS) for at in range(1, LOOKS + 1)} - {0})
        right = torch.full((len(looks), len(self.labels)), torch.nan, dtype=torch.double)
        config, first = self.make(origin, way, **optim)
        for fold in range(count):
            rows, training = (folds == fold).nonzero()[:, 0], (folds != fold).nonzero()[:, 0]
            if not len(rows):
                continue
            method = copy.deepcopy(first)
            self._begin(method, features, decay, training)
            judge, at = self.loader(rows), 0
            for step in updates(method, self.loader(training, training=True), config, total):
                check()
                if step in looks:
                    right[at, rows] = self._answers(method, judge, config)
                    at += 1
        best = int(right.nansum(dim=1).argmax())
        return TriedWay(way, origin, right[best], 0.0, looks[best], total, time.perf_counter() - began)

    def _begin(self, method: Method, features: Tensor, decay: float | None, rows: Tensor) -> None:
        """Initialises the head with the linear probe on these rows."""
        if decay is None:
            return
        rows = rows.to(features.device)
        labels = self.labels.to(features.device)[rows]
        linear = fit_linear(features[rows], labels, len(self.classes), decay)
        fold_in(linear, head_of(method.backbone, len(self.classes)))

    def _answers(self, method: Method, loader: Loader, config: RunConfig) -> Tensor:
        """1 or 0 for each image of a loader in order, NaN for one that cannot be read."""
        hits = torch.full((len(loader.source),), torch.nan, dtype=torch.double)
        with evaluating(method):
            for batch in loader:
                logits = logits_of(method.backbone, batch, config.train.precision_on(self.device))
                hits[sample_of(batch.ids).cpu()] = (logits.argmax(dim=-1) == hard(labels_of(batch))).double().cpu()
        method.train()
        return hits

    def refit(self, tried: TriedWay, features: Tensor, decay: float | None, **optim: Any) -> tuple[RunConfig, Method]:
        """A way fitted to all labelled images, with its best setting on the folds. features, decay: see `trained`."""
        config, method = self.make(tried.origin, tried.way, **optim)
        head, labels = head_of(method.backbone, len(self.classes)), self.labels.to(features.device)
        if tried.way == "class means":
            fold_in(class_means(features, labels, len(self.classes), tried.setting), head)
        elif tried.way == "linear probe":
            fold_in(fit_linear(features, labels, len(self.classes), tried.setting), head)
        else:
            self._begin(method, features, decay, torch.arange(len(labels)))
            for step in updates(method, self.loader(training=True), config, tried.total):
                if step == tried.updates:
                    break
        return config, method.eval()

    def judge(self, backbone: Backbone) -> tuple[Accuracy, Tensor]:
        """Accuracy on the test images, and the answers [C, C]."""
        tally = Tally(len(self.classes))
        return measure_accuracy(backbone, self.loader(test=True), tally=tally), tally.answers()

    # --- pretraining

    def pretrained(
        self, origin: Initial, method: str, source: Source, total: int, head: float = 0.5
    ) -> Iterator[Method]:
        """Pretraining on images without labels; yields the method after every update.

        head: share of the updates that train only the method's new parts; the others train everything, at a low rate.
        The gradients of a new head ruin public weights within a few hundred updates, at every rate that was tried.
        """
        config = finetune_config(self.config, origin.source, None)
        data = replace(self.config.data, balanced=False)
        learns = {"method": METHODS[method].Config(), "tuning": TuningConfig(), "init_positions": True}
        config = replace(config, data=data, **learns)
        learner = make_method(config, None)
        self.start(config, learner.backbone)
        learner = learner.to(self.device)
        weights = [parameter for parameter in learner.backbone.parameters() if parameter.requires_grad]
        alone = int(head * total)
        for count, rate, moves in ((alone, HEAD_RATE, False), (total - alone, BODY_RATE, True)):
            for parameter in weights:
                parameter.requires_grad_(moves)
            loader = make_loader(data, config.augment, self.device, source=source)
            for _ in updates(learner, loader, replace(config, optim=OptimConfig(lr=rate)), count):
                yield learner


def rates_of(way: Way, batch: int, method: Method) -> OptimConfig:
    """The optimiser of a way at this batch size; from the folds of `benchmarks/few_labels.py`."""
    if way == "all layers":
        return gentle(OptimConfig(), method)
    return OptimConfig(lr=1e-4 * math.sqrt(batch) if way == "LoRA" else 1e-3)


def updates(method: Method, loader: Loader, config: RunConfig, total: int) -> Iterator[int]:
    """Trains a method; yields the number of updates after each. The schedule ends at `total`."""
    precision, per = config.train.precision_on(loader.device), loader.steps_per_epoch
    options: dict[str, Any] = {"seed": config.train.seed, "precision": precision, "graph": config.train.graph}
    with notes_to(silent):
        stepper = Stepper(method, config.optim, accumulate=1, parallel="ddp", compiled=False, **options)
    peak = peak_rate(config.optim, loader.global_batch, updates=total, few=trains_few(method))
    optim = replace(config.optim, warmup_steps=total // 10)
    seed_generators(config.train.seed)
    method.train()
    step = 0
    try:
        while step < total:
            epoch = step // per
            for batch in loader.iterate(epoch, step % per):
                rate = rate_at(step, total, warmup_steps(optim, per, total), peak, optim)
                with notes_to(silent):
                    stepper.update(batch, When(step=step, epoch=epoch, progress=step / total), rate, ragged=False)
                step += 1
                if step == total and bool(stepper.flags[0]):
                    raise SitusError("the loss is NaN or infinite", field="data")
                yield step
                if step == total:
                    break
    finally:
        loader.close()


def part_of(source: Source, rows: Tensor) -> Source:
    """Some images of a source; in memory if the source is."""
    if isinstance(source, TensorSource) and source.labels is not None:
        return TensorSource(source.images[rows], source.labels[rows], source.classes, source.name)
    return Rows(source, rows.numpy())
