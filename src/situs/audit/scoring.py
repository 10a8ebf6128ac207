"""Recovered images against the originals: which is which within an upload, and every metric of each.

Only here are attack and truth brought together. An attack gives the images of an upload in any order, because nothing
in a sum over a batch says which was first; they are matched to the originals so that the squared error is least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from situs.audit.attack import Fact, Recovery
from situs.audit.metrics import denormalise, measure_all
from situs.backbones.base import Backbone

Lpips = Callable[[Tensor, Tensor], Tensor]
Scores = dict[str, list[float] | None]
Normalisation = tuple[Sequence[float], Sequence[float]]


def best_order(found: Tensor, real: Tensor) -> Tensor:
    """Which of `found` [B, C, H, W] stands for each of `real` [B, C, H, W], one to one: [B]."""
    from scipy.optimize import linear_sum_assignment

    error = torch.cdist(real.double().flatten(1), found.double().flatten(1)).square()
    _, columns = linear_sum_assignment(error.cpu().numpy())
    return torch.from_numpy(columns).to(found.device)


def pictures_of(found: Recovery, real: Tensor, batch: int, normalisation: Normalisation) -> Tensor:
    """The recovered pictures in the order of the originals, [uploads · batch, C, H, W] in [0, 1]."""
    uploads, pictures = len(found.facts), denormalise(found.images, *normalisation)
    if pictures.shape[0] == uploads and batch > 1:  # one solution, which stands for each image of its batch
        return pictures.repeat_interleave(batch, dim=0)
    assert pictures.shape[0] == uploads * batch, "an attack gives one image an upload, or all"
    parts = zip(pictures.split(batch), real.split(batch), strict=False)  # fewer, where it was stopped
    return torch.cat([part[best_order(part, truth)] for part, truth in parts])


def facts_of(found: Recovery, labels: Tensor, batch: int) -> list[dict[str, Fact]]:
    """The attacker's facts, once an image; of labels he inferred, how many of the batch's are right."""
    facts = [dict(fact) for fact in found.facts]
    if found.labels is not None:
        for fact, guess, truth in zip(facts, found.labels, labels.split(batch), strict=False):
            right = Counter(guess.tolist()) & Counter(truth.tolist())
            fact["labels_inferred"] = ", ".join(str(label) for label in guess.tolist())
            fact["labels_right"] = right.total()
    return [fact for fact in facts for _ in range(batch)]


def measure(pictures: Tensor, real: Tensor, backbone: Backbone, lpips: Lpips | None) -> Scores:
    """Every metric per image, against the first of `real`, all of which are the gallery."""
    height, width = real.shape[2:]
    return measure_all(pictures, real, patch_size_of(backbone, (height, width)), lpips)


def patch_size_of(backbone: Backbone, size: tuple[int, int]) -> tuple[int, int]:
    """The patches that order and best matches are measured on: the model's own.

    Small squares where it has none, or more than 1,024 of them: matching Swin's 3,136 to each other takes minutes.
    """
    height, width = size
    if 0 < backbone.num_tokens <= 1024:
        return height // backbone.grid[0], width // backbone.grid[1]
    side = next(side for side in (16, 8, 4, 2, 1) if height % side == width % side == 0)
    return side, side
