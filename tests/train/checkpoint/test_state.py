"""The states of random generators: those that a device's steps use, and no others."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from situs.train.checkpoint.state import generators, seed_generators, set_generators


@pytest.mark.parametrize("kind", ["cpu", "cuda", "xpu"])
def test_a_devices_generators_are_saved_and_restored(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    states = {"cuda": torch.tensor([1, 2]), "xpu": torch.tensor([3, 4])}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: states["cuda"])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, _: states.update(cuda=state))
    other = SimpleNamespace(get_rng_state=lambda: states["xpu"], set_rng_state=lambda state: states.update(xpu=state))
    monkeypatch.setattr(torch, "get_device_module", lambda _: other)
    device, begin = torch.device(kind), dict(states)
    saved = generators(device)
    assert sorted(saved) == sorted({"cpu", kind})
    numbers = torch.rand(3)
    states.update(cuda=torch.zeros(2), xpu=torch.zeros(2))
    set_generators(saved, device)
    assert torch.equal(torch.rand(3), numbers)
    for name, state in states.items():
        assert torch.equal(state, begin[name]) is (name == kind)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_file_of_another_device_restores_the_cpu_alone(kind: str) -> None:
    saved = generators(torch.device("cpu"))
    numbers = torch.rand(3)
    set_generators(saved, torch.device(kind))
    assert torch.equal(torch.rand(3), numbers)


def test_seeds_steps_and_ranks_have_generators_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_rng_state(), set[int]()
    try:
        for seed in (0, 1, 2, 2**62):
            for step in (0, 1, 2, 1000):
                for rank in (0, 1, 7):
                    monkeypatch.setattr("situs.train.checkpoint.state.distributed.rank", lambda rank=rank: rank)
                    seed_generators(seed, step)
                    seen.add(torch.initial_seed())
        assert len(seen) == 4 * 4 * 3 and all(0 <= seed < 2**63 for seed in seen)
        seed_generators(1, 0)
        assert torch.initial_seed() == (1_000_003 * 65_537) + 7  # as in runs of earlier versions
    finally:
        torch.set_rng_state(before)
