"""Measurements during a training: probes for pretraining, validation with labels, warnings at the end."""

from __future__ import annotations

import math
import shlex
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from situs.data.config import BATCH
from situs.data.loader import Loader, make_loader
from situs.data.open import open_source, splits_at
from situs.data.sources.base import SPLITS, Source
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.limits import check_value
from situs.measure.accuracy import TOP5_FROM, Accuracy, hard, measure_accuracy, measure_labels
from situs.measure.features import extract
from situs.measure.knn import POOLS, knn_accuracy, labelled_features, pools_of, small_k
from situs.measure.objects import measure as measure_objects
from situs.measure.perplexity import measure_perplexity
from situs.measure.position.head import position_accuracy
from situs.measure.probe.linear import SMALL, fit_probe, probe_head, score
from situs.measure.segments import Inference, seeing
from situs.measure.segments import measure as measure_segments
from situs.methods import METHODS
from situs.methods.base import Batch, Method
from situs.methods.detection import Detection
from situs.methods.measured import SolvesPuzzles
from situs.methods.segmentation import Segmentation
from situs.models.inference import evaluating
from situs.progress import note, task
from situs.results import percent
from situs.train.assemble import Hooks, RunConfig, make_eval_loader
from situs.train.contract import Hook, RunState, StartHook

FLATTERED = (
    "the data has only one split besides training. The best model is therefore chosen on the samples that an "
    "evaluation uses too, so its accuracy on these samples is overestimated (train.keep_best)"
)
PROBED = {"train": 10_000, "val": 2_000}
"""split -> how many of its samples a probe uses."""


class _Measures(ABC):
    """A hook that measures a method every `every` epochs and at the end of the run; with EMA weights, if there are."""

    def __init__(self, every: int, precision: str) -> None:
        self.every, self.precision = every, precision

    def after_step(self, state: RunState) -> None:
        """Measures where a run ends in the middle of an epoch."""
        if state.step == state.total and state.step % state.steps_per_epoch:
            self._log(state)

    def after_epoch(self, state: RunState) -> None:
        """Measures every `every` epochs, and after the last."""
        if (state.epoch + 1) % self.every == 0 or state.step == state.total:
            self._log(state)

    def _log(self, state: RunState) -> None:
        with evaluating(state.method, ema=state.ema):
            state.log(self.measure(state.method))

    @abstractmethod
    def measure(self, method: Method) -> dict[str, float]:
        """The numbers for this method now."""


class OnlineProbe(_Measures):
    """kNN accuracy, and position accuracy where there is a position head.

    train, test: the batches of two sets without augmentation, iterated at every probe; a few thousand samples are
    enough. k: neighbours. Every rank uses all samples, so that all have the same numbers and none waits for another.
    """

    def __init__(
        self, train: Iterable[Batch], test: Iterable[Batch], every: int, precision: str = "fp32", k: int = 20
    ) -> None:
        super().__init__(every, precision)
        self.train, self.test, self.k = train, test, k

    def measure(self, method: Method) -> dict[str, float]:
        """knn_accuracy where there are labels, position_accuracy_test where there is a position head."""
        numbers = {}
        if "tokens" not in method.backbone.refusals:
            options = {"positions": method.sees_positions, "precision": self.precision}
            train, test = (extract(method.backbone, batches, **options) for batches in (self.train, self.test))
            if train.labels is not None and test.labels is not None and train.labels.dim() == 1:
                pairs = (train.features, hard(train.labels), test.features, hard(test.labels))
                numbers["knn_accuracy"] = knn_accuracy(*pairs, min(self.k, len(train.labels)))
        if isinstance(method, SolvesPuzzles):
            numbers["position_accuracy_test"] = position_accuracy(method, self.test, precision=self.precision)
        return numbers


class Validation(_Measures):
    """Scores on the validation set. Classification: top-1, balanced accuracy, share of the largest class, loss, and
    top-5 for more than ten classes. Multi-label: mean average precision, accuracy, loss. Segmentation: mIoU, accuracy,
    loss. Detection: average precision of boxes and masks. Language: perplexity, accuracy, loss.

    note: printed once, at the first validation. start: the frozen features that a fine-tuning is compared with at its
    end. keep_best: whether the run keeps its best model instead of its newest.
    """

    def __init__(
        self,
        loader: Loader,
        every: int,
        precision: str,
        note: str = "",
        start: Frozen | None = None,
        *,
        keep_best: bool = False,
    ) -> None:
        super().__init__(every, precision)
        self.loader, self.note, self.start, self.keep_best = loader, note, start, keep_best
        self.skipped_before = 0
        self.frozen: Baseline | None = None
        self.model: Accuracy | None = None  # the newest, or the best where that is kept

    def begin(self, method: Method) -> None:
        """Measures the frozen features that a fine-tuning starts from, where that costs little."""
        if self.start is not None:
            with evaluating(method), task("frozen features, to compare with at the end"):
                self.frozen = self.start.look(method, self.loader, self.precision)

    def _log(self, state: RunState) -> None:
        if self.note:
            note(self.note)
            self.note = ""
        super()._log(state)
        if state.step == state.total and self.model is not None:
            for line in ending(self.model, self.frozen, self.loader):
                note(line)
        if len(self.loader.source.skipped) > self.skipped_before:
            self.skipped_before = len(self.loader.source.skipped)
            note(str(self.loader.source.skip_report()))

    def measure(self, method: Method) -> dict[str, float]:
        """The scores over the validation set of all ranks."""
        if "words" in method.needs_targets:
            words = measure_perplexity(method.backbone, self.loader, precision=self.precision)
            return {"val_perplexity": words.perplexity, "val_accuracy": words.accuracy, "val_loss": words.loss}
        if isinstance(method, Segmentation):
            see = seeing(method.backbone, method.logits, Inference(), self.precision)
            scores = measure_segments(see, self.loader, method.classes).scores
            return {"val_miou": scores.miou, "val_accuracy": scores.accuracy, "val_loss": scores.loss}
        if isinstance(method, Detection):
            objects = measure_objects(method, self.loader, self.loader, self.precision)
            precisions = {"val_ap": objects.boxes.ap, "val_ap50": objects.boxes.ap50, "val_mask_ap": objects.masks.ap}
            return {name: value for name, value in precisions.items() if not math.isnan(value)}  # NaN without objects
        if self.loader.source.multi_label:
            scores = measure_labels(method.backbone, self.loader, precision=self.precision)
            mean_ap = {} if math.isnan(scores.mean_ap) else {"val_map": scores.mean_ap}  # NaN: no class has samples
            return {**mean_ap, "val_accuracy": scores.accuracy, "val_loss": scores.loss}
        accuracy = measure_accuracy(method.backbone, self.loader, precision=self.precision)
        if self.model is None or not self.keep_best or accuracy.top1 > self.model.top1:
            self.model = accuracy
        top5 = {"val_top5": accuracy.top5} if accuracy.classes >= TOP5_FROM else {}
        by_class = {"val_balanced": accuracy.balanced, "val_majority": accuracy.majority}
        return {"val_top1": accuracy.top1, **top5, **by_class, "val_loss": accuracy.loss}


def validation_hooks(every: int, field: str = "validate_every") -> Hooks:
    """For `train_run`: a `Validation` on the run's validation split, shared among the ranks.

    every: epochs between two validations; 0 for none, so that a set without such a split can be trained on.
    """
    check_value(field, every, ">= 0")

    def make(config: RunConfig, loader: Loader, device: torch.device) -> Sequence[Hook | StartHook]:
        first = probe_head(config, loader, _precision(config, device))
        if not every:
            return first
        try:
            val_loader = make_eval_loader(config, device, rank=loader.plan.rank, world=loader.plan.world)
        except SitusError as error:
            raise SitusError(
                f"{error}; to train without validation, set {field}=0", field=(*error.fields, field)
            ) from None
        if val_loader.classes != loader.classes:
            raise SitusError(
                f"{config.data.path}: the training split and the validation split have different classes", field="data"
            )
        start, best = frozen_start(config, loader, val_loader), config.train.keep_best
        note = FLATTERED if best and len(splits_at(config.data) - {*SPLITS["train"]}) < 2 else ""
        return [Validation(val_loader, every, _precision(config, device), note, start, keep_best=best), *first]

    return make


def probe_hooks(config: RunConfig, loader: Loader, device: torch.device) -> Sequence[Hook | StartHook]:
    """For `train_run`: kNN and position accuracy every `probe_every` epochs; validation where labels are learned."""
    if METHODS[config.method_name].needs_targets:
        return validation_hooks(config.probe_every, "probe_every")(config, loader, device)
    if not config.probe_every:
        return []
    train, val = (_probed(config, split, device) for split in PROBED)
    return [OnlineProbe(train, val, config.probe_every, _precision(config, device))]


def _probed(config: RunConfig, split: str, device: torch.device) -> Loader:
    data = replace(config.data, split=split, batch=min(1024, config.data.batch or BATCH))
    source = open_source(data, split)
    return make_loader(data, None, device, source=Subset(source, PROBED[split]))


def _precision(config: RunConfig, device: torch.device) -> str:
    return "bf16" if config.train.precision_on(device) == "bf16" else "fp32"


# --- the end of a training with labels ------------------------------------------------------------------------------
# Warnings where it is no better than the largest class, or than the frozen features that it started from. kNN and a
# linear classifier on the features of the starting weights cost one pass over the images. Where they do better than
# the fine-tuned model, the fine-tuning was not worth it, and the user must know.


PASSES = 10
"""The fewest epochs of a run for which one more pass over its images costs little."""


class Baseline(NamedTuple):
    """name: the classifier on the frozen features. top1: on the validation split. command: that repeats it, or ""."""

    name: str
    top1: float
    command: str = ""


@dataclass(frozen=True)
class Frozen:
    """Baselines on the features that a fine-tuning starts from. source: its training samples. positions: whether the
    weights were trained with the positions that the model has now."""

    config: RunConfig
    source: Source
    positions: bool

    def look(self, method: Method, val: Loader, precision: str) -> Baseline | None:
        """The best of kNN and linear classifiers, on CLS and on the mean of the patches."""
        if "tokens" in method.backbone.refusals:
            return None
        data, classes = replace(self.config.data, batch=val.plan.batch), len(val.classes or ())
        train = make_loader(data, None, val.device, source=self.source)
        options = {"positions": self.positions, "last_alone": True}
        with evaluating(method.backbone):
            bank, labels = labelled_features(method.backbone, train, precision, **options)
            test, truth = labelled_features(method.backbone, val, precision, **options)
        k = small_k(len(labels), classes)
        baselines: list[Baseline] = []
        for pool, features, tested in zip(pools_of(method.backbone), bank[:, 0], test[:, 0], strict=True):
            near = knn_accuracy(features, labels, tested, truth, k)
            baselines.append(Baseline(f"kNN on its {POOLS[pool]}", near, self.command("knn", k=k)))
            try:
                linear = fit_probe(features, labels, classes).linear
            except SitusError:  # too few samples to choose a weight decay by
                continue
            share = score(linear, [(tested, truth)], classes).accuracy
            command = self.command("probe", kind="class", pool=pool, train_count=len(labels))
            baselines.append(Baseline(f"a linear classifier on its {POOLS[pool]}", share, command))
        return max(baselines, key=lambda baseline: baseline.top1)

    def command(self, verb: str, **options: Any) -> str:
        """The command line of an evaluation with these options; "" where no command takes this data."""
        config, init = self.config, str(self.config.init)
        if config.data.count or config.data.per_class:
            return ""
        model = init
        if Path(init).is_file():
            model = f"{config.backbone.name}={init}"
            options["img_size"] = ",".join(map(str, dict.fromkeys(config.data.size)))
        options["data"] = config.data.path
        if config.data.held_out:
            options["held_out"] = f"{config.data.held_out:g}"
        flags = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(["situs", "evaluate", verb, model, *flags])


def frozen_start(config: RunConfig, train: Loader, val: Loader) -> Frozen | None:
    """The baselines of a run, or None: only for small labelled sets of images or clips, in one process, for runs of at
    least `PASSES` epochs, and without differential privacy."""
    plain = train.source.classes is not None and train.source.target == "label" and val.source.target == "label"
    if config.init is None or not plain or config.data.modality.ids or train.plan.world > 1 or config.dp.on:
        return None
    total = config.train.total_steps(train.steps_per_epoch)
    if len(train.source) + len(val.source) > SMALL or total < PASSES * train.steps_per_epoch:
        return None
    return Frozen(config, train.source, config.init_positions)


def ending(last: Accuracy, frozen: Baseline | None, val: Loader) -> Iterator[str]:
    """Warnings about a weak top-1: none where it is above the largest class and the frozen features."""
    low, high = last.interval
    top1, largest = percent(last.top1, 2), percent(last.majority, 2)
    if last.only is not None and last.classes > 1:
        name = val.classes[last.only] if val.classes is not None else str(last.only)
        split = f"{last.count:,} {val.source.things} of the validation split"
        yield f"the model predicts one class, {name!r}, for all {split}"
    elif last.top1 <= last.majority:
        beside = f"not better than always predicting the largest class ({largest})"
        yield f"top-1 {top1} is {beside}: nothing useful was learned"
    elif low <= last.majority <= high:
        few = f"{last.count:,} {val.source.things} are too few to distinguish the model from one that"
        interval = f"top-1 is {top1}, with the 95 % interval {percent(low)} to {percent(high)}"
        yield f"{interval}. {few} always predicts the largest class ({largest})"
    if frozen is not None and frozen.top1 >= last.top1:
        how = "better than" if frozen.top1 > last.top1 else "as good as"
        text = (
            f"the frozen features of the initial weights are {how} the fine-tuned model: {frozen.name} has a top-1 of"
        )
        command = f" (to measure the frozen features: {frozen.command})" if frozen.command else ""
        yield f"{text} {percent(frozen.top1, 2)}, and the fine-tuned model has {top1}{command}"
