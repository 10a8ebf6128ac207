"""Gradient matching: search for images whose gradients are those of the upload.

The idea of DLG (Zhu et al., arXiv 1906.08935) with the signed Adam and total variation of Geiping et al. (arXiv
2003.14053) and the smooth patch borders of GradViT (Hatamizadeh et al., arXiv 2203.11894). It needs no structure: any
model, any batch, gradients with names left out. It proves nothing either: the optimisation may end anywhere.

Deviation: both distances are taken for each named gradient by itself, relative to its size, and averaged with weights
that depend on the noise (`name_weights`). Over all together the classifier's gradient, the largest, drowns the rest:
the cosine distance falls to almost nothing while the images stay noise (measured).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit.attacks.base import Attack, Fact, Knowledge, Ready, Recovery, Refused, known_numbers
from situs.audit.attacks.equations import svd
from situs.audit.client import LocalOptimiser, hidden_places, parameter_names
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import find_stem, noise_for, table_rows
from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.tokens import pair
from situs.errors import SitusError
from situs.limits import Count, NotNegative, Positive
from situs.methods.base import Batch, Draws, Method
from situs.methods.measured import HidesPlaces
from situs.progress import tracked

# ---------------------------------------------------------------------------------------------------------------------
# The search for images by descent: distances of gradients, priors of images, and the optimiser with its best guess.
#
# Everything runs over P independent searches at once, one an upload: none depends on another.


FAINT, NOISY = 1e-2, 10.0
"""Names have equal weight in a distance, except those whose squared norm is below this share of the largest, or this
many times the noise on all gradients together: they count by their size (measured; see `name_weights`)."""


@dataclass(frozen=True)
class MatchingConfig(Checked):
    """How the optimisation attacks search."""

    distance: Literal["l2", "cosine"] = "l2"
    """Distance between the gradient of the guessed images and the sent gradient, as a weighted mean over parameters.
    l2: relative squared error. cosine: cosine distance."""

    iterations: Count = 1000
    """Number of steps of the optimiser. The step size is divided by 10 after 3/8, 5/8 and 7/8 of the steps, or of the
    time limit if that is earlier."""

    lr: Positive = 0.1
    """Step size of the optimiser, in standard deviations of the pixels."""

    signed: bool = True
    """Whether Adam gets only the sign of each pixel's gradient."""

    smooth: NotNegative = 1e-4
    """Weight of the total variation in the loss. A larger weight gives smoother images."""

    border: NotNegative = 1e-4
    """Weight of the squared differences of pixels across the borders of patches."""

    table: NotNegative = 1.0
    """Only for april-optimisation: weight of the cosine distance between gradients of the position table."""

    parallel: Count = 8
    """Number of searches that run at the same time, one for each upload."""


class BestGuesses(NamedTuple):
    """The best guesses: loss and distance [P], images [P, B, C, H, W]. done: number of iterations."""

    loss: Tensor
    distance: Tensor
    images: Tensor
    done: int


# --- distances and priors, all [P] ----------------------------------------------------------------------------


def name_weights(target: Gradients, noise: float = 0.0) -> Tensor:
    """The weight of each name, [P, names] in [0, 1]: t² / (t² + FAINT · max t² + NOISY · σ² · all numbers).

    t: the norm of the upload's gradient, σ: `noise`, the deviation on each number. Names count alike, so that the
    largest drowns none, but faint ones (a key's bias is all rounding) do not mislead. Under noise that swamps the names
    every number counts alike, as is optimal for Gaussian noise: on a small ViT with σ = 1e-3, 21.6 dB instead of 13.5.
    """
    sent = torch.stack([t.flatten(1).square().sum(dim=1) for t in target.values()], dim=1)
    numbers = sum(t[0].numel() for t in target.values())
    return sent / (sent + FAINT * sent.amax(dim=1, keepdim=True) + NOISY * noise**2 * numbers).clamp(min=1e-30)


def gradient_distances(guess: Gradients, target: Gradients, kind: str) -> Tensor:
    """Distance of each name by itself, [P, names]: its relative squared error (l2), or 1 - cosine.

    guess, target: [P, ...] by name.
    """
    pairs = [(guess[name].flatten(1), target[name].flatten(1)) for name in target]
    sent = torch.stack([t.square().sum(dim=1) for _, t in pairs], dim=1).clamp(min=1e-30)
    if kind == "l2":
        return torch.stack([(g - t).square().sum(dim=1) for g, t in pairs], dim=1) / sent
    dots = torch.stack([(g * t).sum(dim=1) for g, t in pairs], dim=1)
    guessed = torch.stack([g.square().sum(dim=1) for g, _ in pairs], dim=1).clamp(min=1e-30)
    return 1 - dots / (guessed * sent).sqrt()


def variation(images: Tensor) -> Tensor:
    """Total variation: mean absolute step to the next pixel, down and across. images: [P, B, C, H, W]."""
    down, across = images.diff(dim=-2).abs(), images.diff(dim=-1).abs()
    return down.flatten(1).mean(dim=1) + across.flatten(1).mean(dim=1)


def border_steps(images: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Mean squared step over the borders between patches of `grid`, down and across. images: [P, B, C, H, W]."""
    total = images.new_zeros(images.shape[0])
    for dim, count in ((-2, grid[0]), (-1, grid[1])):
        if count > 1:
            side = images.shape[dim] // count
            before = torch.arange(side - 1, side * (count - 1), side, device=images.device)
            edges = images.index_select(dim, before + 1) - images.index_select(dim, before)
            total = total + edges.square().flatten(1).mean(dim=1)
    return total


# --- the optimiser --------------------------------------------------------------------------------------------


def optimise(
    objective: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    config: MatchingConfig,
    deadline: Deadline,
    name: str,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> BestGuesses:
    """The images with the least loss on the path from `start` [P, B, C, H, W].

    objective: images -> loss [P] and, as a part of it, the distance [P]. bounds: of the pixels. At the deadline, or on
    Ctrl-C, it stops with the best guess so far. One iteration is always made; a Ctrl-C before its end is raised.
    """
    images = start.clone().requires_grad_()
    optimiser = torch.optim.Adam([images], lr=config.lr)
    infinite = torch.full((start.shape[0],), torch.inf, dtype=start.dtype, device=start.device)
    best, printed = BestGuesses(infinite, infinite, start, 0), time.monotonic()
    try:
        for done in tracked(range(1, config.iterations + 1), name):
            with torch.enable_grad():
                loss, distance = objective(images)
                [gradient] = torch.autograd.grad(loss.sum(), [images])
            best = _better(best, BestGuesses(loss.detach(), distance.detach(), images.detach(), done))
            optimiser.param_groups[0]["lr"] = config.lr * _decay(max(done / config.iterations, deadline.progress()))
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            images.grad = gradient.sign() if config.signed else gradient
            optimiser.step()
            if bounds is not None:
                with torch.no_grad():
                    images.clamp_(*bounds)
            if done % max(1, config.iterations // 10) == 0 or time.monotonic() - printed > 10:
                deadline.say(
                    f"{name}: iteration {done:,} of {config.iterations:,}, distance {best.distance.mean():.3g}"
                )
                printed = time.monotonic()
            if deadline.over():
                break
    except KeyboardInterrupt:
        deadline.interrupt()
        if not best.done:  # the start is noise, no guess
            raise
    return best


def _better(best: BestGuesses, now: BestGuesses) -> BestGuesses:
    """For each search the guess with the smaller loss."""
    wins = now.loss < best.loss
    images = torch.where(wins.view(-1, 1, 1, 1, 1), now.images, best.images)
    loss, distance = (torch.where(wins, a, b) for a, b in ((now.loss, best.loss), (now.distance, best.distance)))
    return BestGuesses(loss, distance, images, now.done)


def _decay(share: float) -> float:
    """The factor on the step size when this share of the iterations is done."""
    return 0.1 ** sum(share > end for end in (3 / 8, 5 / 8, 7 / 8))


# ---------------------------------------------------------------------------------------------------------------------
# The simulation of a client's step: the gradients of guessed images.
#
# The same function as `client.victim_gradients` without what the attacker cannot know (the noise, the draws of MJP
# beyond its mask), pure and twice differentiable, so that it can be mapped over many uploads and differentiated by the
# pixels.


Simulation = Callable[[Tensor, Tensor, Draws], Gradients]
"""(images [B, C, H, W], labels [B], draws) -> gradients by name."""


def simulation(method: Method, known: Knowledge, names: Iterable[str]) -> Simulation:
    """The function that turns guessed images into the gradients of `names` that a client would compute from them."""
    parameters = dict(method.named_parameters())
    full = {name.removeprefix("backbone."): name for name, p in parameters.items() if p.requires_grad}
    names = [name for name in names if name in full]
    whole = known.defence.per_sample or known.step.local_steps > 1  # a norm over all gradients, or steps along them
    start = {name: parameters[full[name]].detach() for name in (full if whole else names)}
    size = 1 if known.defence.per_sample else known.step.batch

    def loss(weights: Gradients, images: Tensor, labels: Tensor, draws: Draws) -> Tensor:
        batch = Batch(images, torch.zeros_like(labels), {"label": labels})
        return functional_call(method, {full[name]: w for name, w in weights.items()}, (batch, draws)).loss

    def mean(weights: Gradients, images: Tensor, labels: Tensor, draws: Draws) -> Gradients:
        total: Gradients = {}
        parts = range(0, known.step.batch, size)
        for i in parts:
            part = {name: value[i : i + size] if value.dim() else value for name, value in draws.items()}
            gradient = grad(loss)(weights, images[i : i + size], labels[i : i + size], part)
            gradient = known.defence.bound(gradient) if known.defence.per_sample else gradient
            total = {name: g + total[name] if total else g for name, g in gradient.items()}
        return {name: g / len(parts) for name, g in total.items()}

    def gradients(images: Tensor, labels: Tensor, draws: Draws) -> Gradients:
        weights, total, optimiser = start, Gradients(), LocalOptimiser(known.step.adam)
        for step in range(known.step.local_steps):
            moved = mean(weights, images, labels, draws)
            if known.step.local_steps > 1:  # `Knowledge.read` undoes a single step of Adam
                moved = optimiser(moved)
            total = {name: g + total[name] if total else g for name, g in moved.items()}
            if step + 1 < known.step.local_steps:
                weights = {name: w - known.step.lr * moved[name] for name, w in weights.items()}
        return {name: total[name] / known.step.local_steps for name in names}

    return gradients


def guessed_draws(method: Method, upload: Gradients, known: Knowledge) -> Draws:
    """The draws behind an upload as far as it shows them.

    For one image under MJP the mask is the rows of the table without a gradient, and the order inside it changes no
    gradient, so that any will do. A batch has one mask for each image, which the sum hides: none is assumed.
    """
    ids = torch.zeros(known.step.batch, dtype=torch.int64)
    draws = method.draw(Batch(ids, ids), known.step.when._replace(seed=known.step.seed))
    for name in {"index", "pixels"} & draws.keys():
        draws[name] = torch.arange(draws[name].shape[1]).expand_as(draws[name]).contiguous()
    if "mask" in draws:
        mask = _mask_of(method.backbone, upload) if isinstance(method, HidesPlaces) and known.step.batch == 1 else None
        draws["mask"] = torch.zeros_like(draws["mask"]) if mask is None else mask[None].to(draws["mask"].device)
    device = next(method.parameters()).device
    return {name: value.to(device) for name, value in draws.items()}


def _mask_of(backbone: Backbone, upload: Gradients) -> Tensor | None:
    stem = find_stem(backbone)
    if isinstance(stem, str) or stem.table not in upload:
        return None
    return hidden_places(table_rows(upload[stem.table], stem))


# ---------------------------------------------------------------------------------------------------------------------
# Labels from the classifier's own gradient: ∂l/∂b = mean over the batch of (p - y), negative only where a label is.
#
# With one image exactly one class is negative (Zhao et al., iDLG, arXiv 2001.02610). With more, every negative class
# is certainly a label, and the rest of the batch is counted off the negative mass: a label of two images has twice as
# much of it. Where no bias gradient is sent, the rows (p - y) f of ∂l/∂W give the same numbers along the direction that
# the images' features share.


class Classifier(NamedTuple):
    """Names of the parameters of the classifier; None where the model has no such parameter."""

    weight: str | None
    bias: str | None


def find_classifier(backbone: Backbone, size: tuple[int, int]) -> Classifier:
    """The classifier's parameters, recognised by their gradients: a bias has that of the logits, a weight its outer
    product with the features. Of several heads (distillation) one is chosen."""
    named = {name: p for name, p in backbone.named_parameters() if p.requires_grad and p.dim() in (1, 2)}
    with torch.enable_grad():
        logits = backbone(noise_for(backbone, 1, backbone.input.channels, *size))
        probe = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
        candidates = {name: p for name, p in named.items() if p.shape[0] == logits.shape[1]}
        if not candidates:
            return Classifier(None, None)
        gradients = torch.autograd.grad((logits * probe).sum(), list(candidates.values()), allow_unused=True)
    weight = bias = None
    for name, gradient in zip(candidates, gradients, strict=True):
        if gradient is None or not _follows(gradient, probe[0]):
            continue
        if gradient.dim() == 1:
            bias = name
        else:
            weight = name
    return Classifier(weight, bias)


def _follows(gradient: Tensor, probe: Tensor) -> bool:
    """Whether every column of `gradient` [K, ...] is a multiple of `probe` [K], and not all are 0."""
    columns = gradient.reshape(gradient.shape[0], -1)
    along = torch.outer(probe, probe @ columns) / probe.square().sum()
    return bool(columns.norm() > 0) and bool((columns - along).norm() <= 1e-3 * columns.norm())


def class_gradient(upload: Gradients, classifier: Classifier) -> Tensor | None:
    """mean (p - y) over the batch, up to a positive factor: [K] in float64; None where it was not sent."""
    if classifier.bias in upload:
        return upload[classifier.bias].double().nan_to_num(0.0, 1e30, -1e30)  # overflow keeps its sign
    if classifier.weight not in upload:
        return None
    weight = known_numbers(upload[classifier.weight])
    weight = weight[:, weight.isfinite().all(dim=0)]
    if not weight.numel():
        return None
    # The direction that the batch's features share; its sign, because labels are few and large, other classes many.
    u, s, _ = svd(weight)
    along = u[:, 0] * s[0]
    return -along if along.max() > -along.min() else along


def count_labels(classes: Tensor, batch: int, noise: float = 0.0) -> Tensor:
    """The labels of a batch from mean (p - y) [K] up to a positive factor: [batch], rising.

    First every class that is more negative than noise explains, the most negative first; then, one by one, the class
    with most negative mass when an even share was subtracted for each label so far.
    """
    mass = (-classes).clamp(min=0.0)
    order = mass.argsort(descending=True, stable=True)[:batch]
    sure = [int(label) for label in order if float(mass[label]) > 4 * noise]
    labels = sure or [int(order[0])]
    rest = mass * (batch / mass.sum().clamp(min=1e-300))
    for label in labels:
        rest[label] -= 1
    while len(labels) < batch:
        best = int(rest.argmax())
        labels.append(best)
        rest[best] -= 1
    return torch.tensor(sorted(labels))


def infer_labels(upload: Gradients, classifier: Classifier, batch: int, noise: float = 0.0) -> Tensor | None:
    """The labels behind an upload, [batch], in rising order; None where the classifier's gradient was not sent."""
    classes = class_gradient(upload, classifier)
    return None if classes is None else count_labels(classes, batch, noise)


# --- the attack ------------------------------------------------------------------------------------------------------


class Matching(Attack):
    """Images whose gradients match, by double backward."""

    needs: ClassVar[str] = "any gradients"
    knows: ClassVar[str] = "the weights before the step, the kind of step, and the defence; optionally the labels"
    measured: ClassVar[str] = "benchmarks/attacks.py"
    paper: ClassVar[str] = "DLG (Zhu et al., 2019), Geiping et al. (2020), GradViT (Hatamizadeh et al., 2022)"
    difference: ClassVar[str] = (
        "signed Adam, total variation and smooth patch borders in one search that simulates the defence"
    )
    name: ClassVar[str] = "matching"
    about: ClassVar[str] = "an optimiser changes random images until their gradients match the upload"
    slow: ClassVar[bool] = True
    Config: ClassVar[type[MatchingConfig]] = MatchingConfig
    config: MatchingConfig

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        if not backbone.input.channels:
            return Refused("the model takes no images")
        if not sent:
            return Refused("all parameters of the model are frozen, so no gradient is sent")
        if known.labels is None and not {*find_classifier(backbone, _size(backbone, known))} & {*sent}:
            return Refused("the labels are not known, and the upload has no classifier gradient to infer them from")
        return Ready(None, "this attack is an optimisation: more iterations may recover more")

    def recover(
        self, backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge, deadline: Deadline
    ) -> Recovery:
        config, method = self.config, known.trained(backbone)
        inferred = None if known.labels is not None else _infer(backbone, uploads, known)
        labels = known.labels if inferred is None else inferred
        assert labels is not None
        images, facts, partial = [], [], None
        for first in range(0, len(uploads), config.parallel):
            if first and deadline.over():
                break
            group = range(first, min(first + config.parallel, len(uploads)))
            deadline.say(f"{self.name}: uploads {known.first + first + 1} to {known.first + group[-1] + 1}")
            try:
                with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                    best = self._search(method, uploads, labels, group, known, deadline)
            except KeyboardInterrupt:  # before this search had a guess: those before it are kept
                if not images:
                    raise
                deadline.interrupt()
                break
            images.append(best.images)
            facts += _facts(best)
            if best.done < config.iterations:
                partial = f"{best.done:,} of {config.iterations:,} iterations"
        inferred = None if inferred is None else inferred[: len(facts)]
        return Recovery(torch.cat(images).flatten(0, 1), facts, inferred, partial)

    def _search(
        self,
        method: Method,
        uploads: Sequence[Gradients],
        labels: Tensor,
        group: range,
        known: Knowledge,
        deadline: Deadline,
    ) -> BestGuesses:
        """The best guess for each upload of a group, all searched at once."""
        backbone, like = method.backbone, next(method.parameters())
        names = [name for name in parameter_names(method) if name in uploads[group[0]]]
        numbers = {name: torch.stack([known_numbers(uploads[i][name]) for i in group]) for name in names}
        finite = {name: gradient.isfinite() for name, gradient in numbers.items()}  # the others overflowed
        target = {name: gradient.nan_to_num(0.0).to(like.dtype) for name, gradient in numbers.items()}
        guesses = {i: guessed_draws(method, uploads[i], known) for i in group}
        draws = {name: torch.stack([guesses[i][name] for i in group]) for name in guesses[group[0]]}
        problem_labels = torch.stack([labels[i] for i in group]).to(like.device)
        noise = [_noise(backbone, known, known.first + number) for number in group]
        start = torch.stack(noise).to(like.device, like.dtype)
        simulate = _mapped(simulation(method, known, names), start, problem_labels, draws)
        measure = self.measure(target, backbone, known.defence.noise_level(known.step.batch))

        def objective(images: Tensor) -> tuple[Tensor, Tensor]:
            guess = simulate(images)
            distance = measure({name: torch.where(finite[name], guess[name], 0.0) for name in names})
            prior = self.config.smooth * variation(images)
            if backbone.num_tokens:
                prior = prior + self.config.border * border_steps(images, backbone.grid)
            return distance + prior, distance

        bounds = _bounds(known, start)
        return optimise(objective, start, self.config, deadline, self.name, bounds)

    def measure(self, target: Gradients, backbone: Backbone, noise: float) -> Callable[[Gradients], Tensor]:  # noqa: ARG002
        """The distance [P] of guessed gradients from those of the upload. noise: its deviation."""
        weights = name_weights(target, noise)
        return lambda guess: (weights * gradient_distances(guess, target, self.config.distance)).mean(dim=1)


def _infer(backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge) -> Tensor:
    """Labels [uploads, batch] from the classifier's gradients; 0 where all overflowed: any guess is as good."""
    classifier, noise = find_classifier(backbone, _size(backbone, known)), known.defence.noise_level(known.step.batch)
    labels = [infer_labels(upload, classifier, known.step.batch, noise) for upload in uploads]
    return torch.stack([torch.zeros(known.step.batch, dtype=torch.int64) if part is None else part for part in labels])


def _size(backbone: Backbone, known: Knowledge) -> tuple[int, int]:
    size = known.size or backbone.input.shape
    if size is None:
        raise SitusError(
            f"{backbone.name} takes images of any size; set Knowledge.size to the size of the attacked images"
        )
    return pair(size)


def _noise(backbone: Backbone, known: Knowledge, upload: int) -> Tensor:
    """The start of a search, [B, C, H, W]: noise that depends on the seed and the upload alone."""
    generator = torch.Generator().manual_seed((known.step.seed * 1_000_003 + upload) * 1_009)
    return torch.randn(known.step.batch, backbone.input.channels, *_size(backbone, known), generator=generator)


def _bounds(known: Knowledge, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Black and white, normalised, [C, 1, 1] each; None where the attacker does not know them."""
    if known.normalisation is None:
        return None
    mean, std = (torch.tensor(part).view(-1, 1, 1).to(like) for part in known.normalisation)
    return (0 - mean) / std, (1 - mean) / std


def _mapped(simulate: Simulation, images: Tensor, labels: Tensor, draws: Draws) -> Callable[[Tensor], Gradients]:
    """The simulation over P searches at once, images [P, B, C, H, W] -> gradients [P, ...]; one after the other where a
    model's operations cannot be mapped."""

    def together(images: Tensor) -> Gradients:
        return vmap(simulate)(images, labels, draws)

    def in_turn(images: Tensor) -> Gradients:
        parts = [
            simulate(image, label, {name: value[i] for name, value in draws.items()})
            for i, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}

    if len(images) == 1:
        return in_turn
    try:
        together(images)
    except RuntimeError:
        return in_turn
    return together


def _facts(best: BestGuesses) -> list[dict[str, Fact]]:
    return [{"distance": d if math.isfinite(d) else None, "iterations": best.done} for d in best.distance.tolist()]
