"""The vector that stands for each place, where a model has one: its table, or what its rotation does to a token.

A relative bias says how two places stand to each other and gives neither a vector, so it is refused, with the reason.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.core.position import Positions, sincos
from situs.errors import SitusError

INSTEAD = "ask `situs evaluate attention` what its heads do with them, `evaluate position` (all) what its features know"


class PositionTable(NamedTuple):
    """kind: in words. rows: the vectors of the places, row by row of `grid`, [N, D] float64 on the CPU."""

    kind: str
    rows: Tensor
    grid: tuple[int, ...]


def tables_of(backbone: Backbone) -> tuple[PositionTable, ...]:
    """What can be analysed of a model's positions: its table, its rotation, or both (EVA-02); never nothing."""
    backbone.require("tokens")
    with torch.enable_grad():  # whether a table is learned shows in its gradient
        places = backbone.positions()
    found, grid = [], (1, *backbone.grid)[-2:]  # a sequence is drawn as one row
    if places.table is not None:
        rows = places.table.detach().double().cpu()
        found.append(PositionTable(_kind_of(rows, grid, places.table.requires_grad), rows, grid))
    if places.rotary is not None:
        found.append(PositionTable("rotation", rotation_features(places.rotary), grid))
    if not found:
        raise SitusError(f"{backbone.name}: {_nothing(backbone, places)}")
    if backbone.num_tokens < 2:
        raise SitusError(f"{backbone.name}: has a single place, which stands to no other", field="img_size")
    for table in found:
        _check_rows(backbone.name, table)
    return tuple(found)


def rotation_features(rotary: Tensor) -> Tensor:
    """The sines and cosines that turn a token at each place, as its vector: [L, 1, H, N, 2d] -> [N, L * H * 2d].

    Turning is all a rotary model does with a place, so these hold whatever it knows of one. They enter products of
    queries and keys and are never added to a token: their lengths and angles are not those of a learned table.
    """
    count = rotary.shape[-2]
    return rotary.detach().double().cpu()[:, 0].movedim(-2, 0).reshape(count, -1)


def reference_tables(count: int, grid: tuple[int, ...], dim: int, seed: int = 0) -> dict[str, Tensor]:
    """Tables of the same shape whose answers are known: sines and cosines of row and column, and random numbers."""
    noise = torch.randn(count, dim, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    even = max(dim - dim % 4, 4)
    return {"sin-cos (reference)": sincos(grid, even).double(), "random (reference)": noise * 0.02}


def _kind_of(rows: Tensor, grid: tuple[int, ...], learned: bool) -> str:
    # Judged by its values: an export does not say whether its table was trained.
    dim = rows.shape[1]
    if dim % 4 == 0 and torch.allclose(rows, sincos(grid, dim).double(), atol=2e-3):
        return "sin-cos table"
    return "learned table" if learned else "fixed table"


def _nothing(backbone: Backbone, places: Positions) -> str:
    if places.bias is not None:
        return f"its positions are biases between pairs of tokens, so that no place has a vector; {INSTEAD}"
    if "rows" in backbone.refusals:
        return f"has no table of positions: {backbone.refusals['rows']}; {INSTEAD}"
    return (
        "has no positions, so there is nothing to analyse; `situs evaluate position` (all) says what its features know"
    )


def _check_rows(name: str, table: PositionTable) -> None:
    if not torch.isfinite(table.rows).all():
        raise SitusError(f"{name}: its {table.kind} holds numbers that are not finite")
    if not table.rows.any():
        raise SitusError(
            f"{name}: its {table.kind} is all zeros (as after a method that never used it, which an export erases), so "
            "there is nothing to analyse"
        )
    if not (table.rows - table.rows[0]).any():
        raise SitusError(f"{name}: every place has the same vector in its {table.kind}, so it tells none from another")
