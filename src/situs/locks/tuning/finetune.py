"""Fine-tuning a locked model, with the key and without it: what the paper's Table 7 and Figures 4 to 6 compare.

Four ways to the same task, from one head, one order of the data and one recipe:

    normal         the open model
    authorised     the locked model, its owner permuting the stream before the blocks and back behind them
    unauthorised   the locked model as it was stolen
    from scratch   random weights: what the unauthorised have to beat for the theft to be of use

Normal and authorised are the same training in another order of the channels: equal but for rounding.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones import BackboneConfig
from situs.backbones.layout import Group
from situs.backbones.weights import HEADS
from situs.config import Checked
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.sources import open_source
from situs.data.sources.base import Source, TensorSource
from situs.data.sources.samples import load_samples
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.limits import Count, Positive
from situs.locks.groups import invert_keys, permute_state, random_keys, residual_only
from situs.locks.owner import with_key
from situs.locks.tuning.paper import RuleCheck, measure_rule
from situs.methods import Supervised, SupervisedConfig
from situs.methods.base import Method
from situs.models.inference import evaluating
from situs.results import Result, Summary, Table, percent
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.contract import RunState
from situs.train.loop import fit
from situs.train.optim import OptimConfig
from situs.train.run import RunConfig, load_run, make_method

WAYS = ("normal", "authorised", "unauthorised", "from scratch")
State = dict[str, Tensor]
Say = Callable[[str], None]


@dataclass(frozen=True)
class TuningConfig(Checked):
    """How long each way trains, and on how much."""

    images: Count = 1000
    """Labelled images to fine-tune on."""

    test: Count = 2000
    """Images that the curves are measured on."""

    epochs: Count = 10
    """Passes over the labelled images, in each of the four ways."""

    batch: Count = 50
    """Images a step."""

    lr: Positive = 1e-3
    """Peak rate of AdamW."""

    looks: Count = 10
    """Points of a curve."""

    pretrain_epochs: Count = 6
    """Passes over 8,000 of the embedded images to make the model that is locked, where none is given."""

    seed: int = 0
    """Of the new head, the key, and the order of the data."""

    def check(self) -> None:
        if self.batch > self.images:
            raise SitusError(field=("batch", "images"), value=self.batch, allowed=f"at most the {self.images} images")


@dataclass(frozen=True)
class Pretrained:
    """The model to lock: its recipe, its weights, and the images for the study. about: one line of what it is."""

    config: RunConfig
    state: State
    train: Source
    test: Source
    about: str


@dataclass
class Curve:
    """Steps, and the validation loss and accuracy after each."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class LockTuning(Result):
    """What was found, by way. chance: accuracy of guessing.

    logits_gap: largest difference of the final logits, normal against authorised. weights_gap: likewise of the weights,
    after un-permuting the authorised ones.
    """

    file: ClassVar[str] = "finetuning"
    page_file: ClassVar[str] = "report"

    config: TuningConfig
    about: str
    curves: dict[str, Curve]
    chance: float
    logits_gap: float
    weights_gap: float
    rule: tuple[RuleCheck, ...] = ()
    """The paper's Eq. 6 on the model that was locked."""

    def summary(self) -> Summary:
        """How far normal and authorised are apart; a row a way; the paper's rule, a sentence for each kind of key."""
        said = (
            f"Normal and authorised ought to differ by rounding alone: their logits differ by at most "
            f"{self.logits_gap:.1e}, their weights by {self.weights_gap:.1e} after {self.curves['normal'].steps[-1]} "
            f"float32 steps. Chance is {percent(self.chance)}."
        )
        rules = [
            f"The paper's Eq. 6 {'holds' if each.holds else 'fails'} with {each.key}: an error of {each.error:.0e} in "
            f"float64; {each.why}."
            for each in self.rule
        ]
        rows = [[way, percent(curve.accuracy[-1], 2), f"{curve.loss[-1]:.4f}"] for way, curve in self.curves.items()]
        return Summary(said, (Table(self.about, ["way", "accuracy", "loss"], rows),), tuple(rules))

    def numbers(self) -> dict[str, Any]:
        """The settings, and every curve."""
        numbers = asdict(self)
        del numbers["provenance"]
        return numbers


def make_way(
    way: str,
    config: RunConfig,
    classes: tuple[str, ...],
    pretrained: Mapping[str, Tensor],
    groups: tuple[Group, ...],
    keys: Mapping[str, Tensor],
) -> Method:
    """The method that one of `WAYS` trains: all begin with the same new head."""
    method = make_method(config, classes)
    if way == "from scratch":
        return method
    model = method.backbone.model
    state = {name: value for name, value in pretrained.items() if not name.startswith(HEADS)}
    kept = {name: value for name, value in model.state_dict().items() if name.startswith(HEADS)}
    held = permute_state(state, groups, keys) if way != "normal" else state
    model.load_state_dict({**held, **kept})
    if way == "authorised":
        return Supervised(with_key(method.backbone, groups, keys), config.method)
    return method


def audit_tuning(
    source: str | Path | None = None,
    data: str | None = None,
    config: TuningConfig | None = None,
    *,
    say: Say = lambda _: None,
) -> LockTuning:
    """Fine-tunes a locked model with its key, without it, and from scratch: the paper's Table 7 and Figures 4 to 6.

    source: the run whose model is locked; None: a small ViT is pretrained on the embedded images. data: labelled images
    to fine-tune on; None: those of the run. say: is told how far it is.
    """
    if source is None and data is not None:
        raise SitusError(f"data={data}: give the run to start from as well", field="source")
    config = config or TuningConfig()
    with tempfile.TemporaryDirectory() as place:
        start = pretrain(config, Path(place), say) if source is None else from_run(source, data, config)
        return run_ways(start, config, Path(place), say)


def run_ways(pretrained: Pretrained, config: TuningConfig, folder: Path, say: Say = lambda _: None) -> LockTuning:
    """Fine-tunes in all four ways, each in its own run under `folder`."""
    recipe = _recipe(pretrained.config, config)
    loader = make_loader(recipe.data, recipe.augment, source=pretrained.train)
    test = make_loader(replace(recipe.data, batch=500), None, source=pretrained.test)
    if loader.classes is None or loader.classes != test.classes or loader.source.multi_label:
        raise SitusError(
            f"{recipe.data.path}: the study needs labels, one an image, the same for training and validation",
            field="data",
        )
    curves: dict[str, Curve] = {}
    methods: dict[str, Method] = {}
    with torch.random.fork_rng(devices=[]):
        groups = residual_only(make_method(recipe, loader.classes).backbone.groups())
        keys = random_keys(groups, torch.Generator().manual_seed(config.seed))
        for way in WAYS:
            methods[way] = make_way(way, recipe, loader.classes, pretrained.state, groups, keys)
            curves[way] = _train(methods[way], loader, test, recipe, config.looks, folder / way.replace(" ", "-"))
            say(f"{way}: {percent(curves[way].accuracy[-1])} after {curves[way].steps[-1]} steps")
    logits = [torch.cat([out for out, _ in _predictions(methods[way], test)]) for way in WAYS[:2]]
    states = [methods[way].backbone.model.state_dict() for way in WAYS[:2]]
    back = permute_state(states[1], groups, invert_keys(keys))
    gap = max(float((states[0][name] - back[name]).abs().max()) for name in back)
    about = f"{pretrained.about}; {len(pretrained.train):,} labelled images, {config.epochs} epochs"
    rule = tuple(measure_rule(methods["normal"].backbone, seed=config.seed))
    return LockTuning(
        config, about, curves, 1 / len(loader.classes), float((logits[0] - logits[1]).abs().max()), gap, rule
    )


def _train(method: Method, loader: Loader, test: Loader, recipe: RunConfig, looks: int, folder: Path) -> Curve:
    curve = Curve()
    _measure(method, test, 0, curve)
    total = recipe.train.total_steps(loader.steps_per_epoch)
    began = time.perf_counter()
    _fit(method, loader, recipe, folder, _Look(test, max(1, total // looks), curve))
    curve.seconds = time.perf_counter() - began
    method.eval()
    return curve


def _fit(method: Method, loader: Loader, recipe: RunConfig, folder: Path, *hooks: Any) -> None:
    run = RunFolder.create(folder, recipe)
    if fit(method, loader, recipe.train, recipe.optim, run, hooks=hooks, quiet=True).interrupted:
        raise KeyboardInterrupt


@dataclass(frozen=True)
class _Look:
    """A hook that measures loss and accuracy every so many steps, and after the last."""

    test: Loader
    every: int
    curve: Curve

    def after_step(self, state: RunState) -> None:
        if state.step % self.every == 0 or state.step == state.total:
            _measure(state.method, self.test, state.step, self.curve)

    def after_epoch(self, state: RunState) -> None:
        """Nothing."""


def _measure(method: Method, test: Loader, step: int, curve: Curve) -> None:
    loss = right = count = 0.0
    for logits, labels in _predictions(method, test):
        loss += float(F.cross_entropy(logits.float(), labels, reduction="sum"))
        right += float((logits.argmax(dim=-1) == labels).sum())
        count += len(labels)
    curve.steps.append(step)
    curve.loss.append(loss / count)
    curve.accuracy.append(right / count)


def _predictions(method: Method, test: Loader) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits and labels of every batch."""
    with evaluating(method):
        for batch in test:
            yield method.backbone(batch.inputs), batch.targets["label"]


def _recipe(config: RunConfig, study: TuningConfig) -> RunConfig:
    return replace(
        config,
        method=SupervisedConfig(),
        init=None,
        backbone=replace(config.backbone, weights=None),
        data=replace(config.data, batch=study.batch, seed=study.seed),
        optim=OptimConfig(lr=study.lr, warmup_epochs=1, clip=1.0),
        # Another seed than the pretraining's: its first head would not be new, the trained blocks grew around it.
        train=TrainConfig(epochs=study.epochs, log_every=100, seed=config.train.seed + study.seed + 1),
        probe_every=0,
    )


def pretrain(config: TuningConfig, folder: Path, say: Say = lambda _: None) -> Pretrained:
    """A small ViT, trained with labels on 8,000 embedded images; the study has the other 1,000."""
    model = {"embed_dim": 64, "depth": 3, "num_heads": 4}
    recipe = RunConfig(
        method=SupervisedConfig(),
        backbone=BackboneConfig("vit_tiny_patch16_224", patch_size=4, model_args=model),
        data=DataConfig(path="samples", img_size=28, channels=1, batch=128, seed=config.seed),
        augment=AugmentConfig(crop="pad", pad=2),
        optim=OptimConfig(lr=2e-3, warmup_epochs=1, clip=1.0),
        train=TrainConfig(epochs=config.pretrain_epochs, log_every=100, seed=config.seed),
    )
    samples = load_samples("train")
    parts = [slice(0, 8000), slice(8000, None)]
    first, rest = (TensorSource(samples.images[p], samples.labels[p], samples.classes, "samples") for p in parts)
    loader = make_loader(recipe.data, recipe.augment, source=first)
    with torch.random.fork_rng(devices=[]):
        method = make_method(recipe, loader.classes)
        _fit(method, loader, recipe, folder / "pretrained")
    say(f"pretrained a small ViT for {config.pretrain_epochs} epochs on {len(first):,} images")
    state = {name: value.clone() for name, value in method.backbone.model.state_dict().items()}
    test = Subset(open_source("samples", "test", channels=1), config.test)
    about = f"a ViT of {recipe.backbone.model_args['depth']} blocks, pretrained on {len(first):,} labelled images"
    return Pretrained(recipe, state, Subset(rest, config.images), test, about)


def from_run(source: str | Path, data: str | None, config: TuningConfig) -> Pretrained:
    """The model of a run folder, and the images it was trained on or those at `data`."""
    loaded = load_run(source)
    described = loaded.config.data if data is None else replace(loaded.config.data, path=data, split=None)
    train, test = (open_source(described.path, split, **described.wanted()) for split in ("train", "val"))
    recipe = replace(loaded.config, data=described)
    state = {name: value.clone() for name, value in loaded.method.backbone.model.state_dict().items()}
    about = f"{recipe.backbone.name} of a {loaded.config.method_name} run"
    return Pretrained(recipe, state, Subset(train, config.images), Subset(test, config.test), about)
