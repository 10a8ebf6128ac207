"""Images through whatever a module does to them before its patch embedding: to the byte, or with what is left said."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from outcomes import reason
from torch import Tensor, nn
from torch.nn import functional as F

from situs.audit import AdaptiveMJP, Knowledge, Noise, PatchEmbedding, adapt
from situs.audit.attacks.base import Ready
from situs.audit.attacks.patchembed import (
    THROUGH,
    System,
    _by_channel,
    _standardised,
    byte_values,
    see_through,
    solve_patches,
)
from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import Deadline
from situs.audit.defences import NoDefence, Step
from situs.audit.gradients import attack_gradients
from situs.audit.stem import Scaled, require_stem
from situs.core.tokens import patchify
from situs.gate import NOT_JUDGED

NORMAL = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


class Module(nn.Module):
    """A small transformer that does something to its image first."""

    def __init__(self, made: Callable[[Tensor], Tensor], stem: nn.Module | None = None, count: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.made, self.stem = made, nn.Conv2d(3, 48, 4, 4) if stem is None else stem
        self.places = nn.Parameter(0.1 * torch.randn(1, count, 48))
        self.block = nn.TransformerEncoderLayer(48, 2, 96, dropout=0.0, batch_first=True)
        self.out = nn.Linear(48, 6)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(self.made(x)).flatten(2).mT + self.places
        return self.out(self.block(tokens).mean(dim=1))


def pictures(count: int = 1) -> Tensor:
    """Smooth pictures of bytes, normalised."""
    chance = torch.Generator().manual_seed(0)
    coarse = 255 * torch.rand(count, 3, 4, 4, generator=chance)
    levels = F.interpolate(coarse, size=(16, 16), mode="bicubic").clamp(0, 255).round()
    mean, std = (torch.tensor(part).view(3, 1, 1) for part in NORMAL)
    return (levels / 255 - mean) / std


def attack(module: nn.Module, x: Tensor, **known: Any) -> Any:
    backbone = adapt(module, 16)
    assert reason(PatchEmbedding(), backbone) is None
    defence = known.get("defence", NoDefence())
    uploads = [victim_gradients(backbone, one, torch.tensor([2]), defence=defence) for one in x.split(1)]
    return PatchEmbedding().recover(backbone, uploads, Knowledge(**{"normalisation": NORMAL, **known}), Deadline())


def test_a_factor_and_an_offset_inside_forward_hide_no_byte() -> None:
    x = pictures(4)
    found = attack(Module(lambda x: x * 0.5 + 0.1), x)
    assert [(fact["bytes"], fact["fits"], fact["unseen"]) for fact in found.facts] == [(True, True, 0)] * 4
    assert torch.equal(found.images, x)


MIX = torch.tensor([[0.3, 0.6, 0.1], [0.5, -0.5, 0.0], [0.2, 0.2, -0.7]])
SHIFT = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)


@pytest.mark.thin(2)
@pytest.mark.parametrize(
    "made",
    [
        lambda x: x * 255 - 12,
        lambda x: x.flip(1) * 2 - SHIFT.to(x),
        lambda x: torch.einsum("dc,bchw->bdhw", MIX.to(x), x),
        lambda x: F.interpolate(F.interpolate(x, size=(24, 24), mode="bilinear"), size=(16, 16), mode="bilinear"),
        lambda x: x.roll(3, -1),
        lambda x: x.clamp(-5, 5),
    ],
)
def test_other_fixed_maps_hide_no_byte(made: Callable[[Tensor], Tensor]) -> None:
    found = attack(Module(made), pictures())
    assert found.facts[0]["bytes"] is True
    assert torch.equal(found.images, pictures())


@pytest.mark.slow
def test_overlapping_patches_and_several_layers_hide_nothing() -> None:
    overlapping = attack(Module(lambda x: x, nn.Conv2d(3, 48, 6, 3, padding=1), 25), pictures())
    assert overlapping.facts[0]["fits"] is True
    assert torch.equal(overlapping.images, pictures())
    torch.manual_seed(1)
    deep = nn.Sequential(nn.Conv2d(3, 12, 2, 2), nn.Softplus(), nn.Conv2d(12, 48, 2, 2))
    found = attack(Module(lambda x: x, deep), pictures())
    assert found.facts[0]["bytes"] is True


def test_undoing_several_layers_ends_with_the_time_and_is_no_pass() -> None:
    deep = nn.Sequential(nn.Conv2d(3, 12, 2, 2), nn.Softplus(), nn.Conv2d(12, 48, 2, 2))
    backbone, x = adapt(Module(lambda x: x, deep), 16), pictures(2)
    ready = PatchEmbedding().prepare(backbone, dict(backbone.named_parameters()), Knowledge())
    assert isinstance(ready, Ready) and ready.seconds == THROUGH
    ticks = count()
    deadline = Deadline(seconds=200.0, clock=lambda: next(ticks))
    test = TestSet(x, torch.tensor([2, 1]), NORMAL)
    audit = attack_gradients(backbone, test, [PatchEmbedding()], [NoDefence()], deadline=deadline)
    [pair] = audit.pairs
    assert pair.status == "stopped" and next(ticks) < 250
    ruling = audit.judge(psnr=100)
    assert ruling.status == NOT_JUDGED and "was stopped after" in ruling.sentence


@pytest.mark.parametrize(("attack", "sent"), [(PatchEmbedding, torch.int8), (AdaptiveMJP, None)])
def test_what_was_not_undone_in_time_is_told_and_the_rest_not_begun(attack: Any, sent: torch.dtype | None) -> None:
    deep = nn.Sequential(nn.Conv2d(3, 12, 2, 2), nn.Softplus(), nn.Conv2d(12, 48, 2, 2))
    backbone, x = adapt(Module(lambda x: x, deep), 16), pictures(2)
    uploads = [victim_gradients(backbone, one, torch.tensor([2])) for one in x.split(1)]
    ticks = count()
    deadline = Deadline(seconds=20.0, clock=lambda: next(ticks))
    found = attack().recover(backbone, uploads, Knowledge(step=Step(dtype=sent), normalisation=NORMAL), deadline)
    assert len(found.facts) == len(found.images) == 1
    assert found.partial is not None and found.facts[0]["fits"] is False


def test_what_the_model_does_not_see_is_counted() -> None:
    x = pictures()
    found = attack(Module(lambda x: x.mean(dim=1, keepdim=True).expand(-1, 3, -1, -1)), x)
    [fact] = found.facts
    assert fact["fits"] is True and fact["bytes"] is False
    assert abs(fact["unseen"] - 512) < 50
    torch.testing.assert_close(found.images.mean(dim=1), x.mean(dim=1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("made", "stem", "seen"),
    [
        (lambda x: x, nn.Conv2d(3, 48, 3, 4), 3),  # every fourth row and column lies between the patches
        (lambda x: F.pad(x[..., 4:12, 4:12], (4, 4, 4, 4)), None, 8),
    ],
)
def test_pixels_that_the_model_does_not_see_are_no_bytes_and_no_pass(
    made: Callable[[Tensor], Tensor], stem: nn.Module | None, seen: int
) -> None:
    """What is seen comes back to the byte. The rest is grey, so that the PSNR is low; that is no privacy."""
    black = ((0.0,) * 3, (1.0,) * 3)  # what is left at 0 is then on a byte
    levels = (255 * torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))).round() / 255
    test = TestSet(levels, torch.tensor([2, 1]), black)
    audit = attack_gradients(adapt(Module(made, stem), 16), test, [PatchEmbedding()], [NoDefence()])
    [pair] = audit.pairs
    assert pair.to_the_byte == 0 and pair.worst_psnr < 20
    assert [fact["fits"] for fact in pair.facts] == [True, True]
    off = (audit.images - pair.shown).abs()
    assert int((off < 1e-6).sum()) >= 2 * 3 * (seen * 4 if seen == 3 else seen) ** 2
    assert not audit.judge(psnr=20).passed and "the attacked layer ignores" in str(pair.why("doubt"))


@pytest.mark.parametrize(
    ("made", "whose"),
    [
        (lambda x: (x - x.mean((1, 2, 3), keepdim=True)) / x.std((1, 2, 3), keepdim=True), "of the image"),
        (F.instance_norm, "of each channel"),
    ],
)
def test_a_normalisation_by_the_image_itself_is_solved_up_to_gain_and_never_fits(
    made: Callable[[Tensor], Tensor], whose: str
) -> None:
    x = pictures()
    found = attack(Module(made), x)
    [fact] = found.facts
    assert fact["fits"] is False
    assert f"gain and offset {whose}" in str(fact["verdict"])
    for one, other in zip(found.images[0].flatten(1), x[0].flatten(1), strict=True):
        assert float(torch.corrcoef(torch.stack([one, other]))[0, 1]) > 0.9999


def test_a_normalisation_patch_by_patch_is_no_pass_either() -> None:
    def patchwise(x: Tensor) -> Tensor:
        cells = x.unfold(2, 4, 4).unfold(3, 4, 4)
        cells = (cells - cells.mean((-2, -1), keepdim=True)) / (cells.std((-2, -1), keepdim=True) + 1e-3)
        return cells.permute(0, 1, 2, 4, 3, 5).reshape(x.shape)

    [fact] = attack(Module(patchwise), pictures()).facts
    assert fact["fits"] is False
    assert fact["verdict"] is not None


@pytest.mark.parametrize(
    ("made", "said"),
    [
        pytest.param(lambda x: torch.sin(40 * x), "and the picture is one of these images", marks=pytest.mark.slow),
        (torch.relu, "attack failed"),
    ],
)
def test_what_cannot_be_undone_is_no_pass(
    made: Callable[[Tensor], Tensor], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("situs.audit.stem.STEPS", 5)
    [fact] = attack(Module(made), pictures()).facts
    assert fact["fits"] is False
    assert said in str(fact["verdict"])


def test_a_fully_connected_layer_with_a_bias_gives_its_image_away() -> None:
    """One row, and the bias has its G: nothing about it is a transformer."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.GELU(), nn.Linear(32, 6))
    found = attack(module, pictures())
    assert found.facts[0]["bytes"] is True
    assert torch.equal(found.images, pictures())


def test_noise_and_large_inputs_are_judged_in_the_inputs_own_units() -> None:
    for factor in (1.0, 255.0):
        module = Module(lambda x, factor=factor: factor * x)
        with torch.no_grad():
            next(module.stem.parameters()).div_(factor)  # the same tokens
        found = attack(module, pictures(), defence=Noise(1e-7 * factor), normalisation=None)
        assert found.facts[0]["fits"] is True
        assert float((found.images - pictures()).norm() / pictures().norm()) < 0.1
        quiet = attack(module, pictures(), normalisation=None).facts[0]
        assert quiet["fits"] is True


def test_what_overflowed_is_left_out_here_too() -> None:
    for made in (lambda x: x * 0.5 + 0.1, lambda x: torch.einsum("dc,bchw->bdhw", MIX.to(x), x)):
        backbone = adapt(Module(made), 16)
        upload = victim_gradients(backbone, pictures(), torch.tensor([2]))
        weight, table = upload["model.stem.weight"], upload["model.places"]
        weight[3], weight[7, 1, 2, 2], table[0, 4, 9] = torch.inf, torch.nan, -torch.inf
        found = PatchEmbedding().recover(backbone, [upload], Knowledge(normalisation=NORMAL), Deadline())
        assert found.facts[0]["fits"] is True
        assert torch.equal(found.images, pictures())


def test_the_byte_reader_is_told_of_the_noise() -> None:
    """Channels of all sizes under one noise: who takes their errors for rounding trusts the faint ones, and reads
    nothing."""
    chance = torch.Generator().manual_seed(0)
    size = torch.logspace(0, -3, 48, dtype=torch.float64)
    table = torch.randn(1, 8, 48, generator=chance, dtype=torch.float64) * size
    levels = torch.randint(0, 256, (1, 8, 12), generator=chance)
    values = byte_values(*NORMAL)
    patches = values.repeat(4, 1).gather(1, levels[0].T).T.unsqueeze(0)  # channels last within a patch
    sigma = 1e-5
    weight = table.mT @ patches
    weight = weight + sigma * torch.randn(weight.shape, generator=chance, dtype=torch.float64)
    table = table + sigma * torch.randn(table.shape, generator=chance, dtype=torch.float64)
    _, [fact], found = solve_patches(System(weight, table, torch.float32, sigma), NORMAL)
    assert fact["bytes"] is True
    torch.testing.assert_close(found, patches, rtol=0, atol=1e-9)
    _, [other], _ = solve_patches(System(weight, table, torch.float32, 0.0), NORMAL)
    assert other["bytes"] is False


def test_an_audit_says_so_of_a_bare_module() -> None:
    found = attack_gradients(
        adapt(Module(lambda x: x * 0.5 + 0.1), 16),
        TestSet(pictures(2), torch.tensor([2, 3]), NORMAL),
        [PatchEmbedding()],
        [NoDefence()],
    )
    [pair] = found.pairs
    assert pair.why("refused") is None
    assert (pair.exact, pair.to_the_byte) == (2, 2)


@pytest.mark.parametrize("mixed", [True, False])
def test_patches_that_another_attack_found_under_noise_are_not_judged_behind_a_mixture(mixed: bool) -> None:
    mix = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.1, 1.0], [1.0, 1.0, 1.1]])
    backbone = adapt(Module((lambda x: torch.einsum("dc,bchw->bdhw", mix.to(x), x)) if mixed else lambda x: x + 0), 16)
    for defence in (NoDefence(), Noise(1e-3)):
        facts: list[dict[str, Any]] = [{"fits": True}]
        see_through(torch.randn(1, 16, 48), backbone, require_stem(backbone), Knowledge(defence), facts)
        assert facts[0]["fits"] == (not mixed or not defence.noise_level(1))
        assert facts[0]["fits"] or "amplifies the noise" in facts[0]["verdict"]


@pytest.mark.parametrize(
    ("residuals", "said"),
    [([0.9e-3, 0.2e-3], "several images"), ([0.2e-3, 1.1e-3], "could not invert"), ([1.1e-3, 0.0], "could not invert")],
)
def test_a_transform_that_was_not_undone_for_one_of_the_images_is_a_failure(
    residuals: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two images to each fact, of which the worse counts; without a fact that fits nothing is to be doubted."""
    left = iter([*residuals, *residuals, *residuals])
    view = SimpleNamespace(image=lambda _: (torch.zeros(3, 4, 4), next(left)), affine=False, scaled=None, invariant="")
    monkeypatch.setattr("situs.audit.attacks.patchembed.view_of", lambda *_: view)
    backbone = adapt(Module(lambda x: x), 16)
    facts: list[dict[str, Any]] = [{"fits": True, "proof": "it fits", "rank": 9}, {"fits": True}, {"fits": False}]
    images = see_through(torch.zeros(6, 16, 48), backbone, require_stem(backbone), Knowledge(), facts)
    assert images.shape == (6, 3, 4, 4)
    verdict = facts[0]["verdict"]
    assert said in str(verdict).lower()
    assert facts[0] == {"fits": False, "proof": None, "rank": 9, "unseen": None, "verdict": verdict}
    assert facts[1] == {"fits": False, "unseen": None, "verdict": verdict} and facts[2] == {
        "fits": False,
        "unseen": None,
    }


def shuffled_columns() -> Scaled:
    """Patches of 2 × 2 of an image [3, 4, 4], their numbers in any order, each channel with a factor and an offset."""
    chance = torch.Generator().manual_seed(2)
    pixels = torch.arange(48).view(1, 3, 4, 4).float()
    index = patchify(pixels, 2)[0].long()[:, torch.randperm(12, generator=chance)]
    channel = index // 16
    return Scaled(index, torch.tensor([2.0, -3.0, 5.0])[channel], torch.tensor([0.1, 0.2, 0.3])[channel])


def test_numbers_of_patches_are_put_in_order_with_the_channels_last() -> None:
    scaled = shuffled_columns()
    columns = _by_channel(scaled, (3, 4, 4))
    assert columns is not None and columns.order.sort().values.tolist() == [*range(12)]
    assert (scaled.index[:, columns.order] // 16).tolist() == [[0, 1, 2] * 4] * 4
    assert columns.scale.tolist() == [2.0, -3.0, 5.0] * 4
    torch.testing.assert_close(columns.shift, torch.tensor([0.1, 0.2, 0.3] * 4))


@pytest.mark.parametrize(
    "change", ["a factor in one patch", "an offset in one patch", "no factor", "channels", "one more"]
)
def test_numbers_without_one_channel_factor_and_offset_each_have_no_such_order(change: str) -> None:
    index, scale, shift = (part.clone() for part in shuffled_columns())
    if change == "a factor in one patch":
        scale[1, 4] *= 1.01
    elif change == "an offset in one patch":
        shift[2, 3] += 0.01
    elif change == "no factor":
        scale[:, 5] = 0.0
    elif change == "channels":
        index[3] = index[3].flip(0)
    else:
        index[:, 0] = (index[:, 0] + 16) % 48  # four of one channel become five
    assert _by_channel(Scaled(index, scale, shift), (3, 4, 4)) is None


@pytest.mark.parametrize("away", [0.0, 1.0])
def test_errors_of_standardised_equations_are_those_that_noise_and_rounding_make(away: float) -> None:
    """By draws: two uploads of three numbers of the table's width, five patches far from 0 or about it."""
    chance = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=chance, dtype=torch.float64)

    view: Any = SimpleNamespace(centre=away * (4 + drawn(5, 40)), spread=2.0)
    weight, table = 3 * drawn(2, 3, 40), drawn(2, 5, 3) * torch.tensor([1.0, 2.0, 4.0])
    clean, errs = _standardised(view, System(weight, table, torch.float64, 0.1))
    torch.testing.assert_close(clean.weight, (weight - torch.einsum("bnd,nk->bdk", table, view.centre)) / 2)
    squares = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(400):
        noisy = System(weight + 0.1 * drawn(2, 3, 40), table + 0.1 * drawn(2, 5, 3), torch.float64, 0.1)
        squares += (_standardised(view, noisy)[0].weight - clean.weight).square().mean(dim=2) / 400
    torch.testing.assert_close(squares, errs, rtol=0.2, atol=0)
    coarse = System(weight.bfloat16().double(), table.bfloat16().double(), torch.bfloat16, 0.0)
    found, errs = _standardised(view, coarse)
    share = (found.weight - clean.weight).square().mean(dim=2) / errs
    assert float(share.max()) < 1 and float(share.mean()) > 0.05
    lost = System(weight, table.index_fill(2, torch.tensor([1]), torch.nan), torch.float64, 0.1)
    without = System(weight, table.index_fill(2, torch.tensor([1]), 0.0), torch.float64, 0.1)
    (one, one_errs), (other, other_errs) = (_standardised(view, system) for system in (lost, without))
    assert torch.equal(one.weight, other.weight) and torch.equal(one_errs, other_errs)
