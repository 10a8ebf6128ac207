"""The oracle: what an attacker could have who is told where to look. A bound that a pass must respect, and no attack.

Noise hides an image from the attacks that are tried here; others may come closer, through other layers, another path
from the pixels to the logits or a better prior. So a gate asks an oracle before it passes anything. It knows the image
x and linearises the whole upload g there, every tensor that is sent, with all that the training does:

    x̂ = argmin |upload - g(a) - J (x̂ - a)|² / σ² + x̂ᵀ Λ⁻¹ x̂,     J = ∂g/∂x at a = x, then once more at a = x̂

Λ is diagonal in the cosine transform, with the image's own energy in rings of frequency: a prior as good as any of that
form. Without information x̂ is grey, far from x, where the upload is another function: so what fits it best near x is
looked for from x̂ too (a second step of Gauss and Newton). Both are scored like any recovered picture. The solve is by
conjugate gradients with products of J (differences) and Jᵀ (the second derivative), in float64.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from situs.audit.attacks.base import Attack, Knowledge, Ready, Recovery, Refused
from situs.audit.attacks.matching import simulation
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.backbones.base import Backbone
from situs.methods.base import Draws, Method

ITERATIONS, LEFT = 60, 0.1
"""Steps of the solve at most, and its end: what is left of the equations, in units of the prior's deviation."""

LINEARISED = 2
"""Times that the upload is linearised: around the image, and around the picture that this gives."""

ASK = 3
"""Steps of the solve between two looks at the picture."""

RINGS = 12
"""Rings of frequency whose energy the prior has, beside the mean."""

STEP = 1e-6
"""Of the differences that make a product of J, in units of the image's size over that of the direction."""


class Oracle(Attack):
    """A bound in the place of an attack: it is told the images."""

    name: ClassVar[str] = "oracle"
    is_bound: ClassVar[bool] = True
    about: ClassVar[str] = (
        "no attack but a bound: it is told the image, linearises the whole upload there and solves for what the noise "
        "leaves of it. Where it is above a limit, an attack that is not among these may be too"
    )

    def prepare(self, backbone: Backbone, sent: Collection[str], known: Knowledge) -> Ready | Refused:  # noqa: ARG002
        return Ready(None)

    def recover(
        self,
        backbone: Backbone,
        uploads: Sequence[Gradients],
        known: Knowledge | None = None,
        deadline: Deadline | None = None,
    ) -> Recovery:
        del backbone, uploads, known, deadline
        raise AssertionError("the oracle is told the images: see `estimate`")


class Estimate(NamedTuple):
    """pictures: x̂ of each linearisation, [B, C, H, W], normalised. ended: whether the solves came to their ends, or to
    where they had told enough."""

    pictures: tuple[Tensor, ...]
    ended: bool


def estimate(
    method: Method,
    upload: Gradients,
    images: Tensor,
    labels: Tensor,
    draws: Draws,
    known: Knowledge,
    enough: Callable[[Tensor], bool] = lambda _: False,
    stop: Callable[[], bool] = lambda: False,
) -> Estimate:
    """x̂ of one upload of images [B, C, H, W] with these labels and draws.

    enough: asked of the picture now and then while it sharpens; where it says so the rest is spared.
    """
    sigma = known.defence.noise_level(known.step.batch)
    assert sigma > 0, "without noise there is nothing to bound"
    x, root, pictures, ended = images.double(), Prior(images.double()), list[Tensor](), True
    names = [name for name in upload if upload[name].numel()]
    run = simulation(deepcopy(method).double(), known, names)
    noisy = torch.cat([upload[name].double().flatten() for name in names])
    with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the second derivative of some operators says of itself

        def flat(at: Tensor) -> Tensor:
            gradients = run(at, labels, draws)
            return torch.cat([gradients[name].flatten() for name in names])

        def around(at: Tensor) -> tuple[Tensor, bool]:
            here, back, *_ = torch.func.vjp(flat, at)

            def along(v: Tensor) -> Tensor:
                h = STEP * float(x.norm()) / max(float(v.norm()), 1e-30)
                with torch.no_grad():
                    return (flat(at + h * v) - here) / h

            def against(u: Tensor) -> Tensor:
                return root(back(u)[0].detach() / sigma**2)

            right = against((noisy - here + along(at)).detach())

            def product(z: Tensor) -> Tensor:
                return against(along(root(z))) + z

            z, ended = _solve(product, right, lambda z: enough(root(z)), stop)
            return root(z), ended

        for _ in range(LINEARISED):
            picture, ended = around(pictures[-1] if pictures else x)
            pictures.append(picture)
            if not ended or enough(picture):
                break
    return Estimate(tuple(pictures), ended)


def _solve(
    product: Callable[[Tensor], Tensor], right: Tensor, enough: Callable[[Tensor], bool], stop: Callable[[], bool]
) -> tuple[Tensor, bool]:
    """z of product(z) = right by conjugate gradients, and whether it came to its end."""
    z, left = torch.zeros_like(right), right
    direction, size = left, float(left.square().sum())
    for number in range(ITERATIONS):
        if size <= LEFT**2 * right.numel() or (number and number % ASK == 0 and enough(z)):
            return z, True
        if stop():
            break
        moved = product(direction)
        bent = float((direction * moved).sum())
        if not (math.isfinite(bent) and bent > 0):
            break
        z, left = z + size / bent * direction, left - size / bent * moved
        before, size = size, float(left.square().sum())
        direction = left + size / before * direction
    return z, enough(z)


class Prior:
    """Λ^½ of images [B, C, H, W]: each image's own energy, by rings of frequency and by colour against grey."""

    def __init__(self, images: Tensor) -> None:
        channels, height, width = images.shape[1:]
        self.rows, self.columns, self.colours = cosines(height, images), cosines(width, images), _colours(images)
        down, across = (torch.arange(n, dtype=images.dtype, device=images.device) / n for n in (height, width))
        radius = (down[:, None] ** 2 + across[None] ** 2).sqrt()
        lowest = float(radius[radius > 0].min()) if radius.numel() > 1 else 1.0
        ring = (radius.clamp(min=lowest) / lowest).log() / math.log(max(2**0.5 / lowest, 1.001)) * (RINGS - 1)
        ring = torch.where(radius > 0, 1 + ring.long(), 0).flatten()
        energy = self._transform(images).square().flatten(2)
        count = torch.bincount(ring, minlength=RINGS + 1).clamp(min=1)
        sums = energy.new_zeros(*energy.shape[:2], RINGS + 1).index_add_(2, ring, energy)
        self.deviation = (sums / count)[..., ring].sqrt().view(-1, channels, height, width)

    def __call__(self, images: Tensor) -> Tensor:
        return self._back(self.deviation * self._transform(images))

    def _transform(self, images: Tensor) -> Tensor:
        return torch.einsum("dc,bchw->bdhw", self.colours, self.rows @ images @ self.columns.T)

    def _back(self, coefficients: Tensor) -> Tensor:
        return self.rows.T @ torch.einsum("dc,bdhw->bchw", self.colours, coefficients) @ self.columns


def cosines(count: int, like: Tensor) -> Tensor:
    """The orthonormal cosine transform (DCT-II) as a matrix [count, count]."""
    k = torch.arange(count, dtype=like.dtype, device=like.device)
    matrix = torch.cos(math.pi / count * (k[None] + 0.5) * k[:, None]) * math.sqrt(2 / count)
    matrix[0] /= math.sqrt(2)
    return matrix


def _colours(like: Tensor) -> Tensor:
    """Grey and two colours of three channels, orthonormal; any other number of channels as they are."""
    if like.shape[1] != 3:
        return torch.eye(like.shape[1], dtype=like.dtype, device=like.device)
    rows = torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]], dtype=like.dtype, device=like.device)
    return rows / rows.norm(dim=1, keepdim=True)
