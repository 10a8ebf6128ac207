"""Whether unlabelled samples are enough to judge the attacker `images` by: without the key, from what they are.

An attack that was given next to nothing fails on every lock, so its failure says nothing of this one. Pictures that are
flat, or noise, tell nothing of how channels go together, and the attacker leaves them out; copies count once. What
counts must be enough by the attacker's own statistics: as many as `ENOUGH`, a covariance at a place that has directions
enough to tell channels apart, and that is the same from either half of the samples. The numbers were set on photographs
(390, of 224 and 32 pixels) and noise, and on small ViTs for CIFAR-100: one trained for 12 epochs, two of 64 and 96
channels whose blocks were made to read what its images make vary together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.errors import counted
from situs.locks.attacks.graph import rows

ENOUGH = 16
"""Varied samples. Where the attack works it works with 2 to 4; of one photograph in three it got nothing."""

CONTRAST, DETAILED = 0.02, 0.2
"""Flat: less than this share of the cells of a 16 × 16 grid deviates by so much of the range of pixels. Photographs
have .29 at least."""

UNEVEN, CELLS = 0.45, 36
"""Noise: the log variance of the cells deviates by less. Photographs have .51 at least, noise of every grain .42 at
most. Fewer cells, as pictures of less than 24 pixels have, do not tell."""

ALIKE = 0.97
"""Copies: thumbnails of 16 × 16 that correlate so, mirrored or not. Different photographs reach .94."""

DIRECTIONS, FAINT = 8, 0.01
"""Eigenvalues of the covariance at a place that must reach so much of the largest; flat pictures have 1 to 4."""

STEADY = 0.8
"""How far the tables of two halves must agree; 16 photographs give .84 to .95, two flat pictures 0."""

FED = (0.4, 3.0)
"""Deviation of what the model is fed. Photographs have .5 to 1.3; left as pixels in [0, 1], .25."""

NAMED = 5
"""Samples that a sentence names at most."""


@dataclass(frozen=True)
class Variety:
    """Which samples count. kept: their numbers; copies, flat, noise: names of those that do not; things: what they are
    called; strange: what is wrong with all of them, in words; again: the numbers of the copies, which count for nothing
    and harm nothing."""

    kept: tuple[int, ...]
    things: str = "images"
    copies: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    strange: str = ""
    again: tuple[int, ...] = ()

    @property
    def left_out(self) -> str:
        """The samples that tell nothing, by name; empty where there are none."""
        kinds = {"too flat": self.flat, "noise": self.noise, "copies of others": self.copies}
        return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)

    def doubt(self, directions: int, steady: float, dim: int) -> str:
        """Why an attack that failed with these samples says nothing of the lock; empty where they were enough.

        directions, steady: see `told_by`; dim: channels of the stream.
        """
        count = len(self.kept)
        if count < ENOUGH:
            reason = f"{counted(count, f'varied {self.things}')}, and {ENOUGH} are needed"
        elif self.strange:
            return self.strange
        elif directions < min(DIRECTIONS, dim // 4):
            reason = f"the {count} {self.things} vary in {counted(directions, 'directions')} only"
        elif steady < STEADY:
            reason = f"{count} {self.things} are too few: what one half shows of the channels, the other does not"
        else:
            return ""
        wanted = "photographs" if self.things == "images" else self.things
        named = f" ({self.left_out})" if self.left_out else ""
        more = max(ENOUGH, 2 * count if count >= ENOUGH else 0)
        return f"{reason}{named}; give {more} {wanted} or more, all different, like those the model was trained on"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def look_at(images: Tensor, pixels: Tensor, names: Sequence[str]) -> Variety:
    """Which images count. images: [B, C, H, W], as the model is fed them; pixels: the same in [0, 1]."""
    cells = _cells(pixels)  # [B, C, n, L]
    spread = (cells - cells.mean(dim=2, keepdim=True)).square().mean(dim=(1, 2))  # [B, L]
    flat = (spread.sqrt() > CONTRAST).float().mean(dim=1) < DETAILED
    uneven = (spread + 1e-6).log().std(dim=1, correction=0)
    noise = ~flat & (uneven < UNEVEN) if spread.shape[1] >= CELLS else torch.zeros_like(flat)
    copies = _copies(pixels)
    kept = tuple((~(flat | noise | copies)).nonzero()[:, 0].tolist())

    def named(which: Tensor) -> tuple[str, ...]:
        return tuple(name for name, chosen in zip(names, which.tolist(), strict=True) if chosen)

    strange = _strange(images[list(kept)]) if kept else ""
    again = copies & ~flat & ~noise
    numbers = tuple(again.nonzero()[:, 0].tolist())
    return Variety(kept, "images", named(again), named(flat), named(noise), strange, numbers)


def unlike(samples: Sequence[Tensor], names: Sequence[str], things: str) -> Variety:
    """Which samples that are no pictures count: each but for those that are equal to one before."""
    kept: list[int] = []
    for number, each in enumerate(samples):
        if not any(torch.equal(each, samples[other]) for other in kept):
            kept.append(number)
    copies = tuple(name for number, name in enumerate(names) if number not in set(kept))
    return Variety(tuple(kept), things, copies)


def told_by(halves: Sequence[Tensor]) -> tuple[int, float]:
    """(directions, steadiness) of the covariances [D, D] at a place that two halves of the samples show."""
    values = torch.linalg.eigvalsh(torch.stack(list(halves)).mean(dim=0).double())
    directions = int((values > FAINT * values[-1].clamp_min(1e-12)).sum())
    one, two = (rows(each.double()) for each in halves)
    return directions, float((one * two).sum(dim=1).mean())


def _cells(pixels: Tensor) -> Tensor:
    """[B, C, n, L]: the n pixels of each of the L cells of a 16 × 16 grid, of 4 × 4 pixels at least."""
    height, width = (min(side, max(4, side // 16)) for side in pixels.shape[-2:])
    size = (height, width)
    return F.unfold(pixels, size, stride=size).unflatten(1, (pixels.shape[1], -1))


def _copies(pixels: Tensor) -> Tensor:
    """[B] bool: whether an image is another one before it, perhaps mirrored, re-encoded or with other light."""
    views = (F.adaptive_avg_pool2d(each.mean(dim=1, keepdim=True), 16).flatten(1) for each in (pixels, pixels.flip(-1)))
    one, two = (F.normalize(view - view.mean(dim=1, keepdim=True), dim=1) for view in views)
    return (torch.maximum(one @ one.T, one @ two.T) > ALIKE).tril(diagonal=-1).any(dim=1)


def _strange(images: Tensor) -> str:
    """What is wrong with what the model is fed; empty where it is in the range of normalised photographs."""
    spread, mean = float(images.std()), float(images.mean())
    if FED[0] <= spread <= FED[1] and abs(mean) <= FED[1]:
        return ""
    return (
        f"the model is fed values of mean {mean:.2f} and deviation {spread:.2f}, where its training had about 0 and 1; "
        "see mean and std in its config.json, and whether the images are like those it was trained on"
    )
