from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from toy import ToyLoader, toy

from situs.core.when import When
from situs.data.batch import Batch
from situs.errors import SitusError
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import read_tensors
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.nan import NotFiniteError, _pack, _unpack, replay
from situs.train.optim import OptimConfig
from situs.train.step import MicroBatch, Update

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
def test_a_bad_step_is_saved_and_runs_again_to_the_same_end(tmp_path: Path, accumulate: int, precision: str) -> None:
    config = dataclasses.replace(TRAIN, accumulate=accumulate, precision=precision)
    error = stopped(tmp_path / "run", config)
    assert isinstance(error, SitusError)
    assert str(error).startswith("step 4 was not finite (loss ")
    assert "\n" not in str(error)
    assert "the weights are still those before it" in str(error)
    assert error.folder == tmp_path / "run" / "nan"
    state = json.loads((error.folder / "state.json").read_text())
    assert (state["step"], state["epoch"], len(state["shares"])) == (4, 0, accumulate)

    torch.manual_seed(123)  # replay brings its own generators
    again = replay(tmp_path / "run", toy(seed=9, poison=SAMPLE, drop_path=0.4))
    assert again.step == 4
    assert not math.isfinite(again.loss)
    assert repr(again.loss) == state["values"]["loss"]
    # The logits' size hangs on draws and drop path of every sample.
    assert again.metrics["size"] == pytest.approx(float(state["values"]["size"]), rel=1e-6)
    assert "backbone.model.patch_embed.weight" in again.gradients
    assert "backbone.model.head.bias" not in again.gradients


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_saved_weights_are_those_before_the_step(tmp_path: Path, precision: str) -> None:
    # Nothing is due after the bad step, so it is found when the next one is already queued: that must not move them.
    config = dataclasses.replace(TRAIN, precision=precision, save_every=100)
    error = stopped(tmp_path / "run", config)
    peace = RunFolder.create(tmp_path / "peace", {})
    # The same schedule, ended early: a run of the whole length whose third step is looked at.
    seen: dict[str, torch.Tensor] = {}

    class Look:
        def after_step(self, state) -> None:
            if state.step == 3:
                seen.update({k: v.clone() for k, v in state.method.state_dict().items()})

        def after_epoch(self, state) -> None:
            pass

    fit(toy(poison=-1, drop_path=0.4), ToyLoader(), config, OPTIM, peace, hooks=[Look()])
    saved = read_tensors(error.folder / "model.safetensors")
    assert saved.keys() == seen.keys()
    assert all(torch.equal(saved[name], seen[name]) for name in saved)


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


def test_a_folder_without_a_bad_step_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match="has no saved step"):
        replay(tmp_path, toy())


def test_a_step_comes_back_whole_and_one_of_before_too() -> None:
    count, state = 3, {"cpu": torch.get_rng_state()}
    mask = torch.arange(count)[:, None] > torch.arange(2)
    part = MicroBatch(Batch(torch.randn(count, 2), torch.arange(count), {"label": torch.arange(count)}, mask),
                {"order": torch.randn(count)}, 0.5)  # fmt: skip
    step = Update(When(), [part, part], state, torch.zeros(1), torch.zeros(()), torch.zeros(2))
    packed = _pack(step)
    earlier = {k.replace("inputs", "images").replace("targets/label", "labels"): v for k, v in packed.items()}
    for held in (packed, earlier):
        for batch, draws, share in _unpack(held, [0.5, 0.5], torch.device("cpu")):
            assert torch.equal(batch.inputs, part.batch.inputs)
            assert torch.equal(batch.ids, part.batch.ids)
            assert {k: v.tolist() for k, v in batch.targets.items()} == {"label": [0, 1, 2]}
            assert batch.mask is not None
            assert torch.equal(batch.mask, mask)
            assert draws.keys() == {"order"}
            assert torch.equal(draws["order"], part.draws["order"])
            assert share == 0.5
