"""The demo's split learning: the scores are those of the truth, and no server outlives a Ctrl-C or a kill."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from warm import Warm

import situs
from situs.audit.scores.metrics import denormalise
from situs.audit.split.stage import streams
from situs.cli.demo.server import Server
from situs.cli.demo.split import Sent, attack, find_order
from situs.cli.demo.stage import Stage, train
from situs.errors import SitusError
from situs.methods.supervised import SupervisedConfig
from situs.models.data import load_set
from situs.train.run import RunConfig


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the classifier that the section starts from, barely trained."""
    runs = tmp_path_factory.mktemp("runs")
    stage = Stage(0, quick=True, say=lambda _: None, runs=runs)
    train(stage, "classifier", "after-MP3", 64, method="supervised", epochs=1, batch=32)
    return runs


def stage_of(runs: Path) -> Stage:
    return Stage(0, quick=True, say=lambda _: None, runs=runs)


@pytest.fixture(scope="module")
def sent(runs: Path) -> Sent:
    """What a client of eight images sends, permuted here by torch alone."""
    model = situs.open_model(runs / "after-MP3")
    loader = load_set(model, None, split="train", count=8, batch=8)
    [inputs] = [batch.inputs for batch in loader]
    z = streams(model.backbone, [inputs])
    chance = torch.Generator().manual_seed(1)
    rows = torch.stack([torch.randperm(z.shape[1], generator=chance) for _ in z])
    channels = torch.randperm(z.shape[2], generator=chance)
    seen = torch.stack([sample[order] for sample, order in zip(z, rows, strict=True)])[..., channels]
    return Sent(
        seen.float(), denormalise(inputs, loader.mean.flatten().tolist(), loader.std.flatten().tolist()), rows, channels
    )


def test_the_attack_finds_what_was_permuted(runs: Path, sent: Sent) -> None:
    got = attack(stage_of(runs), sent)
    assert torch.equal(got.rows, sent.rows)
    assert (got.places, got.channels) == (1.0, 1.0)
    assert torch.allclose(got.pictures, sent.images, atol=1e-3)
    assert got.quality > 50 > got.blind + 20


def test_the_scores_are_of_the_truth(runs: Path, sent: Sent) -> None:
    """Another truth, other scores: none of them follows from what was found alone."""
    other = sent._replace(rows=sent.rows.roll(1, dims=1), channels=sent.channels.roll(1), images=sent.images.flip(0))
    got = attack(stage_of(runs), other)
    assert got.places < 0.1 and got.channels == 0.0
    assert got.quality < 20


def test_features_without_the_images_in_them_are_not_read(runs: Path, sent: Sent) -> None:
    """Noise of the features' own size: the attack stays an attack, and reports what little it found."""
    noise = torch.randn(sent.seen.shape, generator=torch.Generator().manual_seed(2)) * sent.seen.std()
    got = attack(stage_of(runs), sent._replace(seen=sent.seen + 3 * noise))
    assert got.places < 0.5
    assert got.quality < 20


@pytest.mark.parametrize(
    ("modules", "named"), [(("grpc",), "grpcio"), (("grpc", "cryptography"), "grpcio and cryptography")]
)
def test_without_the_extra_it_says_what_it_left_out(
    tmp_path: Path, modules: tuple[str, ...], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    stage = stage_of(tmp_path)
    found = find_order(stage)
    assert (found.number, found.of) == ("left out", f"needs {named}: pip install 'situs[split]'")
    assert f"This finding was not made: needs {named}" in stage.page.render()
    assert list(tmp_path.iterdir()) == []


def test_a_ctrl_c_while_the_server_starts_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(RunConfig(method=SupervisedConfig()), tmp_path / "server", tmp_path / "certs")

    def interrupted() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "_address", interrupted)
    with pytest.raises(KeyboardInterrupt), server:
        pass
    assert server.process.exitcode == -signal.SIGTERM


def test_a_server_that_cannot_start_is_one_sentence(tmp_path: Path) -> None:
    server = Server(RunConfig(method=SupervisedConfig()), tmp_path / "server", tmp_path / "certs")
    with (
        pytest.raises(SitusError, match=r"second process failed: \S+/certs/ca\.pem: cannot be read: no such file"),
        server,
    ):
        pass
    assert not server.process.is_alive()


STARTED = """
import multiprocessing, os, signal, sys
from pathlib import Path
from situs.cli.demo import server, split
from situs.cli.demo.stage import Stage
from situs.cli.main import main

def tell(word):
    if word == sys.argv[2]:
        print(os.getpid(), *(child.pid for child in multiprocessing.active_children()), flush=True)

if __name__ == "__main__":
    import situs.cli.main as cli
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which tests in the background inherit as ignored
    cli._dispatch = lambda words: split.find_order(Stage(0, True, tell, Path(sys.argv[1])))
    split.STEPS = 150
    real = multiprocessing.get_context  # a fork starts at once; other tests have the demo start it as it does
    multiprocessing.get_context = lambda _: real("fork")
    sys.exit(main([]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.slow)])
def test_no_server_is_left_behind(runs: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Ctrl-C goes to every process of a terminal, and a killed demo says goodbye to nobody."""
    script = tmp_path / "started.py"
    script.write_text(STARTED)
    demo = Warm(script, runs, "client and server train", session=True)
    parent, server = map(int, demo.stdout.readline().split())
    assert parent == demo.pid and Path(f"/proc/{server}").exists()
    time.sleep(0.5)  # it trains
    if number == signal.SIGINT:
        os.killpg(parent, number)
    else:
        os.kill(parent, number)
    _, said = demo.communicate(timeout=60)
    assert demo.returncode == (130 if number == signal.SIGINT else -number), said
    ends = time.monotonic() + 20
    while running(server) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not running(server)
    if number == signal.SIGINT:
        assert said == "situs: interrupted\n"
        assert not [each for each in runs.iterdir() if each.name != "after-MP3"]


def running(process: int) -> bool:
    """Whether it runs; a dead one that nobody has asked after does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
