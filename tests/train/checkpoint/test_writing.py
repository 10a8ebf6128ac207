"""Writes in the background: one at a time, whole or not there, and their errors told."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy import ToyLoader, toy

from situs.errors import SitusError
from situs.train.checkpoint import RunFolder, writing
from situs.train.checkpoint.writing import Background, Snapshot
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.optim import OptimConfig

TRAIN = TrainConfig(epochs=4, precision="fp32", log_every=3, save_every=4, keep=3)


class Gate:
    """Holds every file back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.asked = threading.Event(), []
        self.error: OSError | None = None
        real = writing.write_tensors

        def held(path: Path, *given: object) -> object:
            self.asked.append(path.name)
            while not self.open.wait(0.001):
                given[-1]()  # pyright: ignore[reportCallIssue]  (the background's check)
            if self.error is not None:
                raise self.error
            return real(path, *given)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(writing, "write_tensors", held)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open.set()


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", {})


def begin(run: RunFolder, step: int, value: float) -> torch.Tensor:
    weights = torch.full((100,), value)
    run.begin(step, {"model": {"w": weights}}, {}, keep=2)
    return weights


def test_the_run_goes_on_and_the_checkpoint_is_of_its_step(run: RunFolder, gate: Gate) -> None:
    run.append({"step": 1, "loss": 0.5})
    weights = begin(run, 1, 1.0)
    weights.fill_(9.0)  # the next step
    run.append({"step": 2, "loss": 0.25})
    assert list(run.checkpoints.glob("step-*")) == []
    assert not run._background._pending.done()
    gate.open.set()
    assert run.wait() == run.checkpoints / "step-00000001"
    found = run.newest()
    assert torch.equal(found.tensors("model")["w"], torch.ones(100))
    assert found.state["metrics"]["bytes"] == len('{"step": 1, "loss": 0.5}\n')
    run.rewind(found)
    assert [record["step"] for record in run.records()] == [1]
    assert run.wait() is None
    assert run._background._pending is None


def test_a_second_write_waits_for_the_first_and_a_look_for_both(run: RunFolder, gate: Gate) -> None:
    begin(run, 1, 1.0)
    second = threading.Thread(target=lambda: begin(run, 2, 2.0))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    assert gate.asked == ["model.safetensors"]
    gate.open.set()
    second.join()
    assert sorted(run.steps()) == [1, 2]  # though nobody has called wait
    assert run.newest().step == 2


def test_an_error_is_told_once_and_nothing_is_lost(run: RunFolder, gate: Gate) -> None:
    gate.open.set()
    run.save(1, {"model": {"w": torch.ones(3)}}, {}, keep=2)
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    begin(run, 2, 2.0)
    run.steps()
    assert run.failed
    with pytest.raises(
        SitusError, match=r"step 2 could not be written: no space left on device; the checkpoint of step 1 is wh"
    ):
        begin(run, 3, 3.0)
    assert not run.failed
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-00000001"]
    gate.error = None
    begin(run, 3, 3.0)
    assert run.wait() == run.checkpoints / "step-00000003"


def test_a_bug_is_not_swallowed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(writing, "write_tensors", broken)
    with pytest.raises(
        SitusError, match=r"step 1 could not be written: keyerror: 'a bug'; there is no earlier checkpoint"
    ):
        run.save(1, {"model": {"w": torch.ones(3)}}, {}, keep=2)


def test_what_is_given_up_leaves_nothing(run: RunFolder, gate: Gate) -> None:
    begin(run, 1, 1.0)
    run.close(at_once=True)
    assert list(run.checkpoints.iterdir()) == []


def test_an_interrupted_wait_waits_again() -> None:
    background, let = Background(), threading.Event()
    background.begin(lambda: Path("there") if let.wait(5) else Path())
    pending = background._pending
    assert pending is not None
    real, pending.result = pending.result, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        background.wait()
    pending.result = real
    let.set()
    assert background.wait() == Path("there")


# --- in a run -----------------------------------------------------------------------------------------------


class AtStep:
    def __init__(self, step: int, act) -> None:
        self.step, self.act = step, act

    def after_step(self, state) -> None:
        if state.step == self.step:
            self.act()

    def after_epoch(self, state) -> None:
        pass


def train(run: RunFolder, *hooks: AtStep, config: TrainConfig = TRAIN) -> None:
    fit(toy(drop_path=0.3), ToyLoader(), config, OptimConfig(warmup_epochs=1), run, hooks=hooks)


def test_steps_are_made_while_a_checkpoint_is_written(run: RunFolder, gate: Gate) -> None:
    seen: list[list[int]] = []
    look = AtStep(7, lambda: (seen.append([*range(len(list(run.checkpoints.glob("step-*"))))]), gate.open.set()))
    train(run, look)
    assert seen == [[]]  # three steps after it was due
    assert sorted(run.steps()) == [12, 16, 20]  # and the last is there when the run is


def test_a_full_disk_ends_the_run_with_a_sentence_before_the_next_is_due(run: RunFolder, gate: Gate) -> None:
    gate.error = OSError(errno.ENOSPC, "No space left on device")
    steps: list[int] = []

    def fail() -> None:
        gate.open.set()
        while not run.failed:
            time.sleep(0.001)

    counted = [AtStep(step, lambda step=step: steps.append(step)) for step in range(1, 21)]
    with pytest.raises(SitusError, match=r"the checkpoint of step 4 could not be written: no space left on device"):
        train(run, AtStep(5, fail), *counted)
    assert steps[-1] == 5
    assert list(run.checkpoints.iterdir()) == []


def test_another_error_leaves_the_checkpoint_that_was_under_way(run: RunFolder, gate: Gate) -> None:
    def fall() -> None:
        threading.Timer(0.05, gate.open.set).start()
        raise RuntimeError("a probe's own")

    with pytest.raises(RuntimeError, match="a probe's own"):
        train(run, AtStep(6, fall))
    assert run.newest().step == 4


def test_a_second_ctrl_c_waits_for_nothing(run: RunFolder, gate: Gate) -> None:
    def twice() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, AtStep(6, twice))  # the gate is never opened
    assert list(run.checkpoints.iterdir()) == []


# --- the copy that is written ---------------------------------------------------------------------------------


def test_what_comes_later_does_not_change_it() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.5), "d": torch.empty(0, 3)}
    files = {"model": weights | {"turned": weights["a"].T, "tied": weights["a"]}, "log": {"sums": torch.arange(3)}}
    before = {file: {name: t.clone() for name, t in held.items()} for file, held in files.items()}
    held = Snapshot(files)
    for tensors in files.values():
        for tensor in tensors.values():
            tensor.zero_()
    held.wait()
    assert {file: set(tensors) for file, tensors in held.files.items()} == {f: set(t) for f, t in files.items()}
    for file, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(held.files[file][name], tensor), name
            assert held.files[file][name].dtype == tensor.dtype
            assert held.files[file][name].is_contiguous()
    assert held.files["model"]["tied"] is held.files["model"]["a"]  # still one tensor
    assert held.boxes == {}
    assert held.gpu is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fits", [True, False], ids=["device", "host"])
def test_a_graph_that_is_replayed_at_once_does_not_change_it(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is in the order of the device's work; where its memory is full, on the host before the replay."""
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    weights = [torch.full((1 << 22,), 1.0, device="cuda") for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            weight.mul_(2.0)
    for value in (2.0, 8.0, 32.0):
        graph.replay()
        held = Snapshot({"model": {str(n): weight for n, weight in enumerate(weights)}})
        graph.replay()
        held.wait()
        assert (held.gpu is not None) == fits
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found = [t.cpu() for t in held.files["model"].values()]
        assert all(torch.equal(t, torch.full_like(t, value)) for t in found)
