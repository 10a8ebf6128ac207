"""Tests of situs.data.objects."""

from __future__ import annotations

import pytest
import torch

from situs.data.batch import VOID
from situs.data.objects import ObjectConfig, extents, objects_of, pack_masks, unpack_masks
from situs.errors import SitusError


@pytest.mark.parametrize("count", [0, 1, 8, 11])
def test_masks_packed_eight_to_a_byte_come_back_by_number(count: int) -> None:
    masks = torch.rand(2, count, 5, 7, generator=torch.Generator().manual_seed(count)) < 0.5
    packed = pack_masks(masks)
    assert packed.shape == (2, -(-count // 8), 5, 7)
    assert packed.dtype == torch.uint8
    which = torch.arange(count).flip(0)
    assert torch.equal(unpack_masks(packed[1], which), masks[1].flip(0))


def test_objects_of_a_batch_have_no_padding_and_crowds_only_when_asked_for() -> None:
    masks = torch.rand(2, 3, 4, 4) < 0.5
    targets = {
        "boxes": torch.arange(24.0).view(2, 3, 4),
        "classes": torch.tensor([[4, VOID, 2], [VOID, VOID, VOID]]),
        "crowd": torch.tensor([[False, False, True], [False, False, False]]),
        "masks": pack_masks(masks),
        "sides": torch.tensor([[4, 3], [2, 4]]),
    }
    first, second = objects_of(targets)
    assert first.classes.tolist() == [4]
    assert torch.equal(first.masks, masks[0, :1])
    assert torch.equal(first.boxes, targets["boxes"][0, :1])
    assert (first.sides, second.sides) == ((4, 3), (2, 4))
    assert second.boxes.shape == (0, 4)
    assert second.masks.shape == (0, 4, 4)
    both = objects_of(targets, crowd=True)[0]
    assert both.classes.tolist() == [4, 2]
    assert both.crowd.tolist() == [False, True]
    assert torch.equal(both.masks, masks[0, [0, 2]])


def test_names_of_classes_differ() -> None:
    with pytest.raises(SitusError, match="names that differ"):
        ObjectConfig(("cat", "cat"))


def test_extents_are_the_boxes_around_masks() -> None:
    masks = torch.rand(2, 11, 6, 9, generator=torch.Generator().manual_seed(3)) < 0.08
    masks[1, 4] = False
    boxes = extents(pack_masks(masks), 11)
    assert boxes.shape == (2, 11, 4)
    for found, mask in zip(boxes.flatten(0, 1), masks.flatten(0, 1), strict=True):
        rows, columns = mask.nonzero().unbind(1)
        if len(rows):
            ends = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert found.tolist() == [int(each) for each in ends]
        else:
            assert found[0] == found[2] and found[1] == found[3]
    assert extents(pack_masks(masks[:, :0]), 0).shape == (2, 0, 4)
