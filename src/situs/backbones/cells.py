"""A quarter of an image through a hierarchical model: one unit of each 2x2 cell, so that windows and merges stay whole.

Swin cannot run on arbitrary tokens. But one *unit* (the image region of one output token) of each 2x2 cell can be kept,
and the kept ones put side by side: a dense grid of half the height and width, on which every window and every merge is
whole (Li et al., 2022, arXiv 2205.10063, "uniform sampling"). Each output token is then one unit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Backbone, Features, Stream
from situs.core.position import Positions
from situs.core.tokens import take
from situs.errors import SitusError


def enable_cells(backbone: Backbone) -> None:
    """Prepares a Swin for `encode_cells`; refuses sizes at which a window would not be whole."""
    unit, (rows, columns) = _unit(backbone), backbone.out_grid
    fits = (rows * unit, columns * unit) == backbone.grid and rows % 2 == 0 and columns % 2 == 0
    for depth, stage in enumerate(backbone.model.layers):
        sides = [side // 2 // 2**depth for side in backbone.grid]
        fits = fits and all(
            side % window == 0 for block in stage.blocks for side, window in zip(sides, block.window_size, strict=True)
        )
    if not fits:
        windows = sorted({window for stage in backbone.model.layers for b in stage.blocks for window in b.window_size})
        raise SitusError(
            f"{backbone.name} refuses one patch of each 2x2 cell: half of its {backbone.grid[0]}x{backbone.grid[1]}"
            f" tokens must be a multiple of its windows ({', '.join(map(str, windows))}) in every stage; give it twice"
            " its image size, such as 448 pixels for windows of 7",
            field="data.img_size",
        )
    for stage in backbone.model.layers:
        for block in stage.blocks:
            block.dynamic_mask = True  # the mask of shifted windows follows the input's grid


def encode_cells(
    backbone: Backbone,
    tokens: Tensor,
    units: Tensor,
    table: Tensor | None,
    forgotten: Tensor | None,
    unknown: Tensor | None,
) -> Features:
    """Features of one unit of each 2x2 cell: patches [B, V, D], in the order of `units`.

    tokens: [B, N, D] of the whole image. units: [B, V] positions on `out_grid`, one of each cell, in any order. table:
    [N, D]. forgotten: [V] or [B, V] bool, units whose tokens get `unknown` [D] instead of their rows of the table.
    """
    columns, unit = backbone.out_grid[1], _unit(backbone)
    # The model needs the units laid out cell by cell; they are put back into the caller's order afterwards.
    layout = cell_of(units, columns).argsort(dim=1)
    cell, inner = _compact(backbone, tokens.device)
    source = units.gather(1, layout)[:, cell]  # the unit that each token of the dense grid belongs to
    index = (source // columns * unit + inner // unit) * backbone.grid[1] + source % columns * unit + inner % unit
    places = Positions(None if table is None else take(table[None], index))
    if forgotten is not None:
        places = places.forget(forgotten.expand_as(units).gather(1, layout)[:, cell], unknown)
    z = backbone.assemble(take(tokens, index), places).z
    half = (backbone.grid[0] // 2, backbone.grid[1] // 2)
    swin: Any = backbone
    features = backbone.finish(Stream(swin.run_grid(z, half), 0))
    return Features(features.prefix, take(features.patches, layout.argsort(dim=1)))


def cell_of(places: Tensor, columns: int) -> Tensor:
    """The number of a position's 2x2 cell, on a grid with `columns` columns, row by row."""
    return places // columns // 2 * (columns // 2) + places % columns // 2


def _unit(backbone: Backbone) -> int:
    """Tokens along one side of a unit."""
    return 2 ** (len(backbone.model.layers) - 1)


def _compact(backbone: Backbone, device: torch.device) -> tuple[Tensor, Tensor]:
    """The tokens of the dense half-size grid, row by row: their cells and their numbers within a unit, [N / 4] each."""
    unit, columns = _unit(backbone), backbone.grid[1] // 2
    token = torch.arange(backbone.num_tokens // 4, device=device)
    row, column = token // columns, token % columns
    return row // unit * (columns // unit) + column // unit, row % unit * unit + column % unit
