"""What a setting costs in accuracy: one short fine-tuning from what clients send under it, and the same under none.

The server has what the defence leaves of each gradient and moves the weights by it with AdamW; what is withheld stays
as it was. All settings see the same images in the same order, each once, and are judged on the same other ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from situs.audit.client import parameter_names, upload_of
from situs.audit.deadline import StoppedError
from situs.audit.defences import NoDefence, method_of
from situs.audit.remedies.ladders import CostConfig, Rung
from situs.audit.victim import Victim, outputs_of
from situs.backbones.base import Backbone
from situs.data.loader import Loader
from situs.errors import SitusError
from situs.methods.base import Batch, Method
from situs.models.data import check_labels, load_bank
from situs.models.inference import evaluating
from situs.results import percent

AT_ONCE = 64
"""Images that are judged at a time."""

RATED = 64
"""The batch that the rate is said of."""

WORN = 0.05
"""Accuracy that a training without a defence may lose and still tell what a defence costs."""


@dataclass(frozen=True)
class Tuned:
    """A fine-tuning under a setting. accuracy: behind it; plain: behind the same without a defence; before: of the
    model as it was. margin: of the difference of the first two, 95 %, over the images judged."""

    accuracy: float
    plain: float
    before: float
    margin: float
    images: int
    judged: int
    seconds: float

    @property
    def lost(self) -> float:
        """Of accuracy, against no defence; below 0 where it is gained."""
        return self.plain - self.accuracy

    @property
    def told(self) -> str:
        """The same in words, in percentage points."""
        lost, margin = 100 * self.lost, 100 * self.margin
        found = f"{lost:+.1f} ± {margin:.1f} points" + (", none that shows" if abs(lost) <= margin else "")
        worn = "; the training itself wears the model down, which hides the cost: choose a lower rate (tune_lr)"
        told = f"{found} ({percent(self.plain, 1)} without, {percent(self.before, 1)} before)"
        return told + worn * (self.before - self.plain > WORN)


class Tuning:
    """The labelled images, and what is measured on them: a fine-tuning a setting, the plain one once."""

    def __init__(self, victim: Victim, config: CostConfig, plain: Rung) -> None:
        self.victim, self.config, self.plain = victim.trains, config, plain
        data = config.tune_data or ""
        try:
            few: dict[str, Any] = {"train_count": config.tune_images, "count": config.tune_test, "batch": AT_ONCE}
            learned, judged = load_bank(victim.model, data, **few)
            classes = check_labels(learned)
        except SitusError as error:
            raise SitusError(str(error), field="tune_data") from error
        named, outputs = victim.model.classes, outputs_of(victim.model)
        if len(classes) > outputs or (named is not None and named != classes):
            said = f"tune_data={data}: its {len(classes)} classes are not those of the model's {outputs} outputs"
            raise SitusError(said, field="tune_data")
        pixels, labels = _all(learned)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(plain.step.seed))
        order = order.to(labels.device)  # a folder's classes stand one behind the other
        self.learned, self.judged = (pixels[order], labels[order]), _all(judged)
        self._known: dict[str, tuple[Tensor, float]] = {}

    def cost(self, rung: Rung, going: Callable[[], bool] = lambda: True) -> Tuned:
        """What the setting leaves; `StoppedError` where `going` says stop before the end."""
        before = self._before()
        (base, _), (right, seconds) = self._right(self.plain, going), self._right(rung, going)
        apart = base.double() - right.double()
        margin = 1.96 * float(apart.std()) / math.sqrt(len(apart)) if len(apart) > 1 else math.inf
        after, without, own = (float(each.double().mean()) for each in (right, base, before))
        return Tuned(after, without, own, margin, len(self.learned[1]), len(right), seconds)

    def _before(self) -> Tensor:
        if "" not in self._known:
            backbone = self.victim if isinstance(self.victim, Backbone) else self.victim.backbone
            self._known[""] = (self._judge(backbone), 0.0)
        return self._known[""][0]

    def _right(self, rung: Rung, going: Callable[[], bool]) -> tuple[Tensor, float]:
        """Which images are told right behind the fine-tuning, [n] bool, and its seconds."""
        if rung.label not in self._known:
            began = time.perf_counter()
            after = self._judge(self._tune(rung, going).backbone)
            self._known[rung.label] = (after, time.perf_counter() - began)
        return self._known[rung.label]

    def _tune(self, rung: Rung, going: Callable[[], bool]) -> Method:
        step, (pixels, labels) = rung.step, self.learned
        if len(pixels) < step.batch:
            raise SitusError(f"{len(pixels)} labelled images do not make a batch of {step.batch}", field="tune_data")
        method = method_of(NoDefence(), deepcopy(self.victim), step.seed).eval()
        named = parameter_names(method)
        rate = self.config.tune_lr * math.sqrt(step.batch / RATED)
        optimiser = torch.optim.AdamW(named.values(), lr=rate, weight_decay=0.0)
        for at in range(0, len(pixels) - step.batch + 1, step.batch):
            if not going():
                raise StoppedError
            span = slice(at, at + step.batch)
            ids = torch.arange(at, at + step.batch, device=labels.device)  # each step's noise is its own
            batch = Batch(pixels[span], ids, {"label": labels[span]})
            sent = upload_of(method, batch, step, rung.defence, lambda: not going())
            for name, parameter in named.items():  # what overflowed its type moves nothing
                parameter.grad = sent[name].to(parameter.dtype).nan_to_num(0.0, 0.0, 0.0) if name in sent else None
            optimiser.step()
        return method

    def _judge(self, backbone: Backbone) -> Tensor:
        pixels, labels = self.judged
        with torch.no_grad(), evaluating(backbone):
            said = [backbone(part).argmax(dim=-1) for part in pixels.split(AT_ONCE)]
        return torch.cat(said) == labels


def _all(loader: Loader) -> tuple[Tensor, Tensor]:
    batches = list(loader)
    return torch.cat([b.inputs for b in batches]), torch.cat([b.targets["label"] for b in batches])
