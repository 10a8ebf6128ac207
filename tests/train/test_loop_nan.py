from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from toy import ToyLoader, toy

from situs.errors import SitusError
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import read_table
from situs.train.config import TrainConfig
from situs.train.loop import NotFiniteError, fit
from situs.train.optim import OptimConfig

TRAIN = TrainConfig(epochs=4, precision="fp32", log_every=100, save_every=2, keep=2)
OPTIM = OptimConfig(lr=1e-2, warmup_epochs=1, weight_decay=0.1, ema=0.9, clip=1.0)


SAMPLE = int(next(iter(ToyLoader().iterate(0, 3))).ids[0])  # the fourth step: neither a log step nor the last


def stopped(folder: Path, config: TrainConfig = TRAIN, sample: int = SAMPLE) -> NotFiniteError:
    run = RunFolder.create(folder, {"train": dataclasses.asdict(config)})
    with pytest.raises(NotFiniteError) as caught:
        fit(toy(poison=sample, drop_path=0.4), ToyLoader(), config, OPTIM, run)
    return caught.value


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_bad_step_ends_the_run_and_is_recorded(tmp_path: Path, accumulate: int, precision: str) -> None:
    config = dataclasses.replace(TRAIN, accumulate=accumulate, precision=precision)
    error = stopped(tmp_path / "run", config)
    assert isinstance(error, SitusError)
    assert str(error).startswith("step 4 was not finite (loss ")
    assert "\n" not in str(error)
    assert "the weights are still those before this step" in str(error)
    state = read_table(tmp_path / "run" / "nan" / "state.json")
    assert isinstance(state, dict)
    assert (state["step"], state["epoch"]) == (4, 0)
    assert not math.isfinite(float(state["values"]["loss"]))
    assert math.isfinite(float(state["values"]["size"]))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_weights_are_those_before_the_step(tmp_path: Path, precision: str) -> None:
    # Nothing is due after the bad step, so it is found when the next one is already queued: that must not move them.
    config = dataclasses.replace(TRAIN, precision=precision, save_every=100)
    poisoned = toy(poison=SAMPLE, drop_path=0.4)
    with pytest.raises(NotFiniteError, match="step 4"):
        fit(poisoned, ToyLoader(), config, OPTIM, RunFolder.create(tmp_path / "run", {}))
    # The same schedule, ended early: a run of the whole length whose third step is looked at.
    seen: dict[str, torch.Tensor] = {}

    class Look:
        def after_step(self, state) -> None:
            if state.step == 3:
                seen.update({k: v.clone() for k, v in state.method.state_dict().items()})

        def after_epoch(self, state) -> None:
            pass

    peace = RunFolder.create(tmp_path / "peace", {})
    fit(toy(poison=-1, drop_path=0.4), ToyLoader(), config, OPTIM, peace, hooks=[Look()])
    left = poisoned.state_dict()
    assert left.keys() == seen.keys()
    assert all(torch.equal(left[name], seen[name]) for name in left)


def test_a_resumed_run_comes_to_the_same_bad_step(tmp_path: Path) -> None:
    first = stopped(tmp_path / "run")
    run = RunFolder.open(tmp_path / "run")
    with pytest.raises(NotFiniteError) as again:
        fit(toy(seed=9, poison=SAMPLE, drop_path=0.4), ToyLoader(), TRAIN, OPTIM, run)
    assert str(again.value) == str(first)


def test_no_checkpoint_is_written_after_a_bad_step(tmp_path: Path) -> None:
    # save_every=2: the bad step 4 is itself a save step.
    stopped(tmp_path / "run")
    assert RunFolder.open(tmp_path / "run").steps() == [2]


def test_a_bad_last_step_is_found_too(tmp_path: Path) -> None:
    last = int(list(ToyLoader().iterate(0, 0))[-1].ids[0])
    error = stopped(tmp_path / "run", dataclasses.replace(TRAIN, epochs=1, save_every=100), last)
    assert "step 5 was not finite" in str(error)
    assert RunFolder.open(tmp_path / "run").steps() == []


def test_gradients_alone_can_be_bad(tmp_path: Path) -> None:
    class Root(type(toy())):
        def forward(self, batch, draws):
            output = super().forward(batch, draws)
            # The root of zero: value 0, slope infinite, 0 · inf = NaN in the gradient.
            return output._replace(loss=output.loss + (self.backbone.model.head.bias * 0).abs().sum().sqrt())

    method = toy()
    method.__class__ = Root
    with pytest.raises(NotFiniteError, match="gradient norm nan"):
        fit(method, ToyLoader(), TRAIN, OPTIM, RunFolder.create(tmp_path / "run", {}))
