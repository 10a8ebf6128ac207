"""Regions: as torchvision's own Mask R-CNN where nothing is drawn; draws that belong to a sample; exact strides."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.ops import roi_align

from situs.methods.regions import MASK, Proposals, Regions, RegionSampler, mean_over_images

STRIDES = [4.0, 8.0, 16.0, 32.0, 64.0]
SIZE = 64
BOXES = torch.tensor([[6.0, 9.0, 30.0, 41.0], [35.0, 20.0, 60.0, 34.0]])


class Given(nn.Module):
    """A backbone whose maps are there already."""

    out_channels = 8

    def __init__(self, maps: list[Tensor]) -> None:
        super().__init__()
        self.maps = OrderedDict((str(number), each) for number, each in enumerate(maps))

    def forward(self, _: Tensor) -> OrderedDict[str, Tensor]:
        return self.maps


def made(anchors: int = 10**6, regions: int = 10**6) -> tuple[Proposals, Regions, list[Tensor]]:
    torch.manual_seed(0)
    rpn = Proposals(STRIDES, 8, 4.0, anchors, 50).eval()
    heads = Regions(STRIDES, 8, 16, 4, regions, 0.05, 20).eval()
    nn.init.normal_(rpn.head.cls_logits.weight, std=1.0)
    return rpn, heads, [torch.randn(1, 8, int(SIZE / stride), int(SIZE / stride)) for stride in STRIDES]


def peer(rpn: Proposals, heads: Regions, maps: list[Tensor], count: int) -> MaskRCNN:
    """torchvision's model over the same weights, which neither resizes nor normalises."""
    sizes: Any = tuple((int(4 * stride),) for stride in STRIDES)
    return MaskRCNN(
        Given(maps), min_size=SIZE, max_size=SIZE, image_mean=[0.0] * 3, image_std=[1.0] * 3,
        rpn_anchor_generator=AnchorGenerator(sizes, ((0.5, 1.0, 2.0),) * 5), rpn_head=rpn.head,
        rpn_pre_nms_top_n_train=100, rpn_pre_nms_top_n_test=50, rpn_post_nms_top_n_train=50,
        rpn_post_nms_top_n_test=50, rpn_batch_size_per_image=count, box_batch_size_per_image=count,
        box_roi_pool=heads.box_roi_pool, box_head=heads.box_head, box_predictor=heads.box_predictor,
        box_detections_per_img=20,
        mask_roi_pool=heads.mask_roi_pool, mask_head=heads.mask_head, mask_predictor=heads.mask_predictor,
    )  # fmt: skip


def numbered(maps: list[Tensor]) -> dict[str, Tensor]:
    return {str(number): each for number, each in enumerate(maps)}


def truth() -> list[dict[str, Tensor]]:
    masks = torch.zeros(2, SIZE, SIZE, dtype=torch.bool)
    masks[0, 9:41, 6:30] = masks[1, 22:30, 40:60] = True
    return [{"boxes": BOXES, "labels": torch.tensor([1, 3]), "masks": masks}]


def test_what_is_found_is_what_torchvisions_model_finds() -> None:
    rpn, heads, maps = made()
    image = [torch.zeros(3, SIZE, SIZE)]
    # torchvision takes the level of a region from 224 pixels at stride 16, as here 14 strides.
    with torch.no_grad():
        (wanted,) = peer(rpn, heads, maps, 512).eval()(image)
        ((found,), _) = heads(numbered(maps), rpn(maps, [(SIZE, SIZE)])[0], [(SIZE, SIZE)])
    assert len(wanted["boxes"]) == 20
    for name in ("boxes", "labels", "scores"):
        torch.testing.assert_close(found[name], wanted[name])
    torch.testing.assert_close(paste_masks_in_image(found["masks"], found["boxes"], (SIZE, SIZE)), wanted["masks"])


def aligned(masks: Tensor, boxes: Tensor, matched: Tensor, side: int) -> Tensor:
    """What torchvision would hold the masks of regions against, if it did not read them half a pixel too far on."""
    rois = torch.cat([matched[:, None].to(boxes), boxes], dim=1)
    return roi_align(masks[:, None].to(boxes), rois, (side, side), aligned=True)[:, 0]


def test_the_five_losses_of_all_regions_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    rpn, heads, maps = made()
    model = peer(rpn, heads, maps, 10**6).train()
    with monkeypatch.context() as patch:
        patch.setattr("torchvision.models.detection.roi_heads.project_masks_on_boxes", aligned)
        wanted = model([torch.zeros(3, SIZE, SIZE)], truth())
    for each in (rpn, heads):
        each.train()
    keys = torch.tensor([3])
    proposals, found = rpn(maps, [(SIZE, SIZE)], truth(), keys)
    found |= heads.losses(numbered(maps), proposals, [(SIZE, SIZE)], truth(), keys)
    assert found.keys() == wanted.keys() and len(found) == 5
    for name, each in wanted.items():
        torch.testing.assert_close(found[name], each)


def test_no_more_regions_are_chosen_than_asked_and_no_more_objects_than_their_share() -> None:
    labels = torch.tensor([2] * 30 + [0] * 50 + [-1] * 20)
    choose = RegionSampler(20, 0.25, "a")
    choose.keys = torch.tensor([11])
    ((objects,), (others,)) = choose([labels])
    assert int(objects.sum()) == 5 and int(others.sum()) == 15
    assert bool((labels[objects] == 2).all()) and bool((labels[others] == 0).all())
    choose.keys = torch.tensor([11, 12])
    (few, none), (rest, left) = choose([labels[28:], labels[80:]])  # 2 objects, and nothing to choose from
    assert int(few.sum()) == 2 and int(rest.sum()) == 18 and not none.any() and not left.any()


def test_half_of_the_anchors_and_a_quarter_of_the_regions_match_an_object() -> None:
    """As in torchvision's Mask R-CNN."""
    rpn, heads, maps = made(anchors=40, regions=40)
    published = peer(rpn, heads, maps, 40)
    samplers = (
        (rpn.fg_bg_sampler, published.rpn.fg_bg_sampler),
        (heads.fg_bg_sampler, published.roi_heads.fg_bg_sampler),
    )
    for ours, theirs in samplers:
        labels = torch.tensor([1] * 50 + [0] * 50)
        ours.keys = torch.tensor([3])
        counts = [[int(mask.sum()) for (mask,) in chosen] for chosen in (ours([labels]), theirs([labels]))]
        assert counts[0] == counts[1] and sum(counts[0]) == 40


def test_a_choice_belongs_to_the_sample_and_is_fair() -> None:
    labels = torch.tensor([1] * 8 + [0] * 8)
    choose = RegionSampler(8, 0.5, "a")
    choose.keys = torch.arange(400)
    objects, others = choose([labels] * 400)
    choose.keys = torch.tensor([77])
    ((alone,), _) = choose([labels])
    assert torch.equal(alone, objects[77])
    for chosen, among in ((objects, slice(0, 8)), (others, slice(8, 16))):
        shares = torch.stack(chosen)[:, among].double().mean(0)
        assert float((shares - 0.5).abs().max()) < 5 * 0.5 / 400**0.5


def test_strides_need_not_be_whole() -> None:
    """Where a map holds the pixels in the middle of its places, a region pools its own; an anchor stands at its
    place."""
    torch.manual_seed(0)
    strides = [3.5, 7.0, 14.0, 28.0, 56.0]
    heads = Regions(strides, 2, 4, 2, 8, 0.05, 5)
    maps = []
    for stride in strides:
        along = (torch.arange(112 / stride) + 0.5) * stride
        maps.append(torch.stack([along.expand(len(along), -1), along[:, None].expand(-1, len(along))])[None])
    boxes = torch.tensor([[10.0, 20.0, 24.0, 41.0], [7.0, 14.0, 77.0, 80.5], [3.0, 3.0, 31.0, 10.0]])
    pooled = heads.mask_roi_pool(numbered(maps), [boxes], [(112, 112)])  # pyright: ignore[reportOptionalCall]
    shares = (torch.arange(MASK) + 0.5) / MASK
    for own, (left, top, right, bottom) in zip(pooled, boxes.tolist(), strict=True):
        torch.testing.assert_close(own[0], (left + shares * (right - left)).expand(MASK, MASK))
        torch.testing.assert_close(own[1], (top + shares * (bottom - top))[:, None].expand(MASK, MASK))
    rpn = Proposals(strides, 2, 4.0, 8, 10**6)
    rpn.nms_thresh = 2.0  # none is left out
    for layer in (rpn.head.bbox_pred, rpn.head.cls_logits):
        nn.init.zeros_(layer.weight)
    ((found,), _) = rpn(maps, [(112, 112)])
    centre = torch.tensor([31 * 3.5, 5 * 3.5])  # the last but none of the fine places, well inside downwards
    wanted = torch.cat([centre - 7, centre + 7]).clamp(max=112)
    assert bool((found - wanted).abs().amax(1).min() < 1e-4)


def test_boxes_are_float32_whatever_the_maps_are() -> None:
    """In bfloat16 a place behind 256 pixels is off by one and more."""
    rpn, _, _ = made()
    wide = [torch.randn(1, 8, 2, int(2048 / stride)) for stride in STRIDES]
    for layer in (rpn.head.bbox_pred, rpn.head.cls_logits):
        nn.init.zeros_(layer.weight)
    rpn.nms_thresh, rpn._pre_nms_top_n, rpn._post_nms_top_n = 2.0, {"testing": 10**6}, {"testing": 10**6}
    (plain,), _ = rpn(wide, [(64, 2048)])
    with torch.autocast("cpu", torch.bfloat16):
        (half,), _ = rpn([each.bfloat16() for each in wide], [(64, 2048)])
    assert half.dtype == torch.float32 and torch.equal(plain, half)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # where the CPU has no bfloat16
def test_a_region_that_is_not_moved_stays_where_it_is_in_half_precision() -> None:
    _, heads, maps = made()
    heads.score_thresh = 0.0
    nn.init.zeros_(heads.box_predictor.bbox_pred.weight)
    nn.init.zeros_(heads.box_predictor.bbox_pred.bias)
    box = torch.tensor([[10.3, 20.7, 33.1, 47.9]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ((found,), _) = heads(numbered(maps), [box], [(SIZE, SIZE)])
    assert len(found["boxes"]) == 3 and found["scores"].dtype == torch.float32  # one of each class
    torch.testing.assert_close(found["boxes"], box.expand(3, 4))


def test_a_loss_is_the_mean_over_images() -> None:
    found = mean_over_images(
        ("a", "b"), [(torch.tensor(1.0), torch.tensor(2.0)), (torch.tensor(5.0), torch.tensor(2.0))]
    )
    assert {name: float(each) for name, each in found.items()} == {"a": 3.0, "b": 2.0}
