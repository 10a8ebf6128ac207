"""The whole adaptation: the sets, the search within the time budget, the last fit, the run's folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import default_batch, load_resident
from situs.data.modalities.image import ImagePipeline, resident_size
from situs.data.open import open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.subset import Joined, PerClass, Subset
from situs.errors import SitusError, counted, verb
from situs.limits import check_value
from situs.measure.accuracy import Accuracy
from situs.measure.adapt.bench import DECAYS, LOOKS, Bench, part_of, updates
from situs.measure.adapt.ways import (
    FOLDS,
    PARTS,
    START,
    Adapted,
    Initial,
    TriedWay,
    balanced,
    choose,
    folds_of,
    gain,
    one_label,
    top1_better,
)
from situs.measure.finetune import finetune_config
from situs.measure.hooks import Frozen
from situs.methods.base import Method
from situs.models.data import made_with
from situs.models.export import export_model
from situs.models.inference import evaluating
from situs.models.open import open_model
from situs.models.start import addressed_model, finetune_source
from situs.results import percent
from situs.train import distributed
from situs.train.assemble import RunConfig, Start, own_splits, resolve_config
from situs.train.checkpoint import RunFolder, check_target
from situs.train.checkpoint.state import capture
from situs.train.log import machine
from situs.train.optim import make_optimizer

HELD_OUT = 0.2
"""Share of data without a test split that is set aside."""
ONE_LABEL_SCALE = 20.0
FEATURES_SHARE, FEWEST_PATCHES = 0.25, 7
"""On a CPU the frozen features take at most this share of the time limit where the user chose no image size; the images
become smaller for it, but not than so many patches to a side."""


def adapt_model(
    config: RunConfig,
    source: str,
    *,
    out: str | Path,
    start: Start,
    unlabelled: str | None = None,
    method: str = "none",
    minutes: float = 30.0,
    device: str | None = None,
    any_size: bool = False,
    say: Callable[[str], None] = print,
) -> Adapted:
    """Tries every way that fits into the minutes, and writes the run of the best, with its export in it.

    config: of a fine-tuning, with its data and augmentation. source: the model. start: loads its weights. unlabelled:
    more images for the pretraining with `method`; labels of these are ignored. any_size: images may become smaller than
    the config's size where the time is short.
    """
    began, out = time.perf_counter(), Path(out)
    check_value("minutes", minutes, "> 0")
    if unlabelled is not None and method == "none":
        raise SitusError(
            "`unlabelled` is used only for pretraining, so also choose a pretraining method with `method`",
            field=("unlabelled", "method"),
        )
    check_target(out)
    ranks = distributed.start(device)
    if ranks.world > 1:
        raise SitusError(
            "adaptation runs in one process only, but torchrun has started several; start it without torchrun",
            field="device",
        )
    if ranks.device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    origin = Initial("", source)
    bench, remarks = affordable_bench(config, origin, 60 * minutes, ranks.device, start, say, any_size)
    pool = None if method == "none" else unlabelled_source(bench.config.data, unlabelled)
    started = time.perf_counter()
    features, labels, rows = bench.features(bench.make(origin, "class means")[1].backbone)
    image = (time.perf_counter() - started) / len(rows)
    if len(rows) < len(bench.train):
        whole, lost = bench.train, len(bench.train) - len(rows)
        remarks.append(f"{counted(lost, f'labelled {whole.things}')} cannot be read, and {verb(lost, 'are')} left out.")
        bench = replace(bench, train=part_of(whole, rows.cpu()))
        bench.train.notes += [text for text in whole.left_out() if text not in bench.train.left_out()]
    bench = replace(bench, labels=labels.cpu())
    check_classes(bench)
    many = counted(len(labels), f"labelled {bench.train.things}")
    say(f"{bench.train.name}: {many} of {counted(len(bench.classes), 'classes')}")

    search = Search(bench, method, pool, say, began, 60 * minutes, {origin: features})
    remarks += search.run(image)
    chosen = choose(search.tried, bench.labels)
    say(f"chosen: {chosen.name}; now fitted to all {many}")
    settings, model = bench.refit(chosen, search.banks[chosen.origin], search.decay(chosen.origin))
    test, first, answers = None, None, None
    if bench.test is not None:
        test, answers = bench.judge(model.backbone)
        means = next(trial for trial in search.tried if trial.way == "class means")
        first = test if chosen is means else bench.judge(bench.refit(means, features, 0.0)[1].backbone)[0]
        remarks += worse(test, first)
    remarks += top1_better(search.tried, chosen)
    remarks += neighbours_better(bench, settings, search.tried, chosen)
    settings = replace(settings, data=replace(settings.data, count=config.data.count, per_class=config.data.per_class))
    write_run(out, settings, bench, model, chosen, test, time.perf_counter() - began)
    loader = bench.loader(test=bench.test is not None)
    more = {"started from": Path(source.partition("=")[0]).name, "minutes": f"{minutes:g}"}
    result = Adapted(
        out, tuple(search.tried), chosen, bench.labels, bench.classes, test, first, answers, tuple(remarks),
        provenance=made_with(open_model(out), loader, config.train.seed, beside=[bench.loader()], more=more),
    )  # fmt: skip
    try:
        export_model(out, out / "export")
    except SitusError as error:
        say(f"no export was written: {error}")
    return result


def affordable_bench(
    config: RunConfig,
    origin: Initial,
    limit: float,
    device: torch.device,
    start: Start,
    say: Callable[[str], None],
    any_size: bool,
) -> tuple[Bench, list[str]]:
    """`open_bench`, with smaller images where the frozen features would take too much of `limit` seconds."""
    bench, remarks = open_bench(config, origin.source, device, start)
    size, line = affordable(bench, origin, limit, any_size=any_size)
    if line:
        say(line)
    if size is None:
        return bench, remarks
    config = replace(config, data=replace(config.data, img_size=size))
    bench, remarks = open_bench(config, origin.source, device, start)
    return bench, [*remarks, line]


def affordable(bench: Bench, origin: Initial, limit: float, *, any_size: bool) -> tuple[tuple[int, int] | None, str]:
    """A smaller image size, where the frozen features take too much of `limit` seconds on a CPU and any size may be
    taken, else None; and a sentence about the time, "" where it is short."""
    backbone, count = bench.make(origin, "class means")[1].backbone, len(bench.train)
    spec, grid = backbone.input, backbone.grid
    if bench.device.type != "cpu" or spec.shape is None or len(grid) != 2 or not bench.config.data.modality.pixels:
        return None, ""
    images = count + 2 * (0 if bench.test is None else len(bench.test))  # the start and the choice are tested
    samples = torch.zeros(2, spec.channels, *spec.shape)
    with torch.no_grad(), evaluating(backbone):
        backbone(samples)
        began = time.perf_counter()
        backbone(samples)
    seconds = (time.perf_counter() - began) / len(samples) * images
    if seconds <= FEATURES_SHARE * limit:
        return None, ""
    shrink = math.sqrt(FEATURES_SHARE * limit / seconds)
    patches = [min(n, max(FEWEST_PATCHES, int(n * shrink))) for n in grid]
    height, width = (n * side // whole for n, side, whole in zip(patches, spec.shape, grid, strict=True))
    full, size = (" × ".join(map(str, shape)) for shape in (spec.shape, (height, width)))
    long = (
        f"At {full} pixels, computing the features of the frozen model already takes about {_clock(seconds)}. "
        f"The time limit for everything is {limit / 60:g} min"
    )
    if patches == [*grid]:
        return None, f"{long}; allow more minutes."
    if not any_size:
        return None, f"{long}; allow more minutes, or use smaller images (img_size={height})."
    return (height, width), f"{long}, so the images are reduced to {size} pixels (img_size sets another size)."


# --- the sets ----------------------------------------------------------------------------------------------------


def open_bench(config: RunConfig, source: str, device: torch.device, start: Start) -> tuple[Bench, list[str]]:
    """The data of an adaptation, and remarks on it; data without labels is refused.

    config: of a fine-tuning, its model not resolved.
    """
    remarks: list[str] = []
    data = resolve_config(finetune_config(config, source, None)).data
    if data.modality.ids:
        hint = f"contains {data.modality.things}, but adapt takes only images and clips; use finetune instead"
        raise SitusError(f"{data.path}: {hint}", field="data")
    share = config.data.held_out
    if (not share or share == finetune_source(source).data.get("held_out")) and not own_splits(data):
        share = share or HELD_OUT  # chosen by nobody here: the default, or what the model's own run held out
        data = replace(data, held_out=share)
        remarks.append(f"The data has no test split, so {percent(share, 0)} of the samples were held out for testing.")
    try:
        train, test = (open_source(data, split) for split in ("train", "test"))
    except SitusError as error:
        if not remarks or "held_out" not in error.fields:
            raise
        data, test = replace(data, held_out=0.0), None
        train = open_source(data)
        remarks = [f"The data has too few {train.things} to hold some out for testing, so the model was not tested."]
    if train.classes is None or train.target != "label":
        raise SitusError(f"{train.name}: has no labels, but adapt needs one class per sample", field="data")
    if len(train.classes) < 2:
        raise _one_class(train)
    train = train if data.count is None else Subset(train, data.count)
    train = train if data.per_class is None else PerClass(train, data.per_class)
    data = replace(data, count=None, per_class=None)
    if test is not None and test.classes != train.classes:
        raise SitusError(f"{test.name}: its classes differ from those of the training split", field="data")
    if data.modality.pixels and (size := resident_size(train, data)) is not None:
        pipeline = ImagePipeline(train, replace(data, img_size=size), None, resident=size)
        values = load_resident(pipeline, "cpu", int(data.resident_gib * 2**30)).values
        whole, train = train, TensorSource(values["image"], values["label"], train.classes, train.name)
        train.notes += whole.left_out()
    empty = torch.zeros(len(train), dtype=torch.int64)
    augment = config.augment if data.modality.pixels else AugmentConfig()  # crops and flips are for images
    bench = Bench(replace(config, data=data, augment=augment), train, test, empty, train.classes or (), device, start)
    return bench, remarks


def check_classes(bench: Bench) -> None:
    """Refuses labels of a single class, and classes without training images."""
    labels, classes, name = bench.labels, bench.classes, bench.train.name
    counts = labels.bincount(minlength=len(classes))
    if int((counts > 0).sum()) < 2:
        raise _one_class(bench.train)
    if not counts.all():
        none = [classes[at] for at in (counts == 0).nonzero()[:, 0].tolist()]
        few = ", ".join(map(repr, none[:3])) + (", …" if len(none) > 3 else "")
        raise SitusError(f"{name}: has {counted(len(none), 'classes')} without training samples ({few})", field="data")


def _one_class(source: Source) -> SitusError:
    reason = f"must have two classes or more, but all its {source.things} are of one class"
    return SitusError(f"{source.name}: {reason}", field="data")


def unlabelled_source(data: DataConfig, path: str | None) -> Source:
    """The images of the pretraining: of the training split and at `path`, never test images."""
    parts = [open_source(data, "train", labels=False)]
    if path is not None:
        try:
            parts.append(open_source(replace(data, path=path, held_out=0.0), labels=False))
        except SitusError as error:
            raise SitusError(str(error), field="unlabelled") from error
    return parts[0] if len(parts) == 1 else Joined("labelled and unlabelled images", [("", part) for part in parts])


# --- the search --------------------------------------------------------------------------------------------------


class _OutOfTimeError(Exception):
    """The minutes are spent."""


class Search:
    """Tries every way that fits into the time budget, on the folds. banks: initial weights -> the frozen features of
    the labelled images. tried: the ways so far."""

    def __init__(
        self, bench: Bench, method: str, pool: Source | None, say: Callable[[str], None], began: float, budget: float,
        banks: dict[Initial, Tensor],
    ) -> None:  # fmt: skip
        self.bench, self.method, self.pool, self.say = bench, method, pool, say
        self.began, self.budget, self.banks = began, budget, banks
        self.folds = folds_of(bench.labels, seed=bench.config.train.seed)
        self.tried: list[TriedWay] = []

    def run(self, image: float) -> list[str]:
        """Tries the ways; gives remarks on what was left out. image: seconds of a forward of one image."""
        origin, features = next(iter(self.banks.items()))
        if one_label(self.bench.labels):
            untested = torch.full((len(features),), torch.nan, dtype=torch.double)
            self.tried = [TriedWay("class means", origin, untested, ONE_LABEL_SCALE)]
            rule = f"In this case Situs always chooses the simplest recipe ({START})"
            return [f"Most classes have only one labelled sample, so cross-validation is impossible. {rule}."]
        self._add(self.bench.frozen(origin, features, self.folds))
        plan, remarks = self._plan(origin, image)
        last, done = self.began + self.budget - plan.refit, list[Step]()

        def check() -> None:
            if time.perf_counter() > last:
                raise _OutOfTimeError

        try:
            for way, after in plan.seconds:
                if way == FROZEN:
                    origin = self._pretrain(origin, plan.total, check)
                    self._add(self.bench.frozen(origin, self.banks[origin], self.folds))
                else:
                    arguments: Any = (
                        way,
                        origin,
                        self.banks[origin],
                        self.decay(origin),
                        self.folds,
                        plan.folds,
                        plan.total,
                    )
                    self._add([self.bench.trained(*arguments, check=check)])
                done.append((way, after))
        except (KeyboardInterrupt, _OutOfTimeError) as error:
            missing = ", ".join(self._name(step) for step in plan.seconds if step not in done)
            why = "The search was interrupted" if isinstance(error, KeyboardInterrupt) else "The time limit was reached"
            remarks.append(
                f"{why} before these recipes were finished: {missing}. The choice was made among the finished recipes."
            )
            self.say(f"{remarks[-1]} Press Ctrl-C again to end without a model.")
        return remarks

    def decay(self, origin: Initial) -> float:
        """The weight decay of the linear probe on these weights, which initialises the head of a training."""
        return next((trial.setting for trial in self.tried if trial[:2] == ("linear probe", origin)), DECAYS[-2])

    def _add(self, new: Sequence[TriedWay]) -> None:
        self.tried += new
        for trial in new:
            tested = ~trial.right.isnan()
            share = percent(float(trial.right[tested].mean()), 1)
            even = percent(balanced(trial.right, self.bench.labels))
            self.say(f"{trial.name}: {share} of {int(tested.sum()):,} (balanced {even})")

    def _name(self, step: Step) -> str:
        way, after = step
        return f"pretraining with {self.method}" if way == FROZEN else f"{way}{f' after {self.method}' * after}"

    def _plan(self, origin: Initial, image: float) -> tuple[Plan, list[str]]:
        """Times an update of each way, and plans what fits into the time budget."""
        bench, count, remarks, cost = self.bench, len(self.bench.labels), list[str](), dict[str, float]()
        batch = bench.config.data.batch or default_batch(count, 1, training=True)
        total = max(UPDATES, EPOCHS * (count // batch))
        left = self.began + self.budget - time.perf_counter()
        if image * batch * min(total, FEWEST) > left:  # not even the forwards fit, so that no update is timed
            names = [*PARTS, *([] if self.pool is None else [f"pretraining with {self.method}"])]
            remarks.append(f"{self.budget / 60:g} min are not enough to try {', '.join(names)}.")
            self.say(remarks[-1])
            return Plan({}, 0, 0, 0.0), remarks
        for way in PARTS:
            try:
                config, model = bench.make(origin, way)
                cost[way] = seconds_of(updates(model, bench.loader(training=True), config, 100), bench.device)
            except SitusError as error:
                remarks.append(f"{way}: was not tried ({error}).")
        pretraining = None
        if self.pool is not None:
            try:
                pretraining = seconds_of(bench.pretrained(origin, self.method, self.pool, 100, head=0.0), bench.device)
            except SitusError as error:
                remarks.append(f"Pretraining with {self.method} was not tried ({error}).")
        spent = time.perf_counter() - self.began
        plan = plan_of(cost, pretraining, image, count, total, self.budget - spent)
        for step, seconds in plan.seconds.items():
            many = f"{plan.total:,} updates" + ("" if step[0] == FROZEN else f" on {counted(plan.folds, 'folds')}")
            self.say(f"plan: {self._name(step)}, {many}, about {_clock(seconds)}")
        whole = spent + sum(plan.seconds.values()) + plan.refit
        self.say(f"plan: about {_clock(whole)} in total; the limit is {self.budget / 60:g} min")
        if plan.dropped:
            names = ", ".join(map(self._name, plan.dropped))
            enough = f"About {math.ceil((plan.whole + spent) / 60)} min are enough for all recipes"
            remarks.append(f"{self.budget / 60:g} min are not enough to try {names}. {enough}.")
            self.say(remarks[-1])
        return plan, remarks

    def _pretrain(self, origin: Initial, total: int, check: Callable[[], None]) -> Initial:
        """The weights after pretraining; their frozen features are added to `banks`."""
        assert self.pool is not None
        learner = None
        for trained in self.bench.pretrained(origin, self.method, self.pool, total):
            check()
            learner = trained
        assert learner is not None
        self.say(f"pretrained with {self.method}: {total:,} updates on {counted(len(self.pool), self.pool.things)}")
        source, blind = addressed_model(learner), not learner.sees_positions
        assert source is not None
        # New positions are learned where the pretraining used none.
        new = Initial(self.method, source, "learned" if blind else None, "none" if blind else None)
        self.banks[new] = self.bench.features(self.bench.make(new, "class means")[1].backbone)[0]
        return new


def _clock(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


# --- the end -----------------------------------------------------------------------------------------------------


def worse(test: Accuracy, start: Accuracy) -> list[str]:
    """A remark where the chosen way is worse than the frozen start on the test images."""
    for name in ("top1", "balanced"):
        new, old = getattr(test, name), getattr(start, name)
        if new < old:
            shown = {"top1": "top-1", "balanced": "balanced accuracy"}[name]
            beside = f"its {shown} is {percent(new, 2)} instead of {percent(old, 2)}, on {test.count:,} samples"
            return [f"On the test split, the chosen model is worse than the simplest recipe ({START}): {beside}."]
    return []


def neighbours_better(bench: Bench, config: RunConfig, tried: Sequence[TriedWay], chosen: TriedWay) -> list[str]:
    """A remark where kNN is better than the chosen way by more than chance."""
    remarks = []
    for trial in tried:
        more, error = gain(trial.right, chosen.right, bench.labels)
        if trial.way == "kNN" and not trial.origin.name and more > 1.96 * error:
            command = Frozen(config, bench.train, True).command("knn", k=int(trial.setting))
            hint = f" (to measure kNN: {command})" if command else ""
            remarks.append(
                f"In cross-validation, kNN is better than the chosen recipe by {percent(more)}{hint}, but kNN cannot "
                "be exported."
            )
    return remarks


def write_run(
    out: Path, config: RunConfig, bench: Bench, model: Method, chosen: TriedWay, test: Accuracy | None, seconds: float
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


UPDATES, EPOCHS, FEWEST = 300, 10, 100
"""Updates of a training: `UPDATES`, or `EPOCHS` epochs where that is more; at least `FEWEST` where time is short."""
FROZEN = "frozen"
Step = tuple[str, bool]
"""A way that trains, or `FROZEN` (the ways on frozen features); and whether after pretraining."""


class Plan(NamedTuple):
    """What fits into the time budget. seconds: expected for each step, in order. folds, total: folds and updates of a
    training. refit: the most seconds of the last training. dropped: steps that do not fit. whole: seconds in which none
    would have to be dropped."""

    seconds: Mapping[Step, float]
    folds: int
    total: int
    refit: float
    dropped: tuple[Step, ...] = ()
    whole: float = 0.0


def plan_of(
    update: Mapping[str, float], pretraining: float | None, image: float, count: int, total: int, left: float
) -> Plan:
    """The most that fits into `left` seconds: fewer folds first, then fewer updates, then fewer ways.

    update: seconds of an update of each way that trains. pretraining: of an update of it; None: no pretraining. image:
    seconds of a forward of one image, of which there are `count`. total: updates of a training; at least a quarter of
    them, and not fewer than `FEWEST`, are planned.
    """
    steps: list[Step] = [(way, False) for way in update]
    if pretraining is not None:
        steps += [(FROZEN, True), *((way, True) for way in update)]
    every, whole = tuple(steps), 0.0
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
                return Plan(seconds, folds, length, refit, every[len(steps) :], whole)
        whole = whole or sum(seconds.values()) + refit
        steps.pop()
    return Plan({}, 0, 0, 0.0, every, whole)


def seconds_of(steps: Iterator[Any], device: torch.device) -> float:
    """Seconds of one of `steps`, without the first ones, in which kernels are chosen and recorded."""
    first, some = (6, 3) if device.type == "cuda" else (1, 2)
    for _ in range(first):
        next(steps)
    _wait(device)
    began = time.perf_counter()
    for _ in range(some):
        next(steps)
    _wait(device)
    return (time.perf_counter() - began) / some


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
