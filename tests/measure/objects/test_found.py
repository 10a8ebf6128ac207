"""What a model says of its input, in the pixels of the file."""

from __future__ import annotations

import torch
from torch.nn import functional

from situs.data.sources.coco import decode_rles
from situs.measure.objects.found import Found, draw_masks, in_the_file


def test_boxes_and_masks_are_those_of_the_file() -> None:
    """A file of 60 × 90 seen at 32 × 48: boxes are 60 / 32 as large there, and a full mask fills its box."""
    said = {
        "boxes": torch.tensor([[8.0, 0.0, 24.0, 16.0], [0.0, 16.0, 48.0, 32.0]]),
        "labels": torch.tensor([1, 0]),
        "scores": torch.tensor([0.75, 0.5]),
        "masks": torch.stack([torch.ones(28, 28), torch.zeros(28, 28)]),
    }
    found = in_the_file(7, said, (32, 48), (60, 90))
    assert torch.equal(found.boxes, torch.tensor([[15.0, 0, 45, 30], [0, 30, 90, 60]], dtype=torch.float64))
    masks = decode_rles(found.rles, (60, 90))
    inside = torch.zeros(60, 90, dtype=torch.bool)
    inside[:30, 15:45] = True
    assert torch.equal(masks[0], inside)
    assert not masks[1].any()
    again = Found.from_line(found.to_line())
    assert again.row == 7 and again.rles == found.rles
    assert all(torch.equal(one, two) for one, two in zip(again[1:4], found[1:4], strict=True))
    none = in_the_file(0, {name: value[:0] for name, value in said.items()}, (32, 48), (60, 90))
    assert none.rles == [] and Found.from_line(none.to_line()).boxes.shape == (0, 4)


def test_half_a_mask_is_half_its_box() -> None:
    mask = torch.zeros(1, 28, 28)
    mask[:, :, :14] = 1
    drawn = draw_masks(mask, torch.tensor([[10.0, 10, 66, 66]]), (80, 80))[0]
    wanted = torch.zeros(80, 80, dtype=torch.bool)
    wanted[10:66, 10:38] = True
    assert torch.equal(drawn, wanted)


def test_a_mask_is_drawn_where_its_box_lies_also_between_pixels() -> None:
    """Against torch's own sampling at each pixel's middle."""
    torch.manual_seed(0)
    masks, (high, wide) = torch.rand(6, 28, 28), (50, 70)
    boxes = torch.rand(6, 4) * torch.tensor([30.0, 20.0, 50.0, 35.0]) - 3
    boxes[:, 2:] += boxes[:, :2] + 8
    y, x = torch.meshgrid(torch.arange(high) + 0.5, torch.arange(wide) + 0.5, indexing="ij")
    for mask, box in zip(masks, boxes, strict=True):
        across, down = (x - box[0]) / (box[2] - box[0]), (y - box[1]) / (box[3] - box[1])
        grid = 2 * torch.stack([across, down], dim=-1)[None] - 1
        wanted = functional.grid_sample(mask[None, None], grid, align_corners=False)[0, 0] > 0.5
        drawn = draw_masks(mask[None], box[None], (high, wide))[0]
        assert wanted.any() and torch.equal(drawn, wanted)
