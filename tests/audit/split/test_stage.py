"""What is sent is what the truth says it is, and models that no order of rows hides are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from builders import small_vit
from sent import classifier, pictures, sent, stage, streams_of
from sklearn.linear_model import Ridge
from sklearn.model_selection import LeaveOneOut
from sklearn.neighbors import KNeighborsClassifier
from torch.nn.functional import cosine_similarity, cross_entropy

from situs.audit.scores import BEST_PSNR
from situs.audit.split.stage import (
    NONE,
    Scene,
    Stage,
    check_places,
    cosine,
    leave_one_out_knn,
    leave_one_out_probe,
    neighbours,
    streams,
)
from situs.backbones.base import Stream
from situs.errors import SitusError
from situs.locks.veil import Veil, parse_veil
from situs.models import open_model


@pytest.mark.parametrize("defence", ["none", "batch-shuffle=2", "batch-shuffle=4", "batch-shuffle"])
@pytest.mark.parametrize("permute", [(), ("rows",), ("columns",), ("rows", "columns")])
def test_the_truth_names_every_number_that_was_sent(defence: str, permute: tuple[str, ...]) -> None:
    z = streams_of(5).z
    seen, truth = sent(z, defence, *permute)
    assert torch.equal(seen, z[truth.sample, truth.row][..., truth.channels])
    assert torch.equal(truth.channels.sort().values, torch.arange(z.shape[2]))
    assert ("columns" in permute) != torch.equal(truth.channels, torch.arange(z.shape[2]))
    own = truth.sample == torch.arange(len(z))[:, None]
    assert own[truth.row == 0].all()  # the prefix stays with its sample
    assert own.all() == (defence == "none")
    if defence == "none":
        assert ("rows" in permute) != torch.equal(truth.row, torch.arange(z.shape[1]).expand_as(truth.row))


def test_another_step_has_other_rows_and_the_same_words_the_same() -> None:
    z = streams_of(3).z
    one, again, other = (sent(z, "none", "rows", number=number) for number in (0, 0, 1))
    assert torch.equal(one.seen, again.seen) and not torch.equal(one.truth.row, other.truth.row)


def test_a_setting_says_what_it_is() -> None:
    said = [Veil(), Veil("noise", 0.2, rows=True), Veil(rows=True, columns=True)]
    assert list(map(str, said)) == ["none", "noise=0.2 + rows", "rows + columns"]


def test_streams_are_what_enters_the_blocks() -> None:
    backbone, images = classifier(), pictures(3)
    entered = []
    hook = backbone.model.blocks[0].register_forward_pre_hook(lambda _, given: entered.append(given[0]))
    backbone.model(images)
    hook.remove()
    torch.testing.assert_close(streams(backbone, images.split(2)), entered[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("vit_small_patch16_rope_224", "RoPE: its coordinates"),
        ("vit_small_patch16_rope_ape_224", "RoPE: its coordinates"),
        ("vit_relpos_small_patch16_224", "relative bias"),
    ],
)
def test_places_that_go_beside_the_tokens_are_refused(name: str, why: str) -> None:
    backbone = small_vit(32, name=name, depth=1, width=24, heads=2, patch_size=None)
    with pytest.raises(SitusError, match=f"this audit does not apply, .* can hide their order: .*{why}"):
        streams(backbone, [torch.zeros(1, 3, 32, 32)])
    check_places(classifier())


CHANCE = torch.Generator().manual_seed(0)
LABELS = torch.arange(30) % 3
FEATURES = torch.randn(30, 8, generator=CHANCE, dtype=torch.float64) + 0.8 * torch.nn.functional.one_hot(LABELS, 8)


def test_neighbours_that_stay() -> None:
    assert neighbours(FEATURES, 2 * FEATURES) == 1 == cosine(FEATURES, 2 * FEATURES)
    other = torch.randn(30, 8, generator=CHANCE, dtype=torch.float64)
    mixed = neighbours(other, FEATURES)
    assert mixed is not None and 0 < mixed < 0.5  # five of 29 by chance: 17 %
    assert neighbours(FEATURES[:10], FEATURES[:10]) is None
    few = [cosine_similarity(part[:11, None], part[None, :11], dim=2) for part in (other, FEATURES)]
    near = [[set(row.argsort(descending=True).tolist()[1:6]) for row in alike] for alike in few]
    stayed = [len(one & two) / 5 for one, two in zip(*near, strict=True)]
    assert neighbours(other[:11], FEATURES[:11]) == pytest.approx(sum(stayed) / 11)


def test_knn_leaves_each_sample_out() -> None:
    unit = torch.nn.functional.normalize(FEATURES, dim=-1)
    right = 0
    for train, test in LeaveOneOut().split(unit.numpy()):
        near = KNeighborsClassifier(5).fit(unit[train].numpy(), LABELS[train].numpy())
        order = near.kneighbors(unit[test].numpy())[1][0]
        votes = LABELS[train][order]
        counts = [(int((votes == vote).sum()), -place) for place, vote in enumerate(votes)]
        right += int(votes[-max(counts)[1]] == LABELS[test][0])
    assert leave_one_out_knn(FEATURES, LABELS) == pytest.approx(right / 30)


def test_a_class_that_two_neighbours_have_goes_before_a_nearer_one_and_of_four_samples_three_are_looked_at() -> None:
    """Angles from the first: the nearest of another class, then two of its own; and a tie goes to the nearest."""
    angles = torch.tensor([0.0, 0.1, 0.2, 0.3], dtype=torch.float64)
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    assert leave_one_out_knn(features, torch.tensor([1, 0, 1, 1])) == 0.75
    assert leave_one_out_knn(features[:3], torch.tensor([1, 1, 0])) == pytest.approx(2 / 3)


def test_the_probe_leaves_each_sample_out() -> None:
    x = (FEATURES - FEATURES.mean(dim=0)) / FEATURES.std(dim=0)
    x = torch.cat([x, torch.ones(30, 1, dtype=x.dtype)], dim=1).numpy()
    y = torch.nn.functional.one_hot(LABELS).double().numpy()
    right = 0
    for train, test in LeaveOneOut().split(x):
        fitted = Ridge(alpha=3.0, fit_intercept=False).fit(x[train], y[train])
        right += int(fitted.predict(x[test])[0].argmax() == LABELS[test][0])
    assert leave_one_out_probe(FEATURES, LABELS) == pytest.approx(right / 30)


STAGE = stage()


def test_the_blocks_see_the_defence_and_nothing_else() -> None:
    logits = STAGE.backbone.model(STAGE.inputs)
    torch.testing.assert_close(STAGE.logits(STAGE.through(NONE)), logits, rtol=0, atol=1e-10)
    answers = logits.argmax(dim=-1)
    kept = STAGE.keeps(NONE)
    assert (kept.cosine, kept.neighbours) == (pytest.approx(1), None)
    assert kept.accuracy == float((answers == STAGE.labels).double().mean())


def test_permutations_change_nothing_of_what_the_blocks_give() -> None:
    veil = parse_veil("noise=1", ("rows",))
    seen, truth = STAGE.sent(STAGE.z, veil, 0)
    whole = STAGE.through(veil.defence)
    given = STAGE.backbone.blocks(Stream(seen, 1)).z
    torch.testing.assert_close(given, whole[truth.sample, truth.row], rtol=0, atol=1e-10)
    assert not torch.allclose(whole, STAGE.through(NONE), atol=0.1)
    assert STAGE.keeps(veil.defence).cosine < 1 - 1e-6


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


def test_what_costs_most_looks_at_the_first_pictures_alone() -> None:
    held = stage(private=26, public=15)
    assert held.thin is None  # ten tokens per channel
    assert stage(private=1, public=14).thin == "14 public images have 224 tokens of 24 channels"
    shown = held.pictures.clone()
    shown[24:] = 0.5
    scores = held.scores(shown)
    assert (scores["ssim"], scores["fsim"]) == (pytest.approx(1), pytest.approx(1))
    shown[23] = 0.5
    after = held.scores(shown)
    assert after["ssim"] < 0.99 and after["fsim"] < 1 - 1e-6
    psnrs = [10 * math.log10(1 / float((held.pictures[n] - 0.5).square().mean())) for n in range(23, 26)]
    assert scores["psnr"] == pytest.approx((24 * BEST_PSNR + psnrs[1] + psnrs[2]) / 26)


def test_utility_is_that_of_public_and_private_images_together() -> None:
    """Features of the model's own forward pass, the public images first, and labels of both."""
    every = torch.cat([STAGE.public, STAGE.inputs])
    features = STAGE.backbone.model.forward_features(every)[:, 0]
    labels, kept = torch.arange(66) % 4, STAGE.keeps(NONE)
    assert kept.knn == pytest.approx(leave_one_out_knn(features.detach(), labels))
    assert kept.probe == pytest.approx(leave_one_out_probe(features.detach(), labels))


def test_noise_on_public_and_private_images_is_drawn_apart() -> None:
    held, veil = stage(), parse_veil("noise=1")
    held.z = held.side(veil).tokens
    torch.testing.assert_close(held.through(NONE), held.through(NONE, public=True))
    assert not torch.allclose(held.through(veil), held.through(veil, public=True))


SEVERAL = torch.tensor([[1, 0, 0, -1], [1, 1, 0, -1], [0, -1, -1, -1], [1, 0, 1, 0], [0, 1, -1, 1]])
"""Labels of three public and two private images that have any number of four classes."""


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"labels": None}, "the images have no labels"),
        ({"labels": None, "unnamed": "their classes are others"}, "their classes are others"),
        ({"unnamed": "their classes are others"}, "their classes are others"),
        ({"labels": torch.arange(5) % 4}, None),
        ({"labels": torch.arange(5) % 3}, None),
        ({"labels": torch.arange(5)}, "VisionTransformer has no trained classifier for the labels"),
        ({"labels": SEVERAL}, None),
        ({"labels": SEVERAL[:, :3]}, "VisionTransformer has no trained classifier for the labels"),
        ({"labels": SEVERAL.index_copy(0, torch.tensor([3, 4]), SEVERAL[[2, 2]])}, None),
        ({"labels": SEVERAL.index_fill(0, torch.tensor([3, 4]), -1)}, "no label of the attacked images is known"),
    ],
)
def test_why_nothing_can_be_said_of_labels(fields: dict[str, Any], why: str | None) -> None:
    half = torch.full((3,), 0.5)
    model = open_model(classifier().model, img_size=16)
    model.backbone.double()
    held = Stage(model, pictures(5) * 2 - 1, 3, half, half, **{"labels": torch.arange(5) % 4, **fields})
    assert held.unlabelled == why
    if fields.get("labels") is SEVERAL:  # a class that is as often there as not is not guessed
        guess = [int((SEVERAL[:3, k] == 1).sum() > (SEVERAL[:3, k] == 0).sum()) for k in range(4)]
        right = [SEVERAL[row, k] == guess[k] for row in (3, 4) for k in range(4) if SEVERAL[row, k] >= 0]
        assert held.commonest() == {"labels": pytest.approx(sum(map(int, right)) / len(right))} and len(right) == 7
        assert held.keeps(NONE).knn is None
    elif why is not None or not held.several:
        assert held.commonest() == {}


@pytest.mark.parametrize("seed", [0, 3])
def test_a_decoder_learns_under_noise_of_its_own_at_each_step(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn by the number of the step and the seed, for whoever repeats it; other defences are what a client sends."""
    held, seen = stage(public=20), list[Any]()
    held.seed = seed
    monkeypatch.setattr("situs.audit.split.stage.learn", lambda *given, **named: seen.append((given, named)))
    for text in ("noise=0.5", "lowpass=0.5", "batch-shuffle=4", "none"):
        held.decoder(parse_veil(text))
    assert [named["changes"] for _, named in seen] == [True, False, True, False]
    assert all(named["seed"] == seed and named["prefix"] == 1 for _, named in seen)
    (send, z, patches), side = seen[0][0], held.side(parse_veil("noise=0.5"))
    assert z is side.tokens and patches is held.patches
    for step in (0, 7):
        drawn = torch.randn(z.shape, generator=torch.Generator().manual_seed(1000 * seed + step), dtype=z.dtype)
        torch.testing.assert_close(send(z, step), z + 0.5 * side.scale * drawn)
    for text, ((send, z, _), _) in zip(("lowpass=0.5", "batch-shuffle=4", "none"), seen[1:], strict=True):
        assert torch.equal(send(z, 4), held.sent(z, parse_veil(text), 1004).seen)


def test_public_and_private_images_are_apart_and_labels_with_the_private() -> None:
    assert len(STAGE.z) == len(STAGE.pictures) == 6 and len(STAGE.patches) == 60
    torch.testing.assert_close(STAGE.pictures, (STAGE.inputs + 1) / 2)
    assert STAGE.labels is not None and STAGE.labels.tolist() == [(60 + n) % 4 for n in range(6)]
    assert STAGE.unlabelled is None


def test_a_scene_sends_the_same_channels_and_other_rows() -> None:
    scene = Scene.of(STAGE, Veil(rows=True, columns=True))
    assert torch.equal(scene.view.truth.channels, STAGE.channels)
    assert torch.equal(scene.again(1).seen, scene.again(1).seen)
    later = scene.again(1)
    assert not torch.equal(later.seen, scene.view.seen) and not torch.equal(later.truth.sample, scene.view.truth.sample)
    clear = later.seen[..., STAGE.channels.argsort()]
    torch.testing.assert_close(clear, STAGE.z[later.truth.sample, later.truth.row], rtol=0, atol=0)
    assert scene.old is None and scene.side is STAGE.side(NONE)
