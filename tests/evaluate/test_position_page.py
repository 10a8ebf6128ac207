"""A grid with cells that cannot be: the page says why, counts the others, and draws a dash."""

from __future__ import annotations

import torch

from situs.backbones import create_backbone
from situs.evaluate.position import Cell, PositionGrid
from situs.evaluate.position_page import grid_finding, grid_page, grid_table
from situs.methods import DropPos, DropPosConfig


def test_missing_cells_are_said_and_not_counted() -> None:
    torch.manual_seed(0)
    shape = {"depth": 1, "embed_dim": 16, "num_heads": 2}
    backbone = create_backbone("vit_tiny_patch16_224", img_size=8, patch_size=2, model_args=shape, positions="sincos")
    method = DropPos(backbone, DropPosConfig(decoder_width=16, decoder_heads=2))
    reason = "mask_ratio=0.5: must be 0.75 on swin"
    cells = (Cell(0.5, 0.25, None, None, None, reason), Cell(0.75, 0.25, 4, 1, 0.2), Cell(0.75, 0.5, 4, 2, 0.6))
    grid = PositionGrid((*cells[:1], Cell(0.5, 0.5, None, None, None, reason), *cells[1:]), 10, 16)
    assert grid.mean == 0.4
    said = grid_finding(grid)
    assert said == (
        "The mean position accuracy over 2 of 4 cells is 40.00 %, 6.4 times chance (6.25 %): "
        "from 20.00 % (γ = 0.75, γ_pos = 0.25) to 60.00 % (γ = 0.75, γ_pos = 0.5)."
    )
    page, pictures = grid_page(grid, method, "swin", {})
    text = page.render()
    assert f"Some cells cannot be measured: {reason}." in text
    assert said in text
    assert pictures["grid"].startswith(b"\x89PNG")
    header, rows = grid_table(grid)
    assert [row[-1] for row in rows] == [None, None, "20.00", "60.00"]
    assert len(header) == 5
