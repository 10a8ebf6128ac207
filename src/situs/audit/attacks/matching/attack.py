"""Gradient matching: look for images whose gradients are those that were sent.

The idea of DLG (Zhu et al., arXiv 1906.08935) with the signed Adam and total variation of Geiping et al. (arXiv
2003.14053) and the smooth patch borders of GradViT (Hatamizadeh et al., arXiv 2203.11894). It needs no structure: any
model, any batch, gradients with names left out. It promises nothing either: an optimisation ends where it ends.

Deviation: both distances are taken for each named gradient by itself, relative to its size, and averaged with weights
that know the noise (`search.name_weights`). Over all together the classifier's gradient, the largest, drowns the rest:
the cosine distance falls to almost nothing while the images stay noise (measured).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit.attacks.base import Attack, Fact, Knowledge, Ready, Recovery, Refused, absent, known_numbers
from situs.audit.attacks.matching.labels import find_classifier, infer_labels
from situs.audit.attacks.matching.search import (
    BestGuesses,
    MatchingConfig,
    border_steps,
    gradient_distances,
    name_weights,
    optimise,
    variation,
)
from situs.audit.attacks.matching.simulate import Simulation, guessed_draws, simulation
from situs.audit.client import parameter_names
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import find_stem, require_stem
from situs.backbones.base import Backbone
from situs.core.tokens import pair
from situs.errors import SitusError
from situs.methods.base import Draws, Method


class Matching(Attack):
    """Images whose gradients match, by double backward."""

    name: ClassVar[str] = "matching"
    about: ClassVar[str] = "an optimiser moves noise until its gradients match those that were sent"
    slow: ClassVar[bool] = True
    Config: ClassVar[type[MatchingConfig]] = MatchingConfig
    config: MatchingConfig

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        if not backbone.input.channels:
            return Refused("it takes no images")
        if not sent:
            return Refused("all of its parameters are frozen, so that no gradient is sent")
        if known.labels is None and not {*find_classifier(backbone, _size(backbone, known))} & {*sent}:
            return Refused("it is not told the labels, and no gradient of a classifier was sent that gives them away")
        return Ready(None, "an optimisation: it ends where it ends, and more iterations or restarts may find more")

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known, deadline = known or Knowledge(), deadline or Deadline()
        config, method = self.config, known.trained(backbone)
        inferred = None if known.labels is not None else _infer(backbone, uploads, known)
        labels = known.labels if inferred is None else inferred
        assert labels is not None
        each = max(1, config.parallel // config.restarts)
        images, facts, partial = [], [], None
        for first in range(0, len(uploads), each):
            if first and deadline.over():
                break
            group = range(first, min(first + each, len(uploads)))
            deadline.say(f"{self.name}: uploads {known.first + first + 1} to {known.first + group[-1] + 1}")
            try:
                with sdpa_kernel(SDPBackend.MATH):  # the others have no second derivative
                    found = self._search(method, uploads, labels, group, known, deadline)
            except KeyboardInterrupt:  # before this search had made a guess: those before it stay
                if not images:
                    raise
                deadline.interrupt()
                break
            images.append(found.images)
            facts += _facts(found, config)
            if found.done < config.iterations:
                partial = f"{found.done:,} of {config.iterations:,} iterations"
        told = None if inferred is None else inferred[: len(facts)]
        return Recovery(torch.cat(images).flatten(0, 1), facts, told, partial)

    def _search(
        self,
        method: Method,
        uploads: Sequence[Gradients],
        labels: Tensor,
        group: range,
        known: Knowledge,
        deadline: Deadline,
    ) -> BestGuesses:
        """For each upload of a group the best of all restarts, searched for at once."""
        restarts, backbone, like = self.config.restarts, method.backbone, next(method.parameters())
        problems = [(number, restart) for number in group for restart in range(restarts)]
        names = [name for name in parameter_names(method) if name in uploads[group[0]]]
        numbers = {name: torch.stack([known_numbers(uploads[i][name]) for i, _ in problems]) for name in names}
        there = {name: each.isfinite() for name, each in numbers.items()}  # what overflowed says nothing
        target = {name: each.nan_to_num(0.0).to(like.dtype) for name, each in numbers.items()}
        guesses = {i: guessed_draws(method, uploads[i], known) for i in group}
        draws = {name: torch.stack([guesses[i][name] for i, _ in problems]) for name in guesses[group[0]]}
        told = torch.stack([labels[i] for i, _ in problems]).to(like.device)
        noise = [_noise(backbone, known, known.first + number, restart) for number, restart in problems]
        start = torch.stack(noise).to(like.device, like.dtype)
        simulate = _mapped(simulation(method, known, names), start, told, draws)
        measure = self.measure(target, backbone, known.defence.noise_level(known.batch))

        def objective(images: Tensor) -> tuple[Tensor, Tensor]:
            guess = simulate(images)
            distance = measure({name: torch.where(there[name], guess[name], 0.0) for name in names})
            prior = self.config.smooth * variation(images)
            if backbone.num_tokens:
                prior = prior + self.config.border * border_steps(images, backbone.grid)
            return distance + prior, distance

        found = optimise(objective, start, self.config, deadline, self.name, _bounds(known, start))
        best = found.loss.view(-1, restarts).argmin(dim=1)
        pick = torch.arange(len(group), device=best.device) * restarts + best
        return BestGuesses(found.loss[pick], found.distance[pick], found.images[pick], found.done)

    def measure(self, target: Gradients, backbone: Backbone, noise: float) -> Callable[[Gradients], Tensor]:  # noqa: ARG002
        """The distance [P] of guessed gradients from those that were sent with noise of a deviation."""
        weights = name_weights(target, noise)
        return lambda guess: (weights * gradient_distances(guess, target, self.config.distance)).mean(dim=1)


def _infer(backbone: Backbone, uploads: Sequence[Gradients], known: Knowledge) -> Tensor:
    """Labels [uploads, batch] from the classifier's gradients; 0 where all overflowed: any guess is as good."""
    classifier, noise = find_classifier(backbone, _size(backbone, known)), known.defence.noise_level(known.batch)
    found = [infer_labels(upload, classifier, known.batch, noise) for upload in uploads]
    return torch.stack([torch.zeros(known.batch, dtype=torch.int64) if each is None else each for each in found])


def _size(backbone: Backbone, known: Knowledge) -> tuple[int, int]:
    size = known.size or backbone.input.shape
    if size is None:
        raise SitusError(f"{backbone.name} takes images of any size: say which was used (Knowledge.size)")
    return pair(size)


def _noise(backbone: Backbone, known: Knowledge, upload: int, restart: int) -> Tensor:
    """Where a search begins, [B, C, H, W]: noise that only the seed, the upload and the restart decide."""
    chance = torch.Generator().manual_seed((known.seed * 1_000_003 + upload) * 1_009 + restart)
    return torch.randn(known.batch, backbone.input.channels, *_size(backbone, known), generator=chance)


def _bounds(known: Knowledge, like: Tensor) -> tuple[Tensor, Tensor] | None:
    """Black and white, normalised, [C, 1, 1] each; None where the attacker does not know them."""
    if known.normalisation is None:
        return None
    mean, std = (torch.tensor(part).view(-1, 1, 1).to(like) for part in known.normalisation)
    return (0 - mean) / std, (1 - mean) / std


def _mapped(simulate: Simulation, images: Tensor, labels: Tensor, draws: Draws) -> Callable[[Tensor], Gradients]:
    """The simulation over P searches at once, images [P, B, C, H, W] -> gradients [P, ...]; in turn where a model's
    operations cannot be mapped."""

    def together(images: Tensor) -> Gradients:
        return vmap(simulate)(images, labels, draws)

    def in_turn(images: Tensor) -> Gradients:
        each = [
            simulate(image, label, {name: value[i] for name, value in draws.items()})
            for i, (image, label) in enumerate(zip(images, labels, strict=True))
        ]
        return {name: torch.stack([found[name] for found in each]) for name in each[0]}

    if len(images) == 1:
        return in_turn
    try:
        together(images)
    except RuntimeError:
        return in_turn
    return together


def _facts(found: BestGuesses, config: MatchingConfig) -> list[dict[str, Fact]]:
    fixed: dict[str, Fact] = {"iterations": found.done, "restarts": config.restarts}
    # No number where nothing it saw was one.
    return [{"distance": d if math.isfinite(d) else None, **fixed} for d in found.distance.tolist()]


class AprilOptimisation(Matching):
    """APRIL's optimisation form (Lu et al., CVPR 2022, arXiv 2112.14087): matching that counts the table again.

    The paper adds the cosine distance of ∂l/∂E_pos to the squared distance of all gradients, because that one gradient
    has a row for each patch. Here it stands beside the distance of `matching`, with a weight of its own.
    """

    name: ClassVar[str] = "april-optimisation"
    about: ClassVar[str] = "gradient matching that counts the gradient of the position table a second time"

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        return absent(sent, [stem.table]) or super().prepare(backbone, sent, known)

    def measure(self, target: Gradients, backbone: Backbone, noise: float) -> Callable[[Gradients], Tensor]:
        table, plain = require_stem(backbone).table, super().measure(target, backbone, noise)
        sent = {table: target[table]}

        def distance(guess: Gradients) -> Tensor:
            rows = gradient_distances({table: guess[table]}, sent, "cosine").mean(dim=1)
            return plain(guess) + self.config.table * rows

        return distance
