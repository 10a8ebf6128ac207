"""Parquet files with something wrong in them: each is named in one sentence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from image_files import png
from recipes import RECIPES

from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.data.sampler import sample_of
from situs.data.sources import parquet
from situs.data.sources.parquet import ParquetSource
from situs.data.sources.subset import hold_out
from situs.errors import BrokenSampleError, SitusError

WRITES_VIEWS = int(pa.__version__.split(".")[0]) >= 21
"""Older ones read such columns and write none."""


def table(labels: list[int | None], kind: pa.DataType | None = None, column: str = "label") -> pa.Table:
    rows = [{"bytes": png(number), "path": None} for number in range(len(labels))]
    return pa.table({"image": rows, column: pa.array(labels, kind or pa.int64())})


def write(path: Path, content: pa.Table, **options: Any) -> Path:
    pq.write_table(content, path, **options)
    return path


def test_a_row_without_a_label_is_skipped_and_counted(tmp_path):
    write(tmp_path / "x.parquet", table([0, None, 1, -1]))
    source = open_source(tmp_path)
    assert (source.classes, source.read(2)["label"]) == (("0", "1"), 1)
    with pytest.raises(BrokenSampleError, match=r"row 1 of row group 0: the row has no label"):
        source.read(1)
    with pytest.raises(BrokenSampleError, match=r"row 3 of row group 0: the row has the label -1"):
        source.read(3)
    loader = make_loader(DataConfig(str(tmp_path), split="train", img_size=4, batch=4), None)
    [batch] = loader
    assert "label" in batch.targets
    assert (batch.targets["label"].tolist(), batch.ids.tolist()) == ([0, 1], [0, 2])
    assert loader.source.left_out()[0].startswith(f"2 of 4 images of {tmp_path.name} could not be read")


@pytest.mark.parametrize("named", [False, True])
def test_numbers_with_gaps_are_the_classes_and_it_is_said(tmp_path, named):
    """Labels are places in a list of classes, which a part of a set may have gaps in: they are not counted anew."""
    made = table([0, 7, 7, None])
    if named:
        names = {"info": {"features": {"label": {"names": [f"class {number}" for number in range(8)]}}}}
        made = made.replace_schema_metadata({"huggingface": json.dumps(names)})
    for split in ("train", "val"):
        write(tmp_path / f"{split}.parquet", made)
    train, val = (open_source(tmp_path, split) for split in ("train", "val"))
    assert len(train.classes) == 8 and train.read(1)["label"] == 7
    said = f"{train.name}: its labels are used as class numbers: 8 classes, 0 to 7; 6"
    assert train.notes == ([] if named else [f"{said} of them have no sample (1, 2, 3, …)"])
    assert val.notes == []  # the training split makes the classes
    write(tmp_path / "train.parquet", table([0, 1, 2, 3, 4, 5, 6, 7]))
    assert open_source(tmp_path, "train").notes == []


@pytest.mark.parametrize("told", [True, False])
def test_of_labels_that_are_not_looked_at_the_smallest_is_known(tmp_path, told):
    """A larger set is not read: what its footers tell is said, and that the rest is not known."""
    said = "x: its labels are used as class numbers: 8 classes, 0 to 7; "
    first = "the set is too large to check that"
    for labels, wanted in (
        ([2, 7, None, 3], f"2 of them have no sample (0, 1); {first} all other classes have a sample"),
        ([0, 7, -1, 3], f"{first} all classes have a sample"),
    ):
        file = write(tmp_path / "x.parquet", table(labels), row_group_size=2, write_statistics=told)
        assert ParquetSource(file, memory_bytes=0).notes == [said + wanted]


def test_labels_that_are_all_missing_are_none(tmp_path):
    write(tmp_path / "x.parquet", table([None, None]))
    source = open_source(tmp_path)
    assert source.classes is None
    assert "label" not in source.read(0)


@pytest.mark.parametrize("groups", [0, 1])
def test_files_without_a_row_are_refused(tmp_path, groups):
    empty = table([])
    with pq.ParquetWriter(tmp_path / "x.parquet", table([0]).schema) as writer:
        for _ in range(groups):
            writer.write_table(empty.cast(table([0]).schema))
    with pytest.raises(SitusError, match=f"^{tmp_path}: its parquet files contain no rows$"):
        open_source(tmp_path)


def test_a_corrupt_page_is_named(tmp_path):
    path = write(tmp_path / "x.parquet", table([0, 1]), compression="zstd")
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(0).column(0).data_page_offset
    data[start : start + 60] = b"\xa5" * 60
    path.write_bytes(bytes(data))
    with pytest.raises(SitusError, match=r"x\.parquet: row group 0 is damaged \("):
        open_source(tmp_path)


def test_a_checksum_that_does_not_fit_is_named(tmp_path):
    path = write(tmp_path / "x.parquet", table([0, 1]), compression="none", write_page_checksum=True)
    data = path.read_bytes()
    place = data.index(b"IDAT")
    path.write_bytes(data[:place] + b"X" + data[place + 1 :])
    with pytest.raises(SitusError, match=r"row group 0 is damaged .*CRC"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    "written", [b"{torn", b"[1]", b'{"info": 3}', b'{"info": {"features": {"label": 7}}}', b"\xff"]
)
def test_bad_metadata_is_named(tmp_path, written):
    write(tmp_path / "x.parquet", table([0, 1]).replace_schema_metadata({b"huggingface": written}))
    with pytest.raises(SitusError, match=r"its 'huggingface' metadata is damaged"):
        open_source(tmp_path)


def test_metadata_without_names_leaves_the_numbers(tmp_path):
    for written in ({}, {"info": {"features": {"label": {"_type": "Value"}}}}, {"info": None}):
        content = table([0, 1]).replace_schema_metadata({b"huggingface": json.dumps(written).encode()})
        write(tmp_path / "x.parquet", content)
        assert open_source(tmp_path).classes == ("0", "1")


def test_another_shard_must_have_the_same_columns(tmp_path):
    write(tmp_path / "0.parquet", table([0, 1]))
    for other, said in (
        (table([0], column="cls"), r"1\.parquet: its columns are 'image', 'cls', but those of 0\.parquet"),
        (table([0]).drop_columns(["label"]), r"1\.parquet: its columns are 'image', but those of 0\.parquet are"),
        (table([0]).drop_columns(["image"]), r"1\.parquet: has no image column"),
        (pa.table({"image": table([0])["image"], "label": ["a"]}),
         r"1\.parquet: column 'label' has the type string, but labels must be integers"),
        (pa.table({"image": ["a"], "label": [0]}), r"column 'image' has the type string, but images must be bytes"),
        (pa.table({"image": [{"path": "a"}], "label": [0]}), r"column 'image' has the type struct<path: string>"),
    ):  # fmt: skip
        write(tmp_path / "1.parquet", other)
        with pytest.raises(SitusError, match=said):
            open_source(tmp_path)
    write(tmp_path / "1.parquet", pa.table({"image": pa.array([png(9)], pa.large_binary()), "label": [3]}))
    source = open_source(tmp_path)
    assert (len(source), source.classes) == (3, ("0", "1", "2", "3"))
    assert int(source.read(2)["image"][0, 0, 0]) == 9


def test_a_label_that_is_an_id_makes_no_hundred_million_names(tmp_path):
    write(tmp_path / "x.parquet", table([0, 10**8]))
    with pytest.raises(
        SitusError, match=r"x\.parquet, column 'label': the class number 100,000,000 must be below 1,000,000"
    ):
        open_source(tmp_path)
    assert open_source(tmp_path, labels=False).classes is None


def test_a_file_that_unpacks_to_much_is_not_held(tmp_path):
    """Ten million equal bytes pack to almost nothing; what decides is what they unpack to."""
    rows = [{"bytes": png(1) + bytes(10**6), "path": None}] * 10
    path = write(tmp_path / "x.parquet", pa.table({"image": rows}), compression="zstd", use_dictionary=False)
    assert path.stat().st_size < 10**6
    source = parquet.ParquetSource(path, memory_bytes=10**6)
    assert source._groups == {}
    assert int(source.read(3)["image"][0, 0, 0]) == 1


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), *([pa.binary_view()] if WRITES_VIEWS else [])])
@pytest.mark.parametrize("nested", [True, False])
def test_every_kind_of_bytes_is_an_image(tmp_path, kind, nested):
    rows = pa.array(
        [{"bytes": png(7)}, None] if nested else [png(7), None], pa.struct({"bytes": kind}) if nested else kind
    )
    source = open_source(write(tmp_path / "x.parquet", pa.table({"image": rows})))
    assert int(source.read(0)["image"][0, 0, 0]) == 7
    with pytest.raises(BrokenSampleError, match="row 1 of row group 0: the row contains no image bytes"):
        source.read(1)


def test_a_row_is_named_by_its_file_and_number(tmp_path):
    write(tmp_path / "a.parquet", table([0, 1, 0]), row_group_size=2)
    write(tmp_path / "b.parquet", table([0, 1, 0]), row_group_size=1)
    source = open_source(tmp_path)
    assert [source.key(index) for index in range(6)] == [f"{name}.parquet/{row}" for name in "ab" for row in range(3)]


def test_offsets_that_run_backwards_are_named(tmp_path, monkeypatch):
    """A damaged page may unpack to them; Arrow looks for that only when it is asked to check everything."""
    source = parquet.ParquetSource(write(tmp_path / "x.parquet", pa.table({"image": [png(1), png(2)]})), memory_bytes=0)
    offsets, data = pa.array([0, 900, 10], pa.int32()).buffers()[1], pa.py_buffer(bytes(20))
    image = pa.Array.from_buffers(pa.binary(), 2, [None, offsets, data])

    class Damaged:
        metadata, schema_arrow = None, pa.schema({"image": pa.binary()})

        def read_row_group(self, *_: Any, **__: Any) -> pa.Table:
            return pa.table({"image": image})

    monkeypatch.setattr(parquet, "open_parquet", lambda *_: Damaged())
    with pytest.raises(SitusError, match=r"x\.parquet: row group 0 is damaged "):
        source.payload(0)


def test_labels_are_known_without_reading_them_and_checked_when_they_are(tmp_path):
    file = write(tmp_path / "x.parquet", table([0, 3, 1, 2]), row_group_size=2)
    source = parquet.ParquetSource(file, memory_bytes=0)
    assert source.classes == ("0", "1", "2", "3") and not source._groups
    bare = write(tmp_path / "bare.parquet", table([0, 3, 1, 2]), row_group_size=2, write_statistics=False)
    assert parquet.ParquetSource(bare, memory_bytes=0).classes == source.classes
    source.classes = ("0", "1", "2")  # as a footer that tells too little
    assert source.label(3) == 2
    with pytest.raises(SitusError, match=r"x\.parquet: row group 0 is damaged \(the label 3, but .* 3 classes"):
        source.label(0)


def test_a_group_is_held_until_it_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_CACHED_GROUPS", 1)
    for name in "ab":
        write(tmp_path / f"{name}.parquet", table([0, 1] * 3), row_group_size=2)
    source = parquet.ParquetSource(tmp_path, memory_bytes=0)
    blocks = source.blocks()
    assert (blocks.ends.tolist(), blocks.slow_random_access) == ([2, 4, 6, 8, 10, 12], True)
    for index in range(12):
        source.payload(index)
        assert len(source._groups) == 1  # the last and no more
    source.release()
    assert not source._groups
    for index in (0, 5, 11, 1, 4, 10):
        source.payload(index)
    assert sorted(source._groups) == [0, 2, 5]
    source.release(4)
    source.release(3)  # was not held
    assert sorted(source._groups) == [0, 5]
    held = parquet.ParquetSource(tmp_path)
    held.release()
    assert len(held._groups) == 6 and not held.blocks().slow_random_access


@pytest.mark.thin(2)
@pytest.mark.parametrize("workers", [0, 2])
def test_in_training_each_group_is_read_once_and_few_are_held(tmp_path, monkeypatch, workers):
    for name in "abcd":
        write(tmp_path / f"{name}.parquet", table([0, 1] * 48), row_group_size=4)
    source = parquet.ParquetSource(tmp_path, memory_bytes=0)
    log = tmp_path / "reads"
    whole = parquet.ParquetSource._read_group

    def told(self: Any, file: int, number: int) -> Any:
        with log.open("a") as lines:
            lines.write(f"{file}/{number} {len(self._groups)}\n")
        return whole(self, file, number)

    gib = 8.5 * source.blocks().bytes / len(source.blocks().ends) / 2**30
    config = DataConfig(img_size=6, batch=8, workers=workers, resident="never", window_gib=gib)
    loader = make_loader(config, RECIPES["none"], source=source)
    monkeypatch.setattr(parquet.ParquetSource, "_read_group", told)
    assert "384 images streamed" in loader.describe()
    assert "in blocks: 8 of 96 row groups at a time" in loader.describe()
    ids = torch.cat([sample_of(batch.ids) for batch in loader.iterate(1, 0)])
    assert sorted(ids.tolist()) == list(range(384))
    exact = make_loader(replace(config, order="exact"), RECIPES["none"], source=source)
    assert "shuffled exactly; slow, because a whole row group is read for each sample (96 row " in exact.describe()
    if workers == 0:  # else the workers are in the next epoch already
        reads = [line.split() for line in log.read_text().splitlines()]
        assert len({file for file, _ in reads}) == 96
        assert len(reads) <= 96 + 8  # those that lie across two of the 8 lanes
        assert max(int(held) for _, held in reads) <= 8


@pytest.mark.thin(2)
@pytest.mark.parametrize("part", ["whole", pytest.param("count", marks=pytest.mark.slow), "held out"])
def test_in_blocks_copies_parts_and_broken_rows_are_as_in_one_process(tmp_path, part):
    rows = [{"bytes": png(number) if number % 17 else b"torn", "path": None} for number in range(120)]
    content = pa.table({"image": rows, "label": [number % 3 for number in range(120)]})
    write(tmp_path / "x.parquet", content, row_group_size=5)
    config = DataConfig(img_size=6, batch=12, resident="never", order="blocks", window_gib=1e-6)
    augment = replace(RECIPES["crop"], repeated=2)
    found = []
    for workers in (0, 2):
        source: Any = parquet.ParquetSource(tmp_path, memory_bytes=0)
        if part == "held out":
            source = hold_out(source, 0.3, test_side=False)
        count = 60 if part == "count" else None
        loader = make_loader(replace(config, workers=workers, count=count), augment, source=source)
        found.append([batch for epoch, start in ((0, 1), (1, 0)) for batch in loader.iterate(epoch, start)])
        assert loader.source.skipped
        assert {len(batch.ids) for batch in found[-1]} == {12}
        if part == "whole":
            assert all(index % 17 == 0 for index in loader.source.skipped)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.ids, other.ids)
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets["label"], other.targets["label"])
        assert len(sample_of(one.ids).unique()) == 6  # each twice


def test_a_file_that_changes_while_it_is_used_stops_the_run(tmp_path):
    for number in range(2):
        write(tmp_path / f"{number}.parquet", table([0, 1, 2, 3]), row_group_size=2, compression="none")
    source = ParquetSource(tmp_path, memory_bytes=0)
    assert source.read(5)["label"] == 1
    source.release()
    write(tmp_path / "1.parquet", table([3, 2, 1, 0]), row_group_size=2, compression="none")  # of the same size
    with pytest.raises(SitusError, match=r"1\.parquet: has changed since the set was opened; start again"):
        source.read(5)
    assert source.read(1)["label"] == 1


def test_few_large_row_groups_are_kept_where_nobody_releases_them(tmp_path, monkeypatch):
    write(tmp_path / "x.parquet", table([0] * 12), row_group_size=2, compression="none")
    size = ParquetSource(tmp_path, memory_bytes=0)._bytes / 6
    for bytes_, kept in ((0, 1), (2.5 * size, 2), (1e9, 3)):
        monkeypatch.setattr(parquet, "_CACHED_BYTES", int(bytes_))
        monkeypatch.setattr(parquet, "_CACHED_GROUPS", 3)
        source = ParquetSource(tmp_path, memory_bytes=0)
        for index in range(12):
            source.payload(index)
            assert len(source._groups) <= kept
        assert len(source._groups) == kept


@pytest.mark.parametrize("rows", [1, 3])
def test_groups_of_one_row_and_empty_ones(tmp_path, rows):
    """Also empty files, null images, and columns that are nested."""
    content = table([0, 1, 2, 3, 0, 1, 2])
    images = content["image"].to_pylist()
    images[2], images[4] = None, {"bytes": None, "path": "gone.jpg"}
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    content = content.set_column(0, "image", pa.array(images, kind))
    content = content.append_column("boxes", pa.array([[{"x": [1.0, 2.0]}]] * 7))
    write(tmp_path / "0.parquet", content, row_group_size=rows)
    write(tmp_path / "1.parquet", content.slice(0, 0))
    with pq.ParquetWriter(tmp_path / "2.parquet", content.schema) as writer:
        for part in (content.slice(0, 2), content.slice(0, 0), content.slice(3, 1)):
            writer.write_table(part)
    for held in (0, 1 << 30):
        source = ParquetSource(tmp_path, memory_bytes=held)
        assert [len(source), *source.blocks().ends.tolist()] == (
            [10, 1, 2, 3, 4, 5, 6, 7, 9, 10] if rows == 1 else [10, 3, 6, 7, 9, 10]
        )
        for index, wanted in enumerate([*range(7), 0, 1, 3]):
            if index in (2, 4):
                with pytest.raises(BrokenSampleError, match="the row contains no image bytes"):
                    source.read(index)
            else:
                assert (source.payload(index), source.label(index)) == (png(wanted), wanted % 4)
    config = DataConfig(str(tmp_path), img_size=4, batch=3, workers=0, resident="never")
    config = replace(config, order="blocks", window_gib=1e-9)
    loader = make_loader(config, RECIPES["none"], source=ParquetSource(tmp_path, memory_bytes=0))
    ids = [batch.ids for batch in loader.iterate(0)]
    assert len(ids) == 3 and len(torch.cat(ids).unique()) == 9
