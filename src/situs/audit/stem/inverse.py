"""From what a layer was fed back to the image, through whatever the model does before that layer.

A fixed linear map (scaling, channels mixed, padding, resizing) is undone by one least-squares solve with products of
autograd; what it does not see of an image comes out as 0 and is counted. Anything else, a normalisation by the image's
own mean and deviation among them, by Gauss-Newton steps, which are that solve again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from situs.audit.stem.products import Feed

DAMPING = 1e-6
"""Directions weaker than this share of the strongest are left at 0: what they say drowns in rounding."""

STEPS = 25
"""Gauss-Newton steps at most."""

REACHED = 1e-9
"""Gauss-Newton ends when this share of the layer's input is left."""

PROBES = 4
"""Random images that count what a map does not see."""


class StoppedError(Exception):
    """Whoever asked has no more time."""


class Scaled(NamedTuple):
    """A map that only moves and scales numbers: input i is scale[i] · image[index[i]] + shift[i], [N, K] each."""

    index: Tensor
    scale: Tensor
    shift: Tensor


class View:
    """What a layer sees of an image of `shape` (C, H, W). affine: whether that is a fixed affine map.

    centre [N, K] and spread: what is usual for the layer's input, for images of normalised pixels. stop: asked while a
    map that is not affine is undone; stopped: whether it ended one.
    """

    def __init__(self, feed: Feed, shape: tuple[int, int, int], device: torch.device) -> None:
        self.feed, self.shape, self.stopped = feed, shape, False
        self.stop: Callable[[], bool] = lambda: False
        chance = torch.Generator().manual_seed(0)
        images = torch.randn(2, *shape, generator=chance, dtype=torch.float64).to(device)
        with torch.no_grad():
            one, other, both = (feed(image) for image in (images[:1], images[1:], images.sum(dim=0, keepdim=True)))
            none, twice = feed(torch.zeros_like(images[:1])), feed(2 * images[:1])
        size = float((one - none).norm())
        bent = float((both - one - other + none).norm()) + float((twice - 2 * one + none).norm())
        self.affine = bool(none.isfinite().all()) and bent <= 1e-6 * size
        self.start = images[:1]
        self.centre = none[0] if self.affine else torch.zeros_like(one[0])
        self.spread = max(float((one[0] - self.centre).square().mean().sqrt()), 1e-12)
        self.scaled = self._scaled() if self.affine else None
        self.loose = () if self.affine else self._loose(one)

    @torch.no_grad()
    def _scaled(self) -> Scaled | None:
        """The map as moved and scaled numbers, where it is one."""
        count = int(np.prod(self.shape))
        numbers = torch.arange(count, dtype=torch.float64, device=self.start.device).view(1, *self.shape)
        scale = self.feed(torch.ones_like(numbers))[0] - self.centre
        there = scale.abs() > 1e-9 * scale.abs().max()
        index = ((self.feed(numbers)[0] - self.centre) / torch.where(there, scale, 1.0)).round().long()
        index = index.clamp(0, count - 1)
        scale = torch.where(there, scale, 0.0)
        made = scale * self.start.flatten()[index] + self.centre
        if not bool((made - self.feed(self.start)[0]).norm() <= 1e-9 * made.norm()):
            return None
        return Scaled(index, scale, self.centre)

    @torch.no_grad()
    def _loose(self, value: Tensor) -> tuple[str, ...]:
        """Whose gain and offset the layer cannot tell: ("image",), or ("channel",) for each channel's own."""
        channels = torch.linspace(0.7, 1.3, self.shape[0], dtype=torch.float64, device=value.device).view(1, -1, 1, 1)
        for kind, gain in (("channel", channels), ("image", 1.3)):
            other = self.feed(gain * self.start + 0.2 * gain)
            if float((other - value).norm()) <= 1e-3 * float(value.norm()):
                return (kind,)
        return ()

    def unseen(self) -> int:
        """How many of the image's numbers the map does not see: its null space, estimated; 0 is sure."""
        _, along, against = self.feed.derivative(self.start)
        count, chance = int(np.prod(self.shape)), torch.Generator().manual_seed(1)
        missing = []
        for _ in range(PROBES):
            signs = (torch.randint(2, self.start.shape, generator=chance) * 2 - 1).to(self.start)
            left = signs - self._solve(along, against, along(signs))
            missing.append(float((signs * left).sum()))
        lost = float(np.mean(missing))
        return 0 if lost < 1e-3 * count**0.5 else max(1, round(lost))

    def image(self, inputs: Tensor) -> tuple[Tensor, float]:
        """The image [C, H, W] whose layer's input [N, K] is nearest to this one, and the share that is then left."""
        wanted = inputs.unsqueeze(0)
        value, along, against = self.feed.derivative(self.start)
        try:  # of least norm, so that what nothing tells is grey
            image = self._solve(along, against, wanted - value + along(self.start))
        except StoppedError:
            image = torch.zeros_like(self.start)
        left = self._left(image, wanted)
        if self.affine:
            return image[0], left
        image, left = self._descend(image, left, wanted)
        if left > REACHED and not self.loose:  # from grey, where saturation is farthest
            grey = torch.zeros_like(image)
            other = self._descend(grey, self._left(grey, wanted), wanted)
            image, left = min((image, left), other, key=lambda found: found[1])
        return image[0], left

    def _descend(self, image: Tensor, left: float, wanted: Tensor) -> tuple[Tensor, float]:
        """Gauss-Newton steps, each halved until it helps."""
        for _ in range(STEPS):
            if not REACHED < left < np.inf:
                break
            value, along, against = self.feed.derivative(image)
            try:
                step, before = self._solve(along, against, wanted - value), left
            except StoppedError:
                break
            for factor in (1.0, 0.5, 0.25, 0.1, 0.01):
                after = self._left(image + factor * step, wanted)
                if after < left:
                    image, left = image + factor * step, after
                    break
            if left >= before * (1 - 1e-3):
                break
        return image, left

    @torch.no_grad()
    def _left(self, image: Tensor, wanted: Tensor) -> float:
        size = float((wanted - self.centre).norm()) or 1.0
        left = float((self.feed(image) - wanted).norm()) / size
        return left if np.isfinite(left) else float("inf")

    def _solve(self, along: Any, against: Any, right: Tensor) -> Tensor:
        """The image of least norm among those with the least |J image - right|."""
        from scipy.sparse import linalg

        like, shape = self.start, right.shape

        def go(vector: Any, to: torch.Size, product: Any) -> Any:
            if not self.affine and (self.stopped or self.stop()):
                self.stopped = True
                raise StoppedError
            return product(torch.from_numpy(np.array(vector)).view(to).to(like)).detach().cpu().flatten().numpy()

        made: Any = linalg.LinearOperator
        operator = made(
            (right.numel(), like.numel()),
            matvec=lambda v: go(v, like.shape, along),
            rmatvec=lambda u: go(u, shape, against),
            dtype=np.float64,
        )
        flat = right.detach().cpu().flatten().numpy()
        damping = DAMPING * self.spread * (right.numel() / like.numel()) ** 0.5
        most = 2000 if self.affine else 300
        found = linalg.lsmr(operator, flat, damp=damping, atol=1e-13, btol=1e-13, conlim=0, maxiter=most)[0]
        return torch.from_numpy(found).view(like.shape).to(like)


def fill(image: Tensor, loose: Sequence[str], normalisation: tuple[Sequence[float], Sequence[float]]) -> Tensor:
    """A normalised image [C, H, W] with the gain and offset, which nothing tells, that make it fill black to white."""
    mean, std = (torch.tensor(part, dtype=image.dtype, device=image.device).view(-1, 1, 1) for part in normalisation)
    each = "channel" in loose
    dims = (1, 2) if each else (0, 1, 2)
    low, high = image.amin(dim=dims, keepdim=True), image.amax(dim=dims, keepdim=True)
    mean, std = (mean, std) if each else (mean.mean(), std.mean())  # one gain for all channels
    return ((image - low) / (high - low).clamp(min=1e-12) - mean) / std
