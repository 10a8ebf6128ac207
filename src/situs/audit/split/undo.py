"""Puts what arrived back: channels, then rows and whose they are. Every attacker who knows the embedding begins so."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.audit.split.borders import Borders
from situs.audit.split.cluster import Clusters, cluster_rows, name_clusters, settle
from situs.audit.split.labels import share_up_to_names
from situs.audit.split.order import PublicSide, assign_places, order_rows, read_pixels, set_apart
from situs.audit.split.stage import Scene
from situs.audit.split.view import Setting, View, counted_words, send
from situs.locks.attacks.columns import recover_columns


class PutBack(NamedTuple):
    """tokens: [n, N, D], patch tokens where they are believed to belong. index: [n, N], of which row of all n · R each
    is. scores: the shares of channels, places and samples that are right, where they were hidden."""

    tokens: Tensor
    index: Tensor
    scores: dict[str, float]

    @property
    def places(self) -> Tensor:
        """[n · N]: the place of each token in turn."""
        return torch.arange(self.index.shape[1]).repeat(len(self.index))

    def patches(self, side: PublicSide) -> Tensor:
        """Pixels [n, N, P] by regression."""
        return read_pixels(self.tokens.flatten(0, 1), self.places, side).unflatten(0, self.index.shape)


def put_back(scene: Scene, side: PublicSide, view: View, *, drifted: bool = False) -> PutBack:
    """Undoes what the client did to a sending. drifted: `side` is of an old embedding, and tokens are clustered first.

    The truth is looked at for the scores alone.
    """
    seen, truth = view
    scores: dict[str, float] = {}
    if scene.setting.columns:
        found = order_of_channels(scene, side, seen)
        scores["channels"] = float((found == truth.channels).double().mean())
        seen = seen[..., found.argsort()]
    index = _rows(scene, side, seen, drifted)
    count, places = index.shape
    row, sample = (each.flatten()[index] for each in (truth.row, truth.sample))
    if scene.setting.rows or scene.exchanging:
        scores["places"] = float((row == len(side.prefix) + torch.arange(places)).double().mean())
    if scene.exchanging:
        scores["samples"] = share_up_to_names(
            torch.arange(count)[:, None].expand_as(sample).flatten(), sample.flatten()
        )
    return PutBack(seen.flatten(0, 1)[index], index, scores)


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


def _grouped(tokens: Tensor, places: Tensor, batch: Tensor, side: PublicSide, borders: Borders) -> Tensor:
    """[B, N]: the rows of a batch by sample and place, patches joined whose borders fit."""
    group = borders.group(read_pixels(tokens, places, side), places, len(batch))
    return torch.empty_like(batch).index_put_((group, places), batch.flatten())


def _clustered(seen: Tensor, side: PublicSide) -> Tensor:
    """The row of the stream that each is, [n, R], clustered by place and then named; too few samples: as they are."""
    prefix = len(side.prefix)
    if (len(seen) - 1) * (seen.shape[1] - prefix) < seen.shape[2]:  # no covariance within clusters
        return order_rows(seen, side)
    return name_clusters(cluster_rows(seen, prefix), side.places, prefix)


def _settled(tokens: list[Tensor], places: list[Tensor], side: PublicSide) -> list[Tensor]:
    """Places of tokens that several samples exchanged, clustered from where an old embedding puts them."""
    if sum(map(len, tokens)) - len(side.places) < tokens[0].shape[1]:
        return places
    of, centres, within = settle(tokens, places, len(side.places))
    return list(name_clusters(Clusters(torch.cat(of), centres, within), side.places, 0).split([len(x) for x in of]))
