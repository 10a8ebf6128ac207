from __future__ import annotations

import pytest
import torch
from toy import ToyLoader, toy

from situs.core.when import When
from situs.errors import SitusError
from situs.train.checkpoint.state import check_fit, generators, moments, seed_generators, set_generators
from situs.train.optim import OptimConfig
from situs.train.step import Stepper

CPU = torch.device("cpu")


def test_generators_come_back() -> None:
    seed_generators(3)
    torch.rand(5)
    held = generators(CPU)
    first = torch.rand(4)
    set_generators(held, CPU)
    assert torch.equal(torch.rand(4), first)


def test_another_seed_or_step_is_another_stream() -> None:
    drawn = []
    for seed, step in ((0, 0), (1, 0), (0, 1), (2**63, 5)):
        seed_generators(seed, step)
        drawn.append(tuple(torch.rand(3).tolist()))
    assert len(set(drawn)) == 4


def test_moments_are_named_by_parameter_and_none_is_made_up() -> None:
    method = toy()
    stepper = Stepper(method, OptimConfig(), seed=0, precision="fp32", accumulate=1, parallel="ddp", compiled=False)
    stepper.update(next(iter(ToyLoader().iterate(0, 0))), When(), 1e-3, ragged=False)
    used = {name for name, p in method.named_parameters() if p.grad is not None}
    assert set(moments(stepper.optimizer)) == {f"{n}/{k}" for n in used for k in ("step", "exp_avg", "exp_avg_sq")}
    assert "spare" not in used


def test_what_does_not_fit_is_named() -> None:
    a, b = torch.zeros(2), torch.zeros(3)
    check_fit("x", {"w": a}, {"w": a.shape})
    with pytest.raises(SitusError, match=r"x does not fit: v is not in the file"):
        check_fit("x", {"w": a, "v": a}, {"w": a.shape})
    with pytest.raises(SitusError, match=r"x does not fit: v is in the file but not in the model"):
        check_fit("x", {"w": a}, {"w": a.shape, "v": a.shape})
    with pytest.raises(SitusError, match=r"x does not fit: w is \[3\], not \[2\]"):
        check_fit("x", {"w": a}, {"w": b.shape})
