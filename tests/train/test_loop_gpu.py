"""What only a GPU can show: streams, pinned flags, the device's own generator, compiled kernels."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path

import pytest
import torch
from toy import ToyLoader, ToyMethod, toy

from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.contract import TrainResult
from situs.train.loop import NotFiniteError, fit
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


def train(
    folder: Path, config: TrainConfig, *, stop: int = -1, poison: int | None = None, count: int = 40,
    kind: type[ToyMethod] = ToyMethod,
) -> tuple[TrainResult, ToyMethod]:  # fmt: skip
    run = RunFolder.open(folder) if (folder / "config.json").exists() else RunFolder.create(folder, {})
    method = toy(drop_path=0.3, poison=poison).cuda()
    method.__class__ = kind
    return fit(method, ToyLoader(count, device="cuda"), config, OPTIM, run, hooks=[StopAt(stop)]), method


def same(left: ToyMethod, right: ToyMethod) -> None:
    for (name, one), other in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many updates were replayed from a graph."""
    count = [0]
    replay_graph = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay_graph(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return count


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("compiled", "count"), [(False, 48), (False, 45), (True, 48)], ids=["eager", "ragged", "compiled"]
)
def test_a_recorded_step_is_the_step(
    tmp_path: Path, precision: str, compiled: bool, count: int, recorded: list[int]
) -> None:
    """Through accumulation, drop path, the mean, clipping, hooks, checkpoints and a last batch of another size.

    Compiled, a batch of another size makes torch compile anew for all sizes, which rounds otherwise: not compared.
    """
    config = dataclasses.replace(TRAIN, precision=precision, compile=compiled)
    plain, method = train(tmp_path / "plain", dataclasses.replace(config, graph=False), count=count)
    assert recorded == [0]
    graphed, other = train(tmp_path / "graphed", config, count=count)
    # Four epochs of six steps: the first four are not, nor is an epoch's last one of another size.
    assert recorded == [20 if count == 48 else 16]
    assert plain.metrics == graphed.metrics
    same(method, other)


class Asks(ToyMethod):
    """Reads a value on the host, which no graph can hold."""

    def forward(self, batch, draws):
        return super().forward(batch, draws) if float(batch.inputs.sum()) > -1e9 else None


def test_what_cannot_be_recorded_goes_on_as_before(
    tmp_path: Path, recorded: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(TRAIN, accumulate=1)
    _, plain = train(tmp_path / "plain", dataclasses.replace(config, graph=False), kind=Asks)
    _, other = train(tmp_path / "other", config, kind=Asks)
    assert recorded == [0]
    same(plain, other)
    assert capfd.readouterr().err.count("the step cannot be recorded as a CUDA graph") == 1


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, precision: str, compiled: bool) -> None:
    config = dataclasses.replace(TRAIN, precision=precision, compile=compiled)
    _, peace = train(tmp_path / "peace", config)
    first, _ = train(tmp_path / "run", config, stop=7)
    assert first.interrupted
    second, method = train(tmp_path / "run", config)
    assert second.step == 20
    same(peace, method)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("number", [4, 8], ids=["eager", "recorded"])
def test_a_bad_step_ends_the_run(tmp_path: Path, precision: str, number: int) -> None:
    """Found a step late, when the graph's buffers hold the next batch."""
    loader = ToyLoader(80, device="cuda")  # ten steps an epoch: a sample comes once
    sample = int(next(iter(loader.iterate(0, number - 1))).ids[0])
    config = dataclasses.replace(TRAIN, precision=precision, log_every=100, save_every=100)
    with pytest.raises(NotFiniteError, match=f"step {number} was not finite"):
        train(tmp_path / "run", config, poison=sample, count=80)


def test_steps_between_log_lines_do_not_wait_for_the_device(tmp_path: Path) -> None:
    """Under this mode every wait of the host raises; only the flag's event, a step late, is waited for."""
    config = dataclasses.replace(TRAIN, log_every=1000, save_every=1000, epochs=2)

    class Strict:
        def after_step(self, state) -> None:
            torch.cuda.set_sync_debug_mode("error" if 4 < state.step < 9 else "default")

        def after_epoch(self, state) -> None:
            pass

    run = RunFolder.create(tmp_path / "run", {})
    try:
        fit(toy(drop_path=0.3).cuda(), ToyLoader(device="cuda"), config, OPTIM, run, hooks=[Strict()])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert run.records()[-1]["step"] == 10
