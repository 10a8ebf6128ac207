"""Linear classifiers on frozen features, and the result that all linear probes share.

Full-batch logistic regression by L-BFGS on standardised features: convex, so the solution depends only on the data and
the weight decay. The weight decay is chosen on a part of the training set, never on the test set; the final classifier
is fitted to the whole training set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.weights import HEADS
from situs.core.random import uniform
from situs.data.loader import Loader, make_loader
from situs.data.sampler import sample_of
from situs.errors import SitusError
from situs.measure.accuracy import hard, labels_of
from situs.methods.base import Batch, Method
from situs.models.inference import Total, evaluating
from situs.progress import note, task, tracked
from situs.results import Cell, Provenance, Result, Table, points
from situs.train.assemble import RunConfig
from situs.train.step import autocast

WEIGHT_DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
SELECTION_SHARE = 0.2
"""Share of the training set on which the weight decay is chosen."""
STEPS = 200
AT_ONCE = 1 << 25
"""Logits computed at a time: 128 MiB in float32."""

Pairs = Iterable[tuple[Tensor, Tensor]]
"""Features [m, D] and labels [m], part by part."""


@dataclass(frozen=True)
class Linear:
    """logits = weight · (x - mean) / scale + bias; weight: [C, D]."""

    weight: Tensor
    bias: Tensor
    mean: Tensor
    scale: Tensor

    def __call__(self, features: Tensor) -> Tensor:
        """Features [m, D] -> logits [m, C]."""
        return (features - self.mean) / self.scale @ self.weight.T + self.bias


@dataclass(frozen=True)
class Score:
    """accuracy: share of right answers. loss: mean cross entropy. count: rows. answers: [C, C] by (true, predicted)."""

    accuracy: float
    loss: float
    count: int
    answers: Tensor


@dataclass(frozen=True)
class Tried:
    """A weight decay and its scores on the selection part of the training set."""

    weight_decay: float
    accuracy: float
    loss: float


@dataclass(frozen=True)
class Fitted:
    """The classifier, its weight decay, and all weight decays that were tried."""

    linear: Linear
    weight_decay: float
    tried: tuple[Tried, ...]


@dataclass(frozen=True)
class Probe:
    """A fitted classifier. score: over the test split. train_count: samples it was fitted to."""

    score: Score
    fitted: Fitted
    train_count: int

    def numbers(self) -> dict[str, Any]:
        """How it was fitted, for JSON."""
        tried = [asdict(trial) for trial in self.fitted.tried]
        return {"train_images": self.train_count, "weight_decay": self.fitted.weight_decay, "tried": tried}


P = TypeVar("P", bound=Probe)


@dataclass(frozen=True)
class Probes(Result, Generic[P]):
    """The same probe on one frozen model, or on several side by side.

    probes: by the model's name, in order. origins: how each was made, by name.
    """

    probes: Mapping[str, P]
    origins: Mapping[str, Provenance]

    @property
    def first(self) -> tuple[str, P]:
        """The name and the probe of the first model."""
        return next(iter(self.probes.items()))

    @property
    def data(self) -> str:
        """The data that the first model was tested on."""
        return self.origins[self.first[0]].facts.get("data", "")

    def numbers(self) -> dict[str, Any]:
        """Of every model: how it was made, its scores, how the probe was fitted."""
        return {
            "models": {name: {**self.origins[name].facts, **probe.numbers()} for name, probe in self.probes.items()}
        }

    def tried(self) -> Table:
        """Every weight decay on the selection part of the training split."""
        rows: list[list[Cell]] = [
            [name, f"{trial.weight_decay:g}", points(trial.accuracy), trial.loss,
             trial.weight_decay == probe.fitted.weight_decay]
            for name, probe in self.probes.items()
            for trial in probe.fitted.tried
        ]  # fmt: skip
        header = ["model", "weight decay", "held-out accuracy, %", "held-out loss", "chosen"]
        caption = (
            "A fifth of the training split was held out, and the weight decay with the highest accuracy on this part "
            "was chosen. The classifier was then fitted to the whole training split."
        )
        return Table("How the weight decay was chosen", header, rows, caption)

    @property
    def title(self) -> str:
        """Of the page."""
        return f"{self.first[0]}: {self.subject}"

    def details(self) -> list[Table]:
        """How the weight decay was chosen, and how each model's numbers were made."""
        keys = dict.fromkeys(key for origin in self.origins.values() for key in origin.facts)
        rows = [[key, *(origin.facts.get(key) for origin in self.origins.values())] for key in keys]
        facts = Table("How the numbers were measured", ["", *self.origins], rows)
        return [self.tried(), *([facts] if rows else [])]


def fit_probe(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    groups: Tensor | None = None,
    seed: int = 0,
) -> Fitted:
    """Chooses the weight decay on a selection part and fits to everything.

    features: [n, D]. labels: [n] in range(classes). groups: [n] integers; rows of one group (the patches of a sample)
    stay on one side of the split. Of two weight decays with equal accuracy the larger is taken.
    """

    def fit(rows: Tensor, decay: float, start: Linear | None) -> Linear:
        return fit_linear(features[rows], labels[rows], classes, decay, start=start)

    def judge(rows: Tensor, linear: Linear) -> tuple[float, float]:
        scores = score(linear, [(features[rows], labels[rows])], classes)
        return scores.accuracy, scores.loss

    member = torch.arange(len(labels), device=labels.device) if groups is None else groups
    return choose_decay(member, fit, judge, seed)


def choose_decay(
    groups: Tensor,
    fit: Callable[[Tensor, float, Linear | None], Linear],
    judge: Callable[[Tensor, Linear], tuple[float, float]],
    seed: int,
) -> Fitted:
    """Chooses the weight decay on a part of the rows and fits to all of them.

    groups: [n], see `fit_probe`. fit: (rows [n] bool, weight decay, start) -> the classifier. judge: (rows, classifier)
    -> its accuracy and loss on them.
    """
    whole = torch.ones(len(groups), dtype=torch.bool, device=groups.device)
    chosen_on = selection_rows(groups, seed)
    tried: list[Tried] = []
    start = None
    for decay in tracked(sorted(WEIGHT_DECAYS, reverse=True), "fitting"):  # each starts from the one before
        start = fit(~chosen_on, decay, start)
        tried.append(Tried(decay, *judge(chosen_on, start)))
    best = max(tried, key=lambda trial: trial.accuracy).weight_decay
    return Fitted(fit(whole, best, None), best, tuple(tried))


def selection_rows(groups: Tensor, seed: int) -> Tensor:
    """The rows that the weight decay is chosen on: bool [n], about a fifth of the groups, at least one, never all."""
    names, member = groups.unique(return_inverse=True)
    count = len(names)
    if count < 2:
        raise SitusError(
            "a probe needs at least two training samples, one to fit it and one to choose its weight decay",
            field="data",
        )
    order = uniform(seed, 0, names, "probe.held", (1,)).flatten().argsort(stable=True)
    chosen = torch.zeros(count, dtype=torch.bool, device=groups.device)
    chosen[order[: max(1, int(SELECTION_SHARE * count))]] = True
    return chosen[member]


@torch.no_grad()
def fit_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    weight_decay: float,
    *,
    start: Linear | None = None,
) -> Linear:
    """The minimum of mean cross entropy + weight_decay / 2 · ‖W‖² on standardised features; the bias is free.

    features: [n, D]. labels: [n]. start: the initial classifier, for a grid of weight decays.
    """
    count, rows = len(labels), max(1, AT_ONCE // classes)

    def slope_of(linear: Linear) -> Tensor:
        """The gradient by hand, part by part: no graph, and memory for one part only."""
        weight, bias = linear.weight, linear.bias
        loss = weight_decay / 2 * weight.square().sum()
        slope, lift = weight_decay * weight, torch.zeros_like(bias)
        for part, truth in zip(features.split(rows), labels.split(rows), strict=True):
            inputs = (part - linear.mean) / linear.scale
            likely = (inputs @ weight.T + bias).log_softmax(dim=-1)
            loss = loss - likely.gather(1, truth[:, None]).sum() / count
            wrong = likely.exp_().scatter_add_(1, truth[:, None], inputs.new_full((len(truth), 1), -1.0)) / count
            slope += wrong.T @ inputs
            lift += wrong.sum(dim=0)
        weight.grad, bias.grad = slope, lift
        return loss

    return minimise(features, classes, start, slope_of)


@torch.no_grad()
def minimise(features: Tensor, classes: int, start: Linear | None, slope_of: Callable[[Linear], Tensor]) -> Linear:
    """The minimum of a convex loss over the linear classifiers of standardised features [..., D], by L-BFGS.

    start: the initial classifier, fitted to the same features. slope_of: gives a classifier's loss, and puts the
    gradients into its weight and bias.
    """
    axes = tuple(range(features.dim() - 1))
    mean, scale = features.mean(dim=axes), features.std(dim=axes, correction=0)
    scale = torch.where(scale > 1e-6 * mean.abs() + 1e-12, scale, 1.0)
    weight = features.new_zeros(classes, features.shape[-1]) if start is None else start.weight.clone()
    bias = features.new_zeros(classes) if start is None else start.bias.clone()
    optimiser = torch.optim.LBFGS(
        [weight.requires_grad_(), bias.requires_grad_()],
        max_iter=STEPS,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    @torch.no_grad()
    def closure() -> Tensor:
        return slope_of(Linear(weight, bias, mean, scale))

    optimiser.step(closure)
    return Linear(weight.detach(), bias.detach(), mean, scale)


@torch.no_grad()
def score(linear: Linear, pairs: Pairs, classes: int) -> Score:
    """The scores of a classifier over all pairs; sums stay on the device until the end."""
    answers, losses = Total(), Total()
    for features, labels in pairs:
        for part, truth in zip(features.split(AT_ONCE // classes), labels.split(AT_ONCE // classes), strict=True):
            logits = linear(part)
            losses.add(torch.nn.functional.cross_entropy(logits.double(), truth, reduction="sum"))
            cells = truth * classes + logits.argmax(dim=-1)
            table = torch.zeros(classes * classes, dtype=torch.int64, device=truth.device)
            answers.add(table.scatter_add_(0, cells, torch.ones_like(cells)))  # bincount would wait for the device
    confusion = answers.of_this_rank().view(classes, classes).cpu()
    count = int(confusion.sum())
    return Score(int(confusion.diagonal().sum()) / count, float(losses.of_this_rank()) / count, count, confusion)


# --- A model's classifier is initialised with a linear probe on its frozen features ---------------
# The first gradients of a random head disturb the pretrained layers before the head has learned anything (Kumar et
# al. 2022, "Fine-Tuning can Distort Pretrained Features"). Fitting the head first costs one pass over the images.


SMALL = 5_000
"""Up to so many samples the head is initialised with a probe by default."""


def head_of(backbone: Backbone, classes: int) -> nn.Linear:
    """The linear layer that gives the logits."""
    heads = [
        module
        for name, module in backbone.model.named_modules()
        if f"{name}.".startswith(HEADS) and isinstance(module, nn.Linear) and module.out_features == classes
    ]
    if len(heads) != 1 or heads[0].bias is None:
        raise SitusError(
            f"{backbone.name}: its classifier cannot be initialised from a probe; the model must have exactly one "
            "linear classifier, which must have a bias",
            field="source",
        )
    return heads[0]


def head_inputs(
    backbone: Backbone, classes: int, batches: Iterable[Batch], precision: str = "fp32"
) -> tuple[Tensor, Tensor, Tensor]:
    """The classifier's inputs [n, D], labels [n] and sample numbers [n], of the samples that can be read."""
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    inputs: list[Tensor] = []
    hook = head_of(backbone, classes).register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    try:
        with evaluating(backbone):
            for batch in batches:
                with autocast(batch.inputs.device, precision):
                    backbone(batch.inputs)
                parts.append((inputs.pop().float(), hard(labels_of(batch)), sample_of(batch.ids)))
    finally:
        hook.remove()
    if not parts:
        raise SitusError("none of the labelled samples can be read", field="data")
    features, labels, rows = map(torch.cat, zip(*parts, strict=True))
    return features, labels, rows


def fold_in(linear: Linear, head: nn.Linear) -> None:
    """Writes a classifier of standardised features into a head that reads the features themselves."""
    weight = linear.weight / linear.scale
    with torch.no_grad():
        head.weight.copy_(weight)
        head.bias.copy_(linear.bias - weight @ linear.mean)


class ProbeHead:
    """Initialises the classifier of a new run before its first update."""

    def __init__(self, config: RunConfig, train: Loader, precision: str) -> None:
        self.config, self.train, self.precision = config, train, precision

    def begin(self, method: Method) -> None:
        """Fits a linear probe to the training samples without augmentation, and writes it into the head."""
        source, classes = self.train.source, len(self.train.classes or ())
        batches = make_loader(self.config.data, None, self.train.device, source=source)
        try:
            with task("frozen features, to initialise the classifier"):
                features, labels, _ = head_inputs(method.backbone, classes, batches, self.precision)
                probe = fit_probe(features, labels, classes, seed=self.config.train.seed).linear
            fold_in(probe, head_of(method.backbone, classes))
        except SitusError as error:  # another kind of head, or too few samples to choose a weight decay by
            if self.config.tuning.head == "probe":
                raise
            note(f"the classifier starts from random weights, because a linear probe cannot initialise it: {error}")
            return
        note("the classifier starts from a linear probe on the frozen features (tuning.head)")


def probe_head(config: RunConfig, train: Loader, precision: str) -> list[ProbeHead]:
    """The `ProbeHead` of a run, where its head starts from a probe; else nothing."""
    setting = config.tuning.head
    if setting == "new" or (setting is None and config.init is None):
        return []
    plain = train.source.classes is not None and train.source.target == "label" and not train.source.multi_label
    reasons = {
        "there are no pretrained weights": config.init is None,
        "it needs samples with one class each": not plain or config.data.modality.ids,
        "a probe is not differentially private": config.dp.on,
    }
    if refused := [reason for reason, holds in reasons.items() if holds]:
        if setting == "probe":
            raise SitusError(f"tuning.head=probe: {refused[0]}", field="tuning.head")
        return []
    small = len(train.source) <= SMALL and config.init_positions and train.plan.world == 1
    return [ProbeHead(config, train, precision)] if setting == "probe" or small else []
