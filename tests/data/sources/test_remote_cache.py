"""Remote sets: what opening asks for, what is fetched when, what is kept, and what a changed or lying server does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import noise
from PIL import Image
from recipes import RECIPES

from situs.cli.main import main
from situs.data.check import check, survey
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import open_source, splits_at
from situs.data.pack import PackConfig, _items, pack
from situs.data.sources import remote, webdataset
from situs.data.sources.base import Wanted
from situs.data.sources.parquet import ParquetSource
from situs.data.sources.remote import RemoteError
from situs.data.sources.webdataset import TarSource
from situs.errors import SitusError
from situs.folder_lock import in_turn

KINDS = pytest.mark.parametrize("kind", ["parquet", "webdataset"])


def packed(folder: Path, kind: str) -> Path:
    """Twelve images of two classes in train, in three shards or more; two in val."""
    for number in range(12):
        file = folder / f"photos/train/{'ab'[number % 2]}/{number:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(noise(number, 20, 24))
    (folder / "photos/val/b").mkdir(parents=True)
    for number in (20, 21):
        (folder / f"photos/val/b/{number}.png").write_bytes(noise(number, 20, 24))
    groups = {"row_group": 2} if kind == "parquet" else {}
    pack(folder / "photos", folder / "packed", PackConfig(format=kind, shard_mib=0.006, **groups), workers=0)
    return folder / "packed"


def serve(server, folder: Path) -> None:
    server.files |= {f"/set/{file.name}": file.read_bytes() for file in folder.iterdir() if file.name[0] != "."}


def same(one, other) -> None:
    assert len(one) == len(other) and one.classes == other.classes
    for index in range(len(one)):
        first, second = one.read(index), other.read(index)
        assert torch.equal(first["image"], second["image"]) and first["label"] == second["label"]


def here(folder: Path) -> set[str]:
    """The shards that lie in the cache."""
    return {file.name for file in folder.rglob("*") if file.suffix in {".tar", ".parquet"} and file.stat().st_blocks}


def pattern(server, local: Path, split: str = "train") -> str:
    names = sorted(file.name for file in local.glob(f"{split}-*"))
    return f"{server.url}/set/{split}-{{00000..{len(names) - 1:05d}}}{Path(names[0]).suffix}"


@pytest.mark.thin(2)
@KINDS
@pytest.mark.parametrize("by", ["manifest", "folder", "pattern"])
def test_a_remote_set_reads_as_the_local_one(server, tmp_path, kind, by):
    local = packed(tmp_path, kind)
    serve(server, local)
    address = {"manifest": f"{server.url}/set/manifest.json", "folder": f"{server.url}/set/"}.get(
        by, pattern(server, local)
    )
    assert splits_at(address) == ({"train"} if by == "pattern" else {"train", "val"})
    same(open_source(address, "train"), open_source(local, "train"))
    if by != "pattern":
        same(open_source(address, "val"), open_source(local, "val"))


def test_of_parquet_opening_asks_for_the_footers_alone(server, tmp_path):
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 256, (130, 130, 3), dtype=np.uint8)
        (tmp_path / "photos").mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / f"photos/{number:02d}.bmp")
    pack(tmp_path / "photos", tmp_path / "packed", PackConfig(shard_mib=0.3, row_group=2), workers=0)
    serve(server, tmp_path / "packed")
    folder = remote.mount(f"{server.url}/set")
    source = ParquetSource(folder, memory_bytes=0)
    shards = [path for path in server.files if path.endswith(".parquet")]
    assert len(source) == 12 and len(shards) == 2 and here(folder) == set()
    assert all(0 < server.gets(path) <= 70_000 < len(server.files[path]) for path in shards)
    assert source.payload(0) == (tmp_path / "photos/00.bmp").read_bytes()
    assert here(folder) == {"part-00000.parquet"}  # the one that holds it, whole
    before = len(server.asked)
    for index in (1, 0, 5, 3):
        assert source.payload(index) == (tmp_path / f"photos/{index:02d}.bmp").read_bytes()
    assert len(server.asked) == before


@pytest.mark.slow
def test_a_second_process_finds_what_the_first_has_fetched(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    address = f"{server.url}/set"
    same(open_source(address, "train"), open_source(local, "train"))
    server.asked.clear()
    total = "sum(int(source.read(i)['image'].sum()) for i in range(12))"
    code = f"from situs.data.open import open_source; source = open_source({address!r}, 'train'); print({total})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    source = open_source(local, "train")
    assert int(done.stdout) == sum(int(source.read(i)["image"].sum()) for i in range(12))
    assert {path for _, path, _ in server.asked} == {"/set/manifest.json"}


def test_cuts_on_the_way_cost_only_what_was_cut(server, tmp_path, monkeypatch):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    monkeypatch.setattr(remote, "PIECE", 4096)
    name = "/set/train-00000.tar"
    server.faults[name] = ["cut", "503", "short", ""]
    same(open_source(f"{server.url}/set", "train"), open_source(local, "train"))
    assert server.gets(name) <= len(server.files[name]) + 3 * 4096


def test_a_fetch_that_was_stopped_goes_on(server, tmp_path, monkeypatch):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    monkeypatch.setattr(remote, "PIECE", 4096)
    name = "/set/train-00000.tar"
    server.faults[name] = ["", ""] + ["503"] * remote.TRIES
    with pytest.raises(RemoteError, match=r"train-00000.tar: cannot be fetched"):
        open_source(f"{server.url}/set", "train")
    folder = remote.mount(f"{server.url}/set")
    part = [*folder.glob(".train-00000.tar.*.part")]
    assert [each.stat().st_size for each in part] == [8192] and here(folder) == set()
    server.asked.clear()
    open_source(f"{server.url}/set", "train")
    first = next(wanted for _, path, wanted in server.asked if path == name)
    assert first.startswith("bytes=8192-")
    assert [*folder.glob(".*.part")] == []


def test_the_limit_is_kept_and_the_least_used_give_way(server, tmp_path, monkeypatch):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    sizes = {file.name: file.stat().st_size for file in local.glob("train-*")}
    largest = max(sizes.values())
    monkeypatch.setenv(remote.LIMIT, str(2.1 * largest / 2**30))
    source, reference = open_source(f"{server.url}/set", "train"), open_source(local, "train")
    folder = remote.mount(f"{server.url}/set")
    for index in (0, 11, 5, 0, 7, 11, 2):
        assert source.payload(index) == reference.payload(index)
        assert sum(sizes[name] for name in here(folder)) <= 2.1 * largest
        assert 1 <= len(here(folder)) < len(sizes)
    names = sorted(sizes)
    for file in folder.glob("train-*.tar"):  # the first was used long ago, the last just now
        os.utime(file, ns=(names.index(file.name) * 10**9, file.stat().st_mtime_ns))
    held = here(folder)
    missing = next(name for name in names if name not in held)
    remote.ensure_local(folder / missing)
    assert missing in here(folder) and max(held) in here(folder) and min(held) not in here(folder)
    monkeypatch.setenv(remote.LIMIT, str(0.5 * largest / 2**30))
    absent = next(name for name in names if name not in here(folder) and sizes[name] > 0.5 * largest)
    with pytest.raises(
        SitusError, match=r"but the cache may hold at most .*; raise the limit of the cache \(SITUS_CACHE_GIB\)"
    ):
        remote.ensure_local(folder / absent)
    monkeypatch.setenv(remote.LIMIT, "much")
    with pytest.raises(SitusError, match="SITUS_CACHE_GIB=much: must be a number of GiB above 0"):
        remote.limit_bytes()


def test_what_others_are_fetching_counts_and_what_nobody_fetches_goes(server, tmp_path, monkeypatch):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    folder = remote.mount(f"{server.url}/set")
    names = sorted(file.name for file in local.glob("train-*"))
    sizes = [(local / name).stat().st_size for name in names]
    monkeypatch.setenv(remote.LIMIT, str((sum(sizes[:2]) + 100) / 2**30))
    remote.ensure_local(folder / names[0])
    part = folder / f".{names[1]}.{remote._mark(remote._entry(folder / names[1]))}.part"
    part.write_bytes(b"begun")
    old = folder / f".{names[2]}.000000000000.part"
    old.write_bytes(b"of another version")
    os.utime(part, (0, 0))  # as one that is whole and about to be renamed
    with in_turn(folder / f".{names[1]}.lock"):  # another process is at it
        remote.ensure_local(folder / names[2])
        assert here(folder) == {names[2]} and part.exists() and not old.exists()
    remote.ensure_local(folder / names[0])  # fits beside the other shard once what was left is gone
    assert here(folder) == {names[0], names[2]} and not part.exists()
    part.write_bytes(b"begun")
    os.utime(part, (0, 0))
    remote._put_placeholder(folder / names[0], remote._entry(folder / names[0]))
    monkeypatch.setenv(remote.LIMIT, "1")
    remote.ensure_local(folder / names[0])
    assert part.exists()  # there is room for all


@pytest.mark.parametrize(("kind", "word"), [("parquet", "files"), ("webdataset", "shards")])
def test_a_set_larger_than_its_cache_is_fetched_once_an_epoch(server, tmp_path, monkeypatch, kind, word):
    local = packed(tmp_path, kind)
    serve(server, local)
    sizes = {f"/set/{file.name}": file.stat().st_size for file in local.glob("train-*")}
    monkeypatch.setenv(remote.LIMIT, str(2.2 * max(sizes.values()) / 2**30))
    monkeypatch.setattr(webdataset, "DEFAULT_BYTES", 2 * max(sizes.values()))
    folder = remote.mount(f"{server.url}/set")
    train = Wanted("train")
    source = ParquetSource(folder, train, memory_bytes=0) if kind == "parquet" else TarSource(folder, train)
    config = DataConfig(img_size=8, batch=4, workers=0, resident="never", window_gib=1e-9)
    loader = make_loader(config, RECIPES["crop"], source=source)
    assert f"shuffled in blocks: 1 of {len(sizes)} {word} at a time" in loader.describe()
    server.sent.clear()
    ids = [batch.ids for epoch in (0, 1) for batch in loader.iterate(epoch)]
    assert len(torch.cat(ids[:3]).unique()) == 12
    for path, size in sizes.items():
        assert server.sent[path] <= (2 + (kind == "parquet")) * size  # the footer of so small a file is all of it
    assert len(getattr(source, "_groups", None) or {}) <= 6  # the row groups of one file
    total = sum(sizes.values())
    for limit, slow in ((total, kind == "parquet"), (total - 1, True)):
        monkeypatch.setattr(webdataset, "DEFAULT_BYTES", limit)
        assert source.blocks().slow_random_access == slow


def test_of_a_remote_file_all_row_groups_are_released_together(server, tmp_path):
    """It was fetched whole, so its groups are one block."""
    serve(server, packed(tmp_path, "parquet"))
    source = ParquetSource(remote.mount(f"{server.url}/set"), Wanted("train"), memory_bytes=0)
    source.release()
    ends = source.blocks().ends.tolist()
    assert ends[-1] == 12 and 2 < len(ends) < 6
    for index in range(12):
        source.payload(index)
    assert len(source._groups) == 6
    for first, last in zip([0, *ends], ends, strict=False):
        held = {*source._groups}
        source.release(last - 1)
        gone = held - {*source._groups}
        assert gone == {source._place(index)[0] for index in range(first, last)}


def test_the_servers_are_asked_again_after_half_a_minute(server, tmp_path, monkeypatch):
    serve(server, packed(tmp_path, "webdataset"))
    monkeypatch.setattr(remote, "_RECENT", 30.0)
    monkeypatch.setattr(remote, "_mounted", {})
    now = [1e6]
    monkeypatch.setattr("situs.data.sources.remote.time.monotonic", lambda: now[0])
    asked = []
    for seconds in (0, 29, 2, 29, 29):
        now[0] += seconds
        server.asked.clear()
        folder = remote.mount(f"{server.url}/set")
        asked.append(bool(server.asked))
    assert asked == [True, False, True, False, True]
    (folder / ".shards.json").unlink()  # somebody has cleared the cache
    server.asked.clear()
    assert remote.mount(f"{server.url}/set") == folder and server.asked
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "another cache"))
    server.asked.clear()
    assert remote.mount(f"{server.url}/set") != folder and server.asked


def test_a_cache_that_cannot_be_written_says_what_to_do(server, tmp_path, monkeypatch):
    serve(server, packed(tmp_path, "webdataset"))
    folder = remote.mount(f"{server.url}/set")
    shard = folder / "train-00000.tar"
    (folder / f".{shard.name}.{remote._mark(remote._entry(shard))}.part").mkdir()
    said = r"cannot store remote shards: .*; free some space, or choose another folder \(SITUS_CACHE\)$"
    with pytest.raises(SitusError, match=f"^{tmp_path}/cache: {said}"):
        remote.ensure_local(shard)
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "file"))
    with pytest.raises(SitusError, match=f"^{tmp_path}/file: {said}"):
        remote.mount(f"{server.url}/set")


@pytest.mark.parametrize("place", ["", "data/"])
def test_a_process_that_was_not_forked_knows_the_shards_from_the_cache(server, tmp_path, monkeypatch, place):
    local = packed(tmp_path, "webdataset")
    server.files = {f"/set/{place}{file.name}": file.read_bytes() for file in local.glob("*.tar")}
    folder = remote.mount(f"{server.url}/set/{place}train-{{00000..00002}}.tar")
    monkeypatch.setattr(remote, "_known", {})
    shard = folder / f"{place}train-00001.tar"
    assert remote.is_remote_shard(shard)
    remote.ensure_local(shard)
    assert shard.read_bytes() == (local / "train-00001.tar").read_bytes()
    assert not remote.is_remote_shard(folder / f"{place}train-00009.tar")
    handle = remote.open_shard(local / "train-00000.tar")  # any other file is only opened
    assert os.pread(handle, 1 << 20, 0) == (local / "train-00000.tar").read_bytes()
    os.close(handle)


def test_the_last_use_of_a_shard_is_recorded_every_ten_seconds(server, tmp_path):
    serve(server, packed(tmp_path, "webdataset"))
    shard = remote.mount(f"{server.url}/set") / "train-00000.tar"
    remote.ensure_local(shard)
    changed = shard.stat().st_mtime_ns
    for age, recorded in ((5, False), (15, True)):
        used = time.time_ns() - age * 10**9
        os.utime(shard, ns=(used, changed))
        os.close(remote.open_shard(shard))
        assert (shard.stat().st_atime_ns != used, shard.stat().st_mtime_ns) == (recorded, changed)
    assert time.time() - shard.stat().st_atime < 5


def test_what_another_process_fetched_in_the_meantime_is_not_fetched_again(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    shard = remote.mount(f"{server.url}/set") / "train-00000.tar"
    server.asked.clear()
    with ThreadPoolExecutor(1) as pool:
        with in_turn(shard.with_name(f".{shard.name}.lock")):
            waiting = pool.submit(remote.ensure_local, shard)
            time.sleep(0.05)
            shard.unlink()
            shard.write_bytes((local / shard.name).read_bytes())
        waiting.result(timeout=30)
    assert server.asked == [] and shard.read_bytes() == (local / shard.name).read_bytes()


def test_a_part_that_is_too_long_is_begun_anew(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    folder = remote.mount(f"{server.url}/set")
    shard, size = folder / "train-00000.tar", (local / "train-00000.tar").stat().st_size
    part = folder / f".{shard.name}.{remote._mark(remote._entry(shard))}.part"
    part.write_bytes(b"x" * (size + 1))
    with pytest.raises(RemoteError, match=rf"train-00000.tar: {size + 1:,} bytes came instead of {size:,}$"):
        remote.ensure_local(shard)
    assert not part.exists()
    remote.ensure_local(shard)
    assert shard.read_bytes() == (local / shard.name).read_bytes()


def test_a_file_that_is_open_outlives_its_place_in_the_cache(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    folder = remote.mount(f"{server.url}/set")
    file = folder / "train-00000.tar"
    handle = remote.open_shard(file)
    remote._put_placeholder(file, remote._entry(file))
    assert os.pread(handle, 1 << 20, 0) == (local / file.name).read_bytes()
    os.close(handle)
    assert here(folder) == set() and file.stat().st_size == (local / file.name).stat().st_size


def test_a_changed_shard_is_noticed(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    address = pattern(server, local)
    source = open_source(address)
    folder = remote.mount(address)
    entry = remote._entry(folder / "train-00000.tar")
    other = bytearray(server.files["/set/train-00000.tar"])
    other[600] ^= 1  # within an image
    server.files["/set/train-00000.tar"] = bytes(other)
    remote._put_placeholder(folder / "train-00000.tar", entry)
    with pytest.raises(RemoteError, match=r"train-00000.tar: has changed since the set was opened; open the set again"):
        source.payload(0)
    assert [*folder.glob(".*.part")] == []
    again = open_source(address)  # which finds the new one, and does not take the old one for it
    assert again.payload(0) == bytes(other[512 : 512 + len(again.payload(0))])


def test_a_footer_that_changed_is_not_called_damaged(server, tmp_path):
    local = packed(tmp_path, "parquet")
    serve(server, local)
    source = ParquetSource(remote.mount(pattern(server, local)), memory_bytes=0)
    name = next(path for path in server.files if path.endswith("train-00000.parquet"))
    server.files[name] = b"more in front of it" + server.files[name]  # its old end is in the middle
    with pytest.raises(
        RemoteError, match=r"train-00000.parquet: has changed since the set was opened; open the set again"
    ):
        source.payload(0)


def test_a_damaged_footer_of_a_set_with_a_manifest_is_not_called_changed(server, tmp_path):
    """Its manifest tells no version, and what is told of none has not changed."""
    local = packed(tmp_path, "parquet")
    serve(server, local)
    data = server.files["/set/train-00000.parquet"]
    server.files["/set/train-00000.parquet"] = data[:-4] + b"none"
    with pytest.raises(SitusError, match=r"train-00000.parquet") as caught:
        ParquetSource(remote.mount(f"{server.url}/set"), memory_bytes=0)
    assert "was changed" not in str(caught.value)


def test_a_shard_that_is_not_what_was_packed_is_refused(server, tmp_path):
    local = packed(tmp_path, "parquet")
    serve(server, local)
    data = bytearray(server.files["/set/train-00001.parquet"])
    data[100] ^= 1
    server.files["/set/train-00001.parquet"] = bytes(data)
    with pytest.raises(RemoteError, match=r"train-00001.parquet: differs from what was packed"):
        open_source(f"{server.url}/set", "train")


def test_a_server_that_lies_about_the_length(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    server.faults["/set/train-00000.tar"] = ["short"] * 99
    with pytest.raises(RemoteError, match=r"train-00000.tar: cannot be fetched \(.* bytes were received"):
        open_source(f"{server.url}/set", "train")


def test_training_with_a_worker_from_a_remote_set(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)

    def batches(path: str) -> list[torch.Tensor]:
        config = DataConfig(path=path, img_size=8, batch=4, workers=1, resident="never")
        loader = make_loader(config, RECIPES["crop"])
        return [batch.inputs for batch in loader.iterate(0)]

    for one, other in zip(batches(f"{server.url}/set"), batches(str(local)), strict=True):
        assert torch.equal(one, other)


def test_remote_sets_are_packed_and_checked(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    pack(f"{server.url}/set", tmp_path / "again", PackConfig(short_side=0), workers=0)
    same(open_source(tmp_path / "again", "train"), open_source(local, "train"))
    assert check(f"{server.url}/set", workers=0).images == {"train": 12, "val": 2}


def test_a_server_that_goes_away_blames_no_image(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    source = open_source(f"{server.url}/set", "train")
    folder = remote.mount(f"{server.url}/set")
    for file in folder.glob("train-*.tar"):
        remote._put_placeholder(file, remote._entry(file))
    server.files.clear()
    packing = partial(_items, source, PackConfig())
    for ask in (lambda: source.read(0), lambda: survey(source, True, [0]), lambda: packing([0])):
        with pytest.raises(RemoteError, match=r"train-00000.tar: cannot be fetched \("):
            ask()


def test_addresses_that_name_no_set(server, tmp_path):
    for address, said in (
        (f"{server.url}/none", "must name shards"),
        (f"{server.url}/none/{{0..2}}.tar", r"none/0.tar: cannot be fetched \(no such file\)"),
        (f"{server.url}/{{a,b}}/x.tar", "two shards are called x.tar"),
        (f"file://{tmp_path}", "contains no parquet or tar files"),
        ("http://me:secret@127.0.0.1/x.tar", "user or a password"),
    ):
        with pytest.raises(SitusError, match=said) as met:
            open_source(address)
        assert "secret" not in str(met.value)


def test_queries_are_used_and_not_kept(server, tmp_path):
    local = packed(tmp_path, "webdataset")
    serve(server, local)
    source = open_source(f"{server.url}/set/val-00000.tar?token=hidden")
    assert source.classes == ("a", "b")
    assert any(path.endswith("?token=hidden") for _, path, _ in server.asked)
    for file in (tmp_path / "cache").rglob("*"):
        assert "hidden" not in file.name and (not file.is_file() or b"hidden" not in file.read_bytes())
    assert "hidden" not in source.name + source.entry(0)


def test_a_folder_that_can_be_listed(tmp_path, monkeypatch):
    monkeypatch.setenv(remote.FOLDER, str(tmp_path / "cache"))
    local = packed(tmp_path, "webdataset")
    (local / "manifest.json").unlink()
    same(open_source(f"file://{local}", "train"), open_source(local, "train"))
    held = json.loads(next((tmp_path / "cache").rglob(".shards.json")).read_text())["shards"]
    assert all(each["url"].startswith("file:///") and each["version"] for each in held)


def test_a_dry_run_of_a_remote_set_says_what_it_leaves(server, tmp_path: Path, capsys) -> None:
    serve(server, packed(tmp_path, "webdataset"))
    model = ["--backbone.name", "test_vit", "--data.img-size", "32", "--batch", "2", "--steps", "1", "--device", "cpu"]
    words = ["pretrain", "--dry-run", "--method", "mp3", *model, "--out", str(tmp_path / "run"), "--data"]
    assert main([*words, str(tmp_path / "photos")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "nothing was written: this was a dry run"
    assert main([*words, f"{server.url}/set/"]) == 0
    left = f"this was a dry run: no run was written; the fetched shards stay in {tmp_path / 'cache'}"
    assert capsys.readouterr().out.splitlines()[-1] == left
    assert list((tmp_path / "cache").rglob("*.tar")) and not (tmp_path / "run").exists()
