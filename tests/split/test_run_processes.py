"""Two processes and SIGKILL: the verbs as people run them, either side killed on the way, local training's bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from situs.api import layered
from situs.config import from_dict
from situs.split.transport.certificates import make_certificates
from situs.split.whole import merge
from situs.train.checkpoint import RunFolder
from situs.train.run import RunConfig, train_run

CIFAR = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar100"
RECIPE = """
[method]
name = "supervised"
[backbone]
name = "vit_tiny_patch16_224"
patch_size = 4
drop_path = 0.1
num_classes = 100
model_args = {{depth = 4}}
[data]
path = "{data}"
img_size = 32
batch = 8
count = 2000
[optim]
clip = 1.0
ema = 0.99
[train]
epochs = 100
max_steps = {steps}
save_every = 10
log_every = 10
precision = "fp32"
"""


class Verb:
    """A verb of the command line in a process of its own, its words in a file."""

    def __init__(self, log: Path, *words: str) -> None:
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "situs", "split", *words],
                stdout=file,
                stderr=file,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
            )

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def told(self, words: str, seconds: float = 120) -> bool:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if words in self.log.read_text():
                return True
            time.sleep(0.2)
        return False


@pytest.mark.slow
@pytest.mark.shared_data
def test_two_processes_killed_on_the_way_train_as_one_alone(tmp_path) -> None:
    rng, steps = random.Random(5), 100
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE.format(data=CIFAR, steps=steps))
    certs, out, run = tmp_path / "certs", tmp_path / "server", tmp_path / "split"
    make_certificates(certs)
    words = ("--config", str(recipe), "--tls", str(certs))
    first = Verb(tmp_path / "serve0.log", "serve", *words, "--listen", "127.0.0.1:0", "--out", str(out))
    assert first.told("listening on")
    address = (tmp_path / "serve0.log").read_text().split("listening on ")[1].split()[0]
    server, kills = first, 0
    where = ("--server", address, "--tls", str(certs))
    client = Verb(tmp_path / "train.log", "train", "--config", str(recipe), *where, "--out", str(run))
    while client.process.poll() is None:
        time.sleep(rng.uniform(4, 10))
        if kills >= 4 or client.process.poll() is not None or not any((run / "checkpoints").glob("step-*")):
            continue
        kills += 1
        if kills % 2:
            server.kill()
            server = Verb(tmp_path / f"serve{kills}.log", "serve", *words, "--listen", address, "--out", str(out))
            assert server.told("listening on")
        else:
            client.kill()
            client = Verb(tmp_path / "train.log", "train", "--resume", str(run), *where)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert client.process.returncode == 0, (tmp_path / "train.log").read_text()[-2000:]
    assert kills > 0
    assert merge(run, out, tmp_path / "whole") == steps
    config = from_dict(RunConfig, layered(RunConfig, None, recipe)[0])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train_run(config, out=tmp_path / "local", device="cpu", quiet=True)
    finally:
        torch.set_num_threads(threads)
    one, two = (RunFolder.open(tmp_path / name).newest() for name in ("whole", "local"))
    for name in ("model", "optimizer", "ema"):
        left, right = one.tensors(name), two.tensors(name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[each], right[each]) for each in left)
    print(f"{steps} steps, {kills} kills, seed 5: every tensor of model, moments and mean equal to the bit")
