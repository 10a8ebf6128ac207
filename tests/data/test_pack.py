"""A packed set: what the readers find in it, and that neither kills, full disks nor workers change a byte of it."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from image_files import noise, write
from PIL import Image

from situs.data.check import check
from situs.data.open import open_source
from situs.data.pack import PackConfig, Shard, pack
from situs.errors import SitusError

FORMATS = pytest.mark.parametrize("kind", ["parquet", "webdataset"])


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Nine images of two classes in train (the fourth broken), two in val."""
    root = tmp_path / "photos"
    for number in range(9):
        write(root / f"train/{'cat' if number < 5 else 'dög'}/{number}.png", noise(number))
    write(root / "train/cat/3.png", noise(3)[:200])
    for number in (20, 21):
        write(root / f"val/dög/{number}.png", noise(number))
    write(root / "train/notes.txt", b"no image")
    return root


def config(kind: str, **changes) -> PackConfig:
    groups = {"row_group": 2} if kind == "parquet" else {}
    return PackConfig(**{"format": kind, "short_side": 8, "encoding": "png", "shard_mib": 0.001, **groups} | changes)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@FORMATS
def test_a_packed_set_reads_as_the_set_it_was_made_of(photos, tmp_path, kind):
    out = tmp_path / "out"
    packed = pack(photos, out, config(kind), workers=0)
    for split, count in (("train", 8), ("val", 2)):
        before, after = open_source(photos, split), open_source(out, split)
        assert after.classes == before.classes == ("cat", "dög")
        assert len(after) == count
        kept = [i for i in range(len(before)) if split == "val" or i != 3]
        for row, index in enumerate(kept):
            sample = after.read(row)
            whole = Image.open(io.BytesIO(before.payload(index)))
            wanted = np.asarray(whole.resize((10, 8), Image.Resampling.BICUBIC)).astype(int)
            assert np.abs(sample["image"].permute(1, 2, 0).numpy() - wanted).max() <= 1
            assert sample["label"] == before.label(index)
    assert [(each["split"], each["number"], each["name"]) for each in packed.broken] == [("train", 3, "cat/3.png")]
    assert "cannot be decoded" in packed.broken[0]["reason"]
    assert [*packed.provenance.left_out] == open_source(photos, "train").notes and len(packed.provenance.left_out) == 1
    said = packed.summary()
    assert said.sentence.startswith("photos: packed, 10 images in ") and said.sentence.endswith(
        "1 broken image left out."
    )
    assert [(*row[:2], row[5]) for row in said.tables[0].rows] == [("train", 8, 1), ("val", 2, 0)]
    assert (packed.title, packed.tone, packed.mark) == ("photos: packed", "unsure", "Some images left out")
    assert packed.figures()[0].values == ({"train": 8, "val": 2}, "images")
    whole = pack(photos, tmp_path / "val", config(kind), splits=["val"], workers=0)
    assert (whole.tone, whole.mark) == ("good", "All images packed")


@FORMATS
def test_shards_keep_to_their_limit_and_the_manifest_to_the_shards(photos, tmp_path, kind):
    packed = pack(photos, tmp_path / "out", config(kind), workers=0)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest == packed.manifest | {"classes": ["cat", "dög"]}
    written = files(tmp_path / "out")
    listed = {shard["file"] for shard in manifest["shards"]}
    assert {*written} - listed == {"manifest.json"} | ({"classes.txt"} if kind == "webdataset" else set())
    assert len(listed) == 4
    for shard in manifest["shards"]:
        data = written[shard["file"]]
        assert (len(data), hashlib.sha256(data).hexdigest()) == (shard["bytes"], shard["sha256"])
        if kind == "parquet":
            payload = [row["bytes"] for row in pq.read_table(io.BytesIO(data))["image"].to_pylist()]
        else:
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                payload = [tar.extractfile(info).read() for info in tar if info.name.endswith(".png")]
        assert len(payload) == shard["images"]
        assert len(payload) == 1 or sum(map(len, payload)) <= 0.001 * 2**20
    assert check(tmp_path / "out", workers=0).counts["checksum"] == 0


def test_parquet_holds_what_hugging_face_reads(photos, tmp_path):
    pack(photos, tmp_path / "out", config("parquet", shard_mib=1), workers=0)
    file = pq.ParquetFile(tmp_path / "out/train-00000.parquet")
    assert [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)] == [2, 2, 2, 2]
    features = json.loads(file.schema_arrow.metadata[b"huggingface"])["info"]["features"]
    assert features == {"image": {"_type": "Image"}, "label": {"_type": "ClassLabel", "names": ["cat", "dög"]}}
    assert file.read()["image"][3].as_py()["path"] == "cat/4.png"


def test_a_tar_names_images_by_their_number_in_the_set(photos, tmp_path):
    pack(photos, tmp_path / "out", config("webdataset", shard_mib=1), workers=0)
    with tarfile.open(tmp_path / "out/train-00000.tar") as tar:
        assert tar.getnames()[4:8] == ["000000002.png", "000000002.cls", "000000004.png", "000000004.cls"]


@FORMATS
def test_a_set_without_splits_and_labels(tmp_path, kind):
    for number in range(3):
        write(tmp_path / f"flat/{number}.png", noise(number))
    pack(tmp_path / "flat", tmp_path / "out", config(kind, short_side=0), workers=0)
    source = open_source(tmp_path / "out")
    assert source.classes is None
    assert [source.payload(i) for i in range(3)] == [noise(number) for number in range(3)]


def test_pixels_without_files_and_one_split_of_two(tmp_path):
    pack("samples", tmp_path / "out", PackConfig(), splits=["test"], workers=0)
    before, after = open_source("samples", "test"), open_source(tmp_path / "out", "test")
    assert after.classes == before.classes
    for index in (0, 7, len(before) - 1):
        assert torch.equal(after.read(index)["image"], before.read(index)["image"])
        assert after.read(index)["label"] == before.read(index)["label"]
    again = pack("samples", tmp_path / "out", PackConfig(), splits=["test"], workers=0)
    [row] = again.summary().tables[0].rows
    assert [row[at] for at in (0, 1, 4, 5)] == ["test", 2000, None, 0]  # they took no MiB before


def test_the_classes_of_splits_must_agree(tmp_path):
    import pyarrow as pa

    def split(name: str, classes: list[str]) -> None:
        rows = pa.table({"image": [{"bytes": noise(1), "path": None}], "label": [0]})
        described = json.dumps({"info": {"features": {"label": {"names": classes}}}})
        pq.write_table(rows.replace_schema_metadata({"huggingface": described}), tmp_path / "set" / f"{name}.parquet")

    (tmp_path / "set").mkdir()
    split("train", ["cat"])
    split("val", ["cat", "dog"])  # a split may lack the last ones
    assert pack(tmp_path / "set", tmp_path / "out", workers=0).manifest["classes"] == ("cat", "dog")
    split("val", ["dog", "cat"])
    with pytest.raises(SitusError, match=r"^set \(val\): its classes differ from those of the other splits$"):
        pack(tmp_path / "set", tmp_path / "other", workers=0)


@FORMATS
def test_a_stopped_packing_goes_on_to_the_same_bytes(photos, tmp_path, kind, monkeypatch):
    pack(photos, tmp_path / "whole", config(kind), workers=0)
    calls, keep = [], Shard.keep

    def full(self):
        calls.append(self.path.name)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return keep(self)

    monkeypatch.setattr(Shard, "keep", full)
    with pytest.raises(
        SitusError, match=r"out: could not be written: no space left on device; run the same command again"
    ):
        pack(photos, tmp_path / "out", config(kind), workers=0)
    left = files(tmp_path / "out")
    assert sorted(left) == sorted([".packing.json", *calls[:2]])  # nothing half-written, nothing lost
    monkeypatch.setattr(Shard, "keep", keep)
    made = []
    monkeypatch.setattr("situs.data.pack._item", _counted(made))
    packed = pack(photos, tmp_path / "out", config(kind), workers=0)
    assert min(made) > 0 and len(made) == 11 - min(made)  # it went on, and did not begin again
    assert files(tmp_path / "out") == files(tmp_path / "whole")
    assert len(packed.broken) == 1


def _counted(made: list[int]):
    from situs.data.pack import _item

    def item(source, how, number):
        made.append(number + (9 if "val" in source.name else 0))
        return _item(source, how, number)

    return item


def test_a_lost_shard_and_what_follows_are_made_anew(photos, tmp_path, monkeypatch):
    pack(photos, tmp_path / "whole", config("parquet"), workers=0)
    _stop_after(3, photos, tmp_path, monkeypatch)
    (tmp_path / "out/train-00001.parquet").unlink()
    (tmp_path / "out/.train-00004.parquet.tmp").write_bytes(b"half")
    pack(photos, tmp_path / "out", config("parquet"), workers=0)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


@pytest.mark.parametrize("over", [False, True])
def test_a_packing_stopped_before_a_shard_was_noted_is_not_stuck(photos, tmp_path, monkeypatch, over):
    pack(photos, tmp_path / "whole", config("parquet"), workers=0)
    keep = Shard.keep

    def stopping(self):
        keep(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Shard, "keep", stopping)
    with pytest.raises(KeyboardInterrupt):
        pack(photos, tmp_path / "out", config("parquet"), workers=0)
    monkeypatch.undo()
    assert "train-00000.parquet" in files(tmp_path / "out")
    pack(photos, tmp_path / "out", config("parquet"), workers=0, start_over=over)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def _stop_after(count: int, photos: Path, tmp_path: Path, monkeypatch) -> None:
    keep, left = Shard.keep, [count]

    def stopping(self):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return keep(self)

    monkeypatch.setattr(Shard, "keep", stopping)
    with pytest.raises(KeyboardInterrupt):
        pack(photos, tmp_path / "out", config("parquet"), workers=0)
    monkeypatch.undo()


@pytest.mark.slow
def test_a_killed_process_with_workers_leaves_what_another_goes_on_with(tmp_path):
    for number in range(60):
        write(tmp_path / f"photos/{number:02d}.png", noise(number, 200, 210))
    words = ["data", "pack", str(tmp_path / "photos"), "--short-side", "100", "--shard-mib", "0.05"]
    command = [sys.executable, "-m", "situs", *words, "--out", str(tmp_path / "out"), "--workers", "1"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    begun = tmp_path / "out/.packing.json"
    deadline = time.monotonic() + 120
    while running.poll() is None and not (begun.is_file() and begun.read_text().count("sha256") > 3):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, "it ended before it was killed: the test needs more images"
    how = PackConfig(short_side=100, shard_mib=0.05)
    pack(tmp_path / "photos", tmp_path / "out", how, workers=0)
    pack(tmp_path / "photos", tmp_path / "whole", how, workers=0)
    assert files(tmp_path / "out") == files(tmp_path / "whole")


def test_progress_counts_the_images_of_each_split_from_where_it_goes_on(photos, tmp_path, monkeypatch):
    for number in range(30, 93):
        write(photos / f"val/dög/{number}.png", noise(number, 4, 5))
    seen: list[tuple[int, int, str]] = []
    pack(photos, tmp_path / "out", config("parquet"), workers=0, progress=lambda *told: seen.append(told))
    assert seen == [(0, 9, "train"), (9, 9, "train"), *((done, 65, "val") for done in (0, 32, 64, 65))]
    seen.clear()
    _stop_after(1, photos, tmp_path / "stopped", monkeypatch)
    done = json.loads((tmp_path / "stopped/out/.packing.json").read_text())["done"]
    pack(photos, tmp_path / "stopped/out", config("parquet"), workers=0, progress=lambda *told: seen.append(told))
    assert 0 < done["train"] < 9 and seen[:2] == [(done["train"], 9, "train"), (9, 9, "train")]
    for number in range(3):
        write(tmp_path / f"flat/{number}.png", noise(number))
    seen.clear()
    pack(
        tmp_path / "flat", tmp_path / "flat out", config("parquet"), workers=0, progress=lambda *told: seen.append(told)
    )
    assert seen == [(0, 3, "images"), (3, 3, "images")]
    check(photos, workers=0, progress=lambda *told: seen.append(told))
    assert seen[2:] == [(9, 9, "train"), *((done, 65, "val") for done in (32, 64, 65))]


def test_again_another_and_start_over(photos, tmp_path):
    first = pack(photos, tmp_path / "out", config("webdataset"), workers=0)
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = pack(photos, tmp_path / "out", config("webdataset"), workers=0)
    assert again.again and not first.again and "was packed already" in again.summary().sentence
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == stamps
    with pytest.raises(
        SitusError, match="contains a packed set that differs from this one in config; start over, or pack into another"
    ):
        pack(photos, tmp_path / "out", config("parquet"), workers=0)
    (photos / "val/dög/22.png").write_bytes(noise(22))
    with pytest.raises(SitusError, match="contains a packed set that differs from this one in data; start over"):
        pack(photos, tmp_path / "out", config("webdataset"), workers=0)
    pack(photos, tmp_path / "out", config("parquet"), workers=0, start_over=True)
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".parquet", ".json"}
    assert len(open_source(tmp_path / "out", "val")) == 3


def test_a_packing_begun_on_other_images_is_not_gone_on_with(photos, tmp_path, monkeypatch):
    _stop_after(2, photos, tmp_path, monkeypatch)
    with pytest.raises(SitusError, match="contains an unfinished packing that differs from this one in config"):
        pack(photos, tmp_path / "out", config("parquet", short_side=9), workers=0)
    write(photos / "train/cat/00.png", noise(50))
    with pytest.raises(SitusError, match=r"photos \(train\): its images have changed since the packing began"):
        pack(photos, tmp_path / "out", config("parquet"), workers=0)


def test_places_that_nothing_is_packed_into(photos, tmp_path):
    (tmp_path / "taken").write_text("")
    write(tmp_path / "full/own.tar", b"")
    for out, said in (
        (photos, "must be a folder outside of the data"),
        (photos / "train/out", "must be a folder outside of the data"),
        (tmp_path / "taken", "must be a folder"),
        (tmp_path / "full", "already contains own.tar; pack into an empty folder"),
    ):
        with pytest.raises(SitusError, match=said):
            pack(photos, out, config("parquet"), workers=0)
    with pytest.raises(SitusError, match="no such folder"):
        pack(tmp_path / "nosuch", tmp_path / "new", workers=0)
    assert not (tmp_path / "new").exists()


def test_nothing_readable_is_one_sentence_and_leaves_nothing(tmp_path):
    write(tmp_path / "bad/a.png", b"no image")
    with pytest.raises(SitusError, match=r"bad: none of its images can be read; .*a.png: cannot be decoded"):
        pack(tmp_path / "bad", tmp_path / "out", workers=0)
    assert [*(tmp_path / "out").iterdir()] == []


@pytest.fixture
def attributes(tmp_path: Path) -> Path:
    """Five images in two splits with a table of three classes, some of it unknown."""
    root = tmp_path / "attributes"
    lines = ["file,a,bä,c"]
    for number, labels in enumerate(("1,0,1", "0,,1", ",,", "0,0,0", "1,1,0")):
        name = f"{'train' if number < 4 else 'val'}/{number}.png"
        write(root / name, noise(number))
        lines.append(f"{name},{labels}")
    write(root / "labels.csv", "\n".join(lines).encode())
    return root


def test_several_classes_an_image_are_packed_and_read_as_they_were(attributes, tmp_path):
    how, out = config("parquet", multi_label=True), tmp_path / "out"
    packed = pack(attributes, out, how, workers=0)
    assert packed.manifest["classes"] == ("a", "bä", "c")
    assert not packed.manifest["left_out"]
    for split in ("train", "val"):
        before, after = (open_source(path, split, multi_label=True) for path in (attributes, out))
        assert (after.classes, len(after)) == (before.classes, len(before))
        assert all(torch.equal(after.read(n)["label"], before.read(n)["label"]) for n in range(len(before)))
    assert open_source(out, "train", multi_label=True).read(1)["label"].tolist() == [0, -1, 1]
    assert pack(attributes, out, how, workers=0).again
    with pytest.raises(SitusError, match="differs from this one in config"):
        pack(attributes, out, config("parquet"), workers=0)
    assert "multi_label" not in config("parquet").to_manifest()  # as sets that were packed before it had a name have it


def test_a_table_that_is_not_packed_is_said_and_what_cannot_hold_it_refused(attributes, tmp_path):
    packed = pack(attributes, tmp_path / "out", config("parquet"), workers=0)
    assert any("its table of labels was not read" in each for each in packed.manifest["left_out"])
    with pytest.raises(SitusError, match="format=webdataset: allows one class per image"):
        config("webdataset", multi_label=True)
    table = attributes / "labels.csv"
    table.write_text(table.read_text().replace("file,a", "file,image"))
    with pytest.raises(SitusError, match="'image'; rename the class of this name"):
        pack(attributes, tmp_path / "other", config("parquet", multi_label=True), workers=0)
