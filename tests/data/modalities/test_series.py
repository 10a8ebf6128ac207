"""Recordings of several channels: files and rows, windows, normalisation, and a run from pretraining to its export."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from situs.cli.main import main
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.series import SeriesConfig
from situs.data.open import kind_of, open_source, settle, splits_at
from situs.errors import BrokenSampleError, SitusError
from situs.models import open_model

CLASSES = ("fast", "slow")


def wave(number: int, label: int, steps: int = 40, channels: int = 2) -> np.ndarray:
    """A sine of one of two rates in each channel, and noise: [C, T] float32."""
    time = np.arange(steps)
    noise = np.random.default_rng(number).normal(0, 0.1, (channels, steps))
    rates = (0.9, 0.2)[label] * (1 + np.arange(channels))[:, None]
    return (np.sin(rates * time + number) * (1 + 3 * np.arange(channels))[:, None] + noise).astype(np.float32)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("series") / "set"
    for split, count in (("train", 12), ("val", 6)):
        for label, name in enumerate(CLASSES):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                np.save(root / split / name / f"{number}.npy", wave(number, label, 40 + number % 3))
    return root


def config(path: Path, **series: Any) -> DataConfig:
    return settle(DataConfig(str(path), kind="series", batch=4, workers=0, series=SeriesConfig(**series)))


def test_what_lies_there_is_found_out(recordings: Path, tmp_path: Path) -> None:
    assert kind_of(recordings) == "image" and kind_of(recordings, "series") == "series"  # [C, T] may be a picture
    assert splits_at(recordings, kind="series") == {"train", "val"}
    np.save(tmp_path / "one.npy", wave(0, 0)[0])
    assert kind_of(tmp_path) == "series"
    source = open_source(recordings, "val", kind="series")
    assert (len(source), source.classes, source.things) == (12, CLASSES, "recordings")
    assert source.read(0)["series"].shape == (2, 40) and source.read(11)["label"] == 1
    with pytest.raises(SitusError, match="holds recordings, and images are asked for"):
        make_loader(DataConfig(img_size=8), None, source=source)


@pytest.mark.parametrize("extra", ["a.npz", "a.npy", "cat/0.npz", "a/a.npz", "cat/0.npy"])
def test_an_array_beside_images_or_clips_makes_no_series(extra: str, tmp_path: Path) -> None:
    file = tmp_path / extra
    (tmp_path / "cat").mkdir()
    file.parent.mkdir(exist_ok=True)
    (np.savez if extra.endswith("z") else np.save)(file, np.arange(5.0))
    assert kind_of(tmp_path) == "series"
    for name in ("one.wav", "one.png"):
        (tmp_path / "cat" / name).touch()
        assert kind_of(tmp_path) == ("audio" if (name, file.suffix) == ("one.wav", ".npz") else "image")
        assert kind_of(tmp_path, "series") == "series"
        (tmp_path / "cat" / name).unlink()
    np.save(tmp_path / "cat" / "one.npy", np.zeros((4, 4, 3)))
    assert kind_of(tmp_path) == "image" or file.parent.name == "cat"


def test_an_empty_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.npy").touch()
    assert kind_of(tmp_path) == "image"
    with pytest.raises(SitusError, match=r"recordings can be read; the last: .*a\.npy: cannot be read as an"):
        config(tmp_path)


def test_files_of_every_form_and_faults(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(5.0), y=np.ones(5))
    np.save(tmp_path / "b.npy", np.zeros((7, 2)))
    np.save(tmp_path / "c.npy", np.array([1.0, np.nan]))
    np.savez(tmp_path / "d.npz", x=np.arange(5.0), y=np.ones(4))
    (tmp_path / "e.npy").write_bytes(b"\x93NUMPY")
    source = open_source(tmp_path, kind="series", series=SeriesConfig(time_first=True))
    assert source.classes is None and source.read(1)["series"].shape == (2, 7)
    plain = open_source(tmp_path, kind="series")
    assert plain.read(0)["series"].tolist() == [[0, 1, 2, 3, 4], [1, 1, 1, 1, 1]]
    for row, said in ((2, "no numbers"), (3, "differ in length"), (4, "cannot be read as an array")):
        with pytest.raises(BrokenSampleError, match=said):
            plain.read(row)


def test_rows_of_parquet_are_channels_by_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {"x": [[1.0, 2.0], [3.0, 4.0, 5.0]], "y": [[0.0, 0.0], [1.0, 1.0, 1.0]], "label": ["b", "a"]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    source = open_source(tmp_path, kind="series", series=SeriesConfig(columns=("x", "y")))
    assert source.read(1)["series"].tolist() == [[3, 4, 5], [1, 1, 1]]
    assert source.classes == ("a", "b") and [source.label(row) for row in range(2)] == [1, 0]
    with pytest.raises(SitusError, match="column 'z' holds no lists of numbers, only x, y does"):
        open_source(tmp_path, kind="series", series=SeriesConfig(columns=("z",)))
    pq.write_table(pa.table({"signal": [[[1.0, 2.0], [3.0, 4.0]]], "label": [3]}), tmp_path / "train.parquet")
    assert kind_of(tmp_path) == "series"
    nested = open_source(tmp_path)
    assert nested.read(0)["series"].tolist() == [[1, 2], [3, 4]] and nested.classes == ("0", "1", "2", "3")


def test_channels_are_normalised_over_the_training_split(recordings: Path) -> None:
    data = config(recordings)
    assert (data.channels, data.size) == (2, (1, 40)) and data.std[1] > 3 * data.std[0]
    batches = list(make_loader(data, None))
    assert [tuple(batch.inputs.shape) for batch in batches] == [(4, 2, 1, 40)] * 3
    whole = torch.cat([batch.inputs for batch in make_loader(data, AugmentConfig())])
    assert (whole.mean((0, 2, 3)).abs() < 0.1).all() and ((whole.std((0, 2, 3)) - 1).abs() < 0.1).all()
    alone = torch.cat([batch.inputs for batch in make_loader(config(recordings, scale="each"), None)])
    torch.testing.assert_close(alone.mean(-1), torch.zeros(12, 2, 1), atol=1e-5, rtol=0)
    shown = make_loader(data, None).shown(batches[0].inputs)
    assert shown.shape == (4, 1, 1, 40) and float(shown.min()) >= 0 and float(shown.max()) <= 1


def test_windows_are_random_in_training_and_the_middle_one_otherwise(recordings: Path) -> None:
    data = config(recordings, steps=10, scale="each")
    source = open_source(data, "val")
    series = source.read(2)["series"]  # 42 steps, 16 before the middle window
    batch = next(iter(make_loader(data, None)))
    middle = series[:, 16:26]
    wanted = (middle - middle.mean(1, keepdim=True)) / middle.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(batch.inputs[2, :, 0], wanted, atol=1e-4, rtol=0)
    loader = make_loader(data, AugmentConfig())
    one, two = (next(loader.iterate(epoch)).inputs for epoch in (0, 1))
    assert not torch.equal(one, two) and torch.equal(one, next(loader.iterate(0)).inputs)
    every = open_source(config(recordings, steps=10, stride=8), "val")
    assert (len(every), every.things) == (52, "windows")
    assert torch.equal(every.read(1)["series"], source.read(0)["series"][:, 8:18]) and every.key(1).endswith("@8")
    short = next(iter(make_loader(config(recordings, steps=50), None)))
    assert float(short.inputs[0, :, :, 40:].abs().sum()) == 0


@pytest.mark.parametrize("stride", [None, 4])
def test_a_recording_is_on_one_side_of_a_held_out_share(stride: int | None, tmp_path: Path) -> None:
    for label, name in enumerate(CLASSES):
        (tmp_path / name).mkdir()
        for number in range(8):
            np.save(tmp_path / name / f"{number}.npy", wave(number, label))
    data = DataConfig(str(tmp_path), kind="series", held_out=0.3, series=SeriesConfig(steps=8, stride=stride))
    sides = [open_source(data, split) for split in ("train", "val")]
    trained, judged = ({side.key(row).partition("@")[0] for row in range(len(side))} for side in sides)
    assert len(trained | judged) == 16 and not trained & judged
    assert {name.partition("/")[0] for name in judged} == {*CLASSES}
    whole = np.concatenate([np.load(tmp_path / name) for name in sorted(trained)], 1).astype(np.float64)
    for split in (None, "val"):
        settled = settle(replace(data, split=split))
        np.testing.assert_allclose([settled.mean, settled.std], [whole.mean(1), whole.std(1)], rtol=1e-12)


def test_a_class_of_one_recording_is_trained_on_with_all_its_windows(tmp_path: Path) -> None:
    for name, count in (("many", 6), ("one", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            np.save(tmp_path / name / f"{number}.npy", wave(number, 0))
    data = DataConfig(str(tmp_path), kind="series", held_out=0.4, series=SeriesConfig(steps=8, stride=8))
    sides = [open_source(data, split) for split in ("train", "val")]
    assert [sum(side.label(row) == 1 for row in range(len(side))) for side in sides] == [5, 0]
    assert "one recording only" in sides[0].notes[0]


def test_the_scale_is_exact_and_a_constant_channel_has_deviation_one(tmp_path: Path) -> None:
    steps = np.arange(64) % 2
    rows = [1000000 + steps, np.full(64, 0.1), 1e-12 * steps]  # far from zero, constant, and small
    np.save(tmp_path / "a.npy", np.array(rows, np.float32))
    data = config(tmp_path)
    assert data.mean == pytest.approx((1000000.5, 0.1, 5e-13), rel=1e-7)
    assert data.mean[0] == 1000000.5 and data.std[:2] == (0.5, 1.0) and data.std[2] == pytest.approx(5e-13)


def test_what_is_not_for_recordings_is_refused(recordings: Path) -> None:
    data = config(recordings)
    with pytest.raises(SitusError, match=r"mixup=0\.8: is not for recordings"):
        make_loader(data, AugmentConfig(mixup=0.8))
    with pytest.raises(SitusError, match=r"crop_share=0\.5: is not for recordings"):
        DataConfig(kind="series", crop_share=0.5)
    with pytest.raises(SitusError, match="a recording has one row"):
        DataConfig(kind="series", img_size=(2, 40))


def test_a_model_is_pretrained_tuned_measured_and_exported(recordings: Path, tmp_path: Path) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        "[backbone]\npatch_size = [1, 8]\n[backbone.model_args]\nembed_dim = 16\ndepth = 1\nnum_heads = 2\n"
    )
    shape = ["--config", str(file)]
    small = ["--data", str(recordings), "--data.workers", "0", "--batch", "8", "--device", "cpu", "--steps", "2"]
    small += ["--data.series.steps", "40"]
    runs = tmp_path / "runs"
    assert main(["pretrain", "--preset", "series-mp3", *small, *shape, "--out", str(runs / "mp3")]) in (0, None)
    tune = ["finetune", "--preset", "series-supervised", "--from", str(runs / "mp3"), *small, *shape]
    assert main([*tune, "--out", str(runs / "tuned")]) in (0, None)
    look = ["evaluate", "accuracy", str(runs / "tuned"), "--device", "cpu", "--out", str(tmp_path / "look")]
    assert main(look) in (0, None)
    assert "recordings" in (tmp_path / "look" / "accuracy.html").read_text()
    features = [
        "features",
        str(runs / "mp3"),
        "--device",
        "cpu",
        "--split",
        "val",
        "--out",
        str(tmp_path / "features.npz"),
    ]
    assert main(features) in (0, None) and np.load(tmp_path / "features.npz")["features"].shape == (12, 16)
    assert main(["export", str(runs / "tuned"), "--out", str(tmp_path / "out")]) in (0, None)
    table = json.loads((tmp_path / "out" / "config.json").read_text())["situs"]["series"]
    assert table["steps"] == 40 and len(table["mean"]) == 2
    run, export = open_model(runs / "tuned"), open_model(tmp_path / "out")
    assert export.data.size == (1, 40) and export.data.normalisation == run.data.normalisation
    batch = next(iter(make_loader(run.data, None)))
    torch.testing.assert_close(export.backbone(batch.inputs), run.backbone(batch.inputs))
