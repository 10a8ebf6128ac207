"""The kill test's own process: python kill.py OUT KILLS EPOCHS [cuda]. Trains in peace, and again, killed by SIGKILL.

Each run is a fork of this process, so that torch is imported once. A hook tells the step it has reached through shared
memory, and the parent kills it a random moment later: within a step, a log line or, mostly, while a checkpoint is
written, for the killed runs write slowly. Prints what was done as JSON, and whether both runs ended with the same bits.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if __name__ == "__main__":
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # a look for a GPU must not start CUDA before the forks

import torch
import torch._dynamo  # which every optimiser imports: once here, not in each fork
from toy import ToyLoader, toy

from situs.train.checkpoint import RunFolder, folder
from situs.train.checkpoint.writing import Background
from situs.train.config import TrainConfig
from situs.train.loop import fit
from situs.train.optim import OptimConfig

TRAIN = TrainConfig(precision="fp32", log_every=5, save_every=4, keep=2, accumulate=2)
OPTIM = OptimConfig(lr=5e-3, warmup_epochs=2, layer_decay=0.8, clip=1.0, ema=0.95)
TIMES = {"seconds", "images_per_second", "data_wait", "memory_gib"}
PAUSE = 0.0005
"""Seconds before each of the hundred or so chunks of a checkpoint, in the runs that are killed."""


class Shared:
    """What a run tells its parent: the step it has made, and whether a checkpoint is on its way to the disk."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 5)

    @property
    def step(self) -> int:
        return int.from_bytes(self.memory[:4], "little")

    @step.setter
    def step(self, step: int) -> None:
        self.memory[:4] = step.to_bytes(4, "little")

    @property
    def writing(self) -> bool:
        return self.memory[4] == 1

    @writing.setter
    def writing(self, writing: bool) -> None:
        self.memory[4] = int(writing)


class Teller:
    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    def after_step(self, state) -> None:
        self.shared.step = state.step
        torch.rand(3)  # a probe that draws must not disturb the run
        time.sleep(0.001)

    def after_epoch(self, state) -> None:
        state.log({"probe": float(state.epoch)})


def write_slowly(shared: Shared) -> None:
    """Makes this process's writer slow, and tells when it is at work."""
    write, check = folder.write_checkpoint, Background.check

    def told(*given, **named) -> None:
        shared.writing = True
        write(*given, **named)
        shared.writing = False

    folder.write_checkpoint = told
    Background.check = lambda own: (time.sleep(PAUSE), check(own))[1]


def train(out: Path, shared: Shared, epochs: int, device: str) -> None:
    torch.set_num_threads(1)
    config = {"train": {"epochs": epochs, "save_every": TRAIN.save_every}, "optim": {"lr": OPTIM.lr}}
    resumed = (out / "config.json").exists()
    run = RunFolder.open(out, config) if resumed else RunFolder.create(out, config)
    method = toy(seed=3, drop_path=0.3).to(device)
    loader = ToyLoader(count=44, batch=8, device=device)
    fit(method, loader, replace(TRAIN, epochs=epochs), OPTIM, run, hooks=[Teller(shared)])


def forked(out: Path, shared: Shared, epochs: int, device: str) -> int:
    shared.step, shared.writing = 0, False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stderr = out.with_suffix(".err").open("a")
            if out.name == "killed":
                write_slowly(shared)
            train(out, shared, epochs, device)
            status = 0
        except BaseException:  # noqa: BLE001
            import traceback

            traceback.print_exc(file=sys.stderr)
        finally:
            sys.stderr.flush()
            os._exit(status)
    return child


def same(peace: RunFolder, killed: RunFolder) -> bool:
    """Whether the last checkpoints and the logs are equal to the bit, but for the clock."""
    a, b = peace.newest(), killed.newest()
    tensors = [{(file, name): t for file in ("model", "optimizer", "ema", "generators")
                for name, t in each.tensors(file).items()} for each in (a, b)]  # fmt: skip
    lines = [[{k: v for k, v in each.items() if k not in TIMES} for each in run.records()] for run in (peace, killed)]
    equal = tensors[0].keys() == tensors[1].keys() and all(torch.equal(t, tensors[1][k]) for k, t in tensors[0].items())
    return a.step == b.step and equal and lines[0] == lines[1]


def main(out: Path, kills: int, epochs: int, device: str = "cpu") -> None:
    began = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    shared = Shared()
    peace = os.waitpid(forked(out / "peace", shared, epochs, device), 0)[1]
    total = shared.step
    chance = random.Random(0)
    killed, writing = [], 0
    for target in sorted(chance.sample(range(1, total - 2), kills)):
        child = forked(out / "killed", shared, epochs, device)
        while shared.step < target:
            time.sleep(0.0002)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), f"ended by itself: {(out / 'killed.err').read_text()}"
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        killed.append(shared.step)
        writing += shared.writing
    last = os.waitpid(forked(out / "killed", shared, epochs, device), 0)[1]
    facts = {"total": total, "killed": killed, "while writing": writing, "status": [peace, last]}
    facts["same"] = not any(facts["status"]) and same(RunFolder.open(out / "peace"), RunFolder.open(out / "killed"))
    print(json.dumps(facts | {"device": device, "seconds": round(time.perf_counter() - began)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
