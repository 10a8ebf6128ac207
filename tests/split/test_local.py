"""A defence in a local training against split training in one process: the same weights, moments and means."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from served import CONFIG, steps
from wired import TRAIN, Loader, Pair, farthest, train_locally, vit

from situs.core.when import When
from situs.data.audio import AudioConfig
from situs.errors import SitusError
from situs.locks.veil import Words, parse_veil, secret_words, token_scale
from situs.measure.accuracy import evaluate_accuracy
from situs.measure.knn import evaluate_knn
from situs.methods.mp3 import MP3Config
from situs.methods.supervised import SupervisedConfig
from situs.models import open_model
from situs.models.data import load_set
from situs.split.local import Defended, infer_defended, open_defended, train_defended
from situs.train.run import train_run

DEFENCES = ("noise=0.5", "lowpass=0.3", "batch-shuffle=3", "batch-shuffle")


class AsTheClient(Defended):
    """Draws what the client of a split training drew, one micro-batch after the other."""

    drawn: Iterator[Words]

    def words(self, batch, seed, epoch):
        return next(self.drawn)


@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=() if text == "noise=0.5" else pytest.mark.slow) for text in DEFENCES],
)
def test_a_defended_training_is_the_split_one(tmp_path, text, monkeypatch) -> None:
    """Rows and columns permuted too in the split one; two micro-batches a step, and drop path as ever."""
    drawn = []

    def recorded(*parts):
        drawn.append(secret_words(*parts))
        return drawn[-1]

    monkeypatch.setattr("situs.locks.veil.secret_words", recorded)
    train, defence = replace(TRAIN, accumulate=2), parse_veil(text)
    split = Pair(lambda: vit(torch.float64), tmp_path, ("rows", "columns"), defence, train=train).run(Loader())
    assert len(drawn) == 2 * TRAIN.max_steps
    method = AsTheClient(vit(torch.float64), SupervisedConfig(), defence, 1.0)
    method.drawn = iter(drawn)
    local = train_locally(method, Loader(), tmp_path / "local", train)
    assert farthest(local, split) < 1e-9
    plain = train_locally(
        Defended(vit(torch.float64), SupervisedConfig(), parse_veil("none"), 1.0), Loader(), tmp_path / "none", train
    )
    assert farthest(plain, split) > 1e-4  # the defence was there


@pytest.mark.parametrize(
    "text", ["batch-shuffle=3", *(pytest.param(text, marks=pytest.mark.slow) for text in ("none", "noise=0.5"))]
)
def test_permuted_rows_train_to_the_same_weights(tmp_path, text) -> None:
    """The blocks are given every sample's rows in another order, prefix tokens among them, and nothing comes of it."""
    trained, given = {}, {}
    for rows in (False, True):
        method = Defended(vit(torch.float64), SupervisedConfig(), parse_veil(text, ("rows",) * rows), 1.0)
        plain, seen = method.backbone.run_layers, given.setdefault(rows, [])
        method.backbone.run_layers = lambda stream, keys, taps=(), plain=plain, seen=seen: (
            seen.append(stream.z.detach()) or plain(stream, keys, taps)
        )
        trained[rows] = train_locally(method, Loader(), tmp_path / str(rows), TRAIN)
    assert farthest(trained[False], trained[True]) < 1e-9
    one, two = given[False][0], given[True][0]
    assert not torch.allclose(one, two)
    moved = [[int((row == a).all(-1).nonzero()) for row in b] for a, b in zip(one, two, strict=True)]
    assert all(sorted(order) == list(range(len(order))) for order in moved)
    assert len({tuple(order) for order in moved}) == len(moved)  # each sample has its own


def test_draws_are_new_in_every_epoch_and_for_every_sample() -> None:
    batch = next(Loader().iterate(0, 0))
    method = Defended(vit(), SupervisedConfig(), parse_veil("noise=1"), 1.0)
    one, again, later = (method.draw(batch, When(seed=0, epoch=epoch))["defence"] for epoch in (0, 0, 1))
    assert one.shape == (8, method.backbone.num_tokens, method.backbone.dim)
    assert torch.equal(one, again)
    for other in (later, one.roll(1, 0)):
        assert abs(float((one * other).mean())) < 5 / one.numel() ** 0.5
    assert float(one.std()) == pytest.approx(1, abs=5 / (2 * one.numel()) ** 0.5)


def test_a_training_that_was_stopped_goes_on_to_the_same_weights_under_its_own_defence(tmp_path, monkeypatch) -> None:
    """It starts from weights of its own, which a resumed run does not read again."""
    config, drawn, draw = replace(steps(4), init="mine"), [], Defended.draw

    def start(_, backbone):
        with torch.no_grad():
            backbone.model.patch_embed.proj.weight.mul_(5)
        return ()

    given = {"start": start, "device": "cpu", "quiet": True}
    train_defended(config, "noise=3", tmp_path / "whole", **given)

    def stopping(self, *args, **more):
        drawn.append(self.scale)
        if len(drawn) == 2:
            signal.raise_signal(signal.SIGINT)
        return draw(self, *args, **more)

    monkeypatch.setattr(Defended, "draw", stopping)
    done = train_defended(config, "noise=3", tmp_path / "cut", **given)
    assert (done.interrupted, done.step) == (True, 2)
    with pytest.raises(SitusError, match="defence='noise=2': must be noise=3, as in"):
        train_defended(config, "noise=2", tmp_path / "cut", resume=True, **given)
    assert train_defended(config, "noise=3", tmp_path / "cut", resume=True, **given).step == 4
    assert len(drawn) == 4
    assert len(set(drawn)) == 1  # the first weights' deviation, not that of the weights so far
    one, two = (open_model(tmp_path / name).backbone.state_dict() for name in ("whole", "cut"))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_a_run_without_a_defence_is_the_ordinary_run_and_others_are_evaluated_under_theirs(tmp_path) -> None:
    config = steps(4)
    train_run(config, out=tmp_path / "plain", device="cpu", quiet=True)
    for text in ("none", "noise=3"):
        train_defended(config, text, tmp_path / text, device="cpu", quiet=True)
    one, two = (open_model(tmp_path / name).backbone.state_dict() for name in ("plain", "none"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    top1, near = (evaluate_accuracy(tmp_path / "plain", count=40).accuracy.top1, {"k": 5, "count": 40})
    hidden = open_defended(tmp_path / "none", permute=("rows",), device="cpu")  # its layers too are put back in order
    knn = [evaluate_knn(run, train_count=32, **near).rows for run in (tmp_path / "plain", hidden)]
    assert [row.accuracy for row in knn[0]] == [row.accuracy for row in knn[1]]
    noisy, scale = (
        open_model(tmp_path / "noise=3"),
        json.loads((tmp_path / "noise=3/defence.json").read_text())["scale"],
    )
    assert (noisy.facts["defence"], noisy.facts["defence_scale"]) == ("noise=3", scale)
    bare = {name: evaluate_accuracy(tmp_path / name, count=40).accuracy.loss for name in ("plain", "noise=3")}
    for rows in ((), ("rows",)):
        plain = infer_defended(tmp_path / "plain", permute=rows, count=40, device="cpu")
        assert (plain.accuracy.top1, plain.accuracy.loss) == (top1, pytest.approx(bare["plain"], abs=1e-5))
    noise = [infer_defended(tmp_path / "noise=3", count=40, device="cpu").accuracy.loss for _ in range(2)]
    assert noise[0] == noise[1] and abs(noise[0] - bare["noise=3"]) > 5e-5
    checkpoint = max((tmp_path / "noise=3" / "checkpoints").glob("step-*"))  # is of the run's defence too
    assert infer_defended(checkpoint, count=40, device="cpu").accuracy.loss == noise[0]
    with pytest.raises(SitusError, match="permute=columns: has no effect without a server"):
        train_defended(config, "none", tmp_path / "no", permute=("columns",))
    with pytest.raises(SitusError, match="supports only the method supervised"):
        train_defended(replace(CONFIG, method=MP3Config()), "none", tmp_path / "no")


def test_noise_is_measured_on_clips_as_the_model_is_given_them(tmp_path) -> None:
    soundfile = pytest.importorskip("soundfile")
    for number in range(8):
        file = tmp_path / "clips" / "train" / "ab"[number % 2] / f"{number}.wav"
        file.parent.mkdir(parents=True, exist_ok=True)
        soundfile.write(file, torch.rand(1600, generator=torch.Generator().manual_seed(number)).numpy(), 16_000)
    backbone = replace(CONFIG.backbone, patch_size=(40, 1))
    data = replace(
        CONFIG.data, kind="audio", path=str(tmp_path / "clips"), img_size=None, audio=AudioConfig(seconds=0.1)
    )
    config = replace(steps(1), backbone=backbone, data=data, optim=replace(CONFIG.optim, lr=1e-12, ema=None))
    train_defended(config, "noise=1", tmp_path / "run", device="cpu", quiet=True)
    model = open_model(tmp_path / "run")
    inputs = torch.cat([batch.inputs for batch in load_set(model, split="train")])
    deviation = token_scale(model.backbone.embed(inputs) + model.backbone.positions().table)
    assert model.facts["defence_scale"] == pytest.approx(deviation, rel=1e-3)
