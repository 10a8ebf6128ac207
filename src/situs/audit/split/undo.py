"""Puts what arrived back: channels, then rows and whose they are. Every attacker who knows the embedding begins so."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.split.borders import Borders
from situs.audit.split.cluster import Clusters, cluster_rows, name_clusters, settle
from situs.audit.split.joint import Joint, Whole, chosen
from situs.audit.split.labels import share_up_to_names
from situs.audit.split.order import PublicSide, assign_places, order_rows, read_pixels, set_apart
from situs.audit.split.stage import Scene
from situs.audit.split.view import Setting, View, counted_words, send
from situs.locks.attacks.columns import recover_columns

ALONE = Joint()
"""Each token for itself."""


class PutBack(NamedTuple):
    """tokens: [n, N, D], patch tokens where they are believed to belong. index: [n, N], of which row of all n · R each
    is. scores: the shares of channels, places and samples that are right, where they were hidden. expected: [n, N, D],
    the mean of the tokens that each place may have; of one sure token it is that."""

    tokens: Tensor
    index: Tensor
    scores: dict[str, float]
    expected: Tensor

    @property
    def places(self) -> Tensor:
        """[n · N]: the place of each token in turn."""
        return torch.arange(self.index.shape[1]).repeat(len(self.index))

    def patches(self, side: PublicSide, joint: Joint = ALONE) -> Tensor:
        """Pixels [n, N, P] by regression, with what the whole image adds."""
        return joint.read(self.expected, side)


def put_back(scene: Scene, side: PublicSide, view: View, *, joint: Joint = ALONE, drifted: bool = False) -> PutBack:
    """Undoes what the client did to a sending. drifted: `side` is of an old embedding, and tokens are clustered first.

    joint: what neighbours tell of an order. The truth is looked at for the scores alone.
    """
    seen, truth = view
    scores: dict[str, float] = {}
    if scene.setting.columns:
        found = order_of_channels(scene, side, seen)
        scores["channels"] = float((found == truth.channels).double().mean())
        seen = seen[..., found.argsort()]
    index, expected = _rows(scene, side, seen, drifted), None
    if scene.setting.rows and joint.orders is not None:
        index, expected = _together(seen, side, joint.orders)
    count, places = index.shape
    row, sample = (each.flatten()[index] for each in (truth.row, truth.sample))
    if scene.setting.rows or scene.exchanging:
        scores["places"] = float((row == len(side.prefix) + torch.arange(places)).double().mean())
    if scene.exchanging:
        scores["samples"] = share_up_to_names(
            torch.arange(count)[:, None].expand_as(sample).flatten(), sample.flatten()
        )
    tokens = seen.flatten(0, 1)[index]
    return PutBack(tokens, index, scores, tokens if expected is None else expected)


def order_of_channels(scene: Scene, side: PublicSide, seen: Tensor) -> Tensor:
    """[D]: the clear channel of each, by what public images show under the same defence."""
    given = {"prefix": len(side.prefix), "grid": scene.stage.grid, "scale": side.scale}
    public = send(side.tokens, Setting(scene.setting.defence), counted_words(scene.stage.seed, 3), **given).seen
    return recover_columns(seen, public, side.prefix).q


def _rows(scene: Scene, side: PublicSide, seen: Tensor, drifted: bool) -> Tensor:
    count, rows, _ = seen.shape
    prefix = len(side.prefix)
    every = torch.arange(count * rows).view(count, rows)
    if not (scene.setting.rows or scene.exchanging):
        return every[:, prefix:]
    if not scene.exchanging:
        found = _clustered(seen, side) if drifted else order_rows(seen, side)
        return torch.empty_like(every).scatter_(1, found, every)[:, prefix:]
    rest = torch.stack([set_apart(each, side.prefix)[1] for each in seen])
    batches = list(every.gather(1, rest).split(scene.size))
    tokens = [seen.flatten(0, 1)[batch.flatten()] for batch in batches]
    places = [assign_places(each, side, len(batch)) for each, batch in zip(tokens, batches, strict=True)]
    if drifted:
        places = _settled(tokens, places, side)
    given = zip(tokens, places, batches, strict=True)
    return torch.cat([_grouped(each, found, batch, side, scene.stage.borders) for each, found, batch in given])


def _together(seen: Tensor, side: PublicSide, whole: Whole) -> tuple[Tensor, Tensor]:
    """([n, N], which of all n · R rows each place has; [n, N, D], what it may have in the mean), neighbours judged."""
    rest = torch.stack([set_apart(each, side.prefix)[1] for each in seen])
    tokens = seen.gather(1, rest[..., None].expand(-1, -1, seen.shape[2]))
    belief = whole.beliefs(tokens)
    rows = torch.arange(len(seen))[:, None] * seen.shape[1] + rest
    return rows.gather(1, chosen(belief)), belief @ tokens


def _grouped(tokens: Tensor, places: Tensor, batch: Tensor, side: PublicSide, borders: Borders) -> Tensor:
    """[B, N]: the rows of a batch by sample and place, patches joined whose borders fit."""
    group = borders.group(read_pixels(tokens, places, side), places, len(batch))
    return torch.empty_like(batch).index_put_((group, places), batch.flatten())


def unclustered(count: int, places: int, width: int) -> bool:
    """Whether so many samples are too few for a covariance within clusters of their tokens."""
    return (count - 1) * places < width


def _clustered(seen: Tensor, side: PublicSide) -> Tensor:
    """The row of the stream that each is, [n, R], clustered by place and then named; too few samples: as they are."""
    prefix = len(side.prefix)
    if unclustered(len(seen), seen.shape[1] - prefix, seen.shape[2]):
        return order_rows(seen, side)
    return name_clusters(cluster_rows(seen, prefix), side.places, prefix)


def _settled(tokens: list[Tensor], places: list[Tensor], side: PublicSide) -> list[Tensor]:
    """Places of tokens that several samples exchanged, clustered from where an old embedding puts them."""
    if unclustered(sum(map(len, tokens)) // len(side.places), *side.places.shape):
        return places
    of, centres, within = settle(tokens, places, len(side.places))
    return list(name_clusters(Clusters(torch.cat(of), centres, within), side.places, 0).split([len(x) for x in of]))
