"""UperNet over a backbone: its maps, its loss against a slow one, sizes other than its own, layer decay."""

from __future__ import annotations

import math

import pytest
import torch
from builders import small_method, small_swin, small_vit

from situs.errors import SitusError
from situs.methods import Batch
from situs.methods.segmentation import mask_accuracy, mask_loss
from situs.train.optim import OptimConfig, groups

SMALL = {"width": 16, "auxiliary_width": 16}


def test_the_loss_is_the_mean_over_all_places_and_a_void_adds_nothing() -> None:
    torch.manual_seed(0)
    logits, truth = torch.randn(2, 3, 4, 5, dtype=torch.float64), torch.randint(-1, 3, (2, 4, 5)).to(torch.int16)
    total, right, known = 0.0, 0, 0
    for b in range(2):
        for y in range(4):
            for x in range(5):
                row, own = logits[b, :, y, x].tolist(), int(truth[b, y, x])
                if own >= 0:
                    total -= row[own] - math.log(sum(map(math.exp, row)))
                    right, known = right + (row[own] == max(row)), known + 1
    assert 20 < known < 40
    assert abs(float(mask_loss(logits, truth)) - total / 40) < 1e-6
    assert abs(float(mask_accuracy(logits, truth)) - right / known) < 1e-6
    halves = (mask_loss(logits[:1], truth[:1]) + mask_loss(logits[1:], truth[1:])) / 2
    assert abs(float(halves) - total / 40) < 1e-6  # as ranks and micro-batches come to it
    assert float(mask_loss(logits, torch.full_like(truth, -1))) == 0.0


def test_four_depths_of_a_plain_transformer_at_four_sizes() -> None:
    torch.manual_seed(0)
    backbone = small_vit((16, 24), depth=4)
    method = small_method("segmentation", backbone, 3, **SMALL).eval()
    inputs = torch.randn(2, 3, 16, 24)
    assert [level.block for level in backbone.levels()] == [1, 2, 3, 4]
    assert [tuple(each.shape[2:]) for each in method.maps(inputs)] == [(16, 24), (8, 12), (4, 6), (2, 3)]
    # The third is the features after that block, as a classifier would be given them.
    seen: dict[int, torch.Tensor] = {}
    stream = backbone.assemble(backbone.embed(inputs), backbone.positions())
    backbone.run_layers(stream, None, (seen.__setitem__,))
    wanted = backbone.model.norm(seen[3])[:, 1:].transpose(1, 2).unflatten(2, (4, 6))
    torch.testing.assert_close(method.maps(inputs)[2], wanted)
    assert method.logits(inputs).shape == (2, 3, 16, 24)


def test_the_stages_of_swin_are_its_maps() -> None:
    torch.manual_seed(0)
    backbone = small_swin((64, 32), depths=(1, 2, 1), heads=(1, 2, 3))
    method = small_method("segmentation", backbone, 3, **SMALL).eval()
    inputs = torch.randn(1, 3, 64, 32)
    assert [tuple(level) for level in backbone.levels()] == [(1, 0, 12), (3, 1, 24), (4, 2, 48)]
    maps = method.maps(inputs)
    assert [tuple(each.shape[1:]) for each in maps] == [(12, 16, 8), (24, 8, 4), (48, 4, 2)]
    wanted = backbone.encode(backbone.embed(inputs), backbone.positions()).patches
    torch.testing.assert_close(maps[-1].flatten(2).transpose(1, 2), wanted)
    with pytest.raises(SitusError, match="takes only inputs of the size 64 × 32"):
        method.logits(torch.randn(1, 3, 64, 64))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_another_size_is_seen_with_resampled_positions(name: str) -> None:
    """A model made at that size with the resampled table gives the same."""
    torch.manual_seed(0)
    small, large = (small_vit(size, name=name, patch_size=4, num_classes=0) for size in ((8, 16), (16, 24)))
    method = small_method("segmentation", small, 3, **SMALL).eval()
    twin = small_method("segmentation", large, 3, **SMALL).eval()
    state = {k: v for k, v in method.state_dict().items() if "rope" not in k and "pos_embed" not in k}
    twin.load_state_dict({**twin.state_dict(), **state})
    with torch.no_grad():
        prefix = large.model.pos_embed.shape[1] - 24
        large.model.pos_embed[0, :prefix] = small.model.pos_embed[0, :prefix]
        large.model.pos_embed[0, prefix:] = small.positions((4, 6)).table
    inputs = torch.randn(1, 3, 16, 24)
    torch.testing.assert_close(method.logits(inputs), twin.logits(inputs), rtol=1e-4, atol=1e-5)


def test_layers_have_their_rates_and_the_decoder_the_highest() -> None:
    method = small_method("segmentation", small_vit(depth=3, num_classes=0), 2, **SMALL)
    scales = {name: group["scale"] for group in groups(method, OptimConfig(layer_decay=0.5)) for name in group["names"]}
    assert scales["classifier.weight"] == scales["decoder.fuse.0.weight"] == 1.0
    assert scales["backbone.model.blocks.2.mlp.fc1.weight"] == 0.5
    assert scales["backbone.model.patch_embed.proj.weight"] == 0.5**4


def test_the_auxiliary_head_is_a_choice_and_one_class_is_none() -> None:
    backbone = small_vit(num_classes=0)
    plain = small_method("segmentation", backbone, 2, **SMALL, auxiliary_weight=0.0)
    assert plain.auxiliary is None
    batch = Batch(torch.randn(2, 3, 16, 16), torch.arange(2), {"mask": torch.zeros(2, 16, 16, dtype=torch.int16)})
    torch.manual_seed(0)
    both = small_method("segmentation", backbone, 2, **SMALL, dropout=0.0)
    logits = both.logits(batch.inputs)
    assert float(both(batch, {}).loss) > float(mask_loss(logits, batch.targets["mask"]))
    with pytest.raises(SitusError, match="needs at least two classes"):
        small_method("segmentation", backbone, 1)


def test_the_auxiliary_head_learns_the_same_from_the_third_map() -> None:
    torch.manual_seed(0)
    method = small_method("segmentation", small_vit(16, depth=4), 3, auxiliary_weight=0.3, **SMALL).eval()
    inputs, truth = torch.randn(2, 3, 16, 16), torch.randint(-1, 3, (2, 16, 16)).to(torch.int16)
    found = method(Batch(inputs, torch.arange(2), {"mask": truth}), {})
    said = method.auxiliary(method.maps(inputs)[2])
    beside = mask_loss(torch.nn.functional.interpolate(said, (16, 16), mode="bilinear", align_corners=False), truth)
    torch.testing.assert_close(found.loss, mask_loss(method.logits(inputs), truth) + 0.3 * beside)
