"""The unlabelled samples of the attacker `images`: images, or texts for a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.tokens import pair
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.data.sampler import epoch_order
from situs.data.sources.subset import Subset
from situs.errors import SitusError, counted, verb
from situs.files import read_lines
from situs.locks.attacks.images import at_places, shifted
from situs.locks.attacks.match import correlation_rows
from situs.models.open import described, samples_for

LONGEST_TEXT = 128
"""Tokens of a text that are used."""


@dataclass(frozen=True)
class Samples:
    """inputs: images [1, C, H, W] or token ids [1, N]. description: in words. variety: which of them count."""

    inputs: tuple[Tensor, ...]
    description: str
    variety: Variety
    patch: tuple[int, int] | None = None

    @property
    def batches(self) -> Iterable[Tensor]:
        """Images [B, C, H, W], shifted and mirrored, or ids [1, N]: those that count and their copies, else all."""
        chosen = sorted((*self.variety.used, *self.variety.repeated))
        return self._batched([self.inputs[number] for number in chosen] or self.inputs)

    def _batched(self, inputs: Sequence[Tensor]) -> Iterable[Tensor]:
        return inputs if self.patch is None else shifted(torch.cat(list(inputs)), self.patch)

    def doubt(self, backbone: Backbone, groups: Sequence[Group]) -> str:
        """Why these samples are not enough to judge the attacker `images` by; empty if they are."""
        used = [self.inputs[number] for number in self.variety.used]
        if len(used) < ENOUGH:
            return self.variety.doubt(0, 0.0, backbone.dim)
        halves = [at_places(backbone, groups, self._batched(used[start::2])) for start in (0, 1)]
        return self.variety.doubt(*stability_of(halves), backbone.dim)


def _samples(inputs: Sequence[Tensor], variety: Variety, patch: tuple[int, int] | None = None) -> Samples:
    count, used = len(inputs), len(variety.used) + len(variety.repeated)
    total = f" of {count}" if 0 < used < count else ""
    return Samples(tuple(inputs), f"{used or count} unlabelled {variety.things}{total}", variety, patch)


def read_samples(folder: Path, backbone: Backbone, sources: Mapping[str, Path], count: int) -> Samples:
    """At most `count` of the `images` or `texts`, prepared for this model, the same ones every time."""
    [(kind, path)] = sources.items()
    wanted, other = ("texts", "images") if backbone.input.shape is None else ("images", "texts")
    if kind != wanted:
        raise SitusError(f"{kind}={path}: {backbone.name} takes {wanted}, not {other}", field=wanted)
    return (_images if kind == "images" else _texts)(folder, backbone, path, count)


def _images(folder: Path, backbone: Backbone, path: Path, count: int) -> Samples:
    assert backbone.input.patch is not None
    data = samples_for(backbone, described(folder, backbone), str(path))
    assert data is not None  # it has channels
    source = Subset(open_source(data, labels=False), count)
    data = replace(data, crop_share=1.0, batch=min(count, 64), workers=0)  # whole images
    batches = list(make_loader(data, None, source=source))
    whole = torch.cat([batch.inputs for batch in batches])
    names = [source.key(int(row)) for batch in batches for row in batch.ids]
    inputs, patch = whole.split(1), pair(backbone.input.patch)
    if not data.modality.pixels:  # spectrograms, series
        return _samples(inputs, distinct_samples(inputs, names, data.modality.things), patch)
    mean, std = (torch.tensor(part)[:, None, None] for part in data.normalisation)
    return _samples(inputs, varied_images(whole, whole * std + mean, names), patch)


def _texts(folder: Path, backbone: Backbone, path: Path, count: int) -> Samples:
    from situs.backbones.hf.text import token_ids  # transformers is an extra

    lines = read_lines(path, "texts")
    chosen = [lines[row] for row in epoch_order(0, 0, len(lines))[:count].sort().values.tolist()]
    longest = min(LONGEST_TEXT, backbone.num_tokens)
    coded = token_ids(folder, chosen, longest)
    nonempty = [(torch.tensor([ids]), text) for ids, text in zip(coded, chosen, strict=True) if ids]
    inputs = [ids for ids, _ in nonempty]
    return _samples(inputs, distinct_samples(inputs, [repr(text[:40]) for _, text in nonempty], "texts"))


# --- whether the samples are enough to judge by; it needs no key ------------------------------------------------------
# An attack with too little data fails on every lock, so its failure says nothing about this one. Flat images and
# noise reveal nothing about the correlations of channels, and the attacker leaves them out; copies count once. The
# samples that count must suffice for the attacker's statistics: at least `ENOUGH`, a covariance at each place with
# enough directions to distinguish channels, and nearly the same covariance from either half of the samples. The
# thresholds were set on 390 photographs (of 224 and 32 pixels) and noise, and on small ViTs for CIFAR-100: one
# trained for 12 epochs, and two of 64 and 96 channels whose blocks were constructed to read the directions in which
# its images vary.


ENOUGH = 16
"""Varied samples that are needed. Where the attack works, 2 to 4 suffice; with one photograph it failed in a third."""

CONTRAST, DETAILED = 0.02, 0.2
"""Flat: in less than this share of the cells of a 16 × 16 grid the pixels deviate by `CONTRAST`. Photographs have .29
at least."""

UNEVEN, CELLS = 0.45, 36
"""Noise: the log variance of the cells deviates by less. Photographs have .51 at least, noise of any grain .42 at most.
Images with fewer cells (less than 24 pixels) are not tested."""

ALIKE = 0.97
"""Copies: thumbnails of 16 × 16 with this correlation, mirrored or not. Different photographs reach .94."""

DIRECTIONS, FAINT = 8, 0.01
"""Number of eigenvalues of the covariance at a place above `FAINT` times the largest; flat images have 1 to 4."""

STEADY = 0.8
"""Agreement of the tables of two halves; 16 photographs give .84 to .95, two flat images 0."""

FED = (0.4, 3.0)
"""Standard deviation of the model's inputs. Normalised photographs have .5 to 1.3, pixels in [0, 1] have .25."""

NAMED = 5
"""Samples that a sentence lists at most."""


@dataclass(frozen=True)
class Variety:
    """Which samples count. used: their indices; copies, flat, noise: names of those that do not count; things: the word
    for the samples; range_problem: what is wrong with the values of all of them; repeated: indices of the copies, which
    the attacker may use as well."""

    used: tuple[int, ...]
    things: str = "images"
    copies: tuple[str, ...] = ()
    flat: tuple[str, ...] = ()
    noise: tuple[str, ...] = ()
    range_problem: str = ""
    repeated: tuple[int, ...] = ()

    @property
    def left_out(self) -> str:
        """The samples that do not count, by name; empty if all count."""
        kinds = {"too flat": self.flat, "noise": self.noise, "copies of others": self.copies}
        listed = {
            kind: ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
            for kind, names in kinds.items()
        }
        return "; ".join(f"{kind}: {names}" for kind, names in listed.items() if names)

    def doubt(self, directions: int, stability: float, dim: int) -> str:
        """Why a failure with these samples says nothing about the lock; empty if they are enough.

        directions, stability: see `stability_of`; dim: channels of the stream.
        """
        count = len(self.used)
        if count < ENOUGH:
            reason = (
                f"there {verb(count, 'are')} only {counted(count, f'varied {self.things}')}, but {ENOUGH} are needed"
            )
        elif self.range_problem:
            return self.range_problem
        elif directions < min(DIRECTIONS, dim // 4):
            reason = f"the {count} {self.things} vary in only {counted(directions, 'directions')}"
        elif stability < STEADY:
            reason = f"the two halves of the {count} {self.things} do not show the same correlations"
        else:
            return ""
        wanted = "photographs" if self.things == "images" else self.things
        named = f" ({self.left_out})" if self.left_out else ""
        more = max(ENOUGH, 2 * count if count >= ENOUGH else 0)
        differ = "that differ from each other and resemble the training samples"
        return f"{reason}{named}; give {more} {wanted} or more {differ}"


def varied_images(images: Tensor, pixels: Tensor, names: Sequence[str]) -> Variety:
    """Which images count. images: [B, C, H, W], the model's inputs; pixels: the same in [0, 1]."""
    cells = _cells(pixels)  # [B, C, n, L]
    spread = (cells - cells.mean(dim=2, keepdim=True)).square().mean(dim=(1, 2))  # [B, L]
    flat = (spread.sqrt() > CONTRAST).float().mean(dim=1) < DETAILED
    uneven = (spread + 1e-6).log().std(dim=1, correction=0)
    noise = ~flat & (uneven < UNEVEN) if spread.shape[1] >= CELLS else torch.zeros_like(flat)
    copies = _copies(pixels)
    used = tuple((~(flat | noise | copies)).nonzero()[:, 0].tolist())

    def named(which: Tensor) -> tuple[str, ...]:
        return tuple(name for name, chosen in zip(names, which.tolist(), strict=True) if chosen)

    problem = _range_problem(images[list(used)]) if used else ""
    repeated = copies & ~flat & ~noise
    numbers = tuple(repeated.nonzero()[:, 0].tolist())
    return Variety(used, "images", named(repeated), named(flat), named(noise), problem, numbers)


def distinct_samples(samples: Sequence[Tensor], names: Sequence[str], things: str) -> Variety:
    """Which samples other than images count: all but those equal to an earlier one."""
    used: list[int] = []
    for number, sample in enumerate(samples):
        if not any(torch.equal(sample, samples[other]) for other in used):
            used.append(number)
    copies = tuple(name for number, name in enumerate(names) if number not in set(used))
    return Variety(tuple(used), things, copies)


def stability_of(halves: Sequence[Tensor]) -> tuple[int, float]:
    """(directions, stability) of the covariances [D, D] at a place, from two halves of the samples."""
    values = torch.linalg.eigvalsh(torch.stack(list(halves)).mean(dim=0).double())
    directions = int((values > FAINT * values[-1].clamp_min(1e-12)).sum())
    one, two = (correlation_rows(covariance.double()) for covariance in halves)
    return directions, float((one * two).sum(dim=1).mean())


def _cells(pixels: Tensor) -> Tensor:
    """[B, C, n, L]: the n pixels of each of the L cells of a 16 × 16 grid; a cell has at least 4 × 4 pixels."""
    height, width = (min(side, max(4, side // 16)) for side in pixels.shape[-2:])
    size = (height, width)
    return F.unfold(pixels, size, stride=size).unflatten(1, (pixels.shape[1], -1))


def _copies(pixels: Tensor) -> Tensor:
    """[B] bool: whether an image equals an earlier one, perhaps mirrored, re-encoded or with other brightness."""
    views = (F.adaptive_avg_pool2d(side.mean(dim=1, keepdim=True), 16).flatten(1) for side in (pixels, pixels.flip(-1)))
    one, two = (F.normalize(view - view.mean(dim=1, keepdim=True), dim=1) for view in views)
    return (torch.maximum(one @ one.T, one @ two.T) > ALIKE).tril(diagonal=-1).any(dim=1)


def _range_problem(images: Tensor) -> str:
    """What is wrong with the values of the inputs; empty if they are in the range of normalised photographs."""
    spread, mean = float(images.std()), float(images.mean())
    if FED[0] <= spread <= FED[1] and abs(mean) <= FED[1]:
        return ""
    return (
        f"the inputs have mean {mean:.2f} and standard deviation {spread:.2f}. The training inputs had a mean of about "
        f"0 and a standard deviation of about 1. Check mean and std in the model's config.json, and whether the images "
        f"resemble the training images"
    )
