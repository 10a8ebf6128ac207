from __future__ import annotations

import dataclasses
import os
import resource
import signal
import socket
import sys
import types
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import small_method, small_vit
from toy import ToyLoader, ToyMethod, toy

from situs.errors import SitusError
from situs.methods.base import Batch
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.contract import RunState, TrainResult
from situs.train.loop import LONG_RUN, fit, shorten_hints
from situs.train.optim import OptimConfig, rate_at
from situs.train.step import Stepper, Update

TRAIN = TrainConfig(epochs=4, precision="fp32", log_every=3, save_every=4, keep=3)
OPTIM = OptimConfig(lr=1e-2, warmup_epochs=1, weight_decay=0.1, ema=0.9, clip=1.0)
LEARN = dataclasses.replace(OPTIM, lr=3e-2)


class StopAt:
    """Asks the run to stop at a step, as a user would."""

    def __init__(self, step: int, number: int = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def after_step(self, state: RunState) -> None:
        if state.step == self.step:
            signal.raise_signal(self.number)

    def after_epoch(self, state: RunState) -> None:
        pass


class Watcher:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[tuple[int, int]] = []

    def after_step(self, state: RunState) -> None:
        self.steps.append(state.step)
        torch.rand(7)
        state.method.eval()

    def after_epoch(self, state: RunState) -> None:
        self.epochs.append((state.epoch, state.step))
        state.log({"probe": 0.25})


def train(
    folder: Path, config: TrainConfig = TRAIN, optim: OptimConfig = OPTIM, *, hooks=(), loader=None, method=None
) -> tuple[TrainResult, ToyMethod, RunFolder]:
    fields = {"train": dataclasses.asdict(config), "optim": dataclasses.asdict(optim)}
    exists = (folder / "config.json").exists()
    run = RunFolder.open(folder, fields) if exists else RunFolder.create(folder, fields)
    method = toy(drop_path=0.3) if method is None else method
    return fit(method, loader or ToyLoader(), config, optim, run, hooks=hooks), method, run


def same(a: ToyMethod, b: ToyMethod) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


@pytest.fixture(scope="module")
def peace(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainResult, ToyMethod, RunFolder]:
    """The run that nothing disturbs, trained once."""
    return train(tmp_path_factory.mktemp("peace") / "run")


def test_training_learns_and_leaves_a_whole_folder(tmp_path: Path) -> None:
    result, method, run = train(tmp_path / "run", dataclasses.replace(TRAIN, epochs=20), LEARN, method=toy())
    assert (result.step, result.total, result.interrupted) == (100, 100, False)
    records = run.records()
    assert [r["step"] for r in records] == [*range(3, 100, 3), 100]
    assert records[-1]["loss"] < 0.5 * records[0]["loss"]
    assert {
        "epoch",
        "lr",
        "accuracy",
        "gradient_norm",
        "images_per_second",
        "data_wait",
        "memory_gib",
        "seconds",
    } <= set(records[0])
    assert result.metrics["loss"] == records[-1]["loss"]
    lr = [rate_at(r["step"] - 1, 100, 5, 3e-2, OPTIM) for r in records]
    assert [r["lr"] for r in records] == lr
    assert sorted(run.steps()) == [92, 96, 100]
    kinds = {path.suffix for path in run.path.rglob("*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}  # no pickle anywhere
    assert torch.equal(method.spare, torch.ones(3, 3))  # never used, so neither moved nor decayed


@pytest.mark.thin(2)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path: Path, number: int, capsys, peace) -> None:
    handed = signal.signal(number, before := lambda *_: None)  # a suite behind nohup or & is handed a signal ignored
    try:
        first, _, run = train(tmp_path / "run", hooks=[StopAt(7, number)])  # in the middle of epoch 1
        assert signal.getsignal(number) is before
    finally:
        signal.signal(number, handed)
    assert (first.step, first.interrupted) == (7, True)
    assert first.checkpoint == run.checkpoints / "step-00000007"
    assert "stopped after step 7; resume " in capsys.readouterr().err
    second, method, run = train(tmp_path / "run")
    assert (second.step, second.interrupted) == (20, False)
    assert same(method, peace[1])
    drop = ("seconds", "images_per_second", "data_wait", "memory_gib")
    ours = [{k: v for k, v in r.items() if k not in drop} for r in run.records()]
    theirs = [{k: v for k, v in r.items() if k not in drop} for r in peace[2].records()]
    assert ours == theirs
    assert peace[0].metrics["loss"] == second.metrics["loss"]


def test_a_wish_in_the_last_step_is_not_lost(tmp_path: Path, capsys, peace) -> None:
    result, method, run = train(tmp_path / "run", hooks=[StopAt(20)])
    assert (result.step, result.total, result.interrupted) == (20, 20, True)
    assert "stopped after step 20, the last step: the run is complete" in capsys.readouterr().err
    assert 20 in run.steps()
    assert same(method, peace[1])


def test_a_warm_up_that_would_not_end_is_shortened_and_said(tmp_path: Path, capsys) -> None:
    long = dataclasses.replace(OPTIM, warmup_epochs=5)
    _, _, run = train(tmp_path / "run", dataclasses.replace(TRAIN, log_every=1), long)
    said = "the warm-up of 5 epochs is longer than the run, and is shortened to 2 of the 20 steps (optim.warmup"
    assert said in capsys.readouterr().err
    rates = [record["lr"] for record in run.records()]
    assert rates == [rate_at(step, 20, 2, 1e-2, long) for step in range(20)]
    assert max(rates) == 1e-2
    assert rates[-1] < 2e-4
    train(tmp_path / "peace")
    assert "warm-up" not in capsys.readouterr().err


def test_a_slow_run_speaks_between_its_log_steps(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step takes four seconds on this clock: words after 12 s and then every 32, and the same file as ever."""
    _, _, quick = train(tmp_path / "quick", dataclasses.replace(TRAIN, log_every=19))
    capsys.readouterr()
    now = [0.0]
    monkeypatch.setattr("situs.progress.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(ToyLoader):
        def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
            for batch in super().iterate(epoch, start_step):
                now[0] += 4.0
                yield batch

    _, _, run = train(tmp_path / "run", dataclasses.replace(TRAIN, log_every=19), loader=Slow())
    lines = capsys.readouterr().err.splitlines()
    assert [line.strip() for line in lines[:2]] == ["15 %  training  1:08 left", "55 %  training  0:36 left"]
    records = [line for line in lines if line.startswith("step ")]
    assert [line.partition(" · ")[0] for line in records] == ["step 19/20", "step 20/20"]
    assert all(" · loss " in line and " · accuracy " in line for line in records)
    assert [r["step"] for r in run.records()] == [19, 20]
    assert [r["loss"] for r in run.records()] == [r["loss"] for r in quick.records()]


class Ticking(ToyLoader):
    """Each batch takes two seconds of a clock, and the run waits for half of one of them."""

    def __init__(self, now: list[float]) -> None:
        super().__init__()
        self.now = now

    def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
        for batch in super().iterate(epoch, start_step):
            self.now[0] += 2.0
            self.data_wait += 0.5
            yield batch


@pytest.mark.parametrize("stopped", [None, 7])
def test_a_record_counts_its_own_steps_and_no_hook(
    stopped: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four samples a second whoever looks on for how long, after a restart too; the seconds are those of all."""
    now = [100.0]
    monkeypatch.setattr("situs.train.loop.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(StopAt):
        def after_step(self, state: RunState) -> None:
            now[0] += 4.0
            super().after_step(state)

    config = dataclasses.replace(TRAIN, epochs=2)
    if stopped is not None:
        train(tmp_path / "run", config, hooks=[Slow(stopped)], loader=Ticking(now))
        now[0] += 1000.0
    _, _, run = train(tmp_path / "run", config, hooks=[Slow(0)], loader=Ticking(now))
    records = run.records()
    assert [r["step"] for r in records] == [3, 6, 9, 10]
    assert [r["epoch"] for r in records] == [0.6, 1.2, 1.8, 2.0]
    assert [r["images_per_second"] for r in records] == [4.0] * 4
    assert [r["data_wait"] for r in records] == [0.25] * 4
    assert [r["seconds"] for r in records] == [14.0, 32.0, 50.0, 56.0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    assert 0.5 * peak < records[-1]["memory_gib"] * 2**30 <= peak


class Judge:
    """A validation after each epoch: by its accuracy the second is best, and the third is as good."""

    def after_step(self, state: RunState) -> None:
        pass

    def after_epoch(self, state: RunState) -> None:
        state.log({"val_map": (0.9, 0.1, 0.2, 0.95)[state.epoch], "val_top1": (0.5, 0.7, 0.7, 0.6)[state.epoch]})


@pytest.mark.parametrize("stopped", [None, 12])
def test_of_the_best_validations_the_first_stays(
    stopped: int | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(TRAIN, save_every=100, keep=1, keep_best=True)
    if stopped is not None:
        train(tmp_path / "run", config, hooks=[Judge(), StopAt(stopped)])
    _, _, run = train(tmp_path / "run", config, hooks=[Judge()])
    assert sorted(run.steps()) == [10, 20]
    said = capsys.readouterr().err
    assert said.count("best val top1 0.7000 after step 10, whose checkpoint is the model of the run") == 1
    assert "step 10: val map 0.1, val top1 0.7\n" in said and "no validation" not in said


def test_metrics_below_twice_their_chance_are_told_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(TRAIN, epochs=None, max_steps=2)
    metrics = train(tmp_path / "first", config)[0].metrics
    assert "near chance" not in capsys.readouterr().err
    level = {"size": 0.501 * metrics["size"], "loss": 0.499 * metrics["loss"], "absent": 1.0}
    monkeypatch.setattr(ToyMethod, "chance", level)
    train(tmp_path / "again", config)
    said = (
        f"size {metrics['size']:.3g} is near chance ({level['size']:.3g}): the run has learned almost nothing in 2 up"
    )
    (told,) = (line for line in capsys.readouterr().err.splitlines() if "near chance" in line)
    assert told.startswith(said)
    train(tmp_path / "stopped", config, hooks=[StopAt(1)])
    assert "near chance" not in capsys.readouterr().err  # it has not ended


@pytest.mark.parametrize(
    ("changes", "steps", "said"),
    [
        ({"warmup_epochs": 1}, 4, "1 epoch 0 of the 4 steps (optim.warmup_epochs)"),
        ({"warmup_epochs": 1.5}, 5, "1.5 epochs 0 of the 5 steps (optim.warmup_epochs)"),
        ({"warmup_steps": 5}, 5, "5 steps 0 of the 5 steps (optim.warmup_steps)"),
        ({"warmup_steps": 4}, 5, None),
        ({"warmup_epochs": 1}, 6, None),
    ],
)  # fmt: skip
def test_a_warm_up_is_named_as_it_was_asked_for(
    changes: dict[str, int], steps: int, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.replace(TRAIN, epochs=None, max_steps=steps)
    train(tmp_path / "run", config, dataclasses.replace(OPTIM, **changes))
    told = [line for line in capsys.readouterr().err.splitlines() if "warm-up" in line]
    assert len(told) == (said is not None)
    if said is not None:
        length, _, rest = said.partition(" 0 ")
        assert told[0].endswith(f"the warm-up of {length} is longer than the run, and is shortened to 0 {rest}")


@pytest.mark.parametrize(
    ("seconds", "long", "said"), [(0.1, 120.0, None), (2.0, 30.0, "0:32"), (9.0, 120.0, "2:42"), (60.0, 120.0, "19:00")]
)
def test_a_long_run_says_at_its_beginning_how_long_it_takes(
    seconds: float, long: float, said: str | None, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 steps; four tell, on a slow clock two, and from a minute each on the first alone."""
    now = [0.0]
    if long != LONG_RUN:
        monkeypatch.setattr("situs.train.loop.LONG_RUN", long)
    monkeypatch.setattr("situs.train.loop.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(ToyLoader):
        def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
            for batch in super().iterate(epoch, start_step):
                now[0] += seconds
                yield batch

    train(tmp_path / "run", loader=Slow())
    told = [line for line in capsys.readouterr().err.splitlines() if " to go; to shorten the run: " in line]
    assert len(told) == (said is not None)
    if said is not None:
        assert told[0].startswith(f"about {said} to go") and "fewer than 20 updates (train.epochs" in told[0]


@pytest.mark.parametrize("compiled", [True, False])
def test_compiling_is_told_before_and_after_the_first_update(
    compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("situs.train.loop.time", types.SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Stepper):
        def update(self, *given: Any) -> Update:
            now[0] += 42.0 if now[0] == 0 else 1.0
            return super().update(*given)

    def stepper(*given: Any, **more: Any) -> Stepper:
        assert not more["compiled"]  # on the CPU, whatever the config asks for
        made = Slow(*given, **more)
        made.compiled = compiled
        return made

    run = RunFolder.create(tmp_path / "run", {})
    fit(toy(), ToyLoader(), dataclasses.replace(TRAIN, log_every=20, compile=True), OPTIM, run, stepper=stepper)
    said = capsys.readouterr().err.splitlines()
    told = [number for number, line in enumerate(said) if "compil" in line]
    assert [said[number].partition(" a ")[0] for number in told] == (
        ["compiling the step takes about", "compiled in 42 s"] if compiled else []
    )
    assert all(number < said.index(next(line for line in said if "step 20/20" in line)) for number in told)


@pytest.mark.parametrize(
    ("name", "shape", "said"),
    [
        ("supervised", (8, 8), "img_size=4 takes about a quarter of the time)"),
        ("supervised", (8, 12), "img_size=4 takes about a quarter of the time)"),
        ("supervised", (16, 8), "img_size=8,4 takes about a quarter of the time)"),
        ("mp3", (24, 8), "img_size=12,4 takes about a quarter of the time)"),
        ("mp3", (4, 16), "img_size)"),  # one patch high: it has no half
    ],
)
def test_what_shortens_a_run_is_what_it_has(name: str, shape: tuple[int, int], said: str) -> None:
    classes = {"num_classes": 3} if name == "supervised" else {}
    method = small_method(name, small_vit(shape, **classes))
    ways = f"fewer than 1 update (train.epochs, train.max_steps), smaller images (data.{said}"
    adapt = "; or use situs adapt, which has a time limit"
    all_of = f"{ways}, training only the classifier (tuning.parts=head){adapt}" if classes else ways
    assert shorten_hints(method, 1) == all_of
    method.requires_grad_(False)
    assert shorten_hints(method, 1) == f"{ways}{adapt * bool(classes)}"  # little is trained already


def test_a_damaged_checkpoint_sends_the_run_back_one(tmp_path: Path, capsys, peace) -> None:
    _, _, run = train(tmp_path / "run", hooks=[StopAt(9)])
    weights = run.checkpoints / "step-00000009" / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    _, method, _ = train(tmp_path / "run")
    said = capsys.readouterr().err
    assert "the checkpoint of step 9 is damaged (optimizer.safetensors has 100 of" in said
    assert "resumed after step 8 of 20" in said
    assert same(method, peace[1])


@pytest.mark.parametrize(
    ("world", "why"), [(1, "is resumed on another kind of device"), (2, "was saved by 2 ranks and is resumed by 1")]
)
def test_other_random_numbers_are_noted_with_their_cause(
    tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch, world: int, why: str
) -> None:
    begin = RunFolder.begin

    def begin_as(self: RunFolder, step: int, files, state, *rest) -> None:
        begin(self, step, files, {**state, "world": world}, *rest)

    monkeypatch.setattr(RunFolder, "begin", begin_as)
    train(tmp_path / "run", hooks=[StopAt(9)])
    states = {"cpu": torch.get_rng_state(), "other": torch.get_rng_state()}
    monkeypatch.setattr("situs.train.checkpoint.state.generators", lambda device: states)
    train(tmp_path / "run")
    said = capsys.readouterr().err
    assert f"drop path continues with other random numbers, because the run {why}\n" in said


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path: Path, peace) -> None:
    RunFolder.create(tmp_path / "run", {"train": dataclasses.asdict(TRAIN), "optim": dataclasses.asdict(OPTIM)}).append(
        {"step": 3}
    )
    _, method, run = train(tmp_path / "run")
    assert same(method, peace[1])
    assert [r["step"] for r in run.records()] == [3, 6, 9, 12, 15, 18, 20]


def test_a_method_that_was_evaluated_before_trains_with_drop_path(tmp_path: Path, peace) -> None:
    method = toy(drop_path=0.3)
    method.eval()
    train(tmp_path / "run", method=method)
    assert same(method, peace[1])


def test_two_runs_in_one_folder_are_kept_apart(tmp_path: Path, peace) -> None:
    refused: list[str] = []

    class Second:
        """Resumes the run that it looks on at."""

        def after_step(self, state: RunState) -> None:
            if state.step == 5:
                with pytest.raises(SitusError) as caught:
                    train(tmp_path / "run")
                refused.append(str(caught.value))

        def after_epoch(self, state: RunState) -> None:
            pass

    result, method, run = train(tmp_path / "run", hooks=[Second()])
    holder = f"process {os.getpid()} on {socket.gethostname()}"
    assert refused == [f"{run.path}: {holder} is using this folder; wait for that process, or stop it first"]
    assert result.step == 20
    assert same(method, peace[1])
    assert not (run.path / ".lock").exists()


def test_more_epochs_compute_the_schedule_anew_and_say_so(tmp_path: Path, capsys) -> None:
    train(tmp_path / "run")
    longer = dataclasses.replace(TRAIN, epochs=6)
    result, _, run = train(tmp_path / "run", longer)
    noted, said = capsys.readouterr()
    assert "train.epochs: 4 -> 6" in noted
    old, new = rate_at(19, 20, 5, 1e-2, OPTIM), rate_at(20, 30, 5, 1e-2, OPTIM)
    assert "ends at step 30, not 20. Its schedule is computed again over all 30 steps" in said
    assert f"from {old:.3g} to {new:.3g}" in said
    assert result.step == 30
    assert run.records()[-1]["lr"] == rate_at(29, 30, 5, 1e-2, OPTIM)


def test_a_complete_run_is_left_alone(tmp_path: Path, capsys) -> None:
    _, trained, _ = train(tmp_path / "run")
    result, method, run = train(tmp_path / "run", method=toy(seed=9))
    assert (result.step, result.interrupted) == (20, False)
    assert same(method, trained)
    assert "the run is complete" in capsys.readouterr().err
    assert run.records()[-1]["step"] == 20


def test_a_run_cannot_end_before_it_stands(tmp_path: Path) -> None:
    train(tmp_path / "run")
    with pytest.raises(SitusError, match=r"the run cannot end at step 10, because 20 steps are already done"):
        train(tmp_path / "run", dataclasses.replace(TRAIN, epochs=2))
    result, _, _ = train(tmp_path / "run")  # the refused wish left nothing behind
    assert result.step == 20


def test_other_data_cannot_be_resumed(tmp_path: Path) -> None:
    train(tmp_path / "run", hooks=[StopAt(3)])
    with pytest.raises(SitusError, match="steps_per_epoch was 5 and is now 3"):
        train(tmp_path / "run", loader=ToyLoader(count=24))
    # As many batches, and yet other samples in each: the order of 38 is not that of 40.
    with pytest.raises(SitusError, match="order was 40 samples and is now 38 samples, so the data or the batch"):
        train(tmp_path / "run", loader=ToyLoader(count=38))


def test_another_model_cannot_be_resumed(tmp_path: Path) -> None:
    train(tmp_path / "run", hooks=[StopAt(3)])
    whole = r"^step-00000003/model\.safetensors does not fit the run: backbone\.model\."
    for shape, said in (
        ({"depth": 3}, rf"{whole}blocks\.2\.\S+ is not in the file$"),
        ({"depth": 1}, rf"{whole}blocks\.1\.\S+ is in the file but not in the model$"),
        ({"classes": 4}, r"does not fit the run: tied has the shape \[3, 8\] instead of \[4, 8\]$"),
    ):
        with pytest.raises(SitusError, match=said):
            train(tmp_path / "run", method=toy(**shape))
    frozen = toy(drop_path=0.3)
    frozen.backbone.model.pos_embed.requires_grad_(False)
    with pytest.raises(SitusError, match=r"pos_embed is in the file, but the run does not train it$"):
        train(tmp_path / "run", method=frozen)


def test_steps_end_a_run_and_the_schedule_with_it(tmp_path: Path) -> None:
    result, method, run = train(tmp_path / "run", dataclasses.replace(TRAIN, epochs=None, max_steps=7))
    assert (result.step, result.total) == (7, 7)
    assert method.epochs == {2}  # of 5 steps, the second is not finished
    assert run.records()[-1]["lr"] == rate_at(6, 7, 5, 1e-2, OPTIM)


def test_a_method_is_told_how_far_the_run_is(tmp_path: Path) -> None:
    method = toy()
    train(tmp_path / "run", dataclasses.replace(TRAIN, accumulate=2), method=method)
    assert method.progress == [step / 20 for step in range(20) for _ in range(2)]
    assert method.epochs == {4}


def test_hooks_look_on_and_disturb_nothing(tmp_path: Path, peace) -> None:
    watcher = Watcher()
    result, method, run = train(tmp_path / "run", hooks=[watcher])
    assert watcher.steps == [*range(1, 21)]
    assert watcher.epochs == [(0, 5), (1, 10), (2, 15), (3, 20)]
    assert same(method, peace[1])  # though the hook drew noise and left the model in eval mode
    assert [r["step"] for r in run.records() if "probe" in r] == [5, 10, 15, 20]
    assert result.metrics["probe"] == 0.25


def test_a_loader_that_ends_early_is_an_error(tmp_path: Path) -> None:
    class Short(ToyLoader):
        def iterate(self, epoch: int, start_step: int) -> Iterator[Batch]:
            yield from list(super().iterate(epoch, start_step))[:3]

    with pytest.raises(SitusError, match="epoch 0 ended after 3 of 5 batches"):
        train(tmp_path / "run", loader=Short())


@pytest.mark.thin(2)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_learn_and_resume(tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(TRAIN, epochs=12, precision=precision)
    _, learned, run = train(tmp_path / "learned", config, LEARN, method=toy())
    records = run.records()
    assert records[-1]["loss"] < 0.75 * records[0]["loss"]
    assert ("loss_scale" in records[0]) == (precision == "fp16")
    assert learned.backbone.model.head.weight.dtype == torch.float32
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, growth_interval=3))
    config = dataclasses.replace(config, epochs=3)
    _, peace, whole = train(tmp_path / "peace", config)
    train(tmp_path / "run", config, hooks=[StopAt(7)])
    _, method, run = train(tmp_path / "run", config)
    assert same(method, peace)
    scales = [[record.get("loss_scale") for record in each.records()] for each in (whole, run)]
    assert scales[0] == scales[1] and (len(set(scales[0])) > 1) == (precision == "fp16")  # its scale grows, and goes on


def test_a_loss_scale_that_only_falls_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**-25))
    with pytest.raises(SitusError, match=r"precision='fp16': up to step .* gradients overflowed in more than 40"):
        train(tmp_path / "run", dataclasses.replace(TRAIN, precision="fp16"))


def test_a_method_that_comes_in_eval_mode_is_trained_all_the_same(tmp_path: Path, peace) -> None:
    _, method, _ = train(tmp_path / "run", method=toy(drop_path=0.3).eval())
    assert method.training
    assert same(method, peace[1])  # with the drop path that eval mode would leave out


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 0), ("max_steps", 0), ("precision", "int8"), ("accumulate", 0), ("parallel", "dp"), ("seed", -1),
        ("log_every", 0), ("save_every", 0), ("keep", 0), ("trackers", ("paper",)),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_by_its_field(field: str, value: object) -> None:
    with pytest.raises(SitusError) as caught:
        dataclasses.replace(TRAIN, **{field: value})
    assert (caught.value.field or "").partition("[")[0] == field


def test_a_run_needs_an_end() -> None:
    with pytest.raises(SitusError, match=r"epochs=None: must be set if max_steps is"):
        TrainConfig(epochs=None)
