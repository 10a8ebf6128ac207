"""At the true images the attacker's gradients are the victim's own, whatever the defence does; and they can be
followed back to the pixels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import small_vit

from situs.audit import Clip, Defence, Knowledge, MaskedJigsaw, NoDefence, NoPositionGradient
from situs.audit.attacks.matching import guessed_draws, simulation
from situs.audit.client import victim_gradients
from situs.audit.defences import Step, method_of
from situs.methods import create_method
from situs.methods.mjp import VARIANTS

X, Y = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)).double(), torch.tensor([0, 4, 2])


@pytest.fixture(scope="module")
def backbone() -> Any:
    torch.manual_seed(0)
    return small_vit(width=32, heads=4, num_classes=5).eval().double()


def both(victim: Any, known: Knowledge, count: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What was sent, and what the attacker would make of the true images."""
    x, y = X[:count], Y[:count]
    sent = victim_gradients(victim, x, y, defence=known.defence, step=replace(known.step, dtype=torch.float64))
    method = method_of(known.defence, victim, known.step.seed)
    made = simulation(method, known, sent)(x, y, guessed_draws(method, sent, known))
    return sent, made


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("defence", [NoDefence(), Clip(0.3, 0.0), NoPositionGradient()], ids=lambda d: d.name)
def test_the_same_gradients(backbone: Any, defence: Defence, count: int, steps: int) -> None:
    sent, made = both(backbone, Knowledge(defence, Step(count, local_steps=steps)), count)
    assert made.keys() == sent.keys()
    for name, gradient in sent.items():
        torch.testing.assert_close(made[name], gradient, rtol=1e-9, atol=1e-12)


def test_mjp_with_its_mask_found_and_its_order_unknown(backbone: Any) -> None:
    """The true patches in the order the victim shuffled them to need not be known: any order gives these gradients."""
    known = Knowledge(MaskedJigsaw(0.4), Step(seed=3))
    sent, made = both(backbone, known, 1)
    assert (sent["model.pos_embed"][0, 1:] == 0).all(dim=-1).any()
    for name, gradient in sent.items():
        torch.testing.assert_close(made[name], gradient, rtol=1e-7, atol=1e-10)


def test_a_run_of_mjp_brings_its_own_method(backbone: Any) -> None:
    torch.manual_seed(5)
    method: Any = create_method("mjp", backbone, replace(VARIANTS["I"], mask_ratio=0.4)).double().eval()
    with torch.no_grad():
        method.unknown.normal_()
    sent, made = both(method, Knowledge(), 1)
    for name, gradient in sent.items():
        torch.testing.assert_close(made[name], gradient, rtol=1e-7, atol=1e-10)
    assert float(sent["unknown"].abs().max()) > 0


def test_back_to_the_pixels(backbone: Any) -> None:
    """The slope of a distance, against plain autograd on the wrapped model with a graph of its gradients."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    sent = victim_gradients(backbone, X[:1], Y[:1], step=Step(dtype=torch.float64))
    make = simulation(method_of(NoDefence(), backbone), Knowledge(), sent)
    with sdpa_kernel(SDPBackend.MATH):
        x = X[1:2].clone().requires_grad_()
        made = make(x, Y[:1], {})
        [slope] = torch.autograd.grad(sum((made[n] - sent[n]).square().sum() for n in sent), [x])
        named = {f"model.{name}": p for name, p in backbone.model.named_parameters()}
        loss = torch.nn.functional.cross_entropy(backbone.model(x).float(), Y[:1])
        plain = torch.autograd.grad(loss, list(named.values()), create_graph=True)
        apart = sum((g - sent[n]).square().sum() for n, g in zip(named, plain, strict=True))
        [expected] = torch.autograd.grad(apart, [x])
    assert float(expected.abs().max()) > 0
    torch.testing.assert_close(slope, expected, rtol=1e-4, atol=1e-7)
