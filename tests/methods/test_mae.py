from __future__ import annotations

import pytest
import torch
from builders import small_vit

from situs.backbones.base import join
from situs.core.position import sincos
from situs.core.when import When
from situs.errors import SitusError
from situs.methods import MAE, Batch, MAEConfig
from situs.methods.mae import reconstruction_loss


def make(**config) -> MAE:
    torch.manual_seed(0)
    backbone = small_vit((8, 12), positions="sincos")
    fields = dict(mask_ratio=0.5, decoder_width=32, decoder_depth=2, decoder_heads=4) | config
    return MAE(backbone, MAEConfig(**fields)).double()


def batch() -> Batch:
    torch.manual_seed(1)
    return Batch(torch.randn(3, 3, 8, 12, dtype=torch.float64), torch.tensor([5, 900, 31]))


def test_loss_matches_an_independent_slow_mae() -> None:
    """One sample at a time, decoder tokens in the natural order of the places, patches by slicing."""
    method = make()
    draws = method.draw(batch(), When(seed=3, epoch=1))
    losses = []
    for b, image in enumerate(batch().inputs):
        kept, dropped = draws["kept"][b].tolist(), draws["dropped"][b].tolist()
        assert sorted(kept + dropped) == list(range(6))
        patches = [image[:, r : r + 4, c : c + 4] for r in (0, 4) for c in (0, 4, 8)]
        tokens = method.backbone.embed(image[None])[:, kept]
        features = method.backbone.encode(tokens, method.backbone.positions().take(torch.tensor(kept)))
        seen = method.decoder.enter(join(features))[0]
        line = [seen[0]]
        for place in range(6):
            token = seen[1 + kept.index(place)] if place in kept else method.mask_token
            line.append(token + sincos((2, 3), 32)[place])
        out = method.decoder.decode(torch.stack(line)[None])[0]
        for place in dropped:
            truth = patches[place].permute(1, 2, 0).flatten()  # (row, column, channel)
            truth = (truth - truth.mean()) / (truth.var() + 1e-6).sqrt()
            losses.append((out[1 + place] - truth).square().mean())
    ours, slow = method(batch(), draws).loss.detach(), torch.stack(losses).mean().detach()
    assert float(ours) == pytest.approx(float(slow), abs=1e-6)


@torch.no_grad()
def test_hidden_patches_reach_the_loss_only_as_targets() -> None:
    method = make()
    draws = method.draw(batch(), When(seed=0, epoch=0))
    before = method(batch(), draws).extras["guesses"]
    images = batch().inputs.clone()
    place = int(draws["dropped"][0, 0])
    images[0, :, 4 * (place // 3) : 4 * (place // 3) + 4, 4 * (place % 3) : 4 * (place % 3) + 4].mul_(-1.0)
    changed = method(batch()._replace(inputs=images), draws)
    assert torch.equal(changed.extras["guesses"], before)
    assert float(changed.loss) != float(method(batch(), draws).loss)


def test_normalised_targets_ignore_a_patchs_brightness() -> None:
    torch.manual_seed(0)
    guesses, target = torch.randn(2, 3, 48), torch.randn(2, 3, 48)
    shifted = 4.0 * target + 7.0
    assert float(reconstruction_loss(guesses, target)) == pytest.approx(
        float(reconstruction_loss(guesses, shifted)), rel=1e-4
    )


def test_mistakes_are_sentences() -> None:
    with pytest.raises(SitusError, match=r"mask_ratio=0: must be in \(0, 1\)"):
        MAEConfig(mask_ratio=0)
    for ratio in (0.17, 0.84):  # one hidden, and one visible
        make(mask_ratio=ratio)
    for ratio in (0.1, 0.999999999):  # nothing hidden, and nothing visible
        with pytest.raises(
            SitusError, match=rf"mask_ratio={ratio}: out of 6 patches, at least one patch must be hidden, and at least"
        ):
            make(mask_ratio=ratio)
    with pytest.raises(SitusError, match="decoder_width=30: must be a multiple of decoder_heads=4"):
        make(decoder_width=30)
    for name, value in (("decoder_heads", 0), ("decoder_depth", -1), ("decoder_width", -32)):
        with pytest.raises(SitusError) as caught:
            make(**{name: value})
        assert (caught.value.field, caught.value.value) == (name, value)
