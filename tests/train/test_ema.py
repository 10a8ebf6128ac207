from __future__ import annotations

import torch
from torch import nn

from situs.train.ema import Ema, decay_at


def test_the_mean_follows_the_slow_formula() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    model[1].bias.requires_grad_(False)
    ema = Ema(model, 0.7, warmup=True)
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


def test_warmup_only_lowers_the_decay() -> None:
    assert decay_at(0, 0.999, True) == 0.1
    assert decay_at(10**6, 0.999, True) == 0.999
    assert decay_at(0, 0.999, False) == 0.999


def test_applied_swaps_and_gives_back() -> None:
    model = nn.Linear(2, 2)
    ema = Ema(model, 0.5, warmup=False)
    with torch.no_grad():
        model.weight.add_(1.0)
    own, first = model.weight.detach().clone(), ema.mean["weight"].clone()
    with ema.applied():
        assert torch.equal(model.weight, first)
    assert torch.equal(model.weight, own)
    assert torch.equal(ema.mean["weight"], first)
    assert not torch.equal(first, own)
