"""Recovered images against the originals: which is which within an upload, and every metric of each.

Attack and truth meet only here. An attack gives the images of an upload in any order, because a sum over a batch does
not hold it; they are matched to the originals so that the squared error is least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from situs.audit.attacks.base import Fact, Normalisation, Recovery
from situs.audit.scores.metrics import (
    LOWER_IS_CLOSER,
    assign,
    baselines,
    denormalise,
    in_order,
    measure_all,
    psnr,
)
from situs.backbones.base import Backbone
from situs.core.tokens import patchify

Lpips = Callable[[Tensor, Tensor], Tensor]
Scores = dict[str, list[float] | None]


def pictures_of(recovery: Recovery, real: Tensor, batch: int, normalisation: Normalisation) -> Tensor:
    """The recovered pictures in the order of the originals, [uploads · batch, C, H, W]: black is 0 and white 1, and
    what lies beyond is not cut off."""
    uploads, pictures = len(recovery.facts), denormalise(recovery.images, *normalisation, clip=False)
    if pictures.shape[0] == uploads and batch > 1:  # one solution, which stands for each image of its batch
        return pictures.repeat_interleave(batch, dim=0)
    assert pictures.shape[0] == uploads * batch, "an attack gives one image for each upload, or all images"
    parts = zip(pictures.split(batch), real.split(batch), strict=False)  # fewer, where it was stopped
    return torch.cat([part[assign(part.clamp(0, 1).flatten(1), truth.flatten(1))[1]] for part, truth in parts])


def facts_of(recovery: Recovery, labels: Tensor, batch: int) -> list[dict[str, Fact]]:
    """The attack's facts, once for each image; of inferred labels, how many of the batch are right.

    Where a picture of an upload holds NaN, the attack has failed there, whatever its facts say: `broken`.
    """
    facts = [dict(fact) for fact in recovery.facts]
    share = len(recovery.images) // max(1, len(facts))
    for fact, images in zip(facts, recovery.images.split(max(1, share)), strict=False):
        if bool(images.isnan().any()):
            fact |= {"broken": True, "fits": False, "verdict": "the recovered image holds NaN, which counts as black"}
    if recovery.labels is not None:
        for fact, guess, truth in zip(facts, recovery.labels, labels.split(batch), strict=False):
            right = Counter(guess.tolist()) & Counter(truth.tolist())
            fact["labels_inferred"] = ", ".join(str(label) for label in guess.tolist())
            fact["labels_right"] = right.total()
    return [fact for fact in facts for _ in range(batch)]


def measure(pictures: Tensor, real: Tensor, backbone: Backbone, lpips: Lpips | None, first: int = 0) -> Scores:
    """Every metric per image, against those of `real` from number `first` on; all of `real` are the gallery.

    pictures: need not lie in [0, 1].
    """
    height, width = real.shape[2:]
    size = patch_size_of(backbone, (height, width))
    return measure_all(pictures.clamp(0, 1), real, size, lpips, first, raw=pictures)


def closer(scores: Scores, others: Scores) -> Scores:
    """The closer of two scores of the same pictures, against two references, for each image and metric."""
    best: Scores = {}
    for name, values in scores.items():
        more, pick = others.get(name), min if name in LOWER_IS_CLOSER else max
        if values is None or more is None:
            best[name] = values
        else:
            best[name] = [pick(pair) for pair in zip(values, more, strict=True)]
    return best


def measure_guesses(
    real: Tensor, backbone: Backbone, lpips: Lpips | None, normalisation: Normalisation | None = None
) -> dict[str, Scores]:
    """The scores of blind guesses by name, computed a few images at a time.

    The grey is the mean of the normalisation, which everyone has; 0.5 without one.
    """
    zero = real.new_zeros(1, real.shape[1], 1, 1)
    grey = 0.5 if normalisation is None else denormalise(zero, *normalisation)[0]
    scores: dict[str, Scores] = {}
    for first in range(0, len(real), 8):
        for name, guess in baselines(real, slice(first, first + 8), grey).items():
            extend(scores.setdefault(name, {}), measure(guess, real, backbone, lpips, first))
    return scores


def extend(scores: Scores, more: Scores) -> None:
    """Adds the values of more images; a metric that one of them lacks is None for all."""
    for name, values in more.items():
        before = scores.get(name, [])
        scores[name] = None if before is None or values is None else [*before, *values]


def measure_parts(pictures: Tensor, real: Tensor, mask: Tensor, backbone: Backbone) -> Scores:
    """Shown and hidden patches apart, per image. mask: [n, N], the hidden ones.

    shown_psnr: over the shown patches. hidden_psnr: over the hidden ones matched to the recovered ones whatever their
    order. hidden_order: the share of them at its place. The last two are None where an image has nothing hidden.
    """
    height, width = real.shape[2:]
    size = (height // backbone.grid[0], width // backbone.grid[1])
    recovered, truth = (patchify(part.double(), size) for part in (pictures, real))
    shown, hidden, order = [], [], []
    for f, t, m in zip(recovered, truth, mask, strict=True):
        shown.append(float(psnr(f[~m].unsqueeze(0), t[~m].unsqueeze(0))))
        if m.any():
            error, columns = assign(f[m], t[m])
            hidden.append(float(psnr(f[m][columns].unsqueeze(0), t[m].unsqueeze(0))))
            order.append(float(in_order(error, columns).double().mean()))
    whole = len(hidden) == len(shown)
    return {"shown_psnr": shown, "hidden_psnr": hidden if whole else None, "hidden_order": order if whole else None}


def patch_size_of(backbone: Backbone, size: tuple[int, int]) -> tuple[int, int]:
    """The size of the patches by which order and best matches are measured: the model's own.

    Small squares where it has none, or more than 1,024: matching Swin's 3,136 patches takes minutes.
    """
    height, width = size
    if 0 < backbone.num_tokens <= 1024:
        return height // backbone.grid[0], width // backbone.grid[1]
    side = next(side for side in (16, 8, 4, 2, 1) if height % side == width % side == 0)
    return side, side
