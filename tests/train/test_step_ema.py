from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from situs.train.step import Ema


def test_the_mean_follows_the_slow_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[1].bias.requires_grad_(False)
    ema = Ema(model, 0.7)
    slow = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert set(ema.mean) == {"0.weight", "0.bias", "1.weight"}
    for step in range(30):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        ema.update(step)
        decay = min(0.7, (1 + step) / (10 + step))
        for name, parameter in model.named_parameters():
            if name in slow:
                slow[name] = decay * slow[name] + (1 - decay) * parameter.detach()
    for name, mean in slow.items():
        torch.testing.assert_close(ema.mean[name], mean, rtol=1e-12, atol=1e-12)


def test_applied_swaps_and_gives_back() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.weight.add_(1.0)
    own, first = model.weight.detach().clone(), ema.mean["weight"].clone()
    with ema.applied():
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, own)
    assert torch.equal(ema.mean["weight"], first)
    assert not torch.equal(first, own)


def moved() -> tuple[nn.Linear, Ema, torch.Tensor]:
    """A model one away from its mean, with the weights it must have again."""
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.5)
    with torch.no_grad():
        model.weight.add_(1.0)
    return model, ema, model.weight.detach().clone()


def test_the_weights_come_back_when_a_generator_that_holds_them_is_closed() -> None:
    model, ema, own = moved()

    def evaluation() -> Iterator[None]:
        with ema.applied():
            yield

    held = evaluation()
    next(held)
    assert torch.equal(model.weight, ema.mean["weight"])
    held.close()
    assert torch.equal(model.weight, own)


def test_the_evaluation_keeps_the_caller_s_gradient_mode() -> None:
    model, ema, _ = moved()
    with ema.applied():
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None
    with torch.no_grad(), ema.applied():
        assert not model(torch.ones(1, 2)).requires_grad
