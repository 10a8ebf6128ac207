"""The pixels come back: from hand-made systems, every kind of ViT, under rounding, noise, clipping and k steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from builders import small_vit
from outcomes import caveat, prepared, reason

from situs.audit import ATTACKS, Clip, Knowledge, MaskedJigsaw, Noise, NoPositionGradient, PatchEmbedding
from situs.audit.attacks.base import FAILED
from situs.audit.attacks.patchembed import _verdict
from situs.audit.client import hidden_places, victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence, Step
from situs.backbones import create_backbone
from situs.core.tokens import patchify
from situs.core.when import When
from situs.data.batch import Batch


def victim(name: str = "vit_tiny_patch16_224", **fields: Any) -> Any:
    torch.manual_seed(0)
    given = {"img_size": 32, "width": 48, "heads": 4, "patch_size": 8, "num_classes": 5, **fields}
    return small_vit(name=name, **given).eval()


def images(count: int = 1, channels: int = 3, size: int = 32) -> torch.Tensor:
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(1))


def error(found: torch.Tensor, real: torch.Tensor) -> float:
    """Relative error in decibels: -20 log10(|found - real| / |real|)."""
    return -20 * float(((found.double() - real.double()).norm() / real.double().norm()).log10())


def attack(backbone: Any, x: torch.Tensor, known: Knowledge | None = None, **step: Any) -> Any:
    known = Knowledge() if known is None else known
    labels = torch.arange(len(x)) % 5
    uploads = [
        victim_gradients(
            backbone, x[i : i + 1], labels[i : i + 1], defence=known.defence, ids=torch.tensor([i]), step=Step(**step)
        )
        for i in range(len(x))
    ]
    return PatchEmbedding().recover(backbone, uploads, known, Deadline())


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("vit_tiny_patch16_224", {}),
        ("deit_tiny_distilled_patch16_224", {}),
        ("vit_small_patch14_reg4_dinov2", {}),
        ("vit_base_patch16_clip_224", {}),
        ("vit_tiny_patch16_224", {"img_size": (32, 48)}),
        ("vit_tiny_patch16_224", {"in_chans": 1}),
    ],
)
def test_every_learned_table_leaks_every_pixel(name: str, fields: dict[str, Any]) -> None:
    backbone = victim(name, **fields).double()
    x = torch.randn(2, backbone.input.channels, *backbone.input.shape, dtype=torch.float64)
    found = attack(backbone, x, dtype=torch.float64)
    assert caveat(PatchEmbedding(), backbone) is None
    assert error(found.images, x) > 90
    for fact in found.facts:
        assert fact["rank"] == fact["unknowns"] == backbone.num_tokens
        assert float(fact["condition"]) > 1


def test_a_transformers_model_leaks_too() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=32, patch_size=8
    )
    torch.manual_seed(0)
    backbone = create_backbone(config, num_classes=5).eval()
    assert error(attack(backbone, images()).images, images()) > 60


def test_gradients_of_a_plain_backward_are_those_attacked() -> None:
    """The victim's gradients by an independent way: .backward() on timm's own model."""
    backbone = victim()
    x, y = images(3), torch.tensor([0, 3, 4])
    found = victim_gradients(backbone, x, y)
    torch.nn.functional.cross_entropy(backbone.model(x), y).backward()
    for name, parameter in backbone.model.named_parameters():
        torch.testing.assert_close(found[f"model.{name}"], parameter.grad, rtol=1e-4, atol=1e-6)


def test_several_local_steps_on_one_image_hide_nothing() -> None:
    backbone = victim()
    one, five = attack(backbone, images()), attack(backbone, images(), local_steps=5, lr=0.05)
    assert error(five.images, images()) > 60
    assert not torch.allclose(one.images, five.images, atol=0)


def test_clipping_alone_hides_nothing_and_noise_does() -> None:
    backbone = victim()
    clipped = attack(backbone, images(), Knowledge(Clip(norm=1e-3, multiplier=0.0)))
    assert error(clipped.images, images()) > 60
    levels = [error(attack(backbone, images(), Knowledge(Noise(s))).images, images()) for s in (1e-7, 1e-5, 1e-2)]
    assert levels[0] > levels[1] > levels[2]
    assert levels[2] < 6


def test_half_precision_leaks_less_than_float32_and_still_leaks() -> None:
    backbone = victim()
    full, half, brain = (
        error(attack(backbone, images(), dtype=d).images, images())
        for d in (torch.float32, torch.float16, torch.bfloat16)
    )
    assert full > half > brain > 3


def test_a_batch_is_not_taken_apart_and_that_is_said() -> None:
    backbone, x = victim(), images(4)
    upload = victim_gradients(backbone, x, torch.arange(4))
    found = PatchEmbedding().recover(backbone, [upload], Knowledge(step=Step(4)), Deadline())
    assert max(error(found.images, x[i : i + 1]) for i in range(4)) < 10
    assert "sums over the images" in str(caveat(PatchEmbedding(), backbone, step=Step(2)))


def test_too_many_patches_are_told() -> None:
    backbone = victim(width=12)
    found = attack(backbone, images())
    assert "there are more patches (16) than channels (12)" in str(caveat(PatchEmbedding(), backbone))
    assert caveat(PatchEmbedding(), small_vit(16, depth=1, width=16, patch_size=4)) is None  # as many
    assert found.facts[0]["condition"] is None
    assert int(found.facts[0]["rank"]) < 16
    assert error(found.images, images()) < 30


def test_without_the_table_there_is_nothing_to_solve() -> None:
    backbone = victim()
    upload = victim_gradients(backbone, images(), torch.tensor([1]), defence=NoPositionGradient())
    assert "model.pos_embed" not in upload
    assert "model.patch_embed.proj.weight" in upload
    for name in ("patchembed", "april"):
        assert "model.pos_embed is not sent" in str(reason(ATTACKS[name](), backbone, upload))


def test_the_gradient_of_dal_is_subtracted() -> None:
    """MJP without a mask is plain training plus λ DAL: unsubtracted it hides, subtracted it hides nothing."""
    backbone = victim()
    plain, known = MaskedJigsaw(0.0), Knowledge(MaskedJigsaw(0.0))
    upload = victim_gradients(backbone, images(), torch.tensor([1]), defence=plain)
    before = error(PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline()).images, images())
    after = error(PatchEmbedding().recover(backbone, [upload], known, Deadline()).images, images())
    assert after > 60
    assert before < after - 30


def test_rows_without_gradient_are_the_mask_of_mjp() -> None:
    backbone = victim()
    defence = MaskedJigsaw(0.3)
    method: Any = defence.method(backbone)
    upload = victim_gradients(backbone, images(), torch.tensor([1]), defence=defence)
    mask = method.draw(Batch(torch.zeros(1), torch.tensor([0])), When(seed=0, epoch=0))["mask"][0]
    assert mask.any()
    assert torch.equal(hidden_places(upload["model.pos_embed"][0, 1:]), mask)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_equations_that_hold_are_said_to_fit(dtype: torch.dtype) -> None:
    for defence in (NoDefence(), Noise(1e-5), Noise(1.0), Clip(norm=0.1)):
        [fact] = attack(victim(), images(), Knowledge(defence), dtype=dtype).facts
        assert fact["fits"] is True
        assert 0 < fact["residual"] < 3 * fact["expected_residual"]


def test_equations_that_do_not_hold_are_a_failed_attack() -> None:
    """A sum over two images, hidden patches, and more noise than was stated: nothing of that is privacy."""
    backbone, x = victim(), images(2)
    upload = victim_gradients(backbone, x, torch.tensor([0, 1]))
    noisy = victim_gradients(backbone, x[:1], torch.tensor([0]), defence=Noise(1e-4))
    hiding = victim_gradients(backbone, x[:1], torch.tensor([0]), defence=MaskedJigsaw(0.3))
    drowned = victim_gradients(backbone, x, torch.tensor([0, 1]), defence=Noise(1.0))
    for sent, known in (
        (upload, Knowledge(step=Step(2))),
        (upload, Knowledge()),  # even one who takes it for a single image sees it
        (noisy, Knowledge(Noise(1e-6))),
        (hiding, Knowledge(MaskedJigsaw(0.3))),
        (drowned, Knowledge(Noise(1.0), Step(2))),
    ):
        [fact] = PatchEmbedding().recover(backbone, [sent], known, Deadline()).facts
        assert fact["fits"] is False
        assert "attack failed" in str(fact["verdict"])


def test_equations_that_nothing_checks_do_not_fit_unless_bytes_prove_them() -> None:
    [fact] = attack(victim(width=16), images()).facts
    assert fact["residual"] < 1e-5
    assert fact["fits"] is False


@pytest.mark.parametrize("place", ["channels", "entries", "table", "largest"])
def test_what_overflowed_is_an_equation_less_and_no_zero(place: str) -> None:
    backbone, x = victim(), images()
    upload = victim_gradients(backbone, x, torch.tensor([2]))
    plain = error(PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline()).images, x)
    weight, table = (upload[name].clone() for name in ("model.patch_embed.proj.weight", "model.pos_embed"))
    if place == "channels":
        weight[[3, 20, 40]] = torch.inf
    elif place == "largest":
        weight[[3, 20]] = torch.finfo(torch.float32).max
    elif place == "entries":  # no channel is whole
        weight.flatten(1)[torch.arange(48), torch.arange(48) * 4] = -torch.inf
    else:
        table[0, 5, 7], table[0, 9, 8] = torch.inf, torch.nan
    lost = {**upload, "model.patch_embed.proj.weight": weight, "model.pos_embed": table}
    found = PatchEmbedding().recover(backbone, [upload, lost], Knowledge(), Deadline())
    assert found.facts[1]["fits"] is True
    assert error(found.images[1:], x) > plain - 10 > 50
    torch.testing.assert_close(
        found.images[:1], PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline()).images
    )


def test_half_precision_that_overflows_hides_nothing() -> None:
    """Gradients of a loss scaled up so far that the largest channels leave fp16's range."""
    backbone, x = victim(), images()
    upload = victim_gradients(backbone, x, torch.tensor([2]))
    size = upload["model.patch_embed.proj.weight"].abs().flatten(1).amax(dim=1).sort().values
    scaled = {name: (g * (65504 / size[-5])).half() for name, g in upload.items()}
    whole = {name: (g * (30000 / size[-1])).half() for name, g in upload.items()}
    assert int((~scaled["model.patch_embed.proj.weight"].isfinite()).flatten(1).any(dim=1).sum()) == 4
    lost, kept = (PatchEmbedding().recover(backbone, [each], Knowledge(), Deadline()) for each in (scaled, whole))
    assert error(lost.images, x) > error(kept.images, x) - 6 > 10
    assert lost.facts[0]["fits"] is kept.facts[0]["fits"] is True


def test_an_upload_of_nothing_but_overflow_is_a_failed_attack() -> None:
    backbone, x = victim(), images()
    upload = victim_gradients(backbone, x, torch.tensor([2]))
    found = PatchEmbedding().recover(
        backbone, [{name: g * torch.inf for name, g in upload.items()}], Knowledge(), Deadline()
    )
    assert found.images.isfinite().all()
    assert found.facts[0]["fits"] is False


def test_clipping_shrinks_the_gradient_of_dal_too() -> None:
    """MJP with nothing hidden, clipped: the factor is read off the bias."""
    backbone, defence = victim(), Clip(norm=0.05, multiplier=0.0)
    method = MaskedJigsaw(0.0).method(backbone)
    upload = victim_gradients(method, images(), torch.tensor([1]), defence=defence)
    known = Knowledge(defence, method=method)
    found = PatchEmbedding().recover(backbone, [upload], known, Deadline())
    assert error(found.images, images()) > 60
    assert found.facts[0]["fits"] is True
    ready: Any = prepared(PatchEmbedding(), backbone)
    only = {name: upload[name] for name in ready.reads if name in upload}
    torch.testing.assert_close(PatchEmbedding().recover(backbone, [only], known, Deadline()).images, found.images)


def test_the_layout_is_that_of_patchify() -> None:
    """One patch of the estimate, cut by hand from the image."""
    backbone = victim()
    found = patchify(attack(backbone, images()).images, 8)
    by_hand = images()[0, :, 8:16, 16:24].permute(1, 2, 0).flatten()
    torch.testing.assert_close(found[0, 6], by_hand, rtol=1e-2, atol=1e-2)


def test_a_nearly_singular_system_is_said_to_be_one() -> None:
    """Two patches whose gradients differ in the last digits, and noise that drowns all of them."""
    backbone, x = victim(), images()
    sent = victim_gradients(backbone, x, torch.tensor([0]))
    assert PatchEmbedding().recover(backbone, [sent], Knowledge(), Deadline()).facts[0]["verdict"] is None
    table = sent["model.pos_embed"].clone()
    spread = table[0, 1].norm() / 48**0.5
    for digits, said in ((3e-6, "nearly singular"), (0.0, "rank of G")):
        table[0, 2] = table[0, 1] + digits * spread * torch.randn(48, generator=torch.Generator().manual_seed(0))
        weight = torch.einsum("nd,nk->dk", table[0, 1:].double(), patchify(x, (8, 8))[0].double())
        weight = weight.unflatten(1, (8, 8, 3)).movedim(3, 1).float()
        upload = {"model.pos_embed": table, "model.patch_embed.proj.weight": weight}
        found = PatchEmbedding().recover(backbone, [upload], Knowledge(), Deadline())
        assert said in str(found.facts[0]["verdict"])
        assert error(found.images, x) < 60


@pytest.mark.parametrize(
    ("changed", "exact", "said"),
    [
        ({}, True, None),
        ({"condition": 0.1}, True, None),  # a tenth is still enough
        ({"condition": 0.1001}, True, "nearly singular (condition number above 1e-01)"),
        ({"condition": 0.1001}, False, None),
        ({"condition": None}, True, None),
        ({"rank": 3}, True, "rank of G"),
        ({"rank": 3}, False, None),
        ({"rank": 3, "fits": False}, False, FAILED),
        ({"rank": 3, "fits": False, "bytes": True}, True, None),  # what is read to the byte needs no excuse
    ],
)
def test_what_is_said_of_a_solution(changed: dict[str, Any], exact: bool, said: str | None) -> None:
    fact = {"fits": True, "rank": 4, "unknowns": 4, "condition": 0.01} | changed
    found = _verdict(fact, 1.0, exact)
    assert found is None if said is None else said in str(found)
