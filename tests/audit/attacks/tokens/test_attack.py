"""The attack on tokens from what a client sends in float32, without a gradient of positions."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn
from victims import vit

from situs.audit import Knowledge, create_attack
from situs.audit.adapter import adapt
from situs.audit.attacks.base import Ready, Recovery, Refused
from situs.audit.attacks.solver import SOLVED
from situs.audit.attacks.tokens import attack as module
from situs.audit.attacks.tokens.attack import (
    TokensConfig,
    _by_misfit,
    _halfway,
    _left,
    _pixels,
    _rank,
    _times_counted,
)
from situs.audit.attacks.tokens.block import Block, read_block
from situs.audit.attacks.tokens.linear import Misfit, count
from situs.audit.cases import TestSet
from situs.audit.client import victim_gradients
from situs.audit.deadline import FIRST, Deadline
from situs.audit.defences import (
    Clip,
    Defence,
    MaskedJigsaw,
    NoDefence,
    Noise,
    NoPositionGradient,
    Step,
    create_defence,
)
from situs.audit.gradients import Audit, attack_gradients, verdict
from situs.backbones import create_backbone
from situs.backbones.lora import add_lora
from situs.core.tokens import patchify
from situs.findings import NO_NOISE, doubt_of


def photographs(count: int = 1, size: int = 16) -> torch.Tensor:
    """Smooth pictures with some grain, normalised, [count, 3, size, size]."""
    chance = torch.Generator().manual_seed(5)
    coarse = torch.rand(count, 3, 5, 5, generator=chance)
    smooth = torch.nn.functional.interpolate(coarse, size=size, mode="bicubic").clamp(0, 1)
    return (smooth + 0.05 * torch.rand(count, 3, size, size, generator=chance) - 0.5) / 0.5


def attacked(backbone: Any, x: torch.Tensor, defence: Defence, **fields: Any) -> Recovery:
    sent = victim_gradients(backbone, x, torch.arange(len(x)), defence=defence, step=Step(**fields))
    known = Knowledge(defence, Step(len(x), local_steps=fields.get("local_steps", 1)))
    attack = create_attack("tokens")
    ready = attack.prepare(backbone, sent, known)
    assert isinstance(ready, Ready), ready
    assert ready.reads is not None
    return attack.recover(backbone, [{name: sent[name] for name in ready.reads}], known, Deadline())


def psnr(found: torch.Tensor, x: torch.Tensor) -> float:
    return float(-10 * ((found - x) / 2).square().mean().log10())


@pytest.mark.parametrize("defence", [NoDefence(), NoPositionGradient(), Clip(0.1, 0.0)], ids=lambda each: each.label)
def test_one_photograph_comes_back_without_the_positions_gradient(defence: Defence) -> None:
    backbone, x = vit().float(), photographs()
    found = attacked(backbone, x, defence)
    assert psnr(found.images, x) > 60
    [fact] = found.facts
    assert fact["fits"] is True and fact["open_directions"] == 0 and fact["patches_that_fit"] == 16
    assert fact["proof"] and fact["verdict"] is None


def test_a_frozen_table_is_no_defence() -> None:
    backbone, x = vit().float(), photographs()
    backbone.model.pos_embed.requires_grad_(False)
    assert psnr(attacked(backbone, x, NoDefence()).images, x) > 60


@pytest.mark.thin(2)
@pytest.mark.parametrize("withheld", ["attn.qkv", "attn.proj", "mlp.fc1", "patch_embed"])
def test_half_of_the_first_block_is_enough(withheld: str) -> None:
    backbone, x = vit().float(), photographs()
    sent = {name: g for name, g in victim_gradients(backbone, x, torch.tensor([0])).items() if withheld not in name}
    attack = create_attack("tokens")
    ready = attack.prepare(backbone, sent, Knowledge())
    assert isinstance(ready, Ready) and ready.reads is not None and set(ready.reads) <= set(sent)
    found = attack.recover(backbone, [{name: sent[name] for name in ready.reads}], Knowledge(), Deadline())
    assert psnr(found.images, x) > 60 and found.facts[0]["fits"] is True


def test_low_rank_products_are_no_victim_and_the_number_says_why() -> None:
    for rank, shown in ((4, "at most 4"), (5, "all")):  # of five tokens
        backbone = vit(size=8).float()
        add_lora(backbone, rank=rank, alpha=4.0, targets=["qkv"])
        found = create_attack("tokens").prepare(backbone, dict(backbone.named_parameters()), Knowledge())
        assert isinstance(found, Refused) and f"reveals {shown} of these directions" in found.reason


@pytest.mark.parametrize("adam", [False, True])
def test_the_weights_of_several_steps_are_taken_as_their_mean(adam: bool) -> None:
    """Of three steps of SGD along one gradient; of Adam's nothing is known."""
    backbone = vit(size=8)
    name, before = "model.pos_embed", backbone.model.pos_embed.detach().clone()
    gradient = torch.randn(before.shape).double()
    known = Knowledge(step=Step(local_steps=3, lr=0.1, adam=adam))
    moved = dict(_halfway(backbone, {name: gradient}, known).named_parameters())
    path = torch.stack([before - 0.1 * step * gradient for step in range(3)])
    torch.testing.assert_close(moved[name].detach(), before if adam else path.mean(dim=0))
    assert torch.equal(backbone.model.pos_embed, before) and torch.equal(
        moved["model.head.bias"], backbone.model.head.bias
    )


def test_more_inputs_a_token_are_counted_as_long_as_nothing_is_open() -> None:
    known = Knowledge(step=Step(local_steps=8))
    for width, first in ((96, 2), (32, 1)):  # twice 17 tokens fill all of 32 channels
        block = Block(vit(width=width))
        counted = _times_counted(block, known, None)
        assert [each.times for each in counted] == list(range(first, first + len(counted)))
        assert not any(each.full or each.open for each in counted if each.times > 1)
        more = count(block, 1, times=counted[-1].times + 1)
        assert more.full or more.open
    alone = _times_counted(Block(vit()), Knowledge(), None)
    assert [each.times for each in alone] == [1]


@pytest.mark.parametrize(("directions", "said"), [(47, "47 of 48 directions"), (48, "has full rank, so alone it")])
def test_what_the_patch_embedding_alone_leaves_is_said(directions: int, said: str) -> None:
    block = Block(vit())
    counts = count(block, 1)._replace(x=directions)
    assert said in _left(block, counts, 1, True) and "is not sent either" in _left(block, counts, 1, False)


@pytest.mark.parametrize(
    ("ratio", "share", "fits", "said"),
    [
        (2.9, 0.9e-2, True, "None"),
        (3.1, 0.9e-2, False, "does not satisfy"),
        (2.9, 1.1e-2, False, "wrong tokens also lie in them"),
    ],
)
def test_a_solution_fits_where_noise_explains_little_and_enough(
    ratio: float, share: float, fits: bool, said: str
) -> None:
    first, none = torch.full((4,), share).double(), torch.zeros(4).double()
    counts = count(Block(vit(size=8)), 1)
    fact = _by_misfit(counts, Misfit(first, first / ratio, none, none + 1))
    assert (fact["fits"], fact["patches_that_fit"]) == (fits, 4 * fits) and said in str(fact["verdict"])


def test_noise_that_drowns_the_spans_is_no_fit() -> None:
    backbone, x = vit().float(), photographs()
    quiet, loud = attacked(backbone, x, Noise(1e-9)), attacked(backbone, x, Noise(1e-2))
    assert psnr(quiet.images, x) > 40 > 20 > psnr(loud.images, x)
    assert loud.facts[0]["fits"] is False and "nothing" in str(loud.facts[0]["verdict"])


def test_gradients_of_nothing_fit_nothing() -> None:
    backbone = vit().float()
    chance = torch.Generator().manual_seed(3)
    sent = {name: torch.randn(p.shape, generator=chance) for name, p in backbone.named_parameters()}
    [fact] = create_attack("tokens").recover(backbone, [sent], Knowledge(), Deadline()).facts
    assert fact["fits"] is False


def test_what_it_cannot_do_is_said() -> None:
    attack, backbone = create_attack("tokens"), vit().float()
    names = {name for name, _ in backbone.named_parameters()}

    def reason(model: Any = backbone, sent: set[str] = names, **fields: Any) -> str:
        found = attack.prepare(model, sent, Knowledge(**fields))
        assert isinstance(found, Refused)
        return found.reason

    assert "adaptive-mjp" in reason(defence=MaskedJigsaw())
    rest = {name for name in names if not any(part in name for part in ("attn.qkv", "attn.proj"))}
    assert "blocks.0.attn.qkv.weight and model.blocks.0.attn.proj.weight is not sent" in reason(sent=rest)
    assert "contains every patch (it spans 16 of 48" in reason(sent=rest) and "later blocks" in reason(sent=rest)
    less = {name for name in rest if "patch_embed" not in name}
    assert "the gradient of model.patch_embed.proj.weight is not sent either" in reason(sent=less)
    assert "does not search" in reason(vit(size=8, name="vit_base_patch16_clip_224").float(), step=Step(2))
    frozen = vit(size=8, width=32).float()
    assert "a patch has at least as many values (48) as there are channels (32)" in reason(
        frozen, {n for n in names if "patch" not in n}
    )
    full = reason(vit(size=24, width=32))
    assert "tokens (37)" in full and "channels (32)" in full
    large = create_backbone("vit_small_patch16_224", positions="none", model_args={"depth": 1}).eval()
    assert "one round takes about" in reason(large)
    few, many = (attack.prepare(backbone, names, Knowledge(step=Step(local_steps=steps))) for steps in (2, 9))
    assert isinstance(few, Ready) and few.caveat is None
    assert isinstance(many, Ready) and "9 local steps" in str(many.caveat)


def test_weights_that_changed_are_read_again_and_others_once(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone, x = vit().float(), photographs()
    attack, reads = create_attack("tokens"), list[Any]()
    monkeypatch.setattr(module, "read_block", lambda copy: reads.append(copy) or read_block(copy))
    for number in range(2):
        sent = victim_gradients(backbone, x, torch.tensor([0]))
        assert isinstance(attack.prepare(backbone, sent, Knowledge()), Ready)
        assert psnr(attack.recover(backbone, [sent], Knowledge(), Deadline()).images, x) > 60
        assert len(reads) == number + 1
        with torch.no_grad():
            backbone.model.pos_embed.add_(torch.randn_like(backbone.model.pos_embed))


def test_a_fixed_table_of_sines_is_no_defence() -> None:
    backbone, x = vit(size=12, positions="sincos").float(), photographs(size=12)
    found = attacked(backbone, x, NoDefence())
    assert psnr(found.images, x) > 54
    [fact] = found.facts
    assert fact["fits"] is True and int(fact["open_directions"] or 0) > 0 and "hidden" not in fact


def test_only_a_search_has_limited_time_for_all_uploads() -> None:
    for positions, seconds in (("learned", None), ("sincos", 14.0)):
        backbone = vit(size=12, positions=positions).float()
        ready = create_attack("tokens", TokensConfig(seconds=7.0)).prepare(
            backbone, dict(backbone.named_parameters()), Knowledge()
        )
        assert isinstance(ready, Ready) and ready.seconds == seconds


def test_a_batch_of_two_comes_apart() -> None:
    backbone, x = vit(size=8).float(), photographs(2, size=8)
    found = attacked(backbone, x, NoPositionGradient())
    assert found.images.shape == x.shape
    best = max(psnr(found.images, x), psnr(found.images.flip(0), x))
    assert best > 54
    assert found.facts[0]["fits"] is True and found.facts[0]["patches_that_fit"] == 8
    assert 0 < float(found.facts[0]["residual"] or 0.0) <= SOLVED  # the largest of any patch


@pytest.mark.parametrize(
    ("fields", "ordered"), [({"name": "vit_small_patch16_rope_224"}, True), ({"positions": "none"}, False)]
)
def test_the_order_without_a_table_is_proved_by_rotations_and_else_a_guess(
    fields: dict[str, Any], ordered: bool
) -> None:
    backbone, x = vit(size=8, **fields).float(), photographs(size=8)
    found = attacked(backbone, x, NoDefence())
    assert psnr(found.images, x) > 54
    [fact] = found.facts
    assert fact["fits"] is True and fact["patches_that_fit"] == fact["patches"] == 4
    guess = "every patch is proved right. The order of the patches is a guess from their borders"
    assert (fact["verdict"], fact.get("hidden")) == ((None, None) if ordered else (guess, 4))


@pytest.mark.parametrize("normalisation", [None, ((0.5, 0.4, 0.3), (0.2, 0.25, 0.5))])
def test_pixels_range_from_black_to_white_as_far_as_the_normalisation_is_known(normalisation: Any) -> None:
    """And over two deviations to either side where it is not."""
    block = Block(vit(size=8))
    pixels = _pixels(block, Knowledge(normalisation=normalisation))
    mean, std = normalisation or ((0.0,) * 3, (0.5,) * 3)
    first = -1 if normalisation is None else 0
    black, white = ((end - torch.tensor(mean)) / torch.tensor(std) for end in (first, 1))
    for found, end in ((pixels.low, black), (pixels.high, white)):
        torch.testing.assert_close(found, end.repeat(16).double())  # channels last within a patch


def test_the_best_solution_fits_and_leaves_least() -> None:
    facts: list[dict[str, Any]] = [
        {"fits": fits, "residual": residual}
        for fits, residual in ((True, 0.5), (True, 2.0), (False, 0.1), (False, 3.0), (False, None))
    ]
    turned = [facts[number] for number in (4, 2, 0, 3, 1)]
    assert sorted(turned, key=_rank) == facts


def test_equal_images_are_told_and_found_once() -> None:
    backbone, x = vit(size=8).float(), photographs(2, size=8)
    same = attacked(backbone, x[:1].repeat(2, 1, 1, 1), NoPositionGradient())
    assert psnr(same.images, x[:1].repeat(2, 1, 1, 1)) > 54 and same.facts[0]["fits"] is True
    three = attacked(backbone, x[[0, 1, 0]], NoPositionGradient())
    assert min(max(psnr(one[None], image[None]) for one in three.images) for image in x) > 54
    said = str(three.facts[0]["verdict"])
    assert three.facts[0]["fits"] is False and "batch of 3" in said and "2 different images" in said


def test_time_that_is_over_is_told_as_a_part() -> None:
    backbone, x = vit(size=12, positions="sincos").float(), photographs(size=12)
    sent = victim_gradients(backbone, x, torch.tensor([0]))
    clock = iter(range(10_000))
    deadline = Deadline(seconds=1.0, clock=lambda: float(next(clock)))
    found = create_attack("tokens").recover(backbone, [sent], Knowledge(), deadline)
    assert f"{found.facts[0]['patches_that_fit']} of 9 patches" in str(found.partial)
    assert found.facts[0]["fits"] is False and "do not prove that every patch" in str(found.facts[0]["verdict"])
    assert found.images.isfinite().all()


@pytest.mark.parametrize("stop", ["Ctrl-C", pytest.param("the time limit of 100 s", marks=pytest.mark.slow)])
def test_a_search_that_is_stopped_keeps_what_is_proved(stop: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The first image is whole by then, and of the second some patches: leaked is leaked, the rest is not judged."""
    now, before = [0.0], signal.getsignal(signal.SIGINT)

    def say(line: str) -> None:
        if "round 1, 6 of 9" in line and stop == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
        elif "round 1, 6 of 9" in line:
            now[0] = 200.0

    backbone, x = vit(size=12, positions="sincos").float(), photographs(2, size=12)

    def audited(images: torch.Tensor) -> Audit:
        now[0], test = 0.0, TestSet(images, torch.arange(len(images)), ([0.5] * 3, [0.5] * 3))
        deadline = Deadline(say, 100.0, clock=lambda: now[0])
        return attack_gradients(backbone, test, [create_attack("tokens")], [NoDefence()], deadline=deadline)

    found = audited(x)
    [pair], ruling = found.pairs, found.judge(psnr=50)
    assert str(found.stopped).startswith(stop) and "6 of 9 patches" in str(pair.why("stopped"))
    assert (
        pair.exact == 1 and ruling.status == 3 and "what the gate allows" in str(ruling) and "0 has psnr" in str(ruling)
    )
    assert "stopped after" in verdict(found) and "6 of 9 patches" in verdict(found)
    assert pair.shown is not None
    away = patchify((pair.shown - (x / 2 + 0.5).clamp(0, 1)).abs(), (4, 4))[1].amax(dim=1)
    assert int((away < 1e-4).sum()) == 6  # what was proved is shown, exactly
    alone = audited(x[1:]).judge(psnr=50)
    assert not alone.passed
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err.encode() == FIRST * 2 * (stop == "Ctrl-C")


def test_a_table_that_hardly_tells_places_apart_blurs_pixels_and_passes_no_gate() -> None:
    backbone, x = vit(trained=False, heads=3).float(), photographs()
    table = backbone.model.pos_embed
    sharp = attacked(backbone, x, NoPositionGradient())
    assert sharp.facts[0]["proof"] and doubt_of(None, sharp.certificates, 0.0, None) == NO_NOISE
    with torch.no_grad():  # its last directions are more than none, and too little for float32
        left, _, right = torch.linalg.svd(torch.randn(table.shape[1:], generator=torch.Generator().manual_seed(1)))
        fall = 10 ** (-5.5 * torch.arange(len(left)) / (len(left) - 1))
        table.copy_(left * fall @ right[: len(left)])
    found = attacked(backbone, x, NoPositionGradient())
    assert found.facts[0]["fits"] is True and psnr(found.images, x) < 30 < 100 < psnr(sharp.images, x)
    assert found.facts[0]["proof"] is None  # every equation holds, of other pictures too
    assert "more than one solution" in str(doubt_of(None, found.certificates, 0.0, None))


class OwnModule(nn.Module):
    """As people write them: torch's own encoder, patches by a linear layer, a scale inside, a fixed table."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 4, 192, activation="gelu", batch_first=True, norm_first=True)
        self.embed, self.blocks = nn.Linear(48, 96), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.cls, self.head = nn.Parameter(torch.randn(1, 1, 96)), nn.Linear(96, 5)
        self.register_buffer("table", 0.3 * torch.randn(1, 17, 96))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.embed(patchify(1.3 * x + 0.2, (4, 4)))
        z = torch.cat([self.cls.expand(len(x), -1, -1), tokens], dim=1) + self.table
        return self.head(self.blocks(z)[:, 0])


def test_a_users_own_module_is_a_victim_whatever_its_positions_are() -> None:
    torch.manual_seed(0)
    backbone, x = adapt(OwnModule(), 16), photographs()
    found = attacked(backbone, x, NoDefence())
    assert psnr(found.images, x) > 60 and found.facts[0]["fits"] is True and found.facts[0]["open_directions"] == 0
    module = OwnModule()
    module.blocks.layers[0].norm_first = False
    found = create_attack("tokens").prepare(adapt(module, 16), dict(backbone.named_parameters()), Knowledge())
    assert isinstance(found, Refused) and "lacks a norm" in found.reason


@pytest.mark.parametrize(("steps", "rate"), [(2, 0.1), pytest.param(6, 0.02, marks=pytest.mark.slow)])
def test_local_steps_are_no_defence(steps: int, rate: float) -> None:
    """The inputs of the first step lie in the sum's row spaces, at weights that the server itself sent out."""
    backbone, x = vit(width=192).float(), photographs()
    defence = create_defence(f"fedavg={steps}:{rate}+no-pe-gradient")
    known = Knowledge(defence, Step(local_steps=steps, lr=rate))
    attack = create_attack("tokens")
    found = attack.recover(
        backbone,
        [victim_gradients(backbone, x, torch.zeros(1, dtype=torch.int64), defence=defence)],
        known,
        Deadline(),
    )
    assert found.facts[0]["fits"] is True and psnr(found.images, x) > 60
