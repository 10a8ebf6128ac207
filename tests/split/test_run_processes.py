"""Two processes and SIGKILL: the verbs as people run them, either side killed on the way, local training's bits."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tiny_texts import write_folder

from situs.locks import lock, new_key
from situs.split.generate import open_writer
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.whole import merge
from situs.train.checkpoint import RunFolder

CIFAR = Path(__file__).resolve().parents[3] / "shared" / "data" / "cifar100"
RECIPE = """
[method]
name = "supervised"
[backbone]
name = "{name}"
patch_size = 4
drop_path = 0.1
num_classes = 100
model_args = {{{shape}}}
[data]
path = "{data}"
img_size = 32
batch = {batch}
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


def recipe_of(place: Path, steps: int, name: str = "vit_tiny_patch16_224", shape: str = "depth = 4", batch: int = 8):
    found = place / "recipe.toml"
    found.write_text(RECIPE.format(data=CIFAR, steps=steps, name=name, shape=shape, batch=batch))
    return found


class Verb:
    """A verb of the command line in a process of its own, its words in a file."""

    def __init__(self, log: Path, *words: str, within: Sequence[str] = (), verb: str = "split") -> None:
        """within: words before the command, as `ip netns exec NAME`."""
        self.log = log
        with log.open("a") as file:
            self.process = subprocess.Popen(
                [*within, sys.executable, "-m", "situs", verb, *words],
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
    recipe = recipe_of(tmp_path, steps)
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
    assert_local(tmp_path, recipe)
    print(f"{steps} steps, {kills} kills, seed 5: every tensor of model, moments and mean equal to the bit")


def assert_local(tmp_path: Path, recipe: Path) -> None:
    """The merged run is what one process alone gives, to the bit. Its own: here first weights are drawn another way."""
    words = ("--config", str(recipe), "--out", str(tmp_path / "local"), "--device", "cpu", "--quiet")
    alone = Verb(tmp_path / "local.log", *words, verb="pretrain")
    assert alone.process.wait(3600) == 0, alone.log.read_text()
    one, two = (RunFolder.open(tmp_path / name).newest() for name in ("whole", "local"))
    assert one.step == two.step
    for name in ("model", "optimizer", "ema"):
        left, right = one.tensors(name), two.tensors(name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[each], right[each]) for each in left)


SERVER, CLIENT = "10.77.13.1", "10.77.13.2"


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with one cable between them and nothing else; skipped where this machine makes none."""
    names = [f"situs{os.getpid()}{side}" for side in "ab"]

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)

    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        for name, address in zip(names, (SERVER, CLIENT), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield names[0], names[1]
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


@pytest.mark.slow
@pytest.mark.shared_data
def test_two_network_namespaces_train_as_one_machine(tmp_path, namespaces) -> None:
    """Neither side sees the other's loopback: every byte goes over the cable between them, with certificates."""
    steps = 10
    recipe = recipe_of(tmp_path, steps)
    certs, out, run = tmp_path / "certs", tmp_path / "server", tmp_path / "split"
    make_certificates(certs, hosts=(SERVER,))
    here, there = (("ip", "netns", "exec", name) for name in namespaces)
    in_two_processes(tmp_path, recipe, certs, SERVER, here, there)
    assert merge(run, out, tmp_path / "whole") == steps
    counted = ("ip", "netns", "exec", namespaces[1], "cat", "/sys/class/net/cable/statistics/tx_bytes")
    sent = int(subprocess.run(counted, check=True, capture_output=True, text=True).stdout)
    assert sent > steps * 2 * 8 * 65 * 192 * 4  # features and gradients
    assert_local(tmp_path, recipe)
    print(f"{steps} steps over a veth pair, {sent:,} bytes from the client: every tensor equal to the bit")


def in_two_processes(
    place: Path, recipe: Path, certs: Path, host: str = "127.0.0.1", here: Sequence[str] = (), there: Sequence[str] = ()
) -> None:
    """Trains a recipe with a server and a client, each in a process of its own, to the end."""
    words = ("--config", str(recipe), "--tls", str(certs), "--out")
    server = Verb(place / "serve.log", "serve", *words, str(place / "server"), "--listen", f"{host}:0", within=here)
    try:
        assert server.told("listening on"), server.log.read_text()
        address = server.log.read_text().split("listening on ")[1].split()[0]
        client = Verb(place / "train.log", "train", *words, str(place / "split"), "--server", address, within=there)
        assert client.process.wait(3600) == 0, client.log.read_text()
    finally:
        server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0


@pytest.mark.slow
@pytest.mark.shared_data
def test_a_vit_s_4_at_batch_32_trains_in_two_processes_as_in_one(tmp_path) -> None:
    certs = tmp_path / "certs"
    make_certificates(certs)
    recipe = recipe_of(tmp_path, 10, "vit_small_patch16_224", "", 32)
    in_two_processes(tmp_path, recipe, certs)
    assert merge(tmp_path / "split", tmp_path / "server", tmp_path / "whole") == 10
    assert_local(tmp_path, recipe)
    print("ViT-S/4, 10 steps of 32 images: every tensor of model, moments and mean equal to the bit")


@pytest.mark.slow
def test_a_server_killed_while_it_generates_goes_on_with_the_same_words(tmp_path) -> None:
    """A locked model over mutual TLS, 20 ms more for each message, SIGKILL after the fifth of twenty words."""
    folder = write_folder(tmp_path / "model", "llama", max_position_embeddings=64)
    key, certs = tmp_path / "owner.key", tmp_path / "certs"
    make_certificates(certs)
    lock(folder, new_key(key), tmp_path / "locked")
    words = ("serve", "--from", str(tmp_path / "locked"), "--method", "language", "--data.text.longest", "64")
    words += ("--tls", str(certs), "--out", str(tmp_path / "server"), "--device", "cpu", "--listen")
    server = Verb(tmp_path / "serve0.log", *words, "127.0.0.1:0")
    assert server.told("listening on"), server.log.read_text()
    address = server.log.read_text().split("listening on ")[1].split()[0]
    with open_writer(tmp_path / "locked", key=key) as writer:
        expected = list(writer.tokens([5, 6, 7], max_tokens=20))
    try:
        with Connection(address, read_credentials(certs, "client")) as call:

            def late(message, wanted):
                time.sleep(0.02)
                return call(message, wanted)

            with open_writer(tmp_path / "locked", late, key=key) as writer:
                found = []
                for word in writer.tokens([5, 6, 7], max_tokens=20):
                    found.append(word)
                    if len(found) == 5:
                        server.kill()
                        server = Verb(tmp_path / "serve1.log", *words, address)
            assert found == expected and call.again > 0
    finally:
        server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
