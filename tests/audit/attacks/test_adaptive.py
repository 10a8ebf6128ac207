"""The attack on MJP, end to end: every patch of an image comes back, and what is said of it is true."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import caveat, reason

from situs.audit import (
    AdaptiveConfig,
    AdaptiveMJP,
    Clip,
    Knowledge,
    MaskedJigsaw,
    Noise,
    PatchEmbedding,
    create_attack,
)
from situs.audit.attacks import adaptive
from situs.audit.attacks.solver import SOLVED
from situs.audit.attacks.tokens.block import first_matrices
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, NoDefence, Step
from situs.core.tokens import patchify
from situs.core.when import When
from situs.data.batch import Batch
from situs.data.sources.samples import load_samples
from situs.methods.mjp import MJP, VARIANTS


def victim(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 28, "width": 64, "heads": 4, "patch_size": 7, "in_chans": 1, "num_classes": 10, **fields}
    return small_vit(name=name, **given).eval()


def pictures(count: int = 1) -> torch.Tensor:
    """Real pictures: noise has no borders that fit."""
    return (load_samples("test").images[:count].float() / 255 - 0.5) / 0.3


def decibels(found: torch.Tensor, real: torch.Tensor) -> float:
    return -20 * float(((found.double() - real.double()).norm() / real.double().norm()).log10())


def attacked(backbone: Any, x: torch.Tensor, ratio: float, number: int = 0, **step: Any) -> tuple[Any, Any, Any]:
    """The recovery of one image, its true patches [N, K], and the mask."""
    defence = MaskedJigsaw(ratio)
    ids = torch.tensor([number])
    upload = victim_gradients(backbone, x, torch.tensor([3]), defence=defence, ids=ids, step=Step(**step))
    method: Any = defence.method(backbone)
    mask = method.draw(Batch(ids, ids), When(seed=0, epoch=0))["mask"][0]
    return AdaptiveMJP().recover(backbone, [upload], Knowledge(defence), Deadline()), patchify(x, 7)[0], mask


@pytest.mark.thin(2)
@pytest.mark.parametrize(("ratio", "number"), [(0.1, 0), pytest.param(0.2, 1, marks=pytest.mark.slow), (0.3, 2)])
def test_every_patch_comes_back(ratio: float, number: int) -> None:
    backbone, x = victim(), pictures(3)[number : number + 1]
    found, real, mask = attacked(backbone, x, ratio, number)
    patches = patchify(found.images, 7)[0]
    [fact] = found.facts
    assert fact["hidden"] == int(mask.sum()) == int(ratio * 16)
    assert decibels(patches[~mask], real[~mask]) > 60
    best = torch.cdist(real[mask].double(), patches[mask].double()).amin(dim=1)
    assert float(best.max()) < 0.005 * float(real[mask].norm(dim=1).max())
    assert fact["fits"] is True
    static = PatchEmbedding().recover(
        backbone, [upload_of(backbone, x, ratio, number)], Knowledge(MaskedJigsaw(ratio)), Deadline()
    )
    if mask.sum() > 1:
        assert decibels(patchify(static.images, 7)[0][~mask], real[~mask]) < 25
        assert fact["patches_that_fit"] == 16


def upload_of(backbone: Any, x: torch.Tensor, ratio: float, number: int) -> Any:
    return victim_gradients(backbone, x, torch.tensor([3]), defence=MaskedJigsaw(ratio), ids=torch.tensor([number]))


def test_one_hidden_patch_needs_no_search() -> None:
    found, real, mask = attacked(victim(), pictures(), 0.1)
    assert mask.sum() == 1
    assert decibels(patchify(found.images, 7)[0], real) > 60
    assert found.facts[0]["open_directions"] == 0
    assert "every patch is determined" in str(found.facts[0]["proof"])


@pytest.mark.thin(2)
@pytest.mark.parametrize("ratio", [0.1, 0.2])
def test_what_overflowed_is_left_out(ratio: float) -> None:
    backbone, x = victim(), pictures()
    upload = {name: g.clone() for name, g in upload_of(backbone, x, ratio, 0).items()}
    upload["model.patch_embed.proj.weight"][5, 0, 3, 3] = torch.inf
    upload["model.pos_embed"][0, 4, 17] = torch.inf
    upload["unknown"].view(-1)[30] = -torch.inf
    for name in first_matrices(backbone):
        upload[name][2, 7] = torch.inf
    found = AdaptiveMJP().recover(backbone, [upload], Knowledge(MaskedJigsaw(ratio)), Deadline())
    assert found.facts[0]["fits"] is True
    assert decibels(found.images, x) > 50


def test_a_wrong_upload_is_a_failed_attack() -> None:
    backbone, x = victim(), pictures()
    upload = upload_of(backbone, x, 0.1, 0)
    weight = upload["model.patch_embed.proj.weight"]
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    other = {**upload, "model.patch_embed.proj.weight": weight + 1e-5 * weight.std() * noise}
    found = AdaptiveMJP(AdaptiveConfig(rounds=1)).recover(
        backbone, [upload, other], Knowledge(MaskedJigsaw(0.1)), Deadline()
    )
    assert [fact["open_directions"] for fact in found.facts] == [0, 0]
    assert [fact["fits"] for fact in found.facts] == [True, False]
    off: Any = found.facts[1]
    assert off["residual"] > 10 * off["expected_residual"]


def test_the_order_inside_the_mask_is_not_in_the_gradients() -> None:
    """Why order is a matter of borders alone: two shuffles of the same patches send the same."""
    backbone, x = victim(), pictures()
    method: Any = MaskedJigsaw(0.3).method(backbone)
    draws = method.draw(Batch(torch.zeros(1), torch.tensor([0])), When(seed=0, epoch=0))
    mask, index = draws["mask"], draws["index"].clone()
    places = mask[0].nonzero()[:, 0]
    index[0, places] = index[0, places.flip(0)]

    def sent(order: torch.Tensor) -> Any:
        logits = backbone.head(method.encode(x, mask, order))
        loss = torch.nn.functional.cross_entropy(logits, torch.tensor([3]))
        return torch.autograd.grad(loss, list(backbone.parameters()))

    for one, other in zip(sent(draws["index"]), sent(index), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


def test_a_run_of_mjp_is_attacked_with_its_own_tokens() -> None:
    """E_unk and DAL trained elsewhere: they are part of the weights, so the attacker has them."""
    backbone = victim()
    method = MJP(backbone, VARIANTS["J"]).eval()
    with torch.no_grad():
        method.unknown.add_(0.1 * torch.randn(64))
    defence = MaskedJigsaw(0.2)
    x, ids = pictures(), torch.tensor([0])
    upload = victim_gradients(method, x, torch.tensor([3]), defence=defence, ids=ids)
    known = Knowledge(defence, method=defence.retrain(method))
    found = AdaptiveMJP().recover(backbone, [upload], known, Deadline())
    assert found.facts[0]["hidden"] == 3
    real = patchify(x, 7)[0]
    close = (
        torch.cdist(patchify(found.images, 7)[0].double(), real.double()).amin(dim=1) < 0.005 * real.norm(dim=1).max()
    )
    assert close.all()


def test_without_e_unk_in_the_upload_the_bias_has_its_sum() -> None:
    backbone, x = victim(), pictures()
    upload = upload_of(backbone, x, 0.1, 0)
    del upload["unknown"]
    found = AdaptiveMJP().recover(backbone, [upload], Knowledge(MaskedJigsaw(0.1)), Deadline())
    assert decibels(found.images, x) > 50


def test_where_nothing_is_hidden_it_is_patchembed() -> None:
    backbone, x = victim(), pictures(2)
    uploads = [victim_gradients(backbone, one, torch.tensor([3])) for one in x.split(1)]
    mine, plain = (
        kind().recover(backbone, uploads, Knowledge(NoDefence()), Deadline()) for kind in (AdaptiveMJP, PatchEmbedding)
    )
    torch.testing.assert_close(mine.images, plain.images, rtol=1e-4, atol=1e-4)
    assert [fact["hidden"] for fact in mine.facts] == [0, 0]
    clipped = Clip(norm=1e-2, multiplier=0.0)
    upload = victim_gradients(backbone, x[:1], torch.tensor([3]), defence=clipped)
    assert decibels(AdaptiveMJP().recover(backbone, [upload], Knowledge(clipped), Deadline()).images, x[:1]) > 60


def test_too_many_tokens_are_said_and_the_algebra_stays() -> None:
    backbone = victim(width=16)
    said = str(caveat(AdaptiveMJP(), backbone))
    assert "17" in said and "16" in said
    assert caveat(AdaptiveMJP(), victim(width=20)) is None  # wider than there are tokens
    found, _, _ = attacked(backbone, pictures(), 0.2)
    assert found.images.isfinite().all()
    assert "chose the smoothest image" in str(found.facts[0]["verdict"])
    assert found.facts[0]["fits"] is False


def test_it_stops_when_its_time_is_over() -> None:
    backbone, x = victim(), pictures()
    ticks = iter(range(1000))
    deadline = Deadline(seconds=2, clock=lambda: float(next(ticks)))
    uploads = [upload_of(backbone, x, 0.3, 0)] * 3
    found = AdaptiveMJP(AdaptiveConfig(rounds=2)).recover(backbone, uploads, Knowledge(MaskedJigsaw(0.3)), deadline)
    assert found.images.shape[0] == len(found.facts) == 1
    assert "attacked last" in str(found.partial)


def test_ctrl_c_keeps_the_images_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, x = victim(), pictures()
    uploads, known = [upload_of(backbone, x, 0.1, 0)] * 3, Knowledge(MaskedJigsaw(0.1))
    whole = AdaptiveMJP().recover(backbone, uploads[:1], known, Deadline())
    solve, pressed = AdaptiveMJP._one, iter([False, True, True])

    def one(*args: Any) -> Any:
        if next(pressed):
            raise KeyboardInterrupt
        return solve(*args)

    monkeypatch.setattr(AdaptiveMJP, "_one", one)
    deadline = Deadline()
    found = AdaptiveMJP().recover(backbone, uploads, known, deadline)
    assert deadline.interrupted
    assert len(found.facts) == 1
    torch.testing.assert_close(found.images, whole.images)
    with pytest.raises(KeyboardInterrupt):  # nothing is there yet
        AdaptiveMJP().recover(backbone, uploads, known, Deadline())


def test_it_is_in_the_dict_and_refuses_what_it_cannot_read() -> None:
    attack = create_attack("adaptive-mjp")
    assert attack.separates_hidden
    assert "fixed or frozen" in str(reason(attack, victim(positions="sincos")))
    backbone = victim()
    assert reason(attack, backbone, {}) is not None
    assert reason(attack, backbone, upload_of(backbone, pictures(), 0.1, 0)) is None


@pytest.mark.parametrize(
    ("dtype", "ratio"),
    [(torch.bfloat16, 0.1)]
    + [pytest.param(*each, marks=pytest.mark.slow) for each in ((torch.float16, 0.2), (torch.float32, 0.5))],
)
def test_what_is_said_to_fit_is_right(dtype: torch.dtype, ratio: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded numbers explain wrong solutions too: those are not said to fit, and no pixel runs away."""
    seen: list[Any] = []
    solve = adaptive.solve_directions
    monkeypatch.setattr(
        adaptive, "solve_directions", lambda *given: seen.append((given[1], solve(*given))) or seen[-1][1]
    )
    backbone, x = victim(), pictures()
    defence = MaskedJigsaw(ratio)
    upload = victim_gradients(backbone, x, torch.tensor([3]), step=Step(dtype=dtype), defence=defence)
    recovered = AdaptiveMJP(AdaptiveConfig(rounds=3)).recover(backbone, [upload], Knowledge(defence), Deadline())
    assert float(recovered.images.abs().max()) < 30
    [(partly, found)] = seen
    fits = found.fit <= SOLVED
    assert recovered.facts[0]["patches_that_fit"] == int(fits.sum())
    assert dtype != torch.float32 or int(fits.sum()) >= 13
    real = patchify(x, 7)[0].double()
    off = torch.cdist(partly.patches(found.at), real)
    off = torch.where(partly.hidden, off.amin(dim=1), off.diagonal())
    assert (off[fits] < 0.03 * real.norm(dim=1).mean()).all()


@pytest.mark.slow
def test_a_model_without_places_hides_every_patch() -> None:
    backbone, x = victim(), pictures()
    method = MJP(backbone, VARIANTS["B"]).eval()
    upload = victim_gradients(method, x, torch.tensor([3]))
    found = AdaptiveMJP(AdaptiveConfig(rounds=2)).recover(backbone, [upload], Knowledge(method=method), Deadline())
    assert found.facts[0]["hidden"] == 16
    assert found.images.isfinite().all()


def run_of_mjp(backbone: Any, ratio: float = 0.2, variant: str = "J") -> MJP:
    return MJP(backbone, replace(VARIANTS[variant], mask_ratio=ratio)).eval()


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    ("defence", "least"),
    [
        (Noise(1e-9), 50),
        (Clip(norm=0.01, multiplier=0.0), 60),
        pytest.param(Clip(norm=1.0, multiplier=1e-9), 15, marks=pytest.mark.slow),
    ],
)
def test_noise_and_clipping_on_top_of_mjp_are_known_too(defence: Defence, least: float) -> None:
    """Rows of noise alone are the mask, and clipping shrinks DAL's gradient as all others."""
    backbone, x = victim(), pictures()
    method = run_of_mjp(backbone)
    upload = victim_gradients(method, x, torch.tensor([3]), defence=defence)
    found = AdaptiveMJP().recover(backbone, [upload], Knowledge(defence, method=method), Deadline())
    assert found.facts[0]["hidden"] == 3
    assert decibels(found.images, x) > least


def test_what_drowns_in_noise_is_not_said_to_be_known() -> None:
    backbone, x, defence = victim(), pictures(), Noise(1e-2)
    method = run_of_mjp(backbone)
    upload = victim_gradients(method, x, torch.tensor([3]), defence=defence)
    found = AdaptiveMJP().recover(backbone, [upload], Knowledge(defence, method=method), Deadline())
    assert found.facts[0]["hidden"] is None
    assert "rank of G" in str(found.facts[0]["verdict"])
    assert found.facts[0]["fits"] is True  # noise as stated explains all of it
    quiet = AdaptiveMJP(AdaptiveConfig(rounds=1)).recover(
        backbone, [upload], Knowledge(Noise(1e-5), method=method), Deadline()
    )
    assert quiet.facts[0]["fits"] is False


def test_hidden_patches_that_are_alike_leave_nothing_open() -> None:
    backbone = victim()
    for grey, said in (
        (0.7, "the hidden patches are equal"),
        (0.0, "the signal of the hidden patches is weaker than rounding"),
    ):
        found, _, _ = attacked(backbone, torch.full((1, 1, 28, 28), grey), 0.3)
        assert said in str(found.facts[0]["proof"] or found.facts[0]["verdict"])
        torch.testing.assert_close(found.images, torch.full_like(found.images, grey), rtol=0, atol=1e-3)


def test_a_gate_that_is_still_shut_proves_nothing() -> None:
    """timm's SwiGLU begins nearly linear: every token of a family fits, so none may be said to be right."""
    from timm.layers import SwiGLU  # pyright: ignore[reportPrivateImportUsage]

    backbone = victim(model_args={"mlp_layer": SwiGLU})
    upload = upload_of(backbone, pictures(), 0.2, 0)
    found = AdaptiveMJP(AdaptiveConfig(rounds=1)).recover(backbone, [upload], Knowledge(MaskedJigsaw(0.2)), Deadline())
    assert found.facts[0]["patches_that_fit"] == 0
    assert found.facts[0]["fits"] is False
    assert float(found.images.abs().max()) < 30
