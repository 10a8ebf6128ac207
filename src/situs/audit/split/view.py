"""What the server of split learning is sent, and, apart from it, the truth that attacks are judged by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.random import bits
from situs.errors import SitusError
from situs.locks.equivariance.sample import row_leak, row_refusal
from situs.locks.features import Defence, Words, defend, exchange_order, row_orders

PIECE = 32
"""Samples that are embedded at a time."""


NONE = Defence()


@dataclass(frozen=True)
class Setting:
    """What the client does to the tokens it sends. rows, columns: whether it permutes them."""

    defence: Defence = NONE
    rows: bool = False
    columns: bool = False

    def __str__(self) -> str:
        parts = [] if self.defence.kind == "none" else [str(self.defence)]
        parts += [name for name in ("rows", "columns") if getattr(self, name)]
        return " + ".join(parts) or "none"


class Truth(NamedTuple):
    """Of each row that was sent, the sample and the row of the stream it is; of each channel, the clear one.

    sample, row: [n, R]. channels: [D].
    """

    sample: Tensor
    row: Tensor
    channels: Tensor


class View(NamedTuple):
    """What arrived, [n, R, D], and the truth about it."""

    seen: Tensor
    truth: Truth


def counted_words(seed: int, *parts: int) -> Words:
    """Words for a measurement, that anyone can draw again; an owner's come from a key."""

    def words(purpose: str, count: int) -> Tensor:
        stream = f"split:{purpose}:{':'.join(map(str, parts))}"
        return bits(seed, 0, torch.zeros(1, dtype=torch.long), stream, (count,)).flatten()

    return words


def check_places(backbone: Backbone) -> None:
    """Refuses a model whose blocks are told places beside the tokens: no order of rows hides them from its server."""
    if (why := row_refusal(backbone) or row_leak(backbone)) is not None:
        raise SitusError(f"{backbone.name}: no order of rows hides places from its server, nothing to attack: {why}")


@torch.no_grad()
def streams(backbone: Backbone, images: Iterable[Tensor]) -> Tensor:
    """The stream at the entrance of the blocks, [n, R, D] float64, of batches of images."""
    check_places(backbone)
    positions = backbone.positions()
    return torch.cat([backbone.assemble(backbone.embed(each), positions).z.double().cpu() for each in images])


@torch.no_grad()
def send(
    z: Tensor, setting: Setting, words: Words, *, prefix: int, grid: tuple[int, ...], scale: float,
    channels: Tensor | None = None,
) -> View:  # fmt: skip
    """The streams z [n, R, D] as one batch that a client with these settings sends.

    scale: what a noise's σ is a multiple of. channels: [D], the key's order, which stays from step to step while rows
    get a new one; None draws one.
    """
    count, rows, width = z.shape
    sample = torch.arange(count)[:, None].expand(count, rows).clone()
    row = torch.arange(rows).expand(count, rows).clone()
    seen, _ = defend(z, setting.defence, words, prefix=prefix, grid=grid, scale=scale)
    if setting.defence.kind == "batch-shuffle":
        size = int(setting.defence.strength) or count
        index = exchange_order(words, count, rows - prefix, size)
        for each in (sample, row):
            each[:, prefix:] = each[:, prefix:].reshape(-1)[index].view(count, rows - prefix)
    if setting.rows:
        order = row_orders(words, count, rows)
        seen = seen.gather(1, order[..., None].expand_as(seen))
        sample, row = sample.gather(1, order), row.gather(1, order)
    if not setting.columns:
        channels = torch.arange(width)
    elif channels is None:
        channels = words("columns", width).argsort(stable=True)
    return View(seen[..., channels], Truth(sample, row, channels))
