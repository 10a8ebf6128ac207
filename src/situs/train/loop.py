"""The training loop: batches in, updates out; it logs, saves and checks what a long run needs.

It knows a method, a loader and hooks by their interfaces alone. A run that is killed at any step and resumed goes
through the same steps as one that was not: the loader and the draws are functions of (seed, epoch, sample), and
the rest (weights, moments, mean, generators, running sums of the log) is in the checkpoint.

A loss or gradient that is not finite is detected without a sync: the flag of a step is copied to the host while the
next step is being queued, and read one step late. The update of the bad step and every later one was already skipped
on the device, so the weights are those the step started from.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from situs.core.when import When
from situs.errors import SitusError, counted, verb
from situs.files import write_text
from situs.methods.base import Batch, Method
from situs.progress import clock, note, notes_to, shown, task
from situs.train import distributed
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import with_checksum
from situs.train.checkpoint.state import capture, restore, seed_generators
from situs.train.config import TrainConfig
from situs.train.contract import Hook, RunState, StartHook, TrainLoader, TrainResult
from situs.train.interrupt import Interrupt
from situs.train.log import Log, machine, memory_gib
from situs.train.optim import OptimConfig, peak_rate, rate_at, requested_warmup, trains_few, warmup_steps
from situs.train.step import Stepper, Update


class NotFiniteError(SitusError):
    """The run stopped: a loss or gradient was not finite."""


class FiniteCheck:
    """Reads each step's flags one step late: was it finite, and was some rank asked to stop."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pending: tuple[Update, Tensor, Any] | None = None

    def look_back(self, step: Update) -> tuple[Update | None, bool]:
        """Takes a step that is queued; gives (the one before it if it was bad, whether to stop)."""
        flags, event = step.flags, None
        if self.device.type == "cuda":
            flags = flags.to("cpu", non_blocking=True)  # pinned by the allocator
            event = torch.cuda.Event()
            event.record()
        last, self.pending = self.pending, (step, flags, event)
        return self._read(last)

    def wait(self) -> tuple[Update | None, bool]:
        """Reads the newest step's flags now: before a checkpoint, a log line and the end."""
        last, self.pending = self.pending, None
        return self._read(last)

    @staticmethod
    def _read(last: tuple[Update, Tensor, Any] | None) -> tuple[Update | None, bool]:
        if last is None:
            return None, False
        step, flags, event = last
        if event is not None:
            event.synchronize()
        bad, stop = flags.tolist()
        return (step if bad else None), bool(stop)


def record_bad_step(run: RunFolder, step: Update, names: tuple[str, ...]) -> NotFiniteError:
    """Writes the step's number and values to nan/state.json, and gives the error that ends the run."""
    values = dict(zip(names, step.values.tolist(), strict=True)) | {"gradient norm": float(step.norm)}
    listed = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
    number = step.when.step + 1
    if run.writer:
        facts = {"step": number, "epoch": step.when.epoch, "values": {k: repr(v) for k, v in values.items()}}
        with contextlib.suppress(OSError):  # the error itself says all of it
            (run.path / "nan").mkdir(exist_ok=True)
            write_text(run.path / "nan" / "state.json", with_checksum(facts, "state.json"))
    return NotFiniteError(f"step {number} was not finite ({listed}); the weights are still those before this step")


BEST_BY = ("val_top1", "val_map", "val_miou", "val_ap", "val_accuracy")
"""Validation metrics by which the best model is chosen; the first one that was logged decides."""

NEAR_CHANCE = 2.0
"""A metric below this multiple of chance is noted at the end of a run."""

FIRST_UPDATES = 5
"""Updates that compile and warm up."""

TIMED_UPDATES, TIMED_SECONDS, LONG_RUN = 3, 10.0, 120.0
"""The time left is estimated from this many updates after the first, or from fewer after so many seconds; it is noted
where it is longer than `LONG_RUN` seconds."""


def shorten_hints(method: Method, total: int) -> str:
    """What makes a run of `total` updates shorter, as the end of a sentence."""
    ways = f"fewer than {counted(total, 'updates')} (train.epochs, train.max_steps)"
    spec, grid = method.backbone.input, method.backbone.grid
    if not spec.words:
        ways += ", smaller images (data.img_size"
        if spec.shape is not None and len(grid) == 2 and min(grid) > 1:
            half = (side // whole * (whole // 2) for side, whole in zip(spec.shape, grid, strict=True))
            ways += f"={','.join(map(str, dict.fromkeys(half)))} takes about a quarter of the time"
        ways += ")"
    if "label" not in method.needs_targets:
        return ways
    alone = "" if trains_few(method) else ", training only the classifier (tuning.parts=head)"
    return f"{ways}{alone}; or use situs adapt, which has a time limit"


NEWEST = "so the newest checkpoint is the run's model (train.keep_best)"


def fit(
    method: Method,
    loader: TrainLoader,
    config: TrainConfig,
    optim: OptimConfig,
    run: RunFolder,
    *,
    hooks: Sequence[Hook | StartHook] = (),
    stepper: Callable[..., Stepper] = Stepper,
    quiet: bool = False,
) -> TrainResult:
    """Trains `method`, which is already on its device; resumes from the run folder's last checkpoint if it has one.

    stepper: makes the updates, called as `Stepper` is. quiet: nothing is printed; the log file is still written.

    Checkpoints are written in the background; the last is on the disk when this returns.
    Ctrl-C, SIGTERM or SIGHUP: the step is finished, a checkpoint written, and `TrainResult.interrupted` is True.
    A loss or gradient that is not finite raises `NotFiniteError`.
    """
    progress = contextlib.nullcontext() if quiet else shown()
    early: list[str] = []
    with run.hold(), Interrupt() as interrupt, progress:
        with notes_to(early.append):
            loop = _Loop(method, loader, config, optim, run, hooks, interrupt, quiet, stepper)
        try:
            with notes_to(loop.log.say):
                for line in early:  # noted before the log was open
                    note(line)
                return loop.run_all()
        except KeyboardInterrupt:  # the second Ctrl-C: nothing is waited for
            run.close(at_once=True)
            raise
        finally:
            run.close()
            loop.log.close()


class Window:
    """Sums of loss, metrics and gradient norm since the last log line, on the device."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        self.steps = 0

    def add(self, step: Update) -> None:
        """Adds one step."""
        values = torch.cat([step.values, step.norm.float()[None]])
        self.sums = values if self.sums is None else self.sums + values
        self.steps += 1

    def mean(self, names: Sequence[str]) -> dict[str, float]:
        """The means over steps and ranks; waits for the device, and resets the sums."""
        assert self.sums is not None
        means = distributed.mean(self.sums / self.steps).tolist()
        self.sums, self.steps = None, 0
        return dict(zip((*names, "gradient_norm"), means, strict=True))


class _Loop:
    """The state of one run between its steps."""

    def __init__(
        self, method: Method, loader: TrainLoader, config: TrainConfig, optim: OptimConfig, run: RunFolder,
        hooks: Sequence[Hook | StartHook], interrupt: Interrupt, quiet: bool, stepper: Callable[..., Stepper],
    ) -> None:  # fmt: skip
        self.method, self.loader, self.config, self.optim, self.run = method, loader, config, optim, run
        self.hooks, self.interrupt = [hook for hook in hooks if isinstance(hook, Hook)], interrupt
        self.per_epoch = loader.steps_per_epoch
        self.total = config.total_steps(self.per_epoch)
        self.peak = peak_rate(optim, loader.global_batch, updates=self.total, few=trains_few(method))
        device = next(method.parameters()).device
        self.stepper = stepper(
            method, optim, seed=config.seed, precision=config.precision_on(device), accumulate=config.accumulate,
            parallel=config.parallel, compiled=config.compile and device.type == "cuda", graph=config.graph,
        )  # fmt: skip
        self.watch, self.window = FiniteCheck(self.stepper.device), Window()
        self.step, self.stop, self.compiling = 0, False, self.stepper.compiled
        self.metrics: dict[str, float] = {}
        self.saved: Path | None = None
        self.best: dict[str, Any] | None = None
        self.samples, self.hook_seconds, self.before = 0, 0.0, 0.0
        self.timed: list[float] | None = []
        if config.parallel == "fsdp" and distributed.world() > 1:
            run.check_shared(device)
        restored = self._resume() if run.resumed else False
        if not restored:
            seed_generators(config.seed, self.step)
        self.log = Log(run, self.step, self.total, config.trackers, Console(quiet=True) if quiet else None)
        if (warmup := warmup_steps(optim, self.per_epoch, self.total)) < requested_warmup(optim, self.per_epoch):
            by_steps = optim.warmup_steps is not None
            epochs = f"{optim.warmup_epochs:g} epoch{'s' * (optim.warmup_epochs != 1)}"
            length = epochs if optim.warmup_steps is None else counted(optim.warmup_steps, "steps")
            note(
                f"the warm-up of {length} is longer than the run, and is shortened to {warmup} of the "
                f"{self.total} steps (optim.warmup_{'steps' if by_steps else 'epochs'})"
            )
        if config.keep_best and not self.hooks:
            note(f"there is no validation, {NEWEST}")
        self.began = self.mark = time.perf_counter()
        self.waited = loader.data_wait
        method.train()

    def when(self, epoch: int) -> When:
        """What the draws of the next update may depend on."""
        epochs = -(-self.total // self.per_epoch)
        return When(self.config.seed, epoch, self.step / self.total, self.step, epochs)

    def rate(self, step: int, total: int) -> float:
        """The schedule's rate for update number `step`."""
        return rate_at(step, total, warmup_steps(self.optim, self.per_epoch, total), self.peak, self.optim)

    def run_all(self) -> TrainResult:
        """Runs to the end, or until asked to stop."""
        started = self.step
        with task("training", self.total, started) as progress:
            while self.step < self.total and not self.stop:
                epoch, offset = divmod(self.step, self.per_epoch)
                for batch in self.loader.iterate(epoch, offset):
                    self.advance(batch, epoch)
                    progress.tell(self.step)
                    if self.step == started + FIRST_UPDATES:
                        progress.restart()
                    if self.stop or self.step == self.total:
                        break
                else:
                    if self.step % self.per_epoch:
                        raise SitusError(
                            f"epoch {epoch} ended after {self.step % self.per_epoch} of {self.per_epoch} batches: the "
                            "data set has fewer samples than its length says"
                        )
        complete = self.step == self.total
        if complete and self.best is not None:
            best = f"{self.best['by'].replace('_', ' ')} {self.best['value']:.4f}"
            note(f"best {best} after step {self.best['step']}, whose checkpoint is the model of the run")
        elif complete and self.config.keep_best and self.hooks:
            note(f"no validation metric was logged, {NEWEST}")
        if complete:
            self._note_chance()
        # Also where the request came in the last step: a script that waits for this run must learn of it.
        requested = torch.tensor([float(self.interrupt.requested)], device=self.stepper.device)
        interrupted = not complete or bool(distributed.most(requested))
        if interrupted:
            after = "the last step: the run is complete" if complete else f"resume {self.run.path} to continue"
            note(f"stopped after step {self.step}{', ' if complete else '; '}{after}")
        return TrainResult(self.step, self.total, interrupted, self.metrics, self.saved)

    def _note_chance(self) -> None:
        """Notes metrics that are hardly better than chance."""
        for name, level in self.method.chance.items():
            if self.metrics.get(name, math.inf) < NEAR_CHANCE * level:
                note(
                    f"{name.replace('_', ' ')} {self.metrics[name]:.3g} is near chance ({level:.3g}): the run has "
                    f"learned almost nothing in {counted(self.total, 'updates')}; more updates (train.max_steps) or "
                    "another learning rate (optim.lr) may help"
                )

    def advance(self, batch: Batch, epoch: int) -> None:
        """One update, then what is due after it: log, hooks, checkpoint."""
        rate = self.rate(self.step, self.total)
        when = self.when(epoch)
        ragged = (self.step + 1) % self.per_epoch == 0
        done = self._compiled(lambda: self.stepper.update(batch, when, rate, ragged))
        self.step += 1
        self.samples += batch.ids.shape[0] * distributed.world()
        self.window.add(done)
        self._note_time(done)
        self._check_finite(*self.watch.look_back(done))
        last = self.step == self.total
        save = last or self.step % self.config.save_every == 0 or self.step in self.config.keep_at
        if logs := last or self.step % self.config.log_every == 0:
            self._check_finite(*self.watch.wait())
            self._log(rate, epoch)
        started = time.perf_counter()
        better = self._call_hooks(epoch)
        self._check_interrupt()
        if save or better or self.stop:
            if not logs:
                self._check_finite(*self.watch.wait())
            self._save(wait=last or self.stop)
        elif self.run.failed and distributed.world() == 1:  # several ranks learn of it at the next checkpoint
            self.run.wait()
        self.hook_seconds += time.perf_counter() - started

    def _note_time(self, done: Update) -> None:
        """Notes the time left of a long run once, after its first few updates."""
        if self.timed is None:
            return
        float(done.norm)  # waits for the device
        self.timed.append(time.perf_counter())
        if len(self.timed) <= TIMED_UPDATES and self.timed[-1] - self.began < TIMED_SECONDS:
            return
        first = self.timed[0] if len(self.timed) > 1 else self.began  # the first update is the slowest
        left = (self.timed[-1] - first) / max(1, len(self.timed) - 1) * (self.total - self.step)
        self.timed = None
        if left > LONG_RUN:
            note(f"about {clock(left)} to go; to shorten the run: {shorten_hints(self.method, self.total)}")

    def _compiled(self, update: Callable[[], Update]) -> Update:
        """The update; notes before and after the first of a compiled method, which takes a while."""
        if not self.compiling:
            return update()
        self.compiling, began = False, time.perf_counter()
        note(
            "compiling the step takes about a minute the first time, and later only seconds (from the compiler's cache)"
        )
        done = update()
        float(done.norm)  # waits for the device
        note(f"compiled in {time.perf_counter() - began:.0f} s")
        return done

    def _check_interrupt(self) -> None:
        if self.interrupt.requested and distributed.world() == 1:
            self.stop = True
        elif self.interrupt.requested:
            self.stepper.stop.fill_(1.0)  # all ranks learn of it with the flags of the next step

    def _check_finite(self, bad: Update | None, stop: bool) -> None:
        """Ends the run on a step that was not finite; takes over a request to stop that any rank had."""
        if bad is not None:
            raise record_bad_step(self.run, bad, self.stepper.names)
        self.stop = self.stop or stop

    def _log(self, rate: float, epoch: int) -> None:
        self.metrics = self.window.mean(self.stepper.names)
        now = time.perf_counter()
        spent = max(1e-9, now - self.mark - self.hook_seconds)
        record = {"step": self.step, "epoch": self.step / self.per_epoch, **self.metrics, "lr": rate}
        if self.stepper.scaler is not None:
            record["loss_scale"] = scale = self.stepper.scaler.get_scale()
            if scale < 2.0**-24:
                raise SitusError(
                    f"precision='fp16': up to step {self.step} (epoch {epoch}), gradients overflowed in more than 40 "
                    "steps; use bf16 or fp32",
                    field="train.precision",
                )
        record["images_per_second"] = self.samples / spent
        record["data_wait"] = (self.loader.data_wait - self.waited) / spent
        record["memory_gib"] = memory_gib(self.stepper.device)
        record["seconds"] = self.before + now - self.began
        self.log.step(record)
        self.samples, self.hook_seconds, self.mark, self.waited = 0, 0.0, now, self.loader.data_wait

    def _call_hooks(self, epoch: int) -> bool:
        """Calls the hooks; whether they found the best model so far, where that is kept."""
        if not self.hooks:
            return False
        numbers: dict[str, float] = {}
        state = RunState(self.method, self.stepper.ema, self.step, epoch, self.total, self.per_epoch, numbers.update)
        device = self.stepper.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for hook in self.hooks:
                hook.after_step(state)
                if self.step % self.per_epoch == 0:
                    hook.after_epoch(state)
        self.method.train()
        if numbers:
            self.log.keep({"step": self.step, "epoch": self.step / self.per_epoch, **numbers})
            note(f"step {self.step}: " + ", ".join(f"{k.replace('_', ' ')} {v:.4g}" for k, v in numbers.items()))
            self.metrics = self.metrics | numbers
        return self.config.keep_best and self._is_best(numbers)

    def _is_best(self, numbers: dict[str, float]) -> bool:
        """Records a better validation than any before; of equal ones the first stays."""
        name = next((name for name in BEST_BY if name in numbers), None)
        if name is None or (self.best is not None and numbers[name] <= self.best["value"]):
            return False
        self.best = {"step": self.step, "by": name, "value": numbers[name]}
        return True

    def _save(self, wait: bool) -> None:
        """Begins to write a checkpoint, once the one before it is on disk. wait: until this one is, too."""
        stepper = self.stepper
        files = capture(self.method, stepper.optimizer, stepper.ema, stepper.device)
        if self.window.sums is not None:
            files["log"] = {"sums": distributed.mean(self.window.sums)}
        epoch, offset = divmod(self.step, self.per_epoch)
        state = {
            "epoch": epoch, "offset": offset, "total_steps": self.total, "steps_per_epoch": self.per_epoch,
            "global_batch": self.loader.global_batch, "order": self.loader.mark,
            "peak_rate": self.peak, "world": distributed.world(),
            "seconds": self.before + time.perf_counter() - self.began,
            "machine": machine(stepper.device, stepper.precision),
            # images: earlier versions read it.
            "log": {"names": stepper.names, "steps": self.window.steps, "images": self.samples},
            "scaler": None if stepper.scaler is None else stepper.scaler.state_dict(),
        }  # fmt: skip
        stay = set(self.config.keep_at)
        if self.best is not None:
            state["best"] = self.best
            stay.add(self.best["step"])
        self.run.begin(self.step, files, state, self.config.keep, stay)
        if wait:
            self.saved = self.run.wait()

    def _resume(self) -> bool:
        """Goes back to the newest whole checkpoint; False where generators must be started anew."""
        stepper, device = self.stepper, self.stepper.device
        checkpoint = self.run.start if self.run.writer else None
        saved = None if checkpoint is None else {"step": checkpoint.step, **checkpoint.state}
        state = distributed.from_main(saved, device)
        if state is not None:
            self._check_resumable(state)
        if self.run.writer:
            self.run.rewind(checkpoint)
        self.run.adopt_config()
        if state is None:
            note("no checkpoint yet: starting at step 0")
            return False
        if checkpoint is None and self.config.parallel == "fsdp":  # each rank reads its own part
            checkpoint = self.run.checkpoint(state)
        restored = restore(checkpoint, self.method, stepper.optimizer, stepper.ema, device)
        self.step, self.before, self.saved = state["step"], state["seconds"], checkpoint.path if checkpoint else None
        self.best = state.get("best")
        stepper.names = tuple(state["log"]["names"])
        if (log := state["log"])["steps"]:
            self.window.sums = torch.zeros(len(log["names"]) + 1, device=device)
            distributed.place(
                self.window.sums, checkpoint.tensors("log")["sums"] if self.run.writer and checkpoint else None
            )
            self.window.steps = log["steps"]
        if stepper.scaler is not None and state["scaler"] is not None:
            stepper.scaler.load_state_dict(state["scaler"])
        note(f"resumed after step {self.step} of {self.total}")
        if not restored:
            saved_by, ranks = counted(state["world"], "ranks"), distributed.world()
            moved = f"was saved by {saved_by} and is resumed by {ranks}"
            reason = "is resumed on another kind of device" if state["world"] == ranks else moved
            note(f"drop path continues with other random numbers, because the run {reason}")
        return restored

    def _check_resumable(self, state: dict[str, Any]) -> None:
        """Refuses other data; notes what a longer or shorter run does to the schedule."""
        current = {
            "steps_per_epoch": self.per_epoch,
            "global_batch": self.loader.global_batch,
            "order": self.loader.mark,
        }
        for name, now in current.items():
            if state.get(name, now) != now:  # old checkpoints have no order
                raise SitusError(
                    f"{self.run.path}: cannot resume: {name} was {state[name]} and is now {now}, so the data or the "
                    "batch size has changed",
                    field="resume",
                )
        step, old = state["step"], state["total_steps"]
        if self.total < step:
            raise SitusError(
                f"{self.run.path}: the run cannot end at step {self.total}, because {counted(step, 'steps')} "
                f"{verb(step, 'are')} already done",
                field=("train.epochs", "train.max_steps"),
            )
        if old != self.total:
            note(
                f"the run now ends at step {self.total}, not {old}. Its schedule is computed again over all "
                f"{self.total} steps, so the learning rate changes after step {step} from "
                f"{self.rate(max(0, step - 1), old):.3g} to {self.rate(step, self.total):.3g}"
            )
        elif step == self.total:
            binding = "steps" if self.total == self.config.max_steps else "epochs"
            note(f"the run is complete; give more {binding} to continue")
