"""What the attacker `images` of `audit lock` looks at: unlabelled images, or texts for a model of words."""

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
from situs.locks.attacks.variety import ENOUGH, Variety, look_at, told_by, unlike
from situs.models.prepared import described, samples_for

LONGEST_TEXT = 128
"""Tokens of a text that are looked at."""


@dataclass(frozen=True)
class Samples:
    """each: images [1, C, H, W] or token ids [1, N]. had: what they are, in words. variety: which of them count."""

    each: tuple[Tensor, ...]
    had: str
    variety: Variety
    patch: tuple[int, int] | None = None

    @property
    def batches(self) -> Iterable[Tensor]:
        """Images [B, C, H, W], shifted and mirrored, or token ids [1, N].

        Those that count and their copies, unless none does."""
        chosen = sorted((*self.variety.kept, *self.variety.again))
        return self._batched([self.each[number] for number in chosen] or self.each)

    @property
    def _kept(self) -> list[Tensor]:
        return [self.each[number] for number in self.variety.kept]

    def _batched(self, some: Sequence[Tensor]) -> Iterable[Tensor]:
        return some if self.patch is None else shifted(torch.cat(list(some)), self.patch)

    def doubt(self, backbone: Backbone, groups: Sequence[Group]) -> str:
        """Why these samples are not enough to judge the attacker `images` by; empty where they are."""
        if len(self.variety.kept) < ENOUGH:
            return self.variety.doubt(0, 0.0, backbone.dim)
        halves = [at_places(backbone, groups, self._batched(self._kept[start::2])) for start in (0, 1)]
        return self.variety.doubt(*told_by(halves), backbone.dim)


def _samples(each: Sequence[Tensor], variety: Variety, patch: tuple[int, int] | None = None) -> Samples:
    count, kept = len(each), len(variety.kept) + len(variety.again)
    of = f" of {count}" if 0 < kept < count else ""
    had = f"{kept or count} unlabelled {variety.things}{of}"
    return Samples(tuple(each), had, variety, patch)


def read_samples(folder: Path, backbone: Backbone, given: Mapping[str, Path], count: int) -> Samples:
    """The `images` or `texts` that are given, as this model takes them; at most `count`, the same every time."""
    [(kind, path)] = given.items()
    wanted, other = ("texts", "images") if backbone.input.shape is None else ("images", "texts")
    if kind != wanted:
        raise SitusError(f"{kind}={path}: {backbone.name} takes {wanted}, not {other}", field=wanted)
    return (_images if kind == "images" else _texts)(folder, backbone, path, count)


def _images(folder: Path, backbone: Backbone, path: Path, count: int) -> Samples:
    assert backbone.input.patch is not None
    told = described(folder, backbone)
    data = samples_for(backbone, told, str(path))
    assert data is not None  # it has channels
    source = Subset(open_source(data, labels=False), count)
    if not len(source):
        raise SitusError(f"images={path}: holds no images", field="images")
    data = replace(data, crop_share=1.0, batch=min(count, 64), workers=0)  # all that there is to see
    batches = list(make_loader(data, None, source=source))
    whole = torch.cat([batch.inputs for batch in batches])
    names = [source.key(int(row)) for batch in batches for row in batch.ids]
    each, patch = whole.split(1), pair(backbone.input.patch)
    if not data.modality.pixels:  # no picture that looks like another
        return _samples(each, unlike(each, names, data.modality.things), patch)
    mean, std = (torch.tensor(part)[:, None, None] for part in data.normalisation)
    return _samples(each, look_at(whole, whole * std + mean, names), patch)


def _texts(folder: Path, backbone: Backbone, path: Path, count: int) -> Samples:
    from situs.backbones.hf.text import token_ids  # transformers is an extra

    lines = read_lines(path, "texts")
    chosen = [lines[row] for row in epoch_order(0, 0, len(lines))[:count].sort().values.tolist()]
    longest = min(LONGEST_TEXT, backbone.num_tokens)
    coded = token_ids(folder, chosen, longest)
    some = [(torch.tensor([ids]), text) for ids, text in zip(coded, chosen, strict=True) if ids]
    each = [ids for ids, _ in some]
    return _samples(each, unlike(each, [repr(text[:40]) for _, text in some], "texts"))
