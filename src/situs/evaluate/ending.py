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
from typing import NamedTuple

from situs.data.loader import Loader, make_loader
from situs.data.sources.base import Source
from situs.errors import SitusError
from situs.evaluate.accuracy import Accuracy, hard
from situs.evaluate.by_class import wilson
from situs.evaluate.features import Pool, extract
from situs.evaluate.knn import knn_accuracy
from situs.evaluate.probe.linear import fit_probe, score
from situs.methods.base import Method
from situs.results import percent
from situs.train.run import RunConfig

SMALL = 5_000
"""Samples, of training and validation together, up to which the frozen features are looked at."""

PASSES = 10
"""Epochs that a run has at least, for one more look at its images to cost little."""


class Baseline(NamedTuple):
    """name: what was put on the frozen features. top1: on the validation split. verb: the command that tells it too."""

    name: str
    top1: float
    verb: str


@dataclass(frozen=True)
class Frozen:
    """How the features that a fine-tuning starts from are looked at. source: of its samples. positions: whether the
    weights know the positions that the model has now."""

    config: RunConfig
    source: Source
    positions: bool

    def look(self, method: Method, val: Loader, precision: str) -> Baseline | None:
        """The best of neighbours and linear classifiers, on CLS and on the mean of the patches."""
        backbone = method.backbone
        if "tokens" in backbone.refusals:
            return None
        data = replace(self.config.data, batch=val.plan.batch)
        train = make_loader(data, None, val.device, source=self.source)
        pools: tuple[Pool, ...] = ("cls", "mean") if backbone.num_prefix else ("mean",)
        tried: list[Baseline] = []
        for pool in pools:
            told = {"positions": self.positions, "precision": precision}
            bank, test = (extract(backbone, each, pool, **told) for each in (train, val))
            if bank.labels is None or test.labels is None:
                return None
            pairs = bank.features, hard(bank.labels), test.features, hard(test.labels)
            k = min(20, max(1, len(pairs[1]) // (2 * len(val.classes or ()))))
            near = knn_accuracy(*pairs, k)
            tried.append(Baseline(f"nearest neighbours on its {_POOLS[pool]}", near, f"evaluate knn {{}} --k {k}"))
            try:
                fitted = fit_probe(pairs[0], pairs[1], len(val.classes or ()))
            except SitusError:  # too few samples to choose a weight decay by
                continue
            found = score(fitted.linear, [pairs[2:]], len(val.classes or ())).accuracy
            verb = f"evaluate probe {{}} --kind class --pool {pool} --train-count {len(pairs[1])}"
            tried.append(Baseline(f"a linear classifier on its {_POOLS[pool]}", found, verb))
        best = max(tried, key=lambda each: each.top1)
        if data.count or data.per_class:  # no verb takes this part of the training split
            return best._replace(verb="")
        return best._replace(verb=f"situs {best.verb.format(self.command())}")

    def command(self) -> str:
        """The model and the data, as a verb of evaluate takes them."""
        config, init = self.config, str(self.config.init)
        words = [init]
        if Path(init).is_file():
            size = config.data.size
            words = [f"{config.backbone.name}={init}", "--img-size", ",".join(map(str, dict.fromkeys(size)))]
        words += ["--data", config.data.path]
        if config.data.held_out:
            words += ["--held-out", f"{config.data.held_out:g}"]
        return shlex.join(words)


_POOLS = {"cls": "CLS token", "mean": "mean of the patches"}


def frozen_start(config: RunConfig, train: Loader, val: Loader) -> Frozen | None:
    """Whether and how the start of a run is looked at: of small sets of a class a sample, by one process, where the run
    goes over them often enough, and nothing has to stay private."""
    plain = train.source.classes is not None and train.source.target == "label" and val.source.target == "label"
    if config.init is None or not plain or train.plan.world > 1 or config.dp.on:
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
        verb = f" ({frozen.verb})" if frozen.verb else ""
        yield f"{text} {percent(frozen.top1, 2)} here, the fine-tuned model {top1}{verb}"
