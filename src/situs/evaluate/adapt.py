"""From public weights, own images and few labels to the best classifier that they give, with honest numbers.

Five ways to a classifier, from the simplest on: class means and a linear probe on frozen features, then the head alone,
LoRA and all layers, trained; each from the weights as they are, and after pretraining on the own images. Which one is
taken is decided by stratified cross-validation on the training labels alone, every way on the same folds: another takes
the place of a simpler one where it is better by more than one standard error of their difference, image by image. The
test images are looked at once, at the end, with what was chosen and with the frozen start beside it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.config import PositionKind
from situs.backbones.weights import HEADS
from situs.data.config import BATCH, DataConfig
from situs.data.loader import Loader, default_batch, make_loader
from situs.data.resident import load_resident, resident_size
from situs.data.sampler import sample_of
from situs.data.sources import open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.subset import Joined, PerClass, Rows, Subset, check_one_class
from situs.errors import SitusError, counted
from situs.evaluate.accuracy import Accuracy, Tally, hard, labels_of, measure_accuracy
from situs.evaluate.by_class import wilson
from situs.evaluate.finetune import finetune_config
from situs.evaluate.knn import knn_scores
from situs.evaluate.probe.linear import Linear, fit_linear
from situs.limits import check_value
from situs.methods import METHODS
from situs.methods.base import Method
from situs.models.data import made_with
from situs.models.export import export_model
from situs.models.handed import addressed_model
from situs.models.inference import evaluating
from situs.models.open import open_model
from situs.results import Result, Summary, Table, percent
from situs.train import distributed
from situs.train.checkpoint import RunFolder, check_target
from situs.train.checkpoint.state import capture, seed_generators
from situs.train.inputs import own_splits
from situs.train.log import machine
from situs.train.optim import OptimConfig, make_optimizer, peak_rate, rate_at, trains_few, warmup_steps
from situs.train.run import RunConfig, Start, make_method, settled
from situs.train.step import Moment, Stepper
from situs.train.tuning import TuningConfig, attach, freeze

Way = Literal["kNN", "class means", "linear probe", "head", "LoRA", "all layers"]
WAYS: tuple[Way, ...] = ("class means", "linear probe", "head", "LoRA", "all layers")
"""From the simplest on; a later one must be better by more than chance to be taken."""
PARTS: Mapping[Way, Literal["head", "lora", "all"]] = {"head": "head", "LoRA": "lora", "all layers": "all"}
"""The ways that train, and what of the model."""
PRETRAINING = ("droppos", "mp3", "mae", "none")

FOLDS, LOOKS, HELD_OUT = 5, 8, 0.2
DECAYS = (1e-3, 1e-2, 1e-1, 1.0)
SCALES = (5.0, 10.0, 20.0, 40.0, 80.0)
"""What a cosine is multiplied by to be a logit, of which the folds choose one: it moves probabilities, no answer."""
ONE_LABEL_SCALE = 20.0
UPDATES, EPOCHS, FEWEST = 300, 10, 100
"""Updates of a training: so many, or the epochs where they are more; fewer where the minutes ask for it, to `FEWEST`."""
RATES: Mapping[Way, Mapping[str, Any]] = {"head": {}, "LoRA": {}, "all layers": {"layer_decay": 0.75}}
TIMED = 6


class Origin(NamedTuple):
    """Weights to begin with. name: for people. source: as `finetune` takes it. positions, frozen: the kind of positions
    to train with and to take features with; None: those of the weights."""

    name: str
    source: str
    positions: PositionKind | None = None
    frozen: PositionKind | None = None


class Tried(NamedTuple):
    """A way from some weights, on the folds. right: [n], 1 or 0 by image, NaN where it was not tested. setting: the
    weight decay of a probe, the scale of means, k. updates: after which a training did best. seconds: what it took."""

    way: Way
    origin: Origin
    right: Tensor
    setting: float = 0.0
    updates: int = 0
    total: int = 0
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.way}{f' after {self.origin.name}' if self.origin.name else ''}"


# --- pure parts ------------------------------------------------------------------------------------------------


def folds_of(labels: Tensor, count: int = FOLDS, seed: int = 0) -> Tensor:
    """The fold of each image, [n] in range(count), every class spread evenly; -1 for the one image of a class of one,
    which is trained on in all folds."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    folds, at = torch.full_like(labels, -1), 0
    for label in labels.unique().tolist():
        rows = order[labels[order] == label]
        if len(rows) > 1:
            folds[rows] = (torch.arange(len(rows)) + at) % count
            at += len(rows)
    return folds


def class_means(features: Tensor, labels: Tensor, classes: int, scale: float = 1.0) -> Linear:
    """The nearest class mean of features [n, D] by cosine, as a linear classifier: at one image a class its nearest
    neighbour. The length of what is classified moves no answer."""
    unit = F.normalize(features, dim=-1)
    sums = torch.zeros(classes, features.shape[1], dtype=features.dtype, device=features.device)
    weight = F.normalize(sums.index_add_(0, labels, unit), dim=-1) * scale / features.norm(dim=-1).mean()
    zero = torch.zeros(features.shape[1], dtype=features.dtype, device=features.device)
    return Linear(weight, zero.new_zeros(classes), zero, zero + 1)


def fold_in(linear: Linear, head: nn.Linear) -> None:
    """Puts a classifier of standardised features into the head that reads the features themselves."""
    weight = linear.weight / linear.scale
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(linear.bias - weight @ linear.mean)


def gain(new: Tensor, old: Tensor, labels: Tensor) -> tuple[float, float]:
    """How much more often `new` [n] is right than `old`, and the standard error of that: over the images that both
    were tested on, in which every class counts the same."""
    both = ~(new.isnan() | old.isnan())
    if not both.any():
        return 0.0, 0.0
    counts = torch.bincount(labels[both])
    weight = (1 / counts[labels[both]].double()) / (counts > 0).sum()
    apart = weight * (new[both] - old[both]).double()
    return float(apart.sum()), float(apart.square().sum().sqrt())


def choose(tried: Sequence[Tried], labels: Tensor) -> Tried:
    """The simplest, unless a later one is better than what is chosen so far by more than one standard error."""
    order = sorted((each for each in tried if each.way in WAYS), key=lambda each: (
        WAYS.index(each.way), bool(each.origin.name)))  # fmt: skip
    best = order[0]
    for each in order[1:]:
        more, error = gain(each.right, best.right, labels)
        if more > error:
            best = each
    return best


def one_label(labels: Tensor) -> bool:
    """Whether the fixed rule holds: most classes have one image, so that nothing is left to choose by."""
    return bool((labels.bincount() == 1).double().mean() > 0.5)


# --- the work ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bench:
    """What every way is tried with. config: of the run, its backbone not settled. train: labelled images, all of which
    can be read; labels: [n]. start: puts weights into a model. fresh: whether a training begins with a new head, and
    not with the probe's."""

    config: RunConfig
    train: Source
    test: Source | None
    labels: Tensor
    classes: tuple[str, ...]
    device: torch.device
    start: Start
    fresh: bool = False

    def make(self, origin: Origin, way: Way, **optim: Any) -> tuple[RunConfig, Method]:
        """The run's config for a way from some weights, and its method with these weights, on the device."""
        kind = origin.positions if way in PARTS else origin.frozen
        config = finetune_config(self.config, origin.source, kind)
        rates = replace(OptimConfig(), **{**RATES.get(way, {}), **optim})
        config = replace(config, tuning=TuningConfig(PARTS.get(way, "head")), optim=rates)
        method = make_method(config, self.classes)
        self.start(config, method.backbone)
        freeze(attach(method, config.tuning), config.tuning, new_positions=not config.init_positions)
        return config, method.to(self.device)

    def loader(self, rows: Tensor | None = None, *, training: bool = False, test: bool = False) -> Loader:
        """Some of the training images, or the test images."""
        source = self.test if test else self.train
        assert source is not None
        if rows is not None:
            source = part_of(source, rows)
        data = self.config.data
        if not training:
            data = replace(data, batch=min(1024, 4 * (data.batch or 64)))
        return make_loader(data, self.config.augment if training else None, self.device, source=source)

    def features(self, backbone: Backbone, *, test: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """What the classifier is fed, [n, D]; labels [n]; and the images' numbers [n]: those that can be read."""
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        seen: list[Tensor] = []
        hook = head_of(backbone, len(self.classes)).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            with evaluating(backbone):
                for batch in self.loader(test=test):
                    backbone(batch.inputs)
                    parts.append((seen.pop().float(), hard(labels_of(batch)), sample_of(batch.ids)))
        finally:
            hook.remove()
        if not parts:
            raise SitusError("none of the labelled images can be read", field="data")
        features, labels, rows = map(torch.cat, zip(*parts, strict=True))
        return features, labels, rows

    # --- one way on the folds

    def frozen(self, origin: Origin, features: Tensor, folds: Tensor) -> list[Tried]:
        """Neighbours, class means and the linear probe on the folds."""
        n, classes, labels = len(self.labels), len(self.classes), self.labels.to(features.device)
        k = neighbours(len(labels), classes)
        logits = {name: torch.full((n, classes), torch.nan, device=features.device) for name in ("kNN", "class means")}
        probes = torch.full((len(DECAYS), n, classes), torch.nan, device=features.device)
        began = time.perf_counter()
        for fold in range(FOLDS):
            out = (folds == fold).to(features.device)
            if not out.any():
                continue
            bank = features[~out], labels[~out]
            told = {"classes": classes, "k": min(k, len(bank[1]))}
            logits["kNN"][out] = knn_scores(*bank, features[out], **told)
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
        hits = torch.stack([right(each) for each in probes])
        decay = len(DECAYS) - 1 - int(hits.nansum(dim=1).flip(0).argmax())  # of equal ones the greater
        spent = time.perf_counter() - began
        scale = SCALES[min(range(len(SCALES)), key=loss.__getitem__)]
        return [
            Tried("kNN", origin, right(logits["kNN"]), k, seconds=spent),
            Tried("class means", origin, right(logits["class means"]), scale, seconds=spent),
            Tried("linear probe", origin, hits[decay], DECAYS[decay], seconds=spent),
        ]

    def trained(
        self,
        way: Way,
        origin: Origin,
        features: Tensor,
        decay: float,
        folds: Tensor,
        count: int,
        total: int,
        check: Callable[[], None] = lambda: None,
        **optim: Any,
    ) -> Tried:
        """A training on the first `count` folds, looked at now and then; the best moment over the folds counts.

        features: of these weights, frozen; decay: of the probe on them, whose weights the head begins with.
        """
        began = time.perf_counter()
        looks = sorted({round(total * at / LOOKS) for at in range(1, LOOKS + 1)} - {0})
        right = torch.full((len(looks), len(self.labels)), torch.nan, dtype=torch.double)
        config, first = self.make(origin, way, **optim)
        for fold in range(count):
            rows, rest = (folds == fold).nonzero()[:, 0], (folds != fold).nonzero()[:, 0]
            if not len(rows):
                continue
            method = copy.deepcopy(first)
            self._begin(method, features, decay, rest)
            judge, at = self.loader(rows), 0
            for step in updates(method, self.loader(rest, training=True), config, total):
                check()
                if step in looks:
                    right[at, rows] = self._answers(method, judge, config)
                    at += 1
        best = int(right.nansum(dim=1).argmax())
        return Tried(way, origin, right[best], 0.0, looks[best], total, time.perf_counter() - began)

    def _begin(self, method: Method, features: Tensor, decay: float, rows: Tensor) -> None:
        """Gives a training's head the weights of the probe on these rows."""
        if not self.fresh:
            rows = rows.to(features.device)
            labels = self.labels.to(features.device)[rows]
            linear = fit_linear(features[rows], labels, len(self.classes), decay)
            fold_in(linear, head_of(method.backbone, len(self.classes)))

    def _answers(self, method: Method, loader: Loader, config: RunConfig) -> Tensor:
        """1 or 0 for each image of a loader in its order, NaN for one that cannot be read."""
        hits = torch.full((len(loader.source),), torch.nan, dtype=torch.double)
        with evaluating(method):
            for batch in loader:
                with torch.autocast(self.device.type, torch.bfloat16, config.train.precision_on(self.device) == "bf16"):
                    named = method.backbone(batch.inputs).argmax(dim=-1)
                hits[sample_of(batch.ids).cpu()] = (named == hard(labels_of(batch))).double().cpu()
        method.train()
        return hits

    def refit(self, tried: Tried, features: Tensor, decay: float, **optim: Any) -> tuple[RunConfig, Method]:
        """A way on all labelled images, as it did best on the folds. features, decay: as in `trained`."""
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

    def pretrained(self, origin: Origin, method: str, source: Source, total: int, **optim: Any) -> Iterator[Method]:
        """A method of pretraining on images without labels, yielded after every update."""
        config = finetune_config(self.config, origin.source, None)
        data = replace(self.config.data, balanced=False)
        config = replace(
            config,
            method=METHODS[method].Config(),
            tuning=TuningConfig(),
            data=data,
            optim=replace(OptimConfig(), **optim),
            init_positions=True,
        )
        learner = make_method(config, None)
        self.start(config, learner.backbone)
        loader = make_loader(data, config.augment, self.device, source=source)
        learner = learner.to(self.device)
        for _ in updates(learner, loader, config, total):
            yield learner


def updates(method: Method, loader: Loader, config: RunConfig, total: int) -> Iterator[int]:
    """Trains a method; after every update gives how many there were. The schedule's end is `total`."""
    precision, per = config.train.precision_on(loader.device), loader.steps_per_epoch
    stepper = Stepper(
        method, config.optim, seed=config.train.seed, precision=precision, accumulate=1, parallel="ddp", compiled=False,
        graph=config.train.graph, say=lambda _: None,
    )  # fmt: skip
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
                stepper.update(batch, Moment(step, epoch, step / total), rate, ragged=False)
                step += 1
                if step == total and bool(stepper.flags[0]):
                    raise SitusError("the loss is not finite", field="data")
                yield step
                if step == total:
                    break
    finally:
        loader.close()


def head_of(backbone: Backbone, classes: int) -> nn.Linear:
    """The linear layer that gives the logits."""
    heads = [
        module
        for name, module in backbone.model.named_modules()
        if f"{name}.".startswith(HEADS) and isinstance(module, nn.Linear) and module.out_features == classes
    ]
    if len(heads) != 1 or heads[0].bias is None:
        raise SitusError(f"{backbone.name}: has no single linear classifier that adapt could set", field="source")
    return heads[0]


def part_of(source: Source, rows: Tensor) -> Source:
    """Some images of a source, in memory where they are."""
    if isinstance(source, TensorSource) and source.labels is not None:
        return TensorSource(source.images[rows], source.labels[rows], source.classes, source.name)
    return Rows(source, rows.numpy())


def neighbours(count: int, classes: int) -> int:
    """How many neighbours are asked, of so many images."""
    return min(20, max(1, count // (2 * classes)))


# --- how long ----------------------------------------------------------------------------------------------------

FROZEN = "frozen"
Step = tuple[str, bool]
"""A way that trains, or `FROZEN`: what is fitted to frozen features; and whether after pretraining."""


class Plan(NamedTuple):
    """What fits into the minutes. seconds: expected of each step on its folds, in order. folds, total: of a training.
    refit: seconds of the last training at most. dropped: what does not fit."""

    seconds: Mapping[Step, float]
    folds: int
    total: int
    refit: float
    dropped: tuple[Step, ...] = ()


def plan_of(
    update: Mapping[str, float], pretraining: float | None, image: float, count: int, total: int, left: float
) -> Plan:
    """The most that fits into `left` seconds: fewer folds first, then fewer updates, then fewer ways.

    update: seconds of an update of each way that trains. pretraining: of one of it; None: without. image: seconds of a
    forward of one image, of which there are `count`. total: updates of a training, of which at least a quarter, and not
    fewer than `FEWEST`, are made.
    """
    steps: list[Step] = [(way, False) for way in update]
    if pretraining is not None:
        steps += [(FROZEN, True), *((way, True) for way in update)]
    every = tuple(steps)
    while steps:
        for folds, share in ((FOLDS, 1.0), (2, 1.0), (1, 1.0), (1, 0.5), (1, 0.25)):
            length = min(total, max(FEWEST, int(share * total)))
            looks = folds * LOOKS * image * count / FOLDS
            seconds = {
                (way, after): (pretraining or 0.0) * length + image * count
                if way == FROZEN
                else folds * length * update[way] + looks
                for way, after in steps
            }
            refit = length * max(update[way] for way, _ in steps if way != FROZEN)
            if sum(seconds.values()) + refit <= left:
                return Plan(seconds, folds, length, refit, every[len(steps) :])
        steps.pop()
    return Plan({}, 0, 0, 0.0, every)


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _time(steps: Iterator[Any], device: torch.device) -> float:
    """Seconds of one of `steps`: the first are left out, in which kernels are chosen and recorded."""
    first, some = (6, 3) if device.type == "cuda" else (1, 2)
    for _, _ in zip(range(first), steps, strict=False):
        pass
    _wait(device)
    began = time.perf_counter()
    for _, _ in zip(range(some), steps, strict=False):
        pass
    _wait(device)
    return (time.perf_counter() - began) / some


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the whole ---------------------------------------------------------------------------------------------------


class _OutOfTimeError(Exception):
    """The minutes are spent."""


@dataclass(frozen=True)
class Adapted(Result):
    """What was tried and taken. run: the folder of the run. tried: on the folds. labels: [n] of the training images.
    test, start: accuracy of what was chosen and of the frozen start on the test images, None without any; answers:
    [C, C] of the first. remarks: sentences."""

    file: ClassVar[str] = "adapt"
    run: Path
    tried: tuple[Tried, ...]
    chosen: Tried
    labels: Tensor
    classes: Sequence[str]
    test: Accuracy | None
    start: Accuracy | None
    answers: Tensor | None
    minutes: float
    remarks: tuple[str, ...]

    def summary(self) -> Summary:
        """What was taken and what it is worth; the table of all, and of the test."""
        text = f"Taken: {self.chosen.name}."
        tables = [Table(f"cross-validation on {self.provenance.counted(len(self.labels))}", *self.table())]
        if self.test is not None and self.start is not None:
            low, high = wilson(self.test.top1 * self.test.count, self.test.count)
            text += (
                f" It recognises {percent(self.test.top1, 2)} of {self.provenance.counted(self.test.count)} of "
                f"{len(self.classes):,} classes that played no part in any choice (95 % interval {percent(low)} to "
                f"{percent(high)}; naming the largest class: {percent(self.test.majority, 2)}). The frozen start, "
                f"class means on the weights as they were given, has {percent(self.start.top1, 2)}."
            )
            rows = [
                [name, percent(each.top1, 2), f"{100 * ends[0]:.1f} to {percent(ends[1])}", percent(each.balanced, 2),
                 percent(each.majority, 2)]
                for name, each in ((self.chosen.name, self.test), ("class means (frozen start)", self.start))
                for ends in [wilson(each.top1 * each.count, each.count)]
            ]  # fmt: skip
            header = ["", "top-1", "95 % interval", "balanced", "largest class"]
            tables.append(Table(self.provenance.title("the test images"), header, rows))
        return Summary(" ".join([text, *self.remarks]), tuple(tables))

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """Header and rows of what was tried."""
        header = ["way", "images tested", "top-1, %", "balanced, %", "beside what was taken, %", "updates", "taken"]
        rows: list[list[Any]] = []
        for each in self.tried:
            tested = ~each.right.isnan()
            more, error = gain(each.right, self.chosen.right, self.labels)
            shares = [None, None] if not tested.any() else [
                f"{100 * float(each.right[tested].mean()):.1f}", f"{100 * balanced(each.right, self.labels):.1f}"
            ]  # fmt: skip
            beside = None if each is self.chosen or not tested.any() else f"{100 * more:+.1f} ± {100 * error:.1f}"
            step = f"{each.updates:,} of {each.total:,}" if each.total else None
            rows.append([each.name, int(tested.sum()), *shares, beside, step, each is self.chosen])
        return header, rows

    def numbers(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        rows = [
            {
                "way": each.way, "after": each.origin.name, "tested": int((~each.right.isnan()).sum()),
                "right": float(each.right.nansum()), "balanced": balanced(each.right, self.labels),
                "setting": each.setting, "updates": each.updates, "total": each.total, "seconds": each.seconds,
                "chosen": each is self.chosen,
            }
            for each in self.tried
        ]  # fmt: skip
        ends = {"test": self.test, "start": self.start}
        scores = {
            name: None if each is None else {
                "top1": each.top1, "count": each.count, "balanced": each.balanced, "majority": each.majority,
                "interval": wilson(each.top1 * each.count, each.count),
            }
            for name, each in ends.items()
        }  # fmt: skip
        return {"tried": rows, **scores, "minutes": self.minutes, "remarks": list(self.remarks)}


def balanced(right: Tensor, labels: Tensor) -> float:
    """The mean over the classes of their shares of right answers; NaN where nothing was tested."""
    return gain(right, torch.zeros_like(right), labels)[0] if (~right.isnan()).any() else float("nan")


def open_bench(config: RunConfig, source: str, device: torch.device, start: Start) -> tuple[Bench, list[str]]:
    """Images, labels and classes of an adaptation, and sentences on them; refused is what has no classes to tell apart.

    config: a fine-tuning's, its model not settled.
    """
    remarks: list[str] = []
    data = settled(finetune_config(config, source, None)).data
    if data.kind == "text":
        raise SitusError(f"{data.path}: holds sentences, and adapt takes images and clips; see finetune", field="data")
    if not data.held_out and not own_splits(data):
        data = replace(data, held_out=HELD_OUT)
        remarks.append(f"The data has no test split: {percent(HELD_OUT, 0)} of it was set aside first as one.")
    try:
        train, test = (open_source(data.path, split, **data.wanted()) for split in ("train", "test"))
    except SitusError as error:
        if not remarks or "held_out" not in error.fields:
            raise
        data, test = replace(data, held_out=0.0), None
        train = open_source(data.path, None, **data.wanted())
        remarks = ["There are too few images to set some aside: nothing was tested."]
    if train.classes is None or train.target != "label":
        raise SitusError(f"{train.name}: has no labels, one class an image, which adapt chooses by", field="data")
    check_one_class(train, "data")
    train = train if data.count is None else Subset(train, data.count)
    train = train if data.per_class is None else PerClass(train, data.per_class)
    data = replace(data, count=None, per_class=None)
    if test is not None and test.classes != train.classes:
        raise SitusError(f"{test.name}: its classes are not those of the training split", field="data")
    if data.kind != "audio" and (size := resident_size(train, data)) is not None:
        images, labels, _ = load_resident(train, "cpu", size, max_bytes=int(data.resident_gib * 2**30))
        train = TensorSource(images, labels, train.classes, train.name)
    empty = torch.zeros(len(train), dtype=torch.int64)
    bench = Bench(replace(config, data=data), train, test, empty, train.classes or (), device, start)
    return bench, remarks


def check_classes(labels: Tensor, classes: Sequence[str], name: str) -> None:
    """Refuses labels of which nothing can be learned."""
    counts = labels.bincount(minlength=len(classes))
    if len(classes) < 2 or int((counts > 0).sum()) < 2:
        raise SitusError(
            f"{name}: all its images are of one class, so that there is nothing to tell apart", field="data"
        )
    if not counts.all():
        none = [classes[at] for at in (counts == 0).nonzero()[:, 0].tolist()]
        few = ", ".join(map(repr, none[:3])) + (", …" if len(none) > 3 else "")
        raise SitusError(f"{name}: has no training image of {counted(len(none), 'classes')} ({few})", field="data")


def adapt_model(
    config: RunConfig,
    source: str,
    *,
    out: str | Path,
    start: Start,
    unlabelled: str | None = None,
    method: str = "droppos",
    minutes: float = 30.0,
    device: str | None = None,
    say: Callable[[str], None] = print,
) -> Adapted:
    """Tries every way that fits into the minutes, and writes the run of the best, with its export in it.

    config: a fine-tuning's, its data and augmentation. source: the model. start: reads its weights. unlabelled: more
    images for the pretraining with `method`, whose labels nobody looks at.
    """
    began = time.perf_counter()
    check_value("minutes", minutes, "> 0")
    if method not in PRETRAINING:
        raise SitusError(field="method", value=method, allowed=f"one of {', '.join(PRETRAINING)}")
    check_target(Path(out))
    ranks = distributed.start(device)
    if ranks.world > 1:
        raise SitusError("adapt runs in one process, and torchrun has started several", field="device")
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    bench, remarks = open_bench(config, source, ranks.device, start)
    pool = None if method == "none" else unlabelled_source(bench.config.data, unlabelled)
    origin = Origin("", source)
    settings, model = bench.make(origin, "class means")
    features, labels, rows = bench.features(model.backbone)
    image = (time.perf_counter() - began) / len(rows)
    if len(rows) < len(bench.train):
        remarks.append(f"{len(bench.train) - len(rows):,} of the labelled images cannot be read and were left out.")
    train = bench.train if len(rows) == len(bench.train) else part_of(bench.train, rows.cpu())
    bench = replace(bench, train=train, labels=labels.cpu())
    check_classes(bench.labels, bench.classes, train.name)
    say(f"{train.name}: {counted(len(labels), 'labelled images')} of {counted(len(bench.classes), 'classes')}")

    folds = folds_of(bench.labels, seed=config.train.seed)
    tried: list[Tried] = []
    fixed = one_label(bench.labels)
    banks = {origin: features}
    if fixed:
        untested = torch.full((len(labels),), torch.nan, dtype=torch.double)
        tried.append(Tried("class means", origin, untested, ONE_LABEL_SCALE))
        remarks.append("Most classes have one label, so that there is nothing to choose by: by a fixed rule class means "
                       "on the weights as they were given are taken.")  # fmt: skip
    else:
        tried += bench.frozen(origin, features, folds)
        for each in tried:
            say(_line(each, bench.labels))
        remarks += _try_all(bench, tried, banks, folds, method, pool, image, 60 * minutes, began, say)
    chosen = choose(tried, bench.labels)
    say(f"taken: {chosen.name}; now on all {len(labels):,} labelled images")
    decay = next((each.setting for each in tried if each[:2] == ("linear probe", chosen.origin)), DECAYS[-2])
    settings, model = bench.refit(chosen, banks[chosen.origin], decay)
    test, first, answers = None, None, None
    if bench.test is not None:
        test, answers = bench.judge(model.backbone)
        first = test
        if chosen.way != "class means" or chosen.origin != origin:
            first = bench.judge(bench.refit(tried[0] if fixed else tried[1], features, decay)[1].backbone)[0]
        remarks += worse(test, first)
    remarks += _neighbours_better(bench, settings, tried, chosen)
    settings = replace(settings, data=replace(settings.data, count=config.data.count, per_class=config.data.per_class))
    write_run(Path(out), settings, bench, model, chosen, test, time.perf_counter() - began)
    opened = open_model(out, device=str(ranks.device))
    loader = bench.loader(test=bench.test is not None)
    result = Adapted(
        Path(out), tuple(tried), chosen, bench.labels, bench.classes, test, first, answers, minutes, tuple(remarks),
        provenance=made_with(opened, loader, config.train.seed, more={"started from": Path(source).name}),
    )  # fmt: skip
    try:
        export_model(out, Path(out) / "export")
    except SitusError as error:
        say(f"no export was written: {error}")
    return result


def unlabelled_source(data: DataConfig, path: str | None) -> Source:
    """The images of the pretraining: those of the training split, and those at `path`; test images never."""
    parts = [open_source(data.path, "train", labels=False, **data.wanted())]
    if path is not None:
        wanted = {**data.wanted(), "held_out": 0.0}
        more = open_source(path, None, labels=False, **wanted)
        if not len(more):
            raise SitusError(f"{path}: holds no images", field="unlabelled")
        parts.append(more)
    return parts[0] if len(parts) == 1 else Joined("labelled and unlabelled images", [("", each) for each in parts])


def _try_all(
    bench: Bench,
    tried: list[Tried],
    banks: dict[Origin, Tensor],
    folds: Tensor,
    method: str,
    pool: Source | None,
    image: float,
    budget: float,
    began: float,
    say: Callable[[str], None],
) -> list[str]:
    """Plans the ways that train and tries them, adding to `tried` and `banks`; gives sentences on what was left out."""
    remarks: list[str] = []
    origin, features = next(iter(banks.items()))
    everything = torch.arange(len(bench.labels))
    cost: dict[str, float] = {}
    for way in PARTS:
        try:
            config, model = bench.make(origin, way)
            cost[way] = _time(updates(model, bench.loader(training=True), config, 100), bench.device)
        except SitusError as error:
            remarks.append(f"{way}: was not tried ({error}).")
    per = max(1, len(everything) // (bench.config.data.batch or default_batch(len(everything), 1, training=True)))
    total, pretraining = max(UPDATES, EPOCHS * per), None
    if pool is not None:
        try:
            pretraining = _time(bench.pretrained(origin, method, pool, 100), bench.device)
        except SitusError as error:
            remarks.append(f"Pretraining with {method} was not tried ({error}).")
    spent = time.perf_counter() - began
    plan = plan_of(cost, pretraining, image, len(everything), total, budget - spent)
    names = {step: f"{step[0]}{f' after {method}' if step[1] else ''}" for step in (*plan.seconds, *plan.dropped)}
    names |= {(FROZEN, True): f"pretraining with {method}"}
    for step, seconds in plan.seconds.items():
        many = f"{plan.total:,} updates" + ("" if step[0] == FROZEN else f" on {counted(plan.folds, 'folds')}")
        say(f"plan: {names[step]}, {many}, about {_clock(seconds)}")
    whole = spent + sum(plan.seconds.values()) + plan.refit
    say(f"plan: about {_clock(whole)} in all, of {_clock(budget)} (minutes)")
    if plan.dropped:
        left_out = ", ".join(names[step] for step in plan.dropped)
        remarks.append(f"Not tried, for want of time in {budget / 60:g} minutes: {left_out}.")
        say(remarks[-1])
    last = began + budget - plan.refit

    def check() -> None:
        if time.perf_counter() > last:
            raise _OutOfTimeError

    done: list[Step] = []
    try:
        for way, after in plan.seconds:
            if way == FROZEN:
                origin, features = _pretrain(bench, origin, method, pool, plan.total, check, say)
                banks[origin] = features
                new = bench.frozen(origin, features, folds)
            else:
                decay = next(each.setting for each in tried if each[:2] == ("linear probe", origin))
                new = [bench.trained(way, origin, features, decay, folds, plan.folds, plan.total, check)]  # pyright: ignore[reportArgumentType]
            tried += new
            done.append((way, after))
            for each in new:
                say(_line(each, bench.labels))
    except (KeyboardInterrupt, _OutOfTimeError) as error:
        left_out = ", ".join(names[step] for step in plan.seconds if step not in done)
        why = "It was interrupted" if isinstance(error, KeyboardInterrupt) else "The minutes were spent"
        remarks.append(f"{why} before the end of {left_out}: chosen is among the others.")
        say(f"{remarks[-1]} Ctrl-C again ends without a model.")
    return remarks


def _pretrain(
    bench: Bench,
    origin: Origin,
    method: str,
    pool: Source | None,
    total: int,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> tuple[Origin, Tensor]:
    """The weights after pretraining, and the frozen features of them."""
    assert pool is not None
    learner = None
    for learner in bench.pretrained(origin, method, pool, total):
        check()
    assert learner is not None
    say(f"pretrained with {method}: {total:,} updates on {counted(len(pool), 'images')}")
    new = pretrained_origin(learner, method)
    return new, bench.features(bench.make(new, "class means")[1].backbone)[0]


def pretrained_origin(learner: Method, method: str) -> Origin:
    """What was pretrained, as weights to begin with: where it never saw positions, new ones are learned later on."""
    blind = not learner.sees_positions
    source = addressed_model(learner)
    assert source is not None
    return Origin(method, source, "learned" if blind else None, "none" if blind else None)


def _line(each: Tried, labels: Tensor) -> str:
    tested = ~each.right.isnan()
    share = percent(float(each.right[tested].mean()), 1)
    return f"{each.name}: {share} of {int(tested.sum()):,} (balanced {percent(balanced(each.right, labels))})"


def worse(test: Accuracy, start: Accuracy) -> list[str]:
    """A sentence where what was chosen does worse than the frozen start on the test images."""
    for name in ("top1", "balanced"):
        new, old = getattr(test, name), getattr(start, name)
        if new < old:
            shown = {"top1": "top-1", "balanced": "balanced accuracy"}[name]
            return [f"On the test images it is worse than the frozen start: {shown} {percent(new, 2)} against "
                    f"{percent(old, 2)}, of {test.count:,}."]  # fmt: skip
    return []


def _neighbours_better(bench: Bench, config: RunConfig, tried: Sequence[Tried], chosen: Tried) -> list[str]:
    """A sentence where neighbours do better than what was chosen by more than chance."""
    remarks = []
    for each in tried:
        more, error = gain(each.right, chosen.right, bench.labels)
        if each.way == "kNN" and not each.origin.name and more > 1.96 * error:
            from situs.evaluate.ending import Frozen

            command = Frozen(config, bench.train, True).command("knn", k=int(each.setting))
            told = f" ({command})" if command else ""
            remarks.append(f"Neighbours, which no export holds, do better on the folds by {percent(more)}{told}.")
    return remarks


def write_run(
    out: Path, config: RunConfig, bench: Bench, model: Method, chosen: Tried, test: Accuracy | None, seconds: float
) -> None:
    """Writes a run's folder with this model as its one checkpoint."""
    loader = bench.loader(training=True)
    config = replace(config, train=replace(config.train, epochs=None, max_steps=max(1, chosen.updates)))
    run = RunFolder.create(out, config, classes=bench.classes)
    step, epoch = chosen.updates, chosen.updates / loader.steps_per_epoch
    scores = {} if test is None else {"val_top1": test.top1, "val_balanced": test.balanced, "val_loss": test.loss}
    run.append({"step": step, "epoch": epoch, **scores, "seconds": seconds})
    files = capture(model, make_optimizer(model, config.optim), None, bench.device)
    state = {
        "epoch": step // loader.steps_per_epoch, "offset": step % loader.steps_per_epoch, "total_steps": step,
        "steps_per_epoch": loader.steps_per_epoch, "global_batch": loader.global_batch, "order": loader.mark,
        "peak_rate": 0.0, "world": 1, "seconds": seconds, "machine": machine(bench.device, "fp32"),
        "log": {"names": [], "steps": 0, "images": 0}, "scaler": None,
    }  # fmt: skip
    with run.hold():
        run.save(step, files, state, keep=1)
    run.close()
    loader.close()
