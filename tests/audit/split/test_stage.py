"""What an attack is judged by: the blocks' own output, the owner's own gradients, scores whose ends are known."""

from __future__ import annotations

import pytest
import torch
from sent import stage
from torch.nn.functional import cross_entropy

from situs.audit.scores.metrics import BEST_PSNR
from situs.audit.split.stage import Scene
from situs.audit.split.view import NONE, Setting
from situs.backbones.base import Stream
from situs.locks.features import parse_defence

STAGE = stage()


def test_the_blocks_see_the_defence_and_nothing_else() -> None:
    logits = STAGE.backbone.model(STAGE.inputs)
    torch.testing.assert_close(STAGE.logits(STAGE.through(NONE)), logits, rtol=0, atol=1e-10)
    answers = logits.argmax(dim=-1)
    kept = STAGE.keeps(NONE)
    assert (kept.cosine, kept.neighbours) == (pytest.approx(1), None)
    assert kept.accuracy == float((answers == STAGE.labels).double().mean())


def test_permutations_change_nothing_of_what_the_blocks_give() -> None:
    setting = Setting(parse_defence("noise=1"), rows=True)
    seen, truth = STAGE.sent(STAGE.z, setting, 0)
    whole = STAGE.through(setting.defence)
    given = STAGE.backbone.blocks(Stream(seen, 1)).z
    torch.testing.assert_close(given, whole[truth.sample, truth.row], rtol=0, atol=1e-10)
    assert not torch.allclose(whole, STAGE.through(NONE), atol=0.1)
    assert STAGE.keeps(setting.defence).cosine < 1 - 1e-6


def test_what_comes_back_is_the_gradient_of_the_owners_loss() -> None:
    out, gradient = STAGE.returned(NONE)
    assert STAGE.labels is not None
    out, by = out.requires_grad_(), 1e-6
    moved = torch.zeros_like(out)
    moved[2, 0, 3] = by
    losses = [cross_entropy(STAGE.logits(out + sign * moved), STAGE.labels) for sign in (1, -1)]
    assert float((losses[0] - losses[1]) / (2 * by)) == pytest.approx(float(gradient[2, 0, 3]), rel=1e-4)
    assert not gradient[:, 1:].any()  # a CLS head


def test_scores_at_their_ends() -> None:
    same = STAGE.scores(STAGE.pictures)
    assert same == {
        "psnr": BEST_PSNR,
        "best psnr": BEST_PSNR,
        "patch psnr": BEST_PSNR,
        "ssim": pytest.approx(1),
        "fsim": pytest.approx(1),
    }
    other = STAGE.scores(1 - STAGE.pictures)
    assert all(other[name] < same[name] for name in same)
    one = STAGE.pictures.clone()
    one[1:] = 0.5
    assert STAGE.scores(one)["best psnr"] == BEST_PSNR > STAGE.scores(one)["psnr"]
    turned = STAGE.scores(STAGE.pictures.unflatten(3, (4, 4)).flip(3).flatten(3, 4))  # columns of patches change places
    assert turned["patch psnr"] == BEST_PSNR and turned["psnr"] < 40


def test_public_and_private_images_are_apart_and_labels_with_the_private() -> None:
    assert len(STAGE.z) == len(STAGE.pictures) == 6 and len(STAGE.patches) == 60
    torch.testing.assert_close(STAGE.pictures, (STAGE.inputs + 1) / 2)
    assert STAGE.labels is not None and STAGE.labels.tolist() == [(60 + n) % 4 for n in range(6)]
    assert STAGE.unlabelled is None


def test_a_scene_sends_the_same_channels_and_other_rows() -> None:
    scene = Scene.of(STAGE, Setting(rows=True, columns=True))
    assert torch.equal(scene.view.truth.channels, STAGE.channels)
    assert torch.equal(scene.again(1).seen, scene.again(1).seen)
    later = scene.again(1)
    assert not torch.equal(later.seen, scene.view.seen) and not torch.equal(later.truth.sample, scene.view.truth.sample)
    clear = later.seen[..., STAGE.channels.argsort()]
    torch.testing.assert_close(clear, STAGE.z[later.truth.sample, later.truth.row], rtol=0, atol=0)
    assert scene.old is None and scene.side is STAGE.side(NONE)
