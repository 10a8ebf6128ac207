"""What the attacker `images` of `audit lock` looks at: unlabelled images, or texts for a model of words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.tokens import pair
from situs.data.loader import make_loader
from situs.data.sampler import epoch_order
from situs.data.sources import open_source
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.files import read_lines
from situs.locks.attacks.grams import shifted
from situs.models.prepared import described, images_for

LONGEST_TEXT = 128
"""Tokens of a text that are looked at."""


@dataclass(frozen=True)
class Samples:
    """batches: images [B, C, H, W], shifted and mirrored, or token ids [1, N]. each: one by one, as they are.

    had: what they are, in words.
    """

    batches: Iterable[Tensor]
    each: tuple[Tensor, ...]
    had: str


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
    data = images_for(backbone, told.get("pretrained_cfg", {}), str(path), told=told.get("situs", {}))
    assert data is not None  # it has channels
    source = Subset(open_source(str(path), labels=False, **data.wanted()), count)
    if not len(source):
        raise SitusError(f"images={path}: holds no images", field="images")
    data = replace(data, crop_share=1.0, batch=min(count, 64), workers=0)  # all that there is to see
    whole = torch.cat([batch.inputs for batch in make_loader(data, None, source=source)])
    return Samples(shifted(whole, pair(backbone.input.patch)), whole.split(1), f"{len(whole)} unlabelled images")


def _texts(folder: Path, backbone: Backbone, path: Path, count: int) -> Samples:
    from situs.backbones.hf.text import token_ids  # transformers is an extra

    lines = read_lines(path, "texts")
    chosen = [lines[row] for row in epoch_order(0, 0, len(lines))[:count].sort().values.tolist()]
    longest = min(LONGEST_TEXT, backbone.num_tokens)
    coded = token_ids(folder, chosen, longest)
    each = tuple(torch.tensor([ids]) for ids in coded if ids)
    return Samples(each, each, f"{len(chosen)} unlabelled texts")
