"""The unlabelled samples of the attacker `images`: images, or texts for a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.tokens import pair
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.data.sampler import epoch_order
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.files import read_lines
from situs.locks.attacks.grams import at_places, shifted
from situs.locks.attacks.variety import ENOUGH, Variety, distinct_samples, stability_of, varied_images
from situs.models.prepared import described, samples_for

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
    if not len(source):
        raise SitusError(f"images={path}: holds no images", field="images")
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
