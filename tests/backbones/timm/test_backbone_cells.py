from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import SWIN, small_swin
from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.timm.backbone import cell_of, enable_cells, encode_cells
from situs.core.position import Positions
from situs.errors import SitusError


def swin(size: tuple[int, int], window: int = 2, **fields: Any) -> Any:
    torch.manual_seed(0)
    shape = dict(depths=(2, 2, 1, 1), width=24, heads=(2, 2, 2, 2), model_args={"window_size": window})
    backbone = small_swin(size, **shape, **fields).double().eval()
    for parameter in backbone.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return backbone


@pytest.mark.parametrize("positions", ["learned", None])
@torch.no_grad()
def test_a_quarter_of_the_image_is_a_half_size_image(positions: str | None) -> None:
    """The same weights in timm's Swin of half the size, over images laid together by slicing."""
    whole, half = swin((128, 256), positions=positions), swin((64, 128), positions=positions)
    half.model.load_state_dict(whole.model.state_dict())
    enable_cells(whole)
    images = torch.randn(2, 3, 128, 256, dtype=torch.float64)
    # One of each 2x2 cell of the 4x8 units, given in an order that is not the cells'.
    units = torch.tensor([[19, 0, 3, 12, 7, 24, 21, 31], [16, 18, 20, 22, 9, 11, 13, 15]])
    forgotten = torch.tensor([True, False, False, True, False, False, False, True])
    unknown = torch.randn(24, dtype=torch.float64)
    ours = encode_cells(whole, whole.embed(images), units, whole.table, forgotten, unknown)
    for b in range(2):
        small = torch.zeros(1, 3, 64, 128, dtype=torch.float64)
        table = torch.zeros(16, 32, 24, dtype=torch.float64)
        cells = {}
        for number, unit in enumerate(units[b].tolist()):
            row, column = unit // 8, unit % 8
            r, c = row // 2, column // 2
            cells[number] = r * 4 + c
            small[0, :, 32 * r : 32 * r + 32, 32 * c : 32 * c + 32] = images[
                b, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32
            ]
            rows: Tensor = torch.zeros(8, 8, 24, dtype=torch.float64)
            if whole.table is not None:
                rows = whole.table.view(32, 64, 24)[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            table[8 * r : 8 * r + 8, 8 * c : 8 * c + 8] = unknown if forgotten[number] else rows
        slow = half.encode(half.embed(small), Positions(table=table.view(-1, 24))).patches[0]
        for number, cell in cells.items():
            assert torch.allclose(ours.patches[b, number], slow[cell], atol=1e-10)


@torch.no_grad()
def test_the_whole_image_runs_as_before() -> None:
    backbone = swin((128, 256))
    images = torch.randn(1, 3, 128, 256, dtype=torch.float64)
    before = backbone(images)
    enable_cells(backbone)
    assert torch.equal(backbone(images), before)


def test_cells_count_row_by_row() -> None:
    assert cell_of(torch.arange(16), 4).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 3, 3, 2, 2, 3, 3]


def test_sizes_that_break_windows_are_refused() -> None:
    for size, window in (((224, 224), 7), ((128, 128), 4)):
        with pytest.raises(SitusError, match=f"one patch of each 2x2 cell.* In every stage.* window .*{window}"):
            enable_cells(swin(size, window))
    with torch.device("meta"):
        enable_cells(create_backbone(SWIN, img_size=448))
    with pytest.raises(SitusError, match="no tokens"):
        create_backbone("test_resnet").ready_to_select(4)
