"""The patch-embedding attack of one who has seen other images: for gradients that were sent with noise.

`patchembed` takes the table's gradient for G and damps what noise drowns. But a photograph is smooth also across
patches, a model's gradients lie in few directions of its channels, as they do for images that the attacker has himself,
and ∂l/∂W says as much about G as about X. All of that together (`images`, `factor`) gives several dB. It finds, and
proves nothing where it finds little: a better prior gives more.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from situs.audit.attacks.base import (
    Attack,
    Fact,
    Knowledge,
    Ready,
    Recovery,
    Refused,
    absent,
    known_numbers,
    rounded_off,
)
from situs.audit.attacks.patchembed.attack import PatchEmbedding, patch_rows
from situs.audit.attacks.prior.factor import Layer, factorise, turned
from situs.audit.attacks.prior.images import ImagePrior, image_prior
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.stem import Stem, find_stem, flat_weight, require_stem, table_rows, view_of
from situs.audit.stem.inverse import View
from situs.backbones.base import Backbone
from situs.core.precision import full_float32
from situs.core.tokens import pair, patchify, unpatchify
from situs.core.when import When
from situs.methods.base import Batch, Method

GRADIENTS = 40
"""Images whose gradients the attacker makes himself, for the channels' covariance."""

EVEN = 0.1
"""Of that covariance, beside what the images show: the gradient of another may lie in any direction."""

SPARE = 8
"""Directions that noise alone must have in ∂l/∂W before its deviation is read off them."""

BELIEVED = 1.25
"""The stated deviation is taken if what is read off is within this factor."""


class PatchEmbeddingPrior(Attack):
    """∂l/∂W_patch = G^T X with noise on all of it, factorised with what is known of images and of gradients."""

    name: ClassVar[str] = "patchembed-prior"
    about: ClassVar[str] = (
        "patchembed under noise, with what public images tell of photographs and of the model's gradients"
    )

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self._seen: tuple[object, ImagePrior, Tensor] | None = None

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:
        stem = find_stem(backbone)
        if isinstance(stem, str):
            return Refused(stem)
        if missing := absent(sent, (stem.weight, stem.table)):
            return missing
        if known.defence.noise_level(known.batch) == 0:
            return Refused("no noise is added, and without it the equations need no prior (patchembed)")
        if known.batch > 1:
            return Refused(f"a batch of {known.batch}: the rows of the table's gradient are sums over the images")
        if known.training.adam:
            return Refused("Adam divides every number by its own size, and the noise with it")
        if known.hides(backbone):
            return Refused("hidden patches are no part of the table's gradient")
        view = view_of(backbone, stem)
        if view is not None and not view.affine:
            return Refused("what the model does to an image before its patch embedding is not affine")
        return Ready((stem.weight, stem.table, *(() if stem.bias is None else (stem.bias,))))

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        known = Knowledge() if known is None else known
        stem, stop = require_stem(backbone), (lambda: False) if deadline is None else deadline.over
        layer = _layer(backbone, stem)
        prior, covariance = self._learned(backbone, stem, known)
        images, facts, cut = list[Tensor](), list[dict[str, Fact]](), None
        for upload in uploads:
            if images and stop():
                break
            table = patch_rows(known.trained(backbone), stem, upload, known)
            weight = flat_weight(known_numbers(upload[stem.weight]), stem)
            bias = known_numbers(upload[stem.bias]) if stem.bias in upload else None
            whole = table.isfinite().all(dim=0) & weight.isfinite().all(dim=1)
            if bias is not None:
                whole &= bias.isfinite()
                bias = bias[whole]
            table, weight = table[:, whole], weight[whole]
            sigma = _sigma(weight, len(table), upload, stem, known)
            sent = turned(table, weight, bias, sigma, covariance[whole][:, whole])
            plain = PatchEmbedding().recover(backbone, [upload], replace(known, normalisation=None))
            images.append(factorise(sent, prior, layer, plain.images[0].double(), stop))
            facts.append({"sigma": sigma})
            cut = "a part of the search for the last image" if stop() else None
        return Recovery(torch.stack(images).float(), facts, partial=cut)

    def _learned(self, backbone: Backbone, stem: Stem, known: Knowledge) -> tuple[ImagePrior, Tensor]:
        """What is known of images, and the channels' covariance: once for the same weights and public images."""
        weights = tuple((id(p), p._version) for p in backbone.parameters())
        key = (weights, id(known.public), known.normalisation, type(known.trained(backbone)))
        if self._seen is None or self._seen[0] != key:
            assert backbone.input.shape is not None
            shape = (backbone.input.channels, *pair(backbone.input.shape))
            prior = image_prior(shape, known.public, known.normalisation)
            prior = prior.to(next(backbone.parameters()).device)
            self._seen = key, prior, channel_covariance(backbone, stem, prior, known)
        return self._seen[1], self._seen[2]


def channel_covariance(backbone: Backbone, stem: Stem, prior: ImagePrior, known: Knowledge) -> Tensor:
    """The second moment [D, D] of the table's gradient over the rows of images that are not under attack, each image's
    gradient of size 1; where there are too few, of images drawn from the prior.

    The class is the one that the model says in every other image, and any in the rest: nobody knows how sure the model
    is of what is under attack, and both lie in the same directions.
    """
    chance = torch.Generator().manual_seed(0)
    images = prior.draw(GRADIENTS, chance).float() if known.public is None else known.public[:GRADIENTS]
    if len(images) < GRADIENTS:
        images = torch.cat([images.to(prior.mean.device), prior.draw(GRADIENTS - len(images), chance).float()])
    images = images.to(next(backbone.parameters()).device)
    method = known.trained(backbone)
    count, dim = table_rows(dict(backbone.named_parameters())[stem.table], stem).shape
    found = EVEN * torch.eye(dim, dtype=torch.float64, device=images.device)
    for number, image in enumerate(images):
        gradient = _table_gradient(method, stem, image[None], number, chance)
        size = float(gradient.square().mean())
        if 0 < size < math.inf:
            found = found + gradient.T @ gradient / (size * count * len(images))
    return found


def _table_gradient(method: Method, stem: Stem, image: Tensor, number: int, chance: torch.Generator) -> Tensor:
    """∂l/∂E_pos on the patch rows for one image [1, C, H, W] of the attacker's own, [N, D] in float64."""
    with torch.no_grad():
        logits = method.backbone(image)
    anything = torch.randint(logits.shape[-1], (1,), generator=chance).to(image.device)
    label = logits.argmax(dim=-1) if number % 2 else anything
    batch = Batch(image, torch.zeros(1, dtype=torch.int64, device=image.device), {"label": label})
    with torch.enable_grad(), full_float32():
        loss = method(batch, method.draw(batch, When())).loss
        [found] = torch.autograd.grad(loss, [dict(method.backbone.named_parameters())[stem.table]])
    return table_rows(found, stem).double()


def _sigma(weight: Tensor, patches: int, upload: Gradients, stem: Stem, known: Knowledge) -> float:
    """The deviation of what is wrong with a number: as stated with what rounding adds, or as it is read off the
    directions of ∂l/∂W [D, K] beyond as many as there are patches, where that says otherwise."""
    names = (stem.weight, stem.table)
    rounding = max(rounded_off(upload[name], known.type_of(upload[name])) for name in names)
    stated = math.hypot(max(known.noise_on(upload[name]) for name in names), rounding)
    spare = min(weight.shape) - patches
    if spare < SPARE:
        return stated
    rest = torch.linalg.svdvals(weight)[patches:].square().sum()
    read = math.sqrt(float(rest) / ((weight.shape[0] - patches) * (weight.shape[1] - patches)))
    return stated if 1 / BELIEVED < read / stated < BELIEVED else max(read, rounding)


def _layer(backbone: Backbone, stem: Stem) -> Layer:
    """What the patch embedding is fed of an image, as a linear map and its transpose."""
    view = view_of(backbone, stem)
    if view is None:
        return Layer(
            lambda images: patchify(images, stem.patch_size),
            lambda patches: unpatchify(patches, backbone.grid, stem.patch_size),
        )
    return _seen_through(view)


def _seen_through(view: View) -> Layer:
    """The same of a model that does something affine to the image first."""
    if view.scaled is not None:
        index, scale = view.scaled.index.flatten(), view.scaled.scale

        def spread(patches: Tensor) -> Tensor:
            numbers = patches.new_zeros(len(patches), math.prod(view.shape))
            return numbers.index_add_(1, index, (scale * patches).flatten(1)).view(-1, *view.shape)

        return Layer(lambda images: scale * images.flatten(1)[:, index].view(-1, *scale.shape), spread, view.centre)
    _, along, against = view.feed.derivative(view.start)
    return Layer(
        lambda images: torch.cat([along(each[None]) for each in images]),
        lambda patches: torch.cat([against(each[None]) for each in patches]),
        view.centre,
    )
