"""The kill test's own process: python kill.py OUT KILLS EPOCHS. Trains in peace, and again killed so often by SIGKILL.

Each run is a fork of this process, so that torch is imported once. A hook tells the step it has reached through shared
memory, and the parent kills it a random moment later: within a step, a log line or a checkpoint.
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

import torch
import torch._dynamo  # which every optimiser imports: once here, not in each fork
from toy import ToyLoader, toy

from situs.train.checkpoint import RunFolder
from situs.train.loop import TrainConfig, fit
from situs.train.optim import OptimConfig

TRAIN = TrainConfig(precision="fp32", log_every=5, save_every=4, keep=2, accumulate=2)
OPTIM = OptimConfig(lr=5e-3, warmup_epochs=2, layer_decay=0.8, clip=1.0, ema=0.95)


class Teller:
    def __init__(self, shared: mmap.mmap) -> None:
        self.shared = shared

    def after_step(self, state) -> None:
        self.shared[:4] = state.step.to_bytes(4, "little")
        torch.rand(3)  # a probe that draws must not disturb the run
        time.sleep(0.001)

    def after_epoch(self, state) -> None:
        state.log({"probe": float(state.epoch)})


def train(out: Path, shared: mmap.mmap, epochs: int) -> None:
    torch.set_num_threads(1)
    config = {"train": {"epochs": epochs}, "optim": {"lr": OPTIM.lr}}
    resumed = (out / "config.json").exists()
    run = RunFolder.open(out, config) if resumed else RunFolder.create(out, config)
    method = toy(seed=3, drop_path=0.3)
    fit(method, ToyLoader(count=44, batch=8), replace(TRAIN, epochs=epochs), OPTIM, run, hooks=[Teller(shared)])


def forked(out: Path, shared: mmap.mmap, epochs: int) -> int:
    shared[:4] = bytes(4)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
            train(out, shared, epochs)
            status = 0
        finally:
            os._exit(status)
    return child


def main(out: Path, kills: int, epochs: int) -> None:
    shared = mmap.mmap(-1, 4)
    peace = os.waitpid(forked(out / "peace", shared, epochs), 0)[1]
    total = int.from_bytes(shared[:4], "little")
    chance = random.Random(0)
    killed = []
    for target in sorted(chance.sample(range(1, total - 2), kills)):
        child = forked(out / "killed", shared, epochs)
        while int.from_bytes(shared[:4], "little") < target:
            time.sleep(0.0002)
            assert os.waitpid(child, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(chance.uniform(0, 0.01))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        killed.append(int.from_bytes(shared[:4], "little"))
    last = os.waitpid(forked(out / "killed", shared, epochs), 0)[1]
    print(json.dumps({"total": total, "killed": killed, "status": [peace, last]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
