from __future__ import annotations

import pytest
import torch
from torch import nn

from situs.backbones import create_backbone
from situs.errors import SitusError
from situs.evaluate.position import position_accuracy_over
from situs.methods import MP3, Batch, MP3Config

RATIOS = (0.0, 0.5, 0.8)


def make(eta: float = 0.5) -> MP3:
    torch.manual_seed(0)
    shape = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    backbone = create_backbone("vit_tiny_patch16_224", img_size=(8, 12), patch_size=4, model_args=shape, drop_path=0.3)
    method = MP3(backbone, MP3Config(mask_ratio=eta))
    for parameter in method.parameters():  # large enough that what a token attends to shows in its logits
        nn.init.normal_(parameter, std=0.5)
    return method


def batches() -> list[Batch]:
    torch.manual_seed(1)
    return [Batch(torch.randn(size, 3, 8, 12), torch.arange(size) + 10 * size) for size in (4, 4, 3)]


def test_each_ratio_is_what_a_method_of_that_ratio_says() -> None:
    method = make(0.5).train()
    found = position_accuracy_over(method, batches(), RATIOS, seed=3)
    assert tuple(found) == RATIOS
    assert len(set(found.values())) > 1  # the ratio matters
    for ratio in RATIOS:
        other = make(ratio)
        other.load_state_dict(method.state_dict())
        other.eval()
        right = 0
        for batch in batches():
            extras = other(batch, other.draw(batch.ids, seed=3, epoch=0)).extras
            right += int((extras["logits"].argmax(-1) == extras["places"]).sum())
        assert found[ratio] == right / (11 * 6)


def test_the_method_is_left_as_it_was() -> None:
    method = make(0.5).train()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    position_accuracy_over(method, batches(), RATIOS)
    assert (method.training, method.config.mask_ratio, method.context) == (True, 0.5, 3)
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())


def test_a_perfect_reader_scores_one_and_chance_is_chance() -> None:
    """Patches that show their own place: a head that reads them is right at every ratio."""
    method = make()
    method.backbone.model.blocks = nn.ModuleList()  # only the embedding and the final norm stay
    method.backbone.model.norm = nn.Identity()
    with torch.no_grad():
        method.backbone.model.patch_embed.proj.weight.zero_()
        method.backbone.model.patch_embed.proj.bias.zero_()
        method.backbone.model.patch_embed.proj.weight[:6, 0].view(6, 16).copy_(torch.eye(6, 16))
        method.position_head.weight.copy_(torch.eye(6, 16))
        method.position_head.bias.zero_()
    images = torch.zeros(2, 3, 8, 12)
    for place in range(6):
        row, column = divmod(place, 3)
        images[:, 0, 4 * row + place // 4, 4 * column + place % 4] = 1.0
    batch = Batch(images, torch.tensor([0, 1]))
    assert position_accuracy_over(method, [batch], RATIOS) == dict.fromkeys(RATIOS, 1.0)
    blank = batch._replace(images=torch.zeros_like(images))
    assert position_accuracy_over(method, [blank], RATIOS) == pytest.approx(dict.fromkeys(RATIOS, 1 / 6))


def test_mistakes_are_named() -> None:
    with pytest.raises(SitusError, match="no samples"):
        position_accuracy_over(make(), [])
    with pytest.raises(SitusError, match=r"mask_ratio=1.0: must be in \[0, 1\)"):
        position_accuracy_over(make(), batches(), (1.0,))
