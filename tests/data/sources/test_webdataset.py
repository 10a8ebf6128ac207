"""Tar shards that are cut short, damaged or joined: named, never half read."""

from __future__ import annotations

import errno
import io
import os
import tarfile
from dataclasses import replace

import pytest
import torch
from image_files import png, write
from recipes import RECIPES

from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.open import open_source
from situs.data.sampler import BatchPlan, BlockOrder, batches_for, epoch_order
from situs.data.sources import webdataset
from situs.errors import BrokenSampleError, SitusError


def packed(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


WHOLE = packed({f"{number}.png": png(number) for number in range(8)})
EACH = 1024  # header and data of one member


def test_the_whole_is_read(tmp_path):
    source = open_source(write(tmp_path / "x.tar", WHOLE))
    assert len(source) == 8
    assert source.notes == []
    # A writer may leave the padding to whole records out.
    assert len(open_source(write(tmp_path / "y.tar", WHOLE[: 8 * EACH + 1024]))) == 8


@pytest.mark.parametrize("length", [4 * EACH, 4 * EACH + 100, 4 * EACH + 512, 4 * EACH + 600, 8 * EACH, 8 * EACH + 512])
def test_a_tar_that_was_cut_anywhere_is_refused(tmp_path, length):
    with pytest.raises(SitusError, match=r"x\.tar: .*(cut short|damaged) after [458] images"):
        open_source(write(tmp_path / "x.tar", WHOLE[:length]))


def test_a_damaged_header_is_no_end(tmp_path):
    damaged = bytearray(WHOLE)
    damaged[3 * EACH + 150] ^= 0xFF  # in the checksum
    with pytest.raises(SitusError, match=r"is damaged after 3 images .* at byte 3,072"):
        open_source(write(tmp_path / "x.tar", bytes(damaged)))


def test_two_archives_in_one_file_are_told(tmp_path):
    with pytest.raises(SitusError, match=r"ends after 8 images"):
        open_source(write(tmp_path / "x.tar", WHOLE + WHOLE))


@pytest.mark.parametrize("size", [-512, -1024])
def test_a_negative_size_leads_to_no_circle(tmp_path, size):
    info = tarfile.TarInfo("1.png")
    info.size = 10
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[124:136] = b"\xff" + (2**88 + size).to_bytes(11, "big")  # as GNU writes numbers of any size
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    with pytest.raises(SitusError, match=r"x\.tar"):
        open_source(write(tmp_path / "x.tar", WHOLE[:EACH] + bytes(header) + WHOLE[EACH:]))


def test_a_member_too_large_for_an_image_is_named_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr("situs.data.sources.images._MOST_BYTES", 50)
    source = open_source(write(tmp_path / "x.tar", WHOLE))
    with pytest.raises(BrokenSampleError, match=r"x\.tar, 0\.png: has [\d,]+ bytes; an image may have at most 50"):
        source.read(0)


def test_class_numbers_have_an_end(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"100000000"}))
    with pytest.raises(SitusError, match=r"class number 100,000,000 must be below 1,000,000"):
        open_source(tmp_path)
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"1" * 5000}))
    with pytest.raises(SitusError, match=r"'a\.cls' is not a class number: it has 5,000 bytes"):
        open_source(tmp_path)


def test_numbers_with_gaps_are_said(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"0", "b.png": png(0), "b.cls": b"2"}))
    source = open_source(tmp_path)
    assert len(source.classes) == 3 and source.notes[0].endswith("3 classes, 0 to 2; 1 of them has no sample (1)")


@pytest.mark.parametrize("number", [b"0", b"3"])
def test_an_image_without_a_class_among_others_is_named(tmp_path, number):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": number, "b.png": png(1)}))
    with pytest.raises(SitusError, match=r"x\.tar: b\.png has no class \(\.cls file\), but other images have one"):
        open_source(tmp_path)
    write(tmp_path / "x.tar", packed({"a.png": png(0), "b.png": png(1)}))
    assert open_source(tmp_path, labels=False).classes is None


def test_members_that_are_no_images_are_counted(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.json": b"{}", "b.seg.png": png(0), "b.cls": b"0"}))
    source = open_source(tmp_path, labels=False)
    assert len(source) == 1
    assert source.notes == [
        f"{tmp_path.name}: left out 2 (their names are not those of images: .json 1, .png 1); the first: a.json"
    ]


def test_a_class_number_belongs_to_one_image(tmp_path):
    """The last of two would have been the label of both."""
    kinds, labels = {"a.png": png(0), "a.jpg": png(1)}, {"a.cls": b"0", "b.png": png(0), "b.cls": b"1"}
    file = write(tmp_path / "x.tar", packed(kinds | labels))
    with pytest.raises(SitusError, match=r"x\.tar: 'a' has two images and one \.cls"):
        open_source(file)
    assert len(open_source(file, labels=False)) == 3
    end = 2 * 512  # zeros, and then the records are filled
    again = packed({"a.png": png(2), "a.cls": b"1"})
    once = packed({"a.png": png(0), "a.cls": b"0"})[: 2 * EACH]
    write(file, once + again)
    with pytest.raises(SitusError, match=r"'a\.cls' occurs twice, as 0 and as 1"):
        open_source(file)
    write(file, once + packed({"c.cls": b"0"})[: EACH + end])
    assert open_source(file).notes == ["x: left out 1 (their names are not those of images: .cls 1); the first: c.cls"]


def test_a_negative_class_number_is_refused(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"-1"}))
    with pytest.raises(SitusError, match=r"\('a\.cls' contains a negative class number\)"):
        open_source(tmp_path)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_links_and_pipes_in_a_tar_are_counted(tmp_path, kind):
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for name in ("a.png", "z.png"):
            info = tarfile.TarInfo(name)
            info.size = len(png(0))
            file.addfile(info, io.BytesIO(png(0)))
        info = tarfile.TarInfo("b.png")
        info.type, info.linkname = kind, "a.png"
        file.addfile(info)
    source = open_source(tmp_path)
    assert [source.key(index) for index in range(len(source))] == ["x.tar/a.png", "x.tar/z.png"]
    assert source.notes == [f"{tmp_path.name}: left out 1 (pipes, devices or broken links); the first: b.png"]


def test_a_shard_on_a_failing_disk_is_named(tmp_path, monkeypatch):
    source = open_source(write(tmp_path / "x.tar", WHOLE))

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("situs.data.sources.webdataset.os.pread", fail)
    with pytest.raises(BrokenSampleError, match=r"x\.tar, 3\.png: cannot be read \(Input/output error\)$"):
        source.read(3)


def test_class_names_must_be_text_and_enough(tmp_path):
    write(tmp_path / "x.tar", packed({"a.png": png(0), "a.cls": b"0", "b.png": png(1), "b.cls": b"1"}))
    write(tmp_path / "classes.txt", b"cat\n\n")
    with pytest.raises(SitusError, match=r"classes\.txt: lists only 1 class, but the shards use 2 classes$"):
        open_source(tmp_path)
    write(tmp_path / "classes.txt", b"cat\n\ndog\n")
    assert open_source(tmp_path).classes == ("cat", "dog")
    write(tmp_path / "classes.txt", b"\xff\xfe")
    with pytest.raises(SitusError, match=r"classes\.txt: must be UTF-8 text"):
        open_source(tmp_path)


@pytest.fixture
def shards(tmp_path, monkeypatch):
    """24 images of three shards, in blocks of about three of them; another shard is empty."""
    monkeypatch.setattr(webdataset, "_BLOCK", 3 * EACH)
    for shard, name in enumerate("abd"):
        numbers = range(8 * shard, 8 * shard + 8)
        write(tmp_path / f"{name}.tar", packed({f"{number:02}.png": png(number) for number in numbers}))
    write(tmp_path / "c.tar", packed({}))
    return tmp_path


def test_blocks_are_runs_within_a_shard(shards):
    source = open_source(shards)
    blocks = source.blocks()
    assert blocks.ends.tolist() == [3, 6, 8, 11, 14, 16, 19, 22, 24]
    assert (blocks.slow_random_access, blocks.bytes) == (
        False,
        sum(file.stat().st_size for file in shards.glob("*.tar")),
    )
    config = DataConfig(str(shards), img_size=5, batch=4, resident="never", workers=0)
    exact, mixed = (make_loader(replace(config, order=order), RECIPES["none"]) for order in ("auto", "blocks"))
    assert (exact.plan.order, exact.order, exact.mark) == (epoch_order, ", shuffled exactly", "24 samples in any order")
    assert mixed.mark.startswith("24 samples in blocks (")
    assert mixed.order == ", shuffled in blocks: 9 of 9 pieces of shards at a time (3.8e-05 GiB)"


@pytest.mark.parametrize(
    ("block", "ends"), [(1 << 20, [8, 16, 24]), (8 * EACH, [8, 16, 24]), (7 * EACH, [7, 8, 15, 16, 23, 24])]
)
def test_a_small_shard_is_one_block(shards, monkeypatch, block, ends):
    monkeypatch.setattr(webdataset, "_BLOCK", block)
    source = open_source(shards)
    assert source.blocks().ends.tolist() == ends
    source.release()
    assert all(source.payload(index) == png(index) for index in range(24))


@pytest.mark.thin(2)
@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (3, 1)])
def test_block_order_reads_each_block_once_and_gives_the_samples_of_one_process(shards, monkeypatch, world, workers):
    config = DataConfig(str(shards), img_size=5, batch=6, workers=workers, resident="never")
    config = replace(config, order="blocks", window_gib=3 * EACH * 4 / 2**30)
    read = []
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda *asked: read.append(asked[1]) or pread(*asked))
    ranks = [make_loader(config, RECIPES["none"], rank=rank, world=world) for rank in range(world)]
    for epoch in (0, 1):
        read.clear()
        parts = [list(loader.iterate(epoch)) for loader in ranks]
        if not workers:
            # What fills no batch is nobody's; each block is read once, or by two lanes that meet in it.
            assert 9 <= len(read) <= 9 + order_of(ranks[0]).lanes
        steps = [torch.cat([batch.ids for batch in step]) for step in zip(*parts, strict=True)]
        assert torch.equal(torch.stack(steps), torch.stack([*batches_for(whole(ranks[0].plan), epoch)]))
        assert torch.cat(steps).sort().values.tolist() == list(range(24))
        for batch in (batch for part in parts for batch in part):
            values = ((batch.inputs * ranks[0].std.view(-1, 1, 1) + ranks[0].mean.view(-1, 1, 1)) * 255).round()
            assert torch.equal(values.long(), batch.ids.view(-1, 1, 1, 1).expand_as(values))  # the image of its number
    resumed = list(make_loader(config, RECIPES["none"]).iterate(1, 2))
    assert torch.equal(torch.stack([batch.ids for batch in resumed]), torch.stack(steps[2:]))


def order_of(loader: Loader) -> BlockOrder:
    assert isinstance(loader.plan.order, BlockOrder)
    return loader.plan.order


def whole(plan: BatchPlan) -> BatchPlan:
    return replace(plan, rank=0, world=1)


def test_what_is_open_goes_when_it_is_released(shards):
    source = open_source(shards)
    source.payload(4)
    assert source._blocks is None  # asked for one by one nothing is held
    source.release()
    assert [source.payload(index) == png(index) for index in (4, 3, 5, 23, 0)] == [True] * 5
    assert sorted(source._blocks) == [0, 1, 8]
    source.release(4)
    assert sorted(source._blocks) == [0, 8]
    assert source.payload(5) == png(5)
    source.release()
    assert source._blocks == {}


def test_a_member_far_too_large_is_not_held_with_its_block(tmp_path, monkeypatch):
    monkeypatch.setattr(webdataset, "_BLOCK", 3 * EACH)
    write(tmp_path / "x.tar", packed({"0.png": png(0), "1.png": bytes(20 * EACH), "2.png": png(2)}))
    source = open_source(tmp_path)
    source.release()
    assert source.payload(0) == png(0) and source._blocks == {}
    assert source.payload(2) == png(2) and sorted(source._blocks) == [1]


@pytest.mark.parametrize("held", [False, True])
def test_a_shard_that_changes_or_goes_while_it_is_used_stops_the_run(shards, held):
    source, file = open_source(shards), shards / "b.tar"
    if held:
        source.release()
    data = file.read_bytes()
    for other in (data[:-EACH], data[: 3 * EACH], packed({f"x{number}.png": png(9) for number in range(8)})):
        write(file, other)
        with pytest.raises(SitusError, match=r"b\.tar: has changed since the set was opened; start again") as met:
            source.read(11)
        assert not isinstance(met.value, BrokenSampleError)  # which a loader would pass over
    file.unlink()
    with pytest.raises(SitusError, match=r"b\.tar: cannot be opened any more \(no such file or directory\)") as met:
        source.read(11)
    assert not isinstance(met.value, BrokenSampleError)
    assert source.read(3)["image"].shape == (3, 5, 6)


def test_a_file_of_no_bytes_is_no_shard(tmp_path):
    write(tmp_path / "x.tar", WHOLE)
    write(tmp_path / "y.tar", b"")
    with pytest.raises(SitusError, match=r"y\.tar"):
        open_source(tmp_path)
    write(tmp_path / "y.tar", packed({}))
    assert len(open_source(tmp_path)) == 8
