"""Recordings of several channels: files and rows, windows, normalisation, and a run from pretraining to its export."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from situs.cli.main import main
from situs.data.augment.recipes import AugmentConfig
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.modalities.base import ModelInput
from situs.data.modalities.series import SeriesConfig, SeriesPipeline, _is_series
from situs.data.open import kind_of, open_source, resolve, splits_at
from situs.data.preparation import Preparation
from situs.data.sources.folder import FileSource
from situs.errors import BrokenSampleError, SitusError
from situs.models import open_model
from situs.models.data import check_labels

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
    return resolve(DataConfig(str(path), kind="series", batch=4, workers=0, series=SeriesConfig(**series)))


def test_what_lies_there_is_found_out(recordings: Path, tmp_path: Path) -> None:
    assert kind_of(recordings) == "series"  # [C, T] of numbers below 0, which no pixels are
    np.save(tmp_path / "grey.npy", np.full((2, 40), 0.5))
    assert kind_of(tmp_path) == "image" and kind_of(tmp_path, kind="series") == "series"  # which may be a picture
    (tmp_path / "grey.npy").unlink()
    assert splits_at(recordings, kind="series") == {"train", "val"}
    np.save(tmp_path / "one.npy", wave(0, 0)[0])
    assert kind_of(tmp_path) == "series"
    source = open_source(recordings, "val", kind="series")
    assert (len(source), source.classes, source.things) == (12, CLASSES, "recordings")
    assert source.read(0)["series"].shape == (2, 40) and source.read(11)["label"] == 1
    with pytest.raises(SitusError, match="contains recordings, but images are expected"):
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
        assert kind_of(tmp_path) == ("audio" if name == "one.wav" else "image")
        assert kind_of(tmp_path, kind="series") == "series"
        (tmp_path / "cat" / name).unlink()
    np.save(tmp_path / "cat" / "one.npy", np.zeros((4, 4, 3)))
    assert kind_of(tmp_path) == "image" or file.parent.name == "cat"


def test_an_empty_file_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "a.npy").touch()
    assert kind_of(tmp_path) == "image"
    with pytest.raises(SitusError, match=r"recordings can be read; .*a\.npy: cannot be read as an"):
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
    for row, said in ((2, "not finite numbers"), (3, "differ in length"), (4, "cannot be read as an array")):
        with pytest.raises(BrokenSampleError, match=said):
            plain.read(row)


def _header(shape: tuple[int, ...]) -> bytes:
    """The start of a `.npy` file of float64."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return file.getvalue()


def _packed(method: int, *, flags: int = 0, damage: bool = False) -> bytes:
    """A `.npz` file of 9 numbers, with another flag or a damaged byte."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as packed:
        packed.writestr("x.npy", _header((9,)) + bytes(72))
    data = bytearray(file.getvalue())
    start = data.index(b"PK\x01\x02")
    data[6], data[start + 8] = flags, flags
    if damage:
        data[35] = 255  # the first packed byte
    return bytes(data)


def _unpackable() -> bytes:
    """A `.npz` file that says it is packed in a way that nobody knows."""
    data = bytearray(_packed(zipfile.ZIP_STORED))
    data[8], data[data.index(b"PK\x01\x02") + 10] = 97, 97
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.npy", b"", "cannot be read as an array"),
        ("a.npy", _header((2**60,)), "cannot be read as an array"),
        ("a.npz", b"", "cannot be read as an array"),
        ("a.npz", _packed(zipfile.ZIP_STORED, flags=1), "cannot be read as an array .*encrypted"),
        ("a.npz", _packed(zipfile.ZIP_DEFLATED, damage=True), "cannot be read as an array"),
        ("a.npz", _unpackable(), "cannot be read as an array .*compression"),
        ("a.npy", np.arange(3) * 1j, "contains complex128; a recording must contain real numbers"),
        ("a.npy", np.arange(3).astype("datetime64[s]"), "contains datetime64"),
        ("a.npy", np.array(["a", "b"]), "contains <U1"),
        ("a.npy", np.zeros((2, 3, 4)), r"has the shape \[2, 3, 4\]; a recording must be \[T\] or \[C, T\]"),
        ("a.npy", np.array(5.0), r"has the shape \[\]; a recording must be"),
        ("a.npz", b"PK\5\6" + bytes(18), r"cannot be read as an array \(it is empty\)"),
    ],
)
@pytest.mark.parametrize("stride", [None, 2])
def test_odd_files_are_sentences(
    name: str, data: bytes | np.ndarray, said: str, stride: int | None, tmp_path: Path
) -> None:
    if isinstance(data, bytes):
        (tmp_path / name).write_bytes(data)
    else:
        np.save(tmp_path / name, data)
    source = open_source(tmp_path, kind="series", series=SeriesConfig(steps=2, stride=stride))
    with pytest.raises(BrokenSampleError, match=rf"{name}: {said}"):
        source.read(0)


def test_what_is_too_large_unpacked_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros(100000), y=np.zeros(100000))
    monkeypatch.setattr("situs.data.sources.images._MOST_BYTES", 1_000_000)
    with pytest.raises(BrokenSampleError, match=r"a\.npz, unpacked: has 1,600,\d+ bytes; a recording may have at most"):
        open_source(tmp_path, kind="series").read(0)


def test_time_first_is_of_one_array_and_not_of_channels(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(5.0), y=np.ones(5))
    np.savez(tmp_path / "b.npz", x=np.zeros((5, 2)))
    source = open_source(tmp_path, kind="series", series=SeriesConfig(time_first=True))
    assert [source.read(row)["series"].shape for row in range(2)] == [(2, 5), (2, 5)]


def test_windows_read_only_their_part_of_a_file(recordings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = open_source(recordings, "val", kind="series")
    wanted = plain.read(3)["series"]
    monkeypatch.setattr(FileSource, "payload", None)
    windows = open_source(recordings, "val", kind="series", series=SeriesConfig(steps=10, stride=10))
    parts = [windows.read(row)["series"] for row in range(len(windows)) if windows.key(row).startswith(plain.key(3))]
    assert torch.equal(torch.cat(parts, 1), wanted)


@pytest.mark.parametrize(
    ("trained", "judged", "classes", "numbers"),
    [
        (["b", "a", "c"], ["c", "b"], ("a", "b", "c"), [2, 1]),
        ([None, "b", "a"], [None, "b"], ("a", "b"), [None, 1]),
        ([-1, 0, 1], [1, -1], ("-1", "0", "1"), [2, 0]),
        ([0.5, 2.0, float("nan")], [2.0, 0.5], ("0.5", "2.0"), [1, 0]),
        ([0, 2, 1], [2], ("0", "1", "2"), [2]),
        (["a", "b"], ["z", "b"], ("a", "b"), [None, 1]),
        ([None, None], [None], None, []),
    ],
)
def test_labels_of_rows_are_those_of_the_training_files(
    trained: list[Any], judged: list[Any], classes: tuple[str, ...] | None, numbers: list[int | None], tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for split, labels in (("train", trained), ("val", judged)):
        kind = pa.array(trained).type
        rows = {"signal": [[1.0, 2.0]] * len(labels), "label": pa.array(labels, kind)}
        pq.write_table(pa.table(rows), tmp_path / f"{split}.parquet")
    source = open_source(tmp_path, "val")
    assert source.classes == classes == open_source(tmp_path, "train").classes
    for row, number in enumerate(numbers):
        if number is not None:
            assert source.label(row) == number
            continue
        unknown = "the label 'z', which is not in the training split"
        has = unknown if judged[row] else "no label, but other rows have one"
        with pytest.raises(BrokenSampleError, match=rf"val\.parquet, row {row} of row group 0: the row has {has}"):
            source.label(row)


def test_an_error_names_the_file_of_its_row(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"signal": [[1.0], [2.0]], "label": [0, 1]}), tmp_path / "train-0.parquet")
    pq.write_table(pa.table({"signal": [[1.0], [float("nan")]], "label": [0, 1]}), tmp_path / "train-1.parquet")
    source = open_source(tmp_path)
    assert [source.key(row) for row in (1, 2)] == ["train-0.parquet/1", "train-1.parquet/0"]
    with pytest.raises(
        BrokenSampleError, match=r"train-1\.parquet, row 1 of row group 0: contains values that are not finite numbers"
    ):
        source.read(3)
    pq.write_table(pa.table({"signal": [[1.0]]}), tmp_path / "train-1.parquet")
    with pytest.raises(SitusError, match=r"train-1\.parquet: has no column 'label', but other files have"):
        open_source(tmp_path)
    pq.write_table(pa.table({"signal": [[1.0]], "label": [[1]]}), tmp_path / "train-0.parquet")
    with pytest.raises(SitusError, match=r"train-0\.parquet: .*a label must be one number or name"):
        open_source(tmp_path / "train-0.parquet")


def test_rows_of_parquet_are_channels_by_column(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = {"x": [[1.0, 2.0], [3.0, 4.0, 5.0]], "y": [[0.0, 0.0], [1.0, 1.0, 1.0]], "label": ["b", "a"]}
    pq.write_table(pa.table(rows), tmp_path / "train.parquet")
    source = open_source(tmp_path, kind="series", series=SeriesConfig(columns=("x", "y")))
    assert source.read(1)["series"].tolist() == [[3, 4, 5], [1, 1, 1]]
    assert source.classes == ("a", "b") and [source.label(row) for row in range(2)] == [1, 0]
    with pytest.raises(SitusError, match="column 'z' contains no lists of numbers; columns with lists: x, y"):
        open_source(tmp_path, kind="series", series=SeriesConfig(columns=("z",)))
    pq.write_table(pa.table({"signal": [[[1.0, 2.0], [3.0, 4.0]]], "label": [3]}), tmp_path / "train.parquet")
    assert kind_of(tmp_path) == "series"
    nested = open_source(tmp_path)
    assert nested.read(0)["series"].tolist() == [[1, 2], [3, 4]] and nested.classes == ("0", "1", "2", "3")


def test_columns_that_are_not_there_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"signal": [[1.0, 2.0]], "side": ["left"]}), tmp_path / "train.parquet")
    source = open_source(tmp_path, series=SeriesConfig(label="side"))
    assert (source.classes, source.label(0)) == (("left",), 0)
    for none in (open_source(tmp_path), open_source(tmp_path, labels=False, series=SeriesConfig(label="side"))):
        assert (none.classes, none.label(0), sorted(none.read(0))) == (None, None, ["series"])
    with pytest.raises(SitusError, match=r"train\.parquet: has no column 'part', only signal, side$") as stop:
        open_source(tmp_path, series=SeriesConfig(label="part"))
    assert stop.value.fields == ("series.label",)
    pq.write_table(pa.table({"count": [1]}), tmp_path / "train.parquet")
    with pytest.raises(SitusError, match=r"train\.parquet: has no column that contains lists of numbers$") as stop:
        open_source(tmp_path, kind="series")
    assert stop.value.fields == ("series.columns",)
    (tmp_path / "notes.pdf").touch()
    with pytest.raises(SitusError, match=r"notes\.pdf: must be a folder of \.npy or \.npz files, or parquet$"):
        open_source(tmp_path / "notes.pdf", kind="series")


def test_recordings_of_other_channels_are_named(recordings: Path, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", wave(0, 0))
    np.save(tmp_path / "b.npy", wave(0, 0, channels=1))
    said = f"{tmp_path.name}: contains recordings of 2 channels, but b.npy has 1 channels$"
    with pytest.raises(SitusError, match=said):
        config(tmp_path)
    loader = make_loader(config(recordings), None, source=open_source(tmp_path, kind="series"))
    assert [batch.ids.tolist() for batch in loader] == [[0]]
    assert loader.source.skipped == {1: f"{tmp_path.name}, b.npy: has 1 channels, but the model takes 2"}


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


@pytest.mark.parametrize("free", [0, 1, 4])
def test_a_random_window_begins_anywhere_with_equal_chance(free: int, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(5.0 + free))
    pipeline = SeriesPipeline(open_source(tmp_path, kind="series"), config(tmp_path, steps=5), AugmentConfig())
    parts = [pipeline.fetch(0, 0, draw)["series"][0].tolist() for draw in range(60)]
    assert all(part == [part[0] + step for step in range(5)] for part in parts)
    counts = np.bincount([int(part[0]) for part in parts], minlength=free + 1)
    assert len(counts) == free + 1 and chisquare(counts).pvalue > 1e-3 if free else counts.tolist() == [60]


def test_a_window_of_its_own_scale_leaves_out_what_pads_it(tmp_path: Path) -> None:
    np.save(tmp_path / "short.npy", (short := np.array([[1.0, 5.0, 3.0], [7.0, 7.0, 7.0]], np.float32)))
    held = open_source(tmp_path, kind="series")
    batch = next(iter(make_loader(config(tmp_path, steps=5, scale="each"), None, source=held)))
    wanted = (short - short.mean(1, keepdims=True)) / np.maximum(short.std(1, keepdims=True), 1e-6)
    np.testing.assert_allclose(batch.inputs[0, :, 0, :3].numpy(), wanted, atol=1e-6)
    assert not batch.inputs[0, :, 0, 3:].any() and not batch.inputs[0, 1].any()


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
        resolved = resolve(replace(data, split=split))
        np.testing.assert_allclose([resolved.mean, resolved.std], [whole.mean(1), whole.std(1)], rtol=1e-12)


def test_a_class_of_one_recording_is_trained_on_with_all_its_windows(tmp_path: Path) -> None:
    for name, count in (("many", 6), ("one", 1)):
        (tmp_path / name).mkdir()
        for number in range(count):
            np.save(tmp_path / name / f"{number}.npy", wave(number, 0))
    data = DataConfig(str(tmp_path), kind="series", held_out=0.4, series=SeriesConfig(steps=8, stride=8))
    sides = [open_source(data, split) for split in ("train", "val")]
    assert [sum(side.label(row) == 1 for row in range(len(side))) for side in sides] == [5, 0]
    assert "only one recording" in sides[0].notes[0]


def test_the_scale_is_exact_and_a_constant_channel_has_deviation_one(tmp_path: Path) -> None:
    steps = np.arange(64) % 2
    rows = [1000000 + steps, np.full(64, 0.1), 1e-12 * steps]  # far from zero, constant, and small
    np.save(tmp_path / "a.npy", np.array(rows, np.float32))
    data = config(tmp_path)
    assert data.mean == pytest.approx((1000000.5, 0.1, 5e-13), rel=1e-7)
    assert data.mean[0] == 1000000.5 and data.std[:2] == (0.5, 1.0) and data.std[2] == pytest.approx(5e-13)


def test_an_export_keeps_the_scale_out_of_the_words_of_pictures() -> None:
    prepared = Preparation(DataConfig(kind="series", img_size=(1, 8), channels=3, mean=(1, 2, 3), std=(4, 5, 6)))
    photographs = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    assert prepared.to_timm(photographs, 3) == {"mean": [0.0] * 3, "std": [1.0] * 3, "crop_pct": 1.0}
    assert Preparation().to_timm(photographs, 3)["mean"] == [0.485, 0.456, 0.406]
    table = prepared.to_situs()["series"]
    again = Preparation.read(ModelInput("model", (1, 8), 3), {}, {"series": table}).data
    assert again is not None and again.normalisation == ((1, 2, 3), (4, 5, 6))
    del table["mean"]
    with pytest.raises(
        SitusError, match=r"its table situs\.series has no mean, which is needed to normalise recordings"
    ):
        Preparation.read(ModelInput("model", (1, 8), 3), {}, {"series": table})


def test_only_sentences_without_labels_are_told_of_their_column(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", wave(0, 0))
    with pytest.raises(SitusError, match="has no labels to compare with") as stop:
        check_labels(make_loader(config(tmp_path), None, source=open_source(tmp_path, kind="series")))
    assert stop.value.fields == ("data",)


def test_what_is_not_for_recordings_is_refused(recordings: Path) -> None:
    data = config(recordings)
    with pytest.raises(SitusError, match=r"mixup=0\.8: does not apply to recordings"):
        make_loader(data, AugmentConfig(mixup=0.8))
    with pytest.raises(SitusError, match=r"crop_share=0\.5: does not apply to recordings"):
        DataConfig(kind="series", crop_share=0.5)
    with pytest.raises(SitusError, match=r"\(1,STEPS\): one row, and one column per step"):
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


@pytest.mark.parametrize(
    ("array", "series"),
    [
        (np.zeros((4, 9), "f4"), False),  # as grey pixels between 0 and 1
        (np.ones((4, 9), "f4"), False),
        (np.full((4, 9), 1.001, "f4"), True),
        (np.full((4, 9), -0.001, "f4"), True),
        (np.full((4, 9), 255, "u1"), False),
        (np.full((4, 9), -1, "i1"), True),
        (np.zeros((4, 9), "u2"), False),
        (np.zeros((4, 9), "u4"), True),
        (np.zeros((4, 9), "i8"), True),
        (np.zeros(9, "f4"), True),
        (np.zeros((4, 0), "f4"), False),
        (np.zeros((3, 4, 9), "f4"), False),
    ],
)
def test_an_array_is_a_series_if_it_cannot_be_pixels(array: np.ndarray, series: bool, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    assert _is_series(tmp_path / "a.npy") is series
