"""Detection over a backbone: images one by one come to the batch, crowds and empty images, other sizes, layer decay."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_hf, small_method, small_swin, small_vit

from situs.core.when import When
from situs.data.objects import pack_masks
from situs.errors import SitusError
from situs.methods import Batch
from situs.methods.detection import Detection
from situs.train.optim import OptimConfig, groups

SMALL: dict[str, Any] = {"width": 8, "hidden": 8, "anchor": 2.0, "anchors": 16, "proposals": 32, "regions": 16}
SIZE = (32, 48)


def detection(backbone: Any = None, classes: int = 3, **config: Any) -> Detection:
    torch.manual_seed(0)
    method = small_method("detection", backbone or small_vit(SIZE, num_classes=0), classes, **{**SMALL, **config})
    assert isinstance(method, Detection)
    return method


def batch(crowd: bool = False) -> Batch:
    """An image of two objects, one without, and one of a single object, or a crowd beside it."""
    torch.manual_seed(1)
    masks = torch.zeros(3, 2, *SIZE, dtype=torch.bool)
    masks[0, 0, 4:20, 2:18] = masks[0, 1, 10:30, 20:44] = masks[2, 1, 8:24, 8:24] = True
    masks[2, 0, 0:32, 0:48] = crowd
    boxes = torch.tensor([[[2, 4, 18, 20], [20, 10, 44, 30]], [[0] * 4] * 2, [[0, 0, 48, 32], [8, 8, 24, 24]]])
    classes = torch.tensor([[0, 2], [-1, -1], [1 if crowd else -1, 1]])
    targets = {"boxes": boxes.float(), "classes": classes, "masks": pack_masks(masks)}
    targets |= {"crowd": torch.tensor([[False] * 2, [False] * 2, [crowd, False]])}
    return Batch(
        torch.randn(3, 3, *SIZE), torch.tensor([5, 9, 70]), targets | {"sides": torch.tensor([SIZE] * 2 + [(32, 40)])}
    )


def test_images_one_by_one_come_to_the_batch_and_their_five_losses_to_the_loss() -> None:
    method, data = detection(), batch()

    def losses(part: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        found = method(part, method.draw(part, When(seed=3, epoch=1)))
        return found.loss, found.metrics

    loss, each = losses(data)
    names = {"loss_objectness", "loss_rpn_box_reg", "loss_classifier", "loss_box_reg", "loss_mask"}
    assert {*each} == names and all(bool(value > 0) for value in each.values())
    torch.testing.assert_close(torch.stack([*each.values()]).sum(), loss.detach())
    parts = [losses(data.part(slice(image, image + 1))) for image in range(3)]
    torch.testing.assert_close(sum(float(part) for part, _ in parts) / 3, float(loss), rtol=1e-5, atol=1e-5)
    assert float(parts[1][1]["loss_mask"]) == float(parts[1][1]["loss_box_reg"]) == 0.0  # without objects
    assert float(parts[1][1]["loss_objectness"]) > 0 and float(parts[1][1]["loss_classifier"]) > 0
    loss.backward()
    assert [name for name, value in method.named_parameters() if value.grad is None] == []


def test_a_crowd_is_left_out_as_if_it_were_not_there() -> None:
    method = detection()
    with_it, without = batch(crowd=True), batch()
    assert not torch.equal(with_it.targets["masks"], without.targets["masks"])
    draws = method.draw(without, When(seed=0, epoch=0))
    assert torch.equal(method(with_it, draws).loss, method(without, draws).loss)


def test_what_is_not_finite_comes_out_as_a_loss_that_is_not() -> None:
    """And not as an error of some part: the run's own check stops it, with the batch saved."""
    method, data = detection(), batch()
    broken = data._replace(inputs=torch.full_like(data.inputs, torch.nan))
    loss = method(broken, method.draw(data, When(seed=0, epoch=0))).loss
    assert bool(loss.isnan())
    loss.backward()


def test_objects_are_found_inside_the_image_best_first() -> None:
    method = detection(score=0.0, detections=7).eval()
    data = batch()
    found = method.detect(data.inputs, data.targets["sides"])
    assert [len(each["boxes"]) for each in found] == [7, 7, 7]
    for each, (height, width) in zip(found, data.targets["sides"].tolist(), strict=True):
        assert each["boxes"].min() >= 0 and each["boxes"][:, 2].max() <= width and each["boxes"][:, 3].max() <= height
        assert bool((each["scores"].diff() <= 0).all()) and each["masks"].shape == (7, 28, 28)
        assert int(each["labels"].min()) >= 0 and int(each["labels"].max()) < 3 and float(each["masks"].max()) <= 1


def test_a_size_that_patches_do_not_fill_is_filled_up() -> None:
    method = detection(score=0.0).eval()
    cut = batch().inputs[:1, :, :30, :45]
    filled = torch.zeros(1, 3, *SIZE)
    filled[..., :30, :45] = cut
    (one,), (two,) = method.detect(cut), method.detect(filled, torch.tensor([[30, 45]]))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_maps_are_those_of_the_last_layer_or_of_the_stages() -> None:
    method = detection(small_vit((56, 84), name="vit_small_patch14_reg4_dinov2", patch_size=14)).eval()
    inputs = torch.randn(1, 3, 56, 84)
    backbone = method.backbone
    patches = backbone.encode(backbone.embed(inputs), backbone.positions()).patches
    assert [level.block for level in method.levels] == [backbone.depth] and not len(method.norms)
    wanted = method.pyramid([patches.transpose(1, 2).unflatten(2, (4, 6))])
    torch.testing.assert_close(method.maps(inputs), wanted)
    assert [tuple(each.shape[2:]) for each in method.maps(inputs)] == [(16, 24), (8, 12), (4, 6), (2, 3), (1, 2)]
    swin = detection(small_swin((64, 32), depths=(1, 1, 1), heads=(1, 2, 3))).eval()
    assert [tuple(each.shape[2:]) for each in swin.maps(torch.randn(1, 3, 64, 32))] == [(16, 8), (8, 4), (4, 2), (2, 1)]


def test_a_model_of_transformers_with_registers_learns_too() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2}
    method = detection(small_hf("Dinov2WithRegistersModel", image_size=32, patch_size=8, **sizes))
    data = batch()
    targets = data.targets | {"sides": torch.tensor([(32, 32)] * 3), "masks": data.targets["masks"][..., :32]}
    part = Batch(data.inputs[..., :32], data.ids, targets).part(slice(2, 3))
    method(part, method.draw(part, When(seed=0, epoch=0))).loss.backward()
    used = {name for name, value in method.named_parameters() if value.grad is not None and bool(value.grad.any())}
    assert {"backbone.model.embeddings.register_tokens", "pyramid.scales.0.0.weight"} <= used


def test_layers_have_their_rates_and_the_heads_the_highest() -> None:
    method = detection(small_vit(SIZE, depth=3, num_classes=0))
    scales = {name: group["scale"] for group in groups(method, OptimConfig(layer_decay=0.5)) for name in group["names"]}
    assert scales["rpn.head.cls_logits.weight"] == scales["pyramid.smooth.0.0.weight"] == 1.0
    assert scales["roi_heads.mask_predictor.mask_fcn_logits.weight"] == 1.0
    assert scales["backbone.model.blocks.2.mlp.fc1.weight"] == 0.5
    assert scales["backbone.model.patch_embed.proj.weight"] == 0.5**4


@pytest.mark.parametrize("classes", [1, 3])
def test_a_label_is_the_number_of_its_class(classes: int) -> None:
    """torchvision counts the background first."""
    method = detection(classes=classes, score=0.0, detections=4).eval()
    predictor: Any = method.roi_heads.box_predictor
    assert predictor.cls_score.out_features == classes + 1 == predictor.bbox_pred.out_features / 4
    for label in range(classes):
        with torch.no_grad():
            predictor.cls_score.weight.zero_()
            predictor.cls_score.bias.fill_(-9.0)[label + 1] = 9.0
        (found,) = method.detect(batch().inputs[:1])
        assert found["labels"][:1].tolist() == [label] and float(found["scores"][0]) > 0.99


def test_a_class_is_needed_and_patches_are_square() -> None:
    with pytest.raises(SitusError, match="needs at least one class of objects"):
        detection(classes=0)
    flat = small_vit((14, 10), patch_size=(1, 10))  # type: ignore[arg-type]
    with pytest.raises(SitusError, match=r"needs square patches, but .* has 1 × 10"):
        detection(flat)
