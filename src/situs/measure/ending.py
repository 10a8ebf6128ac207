"""Warnings at the end of a training with labels: where it is no better than the largest class, or than the frozen
features that it started from.

kNN and a linear classifier on the features of the starting weights cost one pass over the images. Where they do better
than the fine-tuned model, the fine-tuning was not worth it, and the user must know.
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
from situs.measure.features import Pool, encoded, pool_features
from situs.measure.knn import POOLS, knn_accuracy, small_k
from situs.measure.probe.head import SMALL
from situs.measure.probe.linear import fit_probe, score
from situs.methods.base import Method
from situs.models.inference import evaluating
from situs.results import percent
from situs.train.assemble import RunConfig
from situs.train.step import autocast

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
        (bank, labels), (test, truth) = (self._features(method.backbone, split, precision) for split in (train, val))
        k = small_k(len(labels), classes)
        baselines: list[Baseline] = []
        for pool, features in bank.items():
            near = knn_accuracy(features, labels, test[pool], truth, k)
            baselines.append(Baseline(f"kNN on its {POOLS[pool]}", near, self.command("knn", k=k)))
            try:
                linear = fit_probe(features, labels, classes).linear
            except SitusError:  # too few samples to choose a weight decay by
                continue
            share = score(linear, [(test[pool], truth)], classes).accuracy
            command = self.command("probe", kind="class", pool=pool, train_count=len(labels))
            baselines.append(Baseline(f"a linear classifier on its {POOLS[pool]}", share, command))
        return max(baselines, key=lambda baseline: baseline.top1)

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
        return {pool: torch.cat(rows) for pool, rows in parts.items()}, torch.cat(labels)

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
        yield f"the model predicts one class, {name!r}, for all {last.count:,} {val.source.things} of the validation"
    elif last.top1 <= last.majority:
        yield f"top-1 {top1} is not above always predicting the largest class ({largest}): nothing useful was learned"
    elif low <= last.majority <= high:
        few = (
            f"{last.count:,} {val.source.things} are too few to distinguish it from always predicting the largest class"
        )
        yield f"top-1 {top1}, 95 % interval {percent(low)} to {percent(high)}: {few} ({largest})"
    if frozen is not None and frozen.top1 > last.top1:
        text = f"the frozen features that this run started from do better: {frozen.name} has"
        command = f" ({frozen.command})" if frozen.command else ""
        yield f"{text} {percent(frozen.top1, 2)} here, the fine-tuned model {top1}{command}"
