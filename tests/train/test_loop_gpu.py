"""What only a GPU can show: streams, pinned flags, the device's own generator, compiled kernels."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from toy import ToyLoader, ToyMethod, toy

from situs.train.checkpoint import RunFolder
from situs.train.contract import Result
from situs.train.loop import TrainConfig, fit
from situs.train.nan import NotFiniteError, replay
from situs.train.optim import OptimConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # Each version of torch warns of other insides of its compiler and of its search for waits; none is ours.
    pytest.mark.filterwarnings("ignore"),
]

TRAIN = TrainConfig(epochs=4, precision="bf16", log_every=3, save_every=4, keep=3, accumulate=2)
OPTIM = OptimConfig(lr=1e-2, warmup_epochs=1, layer_decay=0.8, ema=0.9, clip=1.0)


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def after_step(self, state) -> None:
        torch.rand(3, device="cuda")
        if state.step == self.step:
            signal.raise_signal(signal.SIGINT)

    def after_epoch(self, state) -> None:
        pass


def train(folder: Path, config: TrainConfig, *, stop: int = -1, poison: int | None = None) -> tuple[Result, ToyMethod]:
    run = RunFolder.open(folder) if (folder / "config.json").exists() else RunFolder.create(folder, {})
    method = toy(drop_path=0.3, poison=poison).cuda()
    return fit(method, ToyLoader(device="cuda"), config, OPTIM, run, hooks=[StopAt(stop)]), method


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, precision: str, compiled: bool) -> None:
    config = dataclasses.replace(TRAIN, precision=precision, compile=compiled)
    _, peace = train(tmp_path / "peace", config)
    first, _ = train(tmp_path / "run", config, stop=7)
    assert first.interrupted
    second, method = train(tmp_path / "run", config)
    assert second.step == 20
    for (name, left), right in zip(peace.state_dict().items(), method.state_dict().values(), strict=True):
        assert torch.equal(left, right), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_bad_step_is_saved_and_runs_again(tmp_path: Path, precision: str) -> None:
    sample = int(next(iter(ToyLoader(device="cuda").iterate(0, 3))).ids[0])
    config = dataclasses.replace(TRAIN, precision=precision, log_every=100, save_every=100)
    with pytest.raises(NotFiniteError, match="step 4 was not finite") as caught:
        train(tmp_path / "run", config, poison=sample)
    again = replay(caught.value.folder, toy(seed=5, drop_path=0.3, poison=sample).cuda())
    assert again.step == 4
    assert not torch.isfinite(torch.tensor(again.loss))
    assert "backbone.model.patch_embed.weight" in again.gradients


def test_steps_between_log_lines_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Under this mode every wait of the host raises; only the flag's event, a step late, is waited for."""
    config = dataclasses.replace(TRAIN, log_every=1000, save_every=1000, epochs=1)

    class Strict:
        def after_step(self, state) -> None:
            torch.cuda.set_sync_debug_mode("error" if state.step < 4 else "default")

        def after_epoch(self, state) -> None:
            pass

    run = RunFolder.create(tmp_path / "run", {})
    try:
        fit(toy(drop_path=0.3).cuda(), ToyLoader(device="cuda"), config, OPTIM, run, hooks=[Strict()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.records()[-1]["step"] == 5
