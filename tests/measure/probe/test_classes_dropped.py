"""The position probe: what is asked, what is hidden, and two cases whose answer is known in advance."""

from __future__ import annotations

import pytest
import torch
from builders import small_swin
from torch import nn

from situs.backbones import Backbone, create_backbone
from situs.errors import SitusError
from situs.measure.probe.classes import dropped_features, follow, probe_position, unknown_position_of
from situs.methods import MJP, MP3, Batch, DropPos, DropPosConfig, MP3Config
from situs.methods.base import Method, UnknownPosition
from situs.methods.mjp import VARIANTS
from situs.models import Model

ZERO = UnknownPosition(None, "a zero vector")
SHAPE = {"depth": 2, "embed_dim": 16, "num_heads": 2}


def make(positions: str = "learned", **fields: object) -> Backbone:
    torch.manual_seed(0)
    args = {"model_args": SHAPE, "patch_size": 2, "positions": positions} | fields
    backbone = create_backbone("vit_tiny_patch16_224", img_size=(8, 8), **args)
    for parameter in backbone.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.5)
    return backbone.eval()


def of(subject: Backbone | Method) -> Model:
    if isinstance(subject, Backbone):
        return Model("model", subject)
    return Model("run", subject.backbone, subject, positions=subject.sees_positions)


def batches(count: int, start: int = 0) -> list[Batch]:
    generator = torch.Generator().manual_seed(start)
    return [Batch(torch.randn(count, 3, 8, 8, generator=generator), start + torch.arange(count))]


@torch.no_grad()
def test_features_are_those_of_one_image_whose_places_are_overwritten() -> None:
    backbone, vector = make(), torch.randn(16)
    (batch,) = batches(5)
    found, places = dropped_features(backbone, batch, UnknownPosition(vector, ""), ratio=0.75, seed=3)
    assert found.shape == (5, 12, 16)
    kept = backbone.model.pos_embed.data.clone()
    for image, features, dropped in zip(batch.inputs, found, places, strict=True):
        assert len(set(dropped.tolist())) == 12
        backbone.model.pos_embed.data = kept.clone()
        backbone.model.pos_embed.data[0, 1 + dropped] = vector
        whole = backbone.model.forward_features(image[None])[0, 1:]
        assert torch.allclose(features, whole[dropped], atol=1e-5)
    backbone.model.pos_embed.data = kept
    assert len({tuple(sorted(row.tolist())) for row in places}) > 1  # each image has its own


@torch.no_grad()
def test_places_that_patches_show_are_read_and_noise_is_not() -> None:
    """Patch number i has a mark of its own in one set; in the other there is nothing but noise and no position."""
    backbone = make("none")
    unknown = unknown_position_of(of(backbone))
    assert not unknown.sighted
    mark = torch.randn(16, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    picture = mark.view(4, 4, 3, 2, 2).permute(2, 0, 3, 1, 4).reshape(3, 8, 8)
    shown = [[Batch(picture + 0.05 * b.inputs, b.ids) for b in batches(60, start)] for start in (0, 100)]
    found = probe_position(backbone, *shown, unknown)
    assert found.score.accuracy > 0.95
    assert found.distance < 0.2
    assert (found.score.count, found.train_count, len(found.score.answers)) == (60 * 12, 60, 16)
    blind = probe_position(backbone, batches(60), batches(60, 100), unknown)
    assert abs(blind.score.accuracy - 1 / 16) < 4.5 * (1 / 16 * 15 / 16 / (60 * 12)) ** 0.5
    assert blind.distance > 1.5
    assert found.guess == pytest.approx(1.53, abs=0.1)  # from an inner place of 4 × 4


def test_weights_stay_and_the_answer_is_the_same_every_time() -> None:
    method = DropPos(make("sincos"), DropPosConfig(decoder_width=16, decoder_heads=2)).train()
    before = {name: tensor.clone() for name, tensor in method.state_dict().items()}
    own = unknown_position_of(of(method))
    one, two = (probe_position(method.backbone, batches(8), batches(6, 50), own, seed=1) for _ in range(2))
    assert torch.equal(one.score.answers, two.score.answers)
    assert one.fitted.weight_decay == two.fitted.weight_decay
    assert method.training
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())
    assert not any(parameter.grad is not None for parameter in method.parameters())


def test_who_learned_a_vector_uses_it_and_lends_it() -> None:
    method = DropPos(make("sincos"), DropPosConfig(decoder_width=16, decoder_heads=2))
    own = unknown_position_of(of(method))
    assert own.vector is not None
    assert torch.equal(own.vector, method.mask_token)
    jigsaw = MJP(make(), VARIANTS["J"])
    assert torch.equal(unknown_position_of(of(jigsaw)).vector, jigsaw.unknown)  # type: ignore[arg-type]
    assert "zero vector" in unknown_position_of(of(make())).words
    assert "no positions" in unknown_position_of(of(MP3(make(), MP3Config()))).words
    held = follow({"before": of(method), "after": of(make()), "mp3": of(MP3(make(), MP3Config()))})
    assert torch.equal(held["after"].vector, method.mask_token)  # type: ignore[arg-type]
    assert "before's vector for unknown positions" in held["after"].words
    assert held["mp3"].vector is None
    plain = follow({"before": of(make()), "after": of(make())})
    assert plain["after"].vector is None


@torch.no_grad()
def test_swin_loses_a_whole_output_token() -> None:
    torch.manual_seed(0)
    backbone = small_swin(8, width=8, patch_size=1, positions="learned", model_args={"window_size": 2}).eval()
    (batch,) = batches(2)
    seen = {}

    def assemble(tokens: torch.Tensor, positions: object, mask: object = None) -> object:
        seen["table"] = positions.table  # type: ignore[attr-defined]
        return type(backbone).assemble(backbone, tokens, positions, mask)  # type: ignore[arg-type]

    backbone.assemble = assemble  # type: ignore[method-assign, assignment]
    found, places = dropped_features(backbone, batch, UnknownPosition(torch.full((8,), 7.0), ""), seed=0)
    assert found.shape == (2, 12, 16)
    lost = (seen["table"] == 7.0).all(-1).view(2, 4, 2, 4, 2)
    assert torch.equal(lost.all(4).all(2), lost.any(4).any(2))
    for cells, named in zip(lost[:, :, 0, :, 0].flatten(1), places, strict=True):
        assert cells.nonzero().flatten().tolist() == sorted(named.tolist())


def test_mistakes_are_named() -> None:
    backbone = make()
    with pytest.raises(SitusError, match="convolutional network and has no tokens"):
        probe_position(create_backbone("test_resnet", num_classes=3), batches(2), batches(2), ZERO)
    with pytest.raises(SitusError, match=r"ratio=0.0: must be in \(0, 1\]"):
        probe_position(backbone, batches(2), batches(2), ZERO, ratio=0.0)
    with pytest.raises(SitusError, match="drops none of 16"):
        probe_position(backbone, batches(2), batches(2), ZERO, ratio=0.01)
    with pytest.raises(SitusError, match="no samples to fit"):
        probe_position(backbone, [], batches(2), ZERO)
