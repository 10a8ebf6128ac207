"""How well MP3 knows where its patches were, over the share η of patches that are no keys (the paper's Figure 5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from situs.errors import SitusError
from situs.evaluate.inference import evaluating, sum_over_ranks
from situs.methods.base import Batch
from situs.methods.mp3 import MP3
from situs.train.step import autocast

RATIOS = (0.0, 0.25, 0.5, 0.75, 0.9)


def position_accuracy_over(
    method: MP3,
    batches: Iterable[Batch],
    ratios: Sequence[float] = RATIOS,
    *,
    seed: int = 0,
    precision: str = "fp32",
) -> dict[float, float]:
    """η -> share of all patches whose place is guessed right, over one pass, the same draws every time.

    The weights are those of `method`, whatever η it was trained with.
    """
    views = {ratio: method.at(ratio) for ratio in ratios}
    sums: Tensor | None = None
    with evaluating(method):
        for batch in batches:
            hits = torch.stack([_hits(view, batch, seed, precision) for view in views.values()])
            tokens = hits.new_full((1,), float(len(batch.ids) * method.backbone.num_tokens))
            found = torch.cat([hits, tokens])
            sums = found if sums is None else sums + found
    if sums is None:
        raise SitusError("there are no samples to evaluate on (--data)")
    *right, total = sum_over_ranks(sums).tolist()
    return {ratio: hits / total for ratio, hits in zip(views, right, strict=True)}


def _hits(view: MP3, batch: Batch, seed: int, precision: str) -> Tensor:
    draws = view.draw(batch.ids, seed=seed, epoch=0)
    with autocast(batch.images.device, precision):
        extras = view(batch, draws).extras
    return (extras["logits"].argmax(dim=-1) == extras["places"]).sum().double()
