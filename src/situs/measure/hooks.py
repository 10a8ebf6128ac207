"""What looks on while a run is trained: probes for pretraining, validation for training with labels."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from situs.data.config import BATCH
from situs.data.loader import Loader, make_loader
from situs.data.open import open_source, splits_at
from situs.data.sources.base import SPLITS
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.limits import check_value
from situs.measure.accuracy import Accuracy, hard, measure_accuracy, measure_labels
from situs.measure.by_class import TOP5_FROM
from situs.measure.ending import Baseline, Frozen, ending, frozen_start
from situs.measure.features import extract
from situs.measure.knn import knn_accuracy
from situs.measure.objects import measure as measure_objects
from situs.measure.perplexity import measure_perplexity
from situs.measure.position.head import position_accuracy
from situs.measure.probe.head import probe_head
from situs.measure.segments import Inference, measure, seeing
from situs.methods import METHODS
from situs.methods.base import Batch, Method
from situs.methods.detection import Detection
from situs.methods.measured import SolvesPuzzles
from situs.methods.segmentation import Segmentation
from situs.models.inference import evaluating
from situs.progress import note, task
from situs.train.assemble import Hooks, RunConfig, make_eval_loader
from situs.train.contract import Beginner, Hook, RunState

FLATTERED = (
    "the data has one split beside that of the training, so that the best is chosen by what an evaluation judges it "
    "on, where its accuracy is flattered (train.keep_best)"
)
PROBED = {"train": 10_000, "val": 2_000}
"""split -> how many of its samples a probe looks at."""


Batches = Callable[[], Iterable[Batch]]


class _Looks(ABC):
    """A hook that looks at a method after every `every` epochs and at the run's end: at the weights' mean, if any."""

    def __init__(self, every: int, precision: str) -> None:
        self.every, self.precision = every, precision

    def after_step(self, state: RunState) -> None:
        """Looks where a run ends in the middle of an epoch."""
        if state.step == state.total and state.step % state.steps_per_epoch:
            self._log(state)

    def after_epoch(self, state: RunState) -> None:
        """Looks after every `every` epochs, and after the last."""
        if (state.epoch + 1) % self.every == 0 or state.step == state.total:
            self._log(state)

    def _log(self, state: RunState) -> None:
        with evaluating(state.method, ema=state.ema):
            state.log(self.look(state.method))

    @abstractmethod
    def look(self, method: Method) -> dict[str, float]:
        """The numbers for this method now."""


class OnlineProbe(_Looks):
    """kNN accuracy, and position accuracy where there is a position head.

    train, test: give the batches of two sets without augmentation, anew at each call; a few thousand samples are
    enough. k: neighbours. Every rank looks at all samples, so that all come to the same numbers and none waits for
    another.
    """

    def __init__(self, train: Batches, test: Batches, every: int, precision: str = "fp32", k: int = 20) -> None:
        super().__init__(every, precision)
        self.train, self.test, self.k = train, test, k

    def look(self, method: Method) -> dict[str, float]:
        """The numbers for this method now: knn_accuracy with labels, position_accuracy_test with a position head."""
        found = {}
        if "tokens" not in method.backbone.refusals:
            told = {"positions": method.sees_positions, "precision": self.precision}
            train, test = (extract(method.backbone, batches(), **told) for batches in (self.train, self.test))
            if train.labels is not None and test.labels is not None and train.labels.dim() == 1:
                pairs = (train.features, hard(train.labels), test.features, hard(test.labels))
                found["knn_accuracy"] = knn_accuracy(*pairs, min(self.k, len(train.labels)))
        if isinstance(method, SolvesPuzzles):
            found["position_accuracy_test"] = position_accuracy(method, self.test(), precision=self.precision)
        return found


class Validation(_Looks):
    """Top-1, balanced accuracy, the largest class's share and loss on the validation set, and top-5 where there are
    more than ten classes; of a multi-label one mean average precision, accuracy and loss; of masks mIoU, accuracy and
    loss; of objects average precision of boxes and masks; of words perplexity, accuracy and loss.

    note: said at the first look. start: the frozen features that a fine-tuning is compared with at its end. keep_best:
    whether the best model is the run's, and not the newest.
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
        self.loader, self.note, self.told, self.start, self.keep_best = loader, note, 0, start, keep_best
        self.frozen: Baseline | None = None
        self.model: Accuracy | None = None  # the newest, or the best where that is kept

    def begin(self, method: Method) -> None:
        """Looks at the frozen features that a fine-tuning starts from, where that costs little."""
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
        if len(self.loader.source.skipped) > self.told:
            self.told = len(self.loader.source.skipped)
            note(str(self.loader.source.skip_report()))

    def look(self, method: Method) -> dict[str, float]:
        """The accuracy over the validation set of all ranks."""
        if "words" in method.needs_targets:
            words = measure_perplexity(method.backbone, self.loader, precision=self.precision)
            return {"val_perplexity": words.perplexity, "val_accuracy": words.accuracy, "val_loss": words.loss}
        if isinstance(method, Segmentation):
            see = seeing(method, method.logits, Inference(), self.precision)
            scores = measure(see, self.loader, method.classes).scores
            return {"val_miou": scores.miou, "val_accuracy": scores.accuracy, "val_loss": scores.loss}
        if isinstance(method, Detection):
            found = measure_objects(method, self.loader, self.loader, self.precision)
            told = {"val_ap": found.boxes.ap, "val_ap50": found.boxes.ap50, "val_mask_ap": found.masks.ap}
            return {name: value for name, value in told.items() if not math.isnan(value)}  # without objects none
        if self.loader.source.multi_label:
            scores = measure_labels(method.backbone, self.loader, precision=self.precision)
            found = {"val_accuracy": scores.accuracy, "val_loss": scores.loss}
            return found if math.isnan(scores.mean_ap) else {"val_map": scores.mean_ap, **found}  # no class has samples
        found = measure_accuracy(method.backbone, self.loader, precision=self.precision)
        if self.model is None or not self.keep_best or found.top1 > self.model.top1:
            self.model = found
        top5 = {"val_top5": found.top5} if found.classes >= TOP5_FROM else {}
        beside = {"val_balanced": found.balanced, "val_majority": found.majority}
        return {"val_top1": found.top1, **top5, **beside, "val_loss": found.loss}


def validation_hooks(every: int, field: str = "validate_every") -> Hooks:
    """For `train_run`: one `Validation` on the run's validation split, of which each rank takes its part.

    every: epochs between two looks; 0 for none at all, so that a set without such a split can be trained on.
    """
    check_value(field, every, ">= 0")

    def make(config: RunConfig, loader: Loader, device: torch.device) -> Sequence[Hook | Beginner]:
        first = probe_head(config, loader, _precision(config, device))
        if not every:
            return first
        try:
            held = make_eval_loader(config, device, rank=loader.plan.rank, world=loader.plan.world)
        except SitusError as error:
            raise SitusError(f"{error}; {field}=0 trains without validation", field=(*error.fields, field)) from None
        if held.classes != loader.classes:
            raise SitusError(f"{config.data.path}: training and validation split have different classes", field="data")
        note = FLATTERED if _judged_alike(config) else ""
        start, best = frozen_start(config, loader, held), config.train.keep_best
        return [Validation(held, every, _precision(config, device), note, start, keep_best=best), *first]

    return make


def _judged_alike(config: RunConfig) -> bool:
    """Whether the best is kept, and chosen by the samples that test means too."""
    found = splits_at(config.data)
    return config.train.keep_best and len(found - {*SPLITS["train"]}) < 2


def probe_hooks(config: RunConfig, loader: Loader, device: torch.device) -> Sequence[Hook | Beginner]:
    """For `train_run`: kNN and position accuracy every `probe_every` epochs; validation where labels are learned."""
    if METHODS[config.method_name].needs_targets:
        return validation_hooks(config.probe_every, "probe_every")(config, loader, device)
    if not config.probe_every:
        return []
    sets = {split: _probed(config, split, device) for split in PROBED}
    looks = (lambda: iter(sets["train"]), lambda: iter(sets["val"]))
    return [OnlineProbe(*looks, config.probe_every, _precision(config, device))]


def _probed(config: RunConfig, split: str, device: torch.device) -> Loader:
    data = replace(config.data, split=split, batch=min(1024, config.data.batch or BATCH))
    source = open_source(data, split)
    return make_loader(data, None, device, source=Subset(source, PROBED[split]))


def _precision(config: RunConfig, device: torch.device) -> str:
    return "bf16" if config.train.precision_on(device) == "bf16" else "fp32"
