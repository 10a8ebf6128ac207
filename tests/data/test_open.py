"""`open_source` on every layout, written here by independent means; and every error sentence."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import png, write

from situs.data.config import DataConfig
from situs.data.open import ALL, _prefix, judged_split, open_source, resolve
from situs.data.sources.base import Wanted
from situs.errors import BrokenSampleError, SitusError


def everything(source) -> list[tuple[int, int | None]]:
    read = [source.read(i) for i in range(len(source))]
    return [(int(sample["image"][0, 0, 0]), sample.get("label")) for sample in read]


def test_a_labelled_folder_is_read_in_the_order_of_its_paths(tmp_path):
    for name, value in {"b/2.png": 3, "b/10.PNG": 2, "a/x.png": 1, "b/deep/z.png": 4}.items():
        write(tmp_path / name, png(value))
    write(tmp_path / "b/notes.txt", b"no image")
    write(tmp_path / ".hidden/y.png", png(9))
    source = open_source(tmp_path)
    assert source.classes == ("a", "b")
    assert everything(source) == [(1, 0), (2, 1), (3, 1), (4, 1)]
    assert everything(open_source(tmp_path, labels=False)) == [(1, None), (2, None), (3, None), (4, None)]


def test_a_flat_folder_has_no_labels(tmp_path):
    for value in (2, 1):
        write(tmp_path / f"{value}.png", png(value))
    write(tmp_path / "more/3.png", png(3))
    source = open_source(tmp_path)
    assert source.classes is None
    assert everything(source) == [(1, None), (2, None), (3, None)]


def test_split_folders_share_the_training_classes(tmp_path):
    write(tmp_path / "train/cat/1.png", png(1))
    write(tmp_path / "train/dog/1.png", png(2))
    write(tmp_path / "val/dog/1.png", png(3))
    assert everything(open_source(tmp_path)) == [(1, 0), (2, 1)]
    for split in ("val", "test", "validation"):
        source = open_source(tmp_path, split)
        assert source.classes == ("cat", "dog")
        assert everything(source) == [(3, 1)]
    write(tmp_path / "val/fox/1.png", png(3))
    with pytest.raises(SitusError, match="class 'fox' is not among the 2 classes"):
        open_source(tmp_path, "val")


def test_splits_that_are_read_together_keep_their_names_apart(tmp_path):
    for split, number in (("val", 3), ("test", 4), ("train", 1)):
        write(tmp_path / split / "cat/1.png", png(number))
    source = open_source(tmp_path, ALL)
    assert [source.key(index) for index in range(3)] == ["train/cat/1.png", "val/cat/1.png", "test/cat/1.png"]
    assert everything(source) == [(1, 0), (3, 0), (4, 0)]
    assert _prefix(tmp_path, "train") == "train/" and _prefix(tmp_path, "dev") == ""
    assert _prefix("https://host/set", "train") == ""
    (tmp_path / "train-00000.tar").touch()  # shards beside them name their own samples
    assert _prefix(tmp_path, "train") == ""


@pytest.mark.parametrize("splits", [["train"], ["train", "val"], ["val", "test"], []])
def test_all_splits_are_all_there_are(tmp_path, splits):
    for number, split in enumerate(splits):
        write(tmp_path / split / "cat/1.png", png(number))
    write(tmp_path / "cat/1.png", png(0)) if not splits else None
    source = open_source(tmp_path, ALL, held_out=0.5)  # which holds nothing out
    assert everything(source) == [(number, 0) for number in range(max(1, len(splits)))]
    prefix = [f"{split}/" for split in splits] if len(splits) > 1 else [""]
    assert [source.key(index) for index in range(len(source))] == [f"{each}cat/1.png" for each in prefix]


@pytest.mark.parametrize("channels", [0, -1])
def test_channels_are_at_least_one(channels):
    with pytest.raises(SitusError, match=f"^channels={channels}: must be at least 1$") as caught:
        open_source("samples", channels=channels)
    assert caught.value.field == "channels"
    assert open_source("samples", channels=1).read(0)["image"].shape == (1, 28, 28)


def test_a_config_without_data_is_complete():
    assert resolve(DataConfig()) == DataConfig() and resolve(DataConfig(kind="series")) == DataConfig(kind="series")


def test_tiny_imagenet_as_it_is_unpacked(tmp_path):
    write(tmp_path / "train/n1/images/n1_0.png", png(1))
    write(tmp_path / "train/n2/images/n2_0.png", png(2))
    write(tmp_path / "val/images/val_0.png", png(3))
    write(tmp_path / "val/val_annotations.txt", b"val_0.png\tn2\t0\t0\t62\t62\n")
    assert everything(open_source(tmp_path)) == [(1, 0), (2, 1)]
    assert everything(open_source(tmp_path, "val")) == [(3, 1)]


def parquet(path: Path, values: list[int], names: list[str] | None, column: str = "image") -> None:
    rows = [{"bytes": png(v), "path": None} for v in values]
    table = pa.table({column: rows, "label": pa.array([v % 2 for v in values], pa.int64())})
    if names:
        described = {"info": {"features": {"label": {"_type": "ClassLabel", "names": names}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(described)})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=2)


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_hugging_face_parquet(tmp_path, memory_bytes, monkeypatch):
    monkeypatch.setattr("situs.data.sources.parquet._CACHED_GROUPS", 1)
    parquet(tmp_path / "train-00001-of-00002.parquet", [4, 5], ["even", "odd"])
    parquet(tmp_path / "train-00000-of-00002.parquet", [1, 2, 3], ["even", "odd"])
    parquet(tmp_path / "test-00000-of-00001.parquet", [7], ["even", "odd"])
    from situs.data.sources.parquet import ParquetSource

    source = ParquetSource(tmp_path, Wanted("train"), memory_bytes=memory_bytes)
    assert source.classes == ("even", "odd")
    assert everything(source) == [(1, 1), (2, 0), (3, 1), (4, 0), (5, 1)]
    assert [source.label(i) for i in (4, 0, 3)] == [1, 1, 0]
    assert everything(open_source(tmp_path, "val")) == [(7, 1)]
    assert everything(open_source(tmp_path / "test-00000-of-00001.parquet")) == [(7, 1)]


def test_parquet_of_a_hub_repository_and_without_names(tmp_path):
    parquet(tmp_path / "data/train-0.parquet", [1, 2], None, column="img")
    source = open_source(tmp_path)
    assert source.classes == ("0", "1")
    assert everything(source) == [(1, 1), (2, 0)]


def labelled(path: Path, labels: list[int], names: list[str] | None = None) -> None:
    """One image a label; a parquet file of Hugging Face's layout."""
    rows = [{"bytes": png(1), "path": None} for _ in labels]
    table = pa.table({"image": rows, "label": pa.array(labels, pa.int64())})
    described = {"info": {"features": {"label": {"names": names}}}}
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(described)}) if names else table, path)


def test_parquet_labels_are_those_of_every_shard(tmp_path):
    labelled(tmp_path / "train-0.parquet", [0, 0, 1])  # sorted by class: the first shard has not seen them all
    labelled(tmp_path / "train-1.parquet", [2, 3])
    assert open_source(tmp_path).classes == ("0", "1", "2", "3")
    labelled(tmp_path / "test-0.parquet", [-1, -1], ["a", "b"])  # withheld, though the classes have names
    assert open_source(tmp_path, "test").classes is None
    labelled(tmp_path / "val-0.parquet", [0, 2], ["a", "b"])
    with pytest.raises(SitusError, match=r"names 2 classes, but its column 'label' has the label 2"):
        open_source(tmp_path, "val")


def tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def test_webdataset_shards(tmp_path):
    tar(tmp_path / "train-000001.tar", {"c.png": png(3), "c.cls": b"2"})
    tar(
        tmp_path / "train-000000.tar",
        {"a.png": png(1), "a.cls": b"0\n", "a.json": b"{}", "b.cls": b"1", "b.png": png(2)},
    )
    tar(tmp_path / "val-000000.tar", {"dir/v.PNG": png(4), "dir/v.cls": b"1"})
    source = open_source(tmp_path)
    assert source.classes == ("0", "1", "2")
    assert everything(source) == [(1, 0), (2, 1), (3, 2)]
    assert everything(open_source(tmp_path, "val")) == [(4, 1)]
    write(tmp_path / "classes.txt", b"ant\nbee\ncat\n")
    assert open_source(tmp_path).classes == ("ant", "bee", "cat")
    assert open_source(tmp_path / "val-000000.tar", labels=False).classes is None


def test_webdataset_where_one_label_is_missing(tmp_path):
    tar(tmp_path / "x.tar", {"a.png": png(1), "a.cls": b"0", "b.png": png(2)})
    with pytest.raises(SitusError, match=r"b\.png has no class \(\.cls file\)"):
        open_source(tmp_path)


def test_the_embedded_samples():
    source = open_source("samples", channels=3)
    image, label = source.read(3).values()
    assert (image.shape, label, len(source)) == ((3, 28, 28), 3, 9000)
    assert source.classes is not None
    assert len(source.classes) == 10
    assert open_source("samples", "val").name == "samples (test)"


@pytest.mark.parametrize(
    ("make", "path", "split", "sentence"),
    [
        (lambda p: None, "nowhere", None, r"nowhere: no such folder or file"),
        (lambda p: (p / "e").mkdir(), "e", None, r"e: contains no images "),
        (lambda p: write(p / "e/readme.md", b""), "e", None, "e: contains no images"),
        (lambda p: (p / "e").mkdir(), "e", "val", "e: contains no images"),
        (lambda p: write(p / "x.zip", b""), "x.zip", None, r"x.zip: must be a folder, a .parquet or a .tar file"),
        (
            lambda p: write(p / "f/a.png", png()),
            "f",
            "val",
            r"it has no splits, so 'train' means all samples; hold out a fraction of the data .*choose another split",
        ),
        (lambda p: write(p / "f/train/a/a.png", png()), "f", "test", "has no split 'test'; it has only train"),
        (lambda p: write(p / "f/a.png", png()), "f", "holdout", r"split='holdout': must be one of train, val, test"),
        (lambda p: write(p / "f/x.parquet", b"PAR1 no"), "f", None, "x.parquet: is not a readable parquet file"),
        (lambda p: write(p / "f/x.tar", b"no tar" * 200), "f", None, "x.tar: is not a plain tar"),
        (lambda p: tar(p / "f/x.tar", {"a.txt": b""}), "f", None, "f: its tar files contain no images"),
        (lambda p: tar(p / "f/x.tar", {"a.png": png(), "a.cls": b"cat"}), "f", None, "x.tar: is not a plain tar"),
        (lambda p: pq.write_table(pa.table({"count": [1]}), p / "x.parquet"), "x.parquet", None, "no image column"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, make, path, split, sentence):
    make(tmp_path)
    with pytest.raises(SitusError, match=sentence) as caught:
        open_source(tmp_path / path, split)
    assert "\n" not in str(caught.value)


def test_a_broken_file_is_named_when_it_is_read(tmp_path):
    write(tmp_path / "a/good.png", png(1))
    write(tmp_path / "a/bad.jpg", b"\xff\xd8 torn")
    write(tmp_path / "a/gone.png", png(1))
    source = open_source(tmp_path)
    (tmp_path / "a/gone.png").unlink()
    with pytest.raises(BrokenSampleError, match=r"a/bad\.jpg: cannot be decoded"):
        source.read(0)
    with pytest.raises(BrokenSampleError, match=r"a/gone\.png: cannot be read"):
        source.read(1)


@pytest.mark.shared_data
def test_the_real_cifar100(shared_data):
    test = open_source(shared_data / "cifar100", "val")
    assert (len(test), test.classes and test.classes[:2]) == (10000, ("apple", "aquarium_fish"))
    labels = torch.tensor([test.read(i)["label"] for i in range(0, 10000, 10)])
    assert torch.bincount(labels, minlength=100).min() >= 2
    image = test.read(17)["image"]
    assert image.shape == (3, 32, 32)
    assert len(open_source(shared_data / "cifar100")) == 50000


@pytest.mark.shared_data
def test_real_photographs(shared_data):
    source = open_source(shared_data / "imagenet-samples", channels=3)
    assert len(source) == 1000
    assert source.classes is None
    assert min(source.read(7)["image"].shape[1:]) == 224


def test_what_the_system_refuses_is_one_sentence(tmp_path, monkeypatch):
    write(tmp_path / "a.png", png())

    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refuse)
    for look in (open_source, judged_split):
        with pytest.raises(SitusError, match=r"cannot be read \(permission denied\)"):
            look(tmp_path)
