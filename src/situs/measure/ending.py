"""What a training with labels has come to at its end, in sentences: beside the largest class, and beside the frozen
features that it started from.

Neighbours and a linear classifier on the features of the starting weights cost one look at the images. Where they do
better than what was fine-tuned, the fine-tuning was not worth it, and who ran it must hear so.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.data.loader import Loader, make_loader
from situs.data.sources.base import Source
from situs.errors import SitusError
from situs.measure.accuracy import Accuracy, hard, labels_of
from situs.measure.by_class import wilson
from situs.measure.features import Pool, encoded, pool_features
from situs.measure.knn import POOLS, knn_accuracy
from situs.measure.probe.head import SMALL
from situs.measure.probe.linear import fit_probe, score
from situs.methods.base import Method
from situs.models.inference import evaluating
from situs.results import percent
from situs.train.assemble import RunConfig
from situs.train.step import autocast

PASSES = 10
"""Epochs that a run has at least, for one more look at its images to cost little."""


class Baseline(NamedTuple):
    """name: what was put on the frozen features. top1: on the validation split. command: that tells it too, or ""."""

    name: str
    top1: float
    command: str = ""


@dataclass(frozen=True)
class Frozen:
    """How the features that a fine-tuning starts from are looked at. source: of its samples. positions: whether the
    weights know the positions that the model has now."""

    config: RunConfig
    source: Source
    positions: bool

    def look(self, method: Method, val: Loader, precision: str) -> Baseline | None:
        """The best of neighbours and linear classifiers, on CLS and on the mean of the patches."""
        if "tokens" in method.backbone.refusals:
            return None
        data, classes = replace(self.config.data, batch=val.plan.batch), len(val.classes or ())
        train = make_loader(data, None, val.device, source=self.source)
        (bank, labels), (test, truth) = (self._features(method.backbone, each, precision) for each in (train, val))
        k = min(20, max(1, len(labels) // (2 * classes)))
        tried: list[Baseline] = []
        for pool, features in bank.items():
            near = knn_accuracy(features, labels, test[pool], truth, k)
            tried.append(Baseline(f"nearest neighbours on its {POOLS[pool]}", near, self.command("knn", k=k)))
            try:
                linear = fit_probe(features, labels, classes).linear
            except SitusError:  # too few samples to choose a weight decay by
                continue
            share = score(linear, [(test[pool], truth)], classes).accuracy
            command = self.command("probe", kind="class", pool=pool, train_count=len(labels))
            tried.append(Baseline(f"a linear classifier on its {POOLS[pool]}", share, command))
        return max(tried, key=lambda each: each.top1)

    def _features(self, backbone: Backbone, batches: Loader, precision: str) -> tuple[dict[Pool, Tensor], Tensor]:
        """Features [n, D] by pool, and labels [n]."""
        pools: tuple[Pool, ...] = ("cls", "mean") if backbone.num_prefix else ("mean",)
        parts: dict[Pool, list[Tensor]] = {pool: [] for pool in pools}
        labels = []
        with evaluating(backbone):
            for batch in batches:
                with autocast(batch.inputs.device, precision):
                    features = encoded(backbone, batch.inputs, batch.mask, positions=self.positions)
                for pool in pools:
                    parts[pool].append(pool_features(features, pool).float())
                labels.append(hard(labels_of(batch)))
        return {pool: torch.cat(each) for pool, each in parts.items()}, torch.cat(labels)

    def command(self, verb: str, **asked: Any) -> str:
        """The verb of evaluate in a shell, its flags named as its arguments are; "" where no verb takes this data."""
        config, init = self.config, str(self.config.init)
        if config.data.count or config.data.per_class:
            return ""
        model = init
        if Path(init).is_file():
            model = f"{config.backbone.name}={init}"
            asked["img_size"] = ",".join(map(str, dict.fromkeys(config.data.size)))
        asked["data"] = config.data.path
        if config.data.held_out:
            asked["held_out"] = f"{config.data.held_out:g}"
        flags = [word for name, value in asked.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        return shlex.join(["situs", "evaluate", verb, model, *flags])


def frozen_start(config: RunConfig, train: Loader, val: Loader) -> Frozen | None:
    """Whether and how the start of a run is looked at: of small sets of images or clips with a class each, by one
    process, where the run goes over them often enough, and nothing has to stay private."""
    plain = train.source.classes is not None and train.source.target == "label" and val.source.target == "label"
    if config.init is None or not plain or config.data.modality.ids or train.plan.world > 1 or config.dp.on:
        return None
    total = config.train.total_steps(train.steps_per_epoch)
    if len(train.source) + len(val.source) > SMALL or total < PASSES * train.steps_per_epoch:
        return None
    return Frozen(config, train.source, config.init_positions)


def ending(last: Accuracy, frozen: Baseline | None, val: Loader) -> Iterator[str]:
    """Sentences on a top-1 that is worth little: none where it is above the largest class and the frozen features."""
    low, high = wilson(last.top1 * last.count, last.count)
    top1, largest = percent(last.top1, 2), percent(last.majority, 2)
    if last.only is not None and last.classes > 1:
        name = val.classes[last.only] if val.classes is not None else str(last.only)
        yield f"the model names one class, {name!r}, for all {last.count:,} {val.source.things} of the validation"
    elif last.top1 <= last.majority:
        yield f"top-1 {top1} is not above naming the largest class every time ({largest}): nothing useful was learned"
    elif low <= last.majority <= high:
        few = f"{last.count:,} {val.source.things} are too few to tell apart from naming the largest class"
        yield f"top-1 {top1}, 95 % interval {percent(low)} to {percent(high)}: {few} ({largest})"
    if frozen is not None and frozen.top1 > last.top1:
        text = f"the frozen features that this run started from do better: {frozen.name} has"
        command = f" ({frozen.command})" if frozen.command else ""
        yield f"{text} {percent(frozen.top1, 2)} here, the fine-tuned model {top1}{command}"
