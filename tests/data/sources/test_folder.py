"""What lies below a folder: links in circles, pipes, endings, and what is told of all that is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_files import encoded, write
from PIL import Image

from situs.data.open import open_source
from situs.data.sources.folder import AGAIN, CLOSED, printable, walk
from situs.errors import BrokenSampleError, SitusError


def test_a_link_to_its_own_folder_adds_no_image(tmp_path):
    write(tmp_path / "a" / "one.png")
    (tmp_path / "a" / "self").symlink_to(".")
    source = open_source(tmp_path)
    assert (len(source), source.classes) == (1, ("a",))
    assert source.left_out() == [
        f"{tmp_path.name}: left out 1 (links to a folder that is already read); the first: a/self/"
    ]


def test_links_that_branch_and_circle_are_walked_once(tmp_path):
    """Twelve folders with four links each to the next and the first: 4 ** 12 ways through them."""
    for number in range(12):
        write(tmp_path / f"{number:02}" / "x.png")
        for link in range(4):
            goal = f"../{(number + 1 if link else 0) % 12:02}"
            (tmp_path / f"{number:02}" / f"link{link}").symlink_to(goal)
    assert walk(tmp_path)[0] == [f"{number:02}/x.png" for number in range(12)]


def test_a_folder_is_read_under_its_own_path_and_else_under_its_first_link(tmp_path):
    write(tmp_path / "away" / "deep" / "y.png")
    root = tmp_path / "root"
    write(root / "real" / "x.png")
    for name, goal in {"b": "../away", "a": "../away/deep", "aaa": "real"}.items():
        (root / name).symlink_to(goal)
    files, left_out = walk(root)
    assert files == ["a/y.png", "real/x.png"]
    assert (left_out.counts, left_out.first) == ({AGAIN: 2}, {AGAIN: "aaa/"})


def test_a_linked_file_is_an_image_each_time(tmp_path):
    write(tmp_path / "a" / "one.png")
    (tmp_path / "a" / "two.png").symlink_to("one.png")
    assert walk(tmp_path)[0] == ["a/one.png", "a/two.png"]


def test_only_regular_files_are_read(tmp_path):
    write(tmp_path / "good.png")
    os.mkfifo(tmp_path / "pipe.png")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "nowhere.png").symlink_to("gone.png")
    (tmp_path / "loop.png").symlink_to("loop.png")
    (tmp_path / "zero.png").symlink_to("/dev/zero")
    assert walk(tmp_path)[0] == ["good.png"]
    assert "left out 5 (pipes, devices or broken links); the first: loop.png" in open_source(tmp_path).notes[0]


def test_a_file_too_large_for_an_image_is_named_before_it_is_read(tmp_path):
    write(tmp_path / "a.png")
    with (tmp_path / "b.png").open("wb") as file:
        file.truncate(1 << 40)  # a hole: a terabyte that takes no space
    source = open_source(tmp_path)
    with pytest.raises(
        BrokenSampleError, match=r"b\.png: has 1,099,511,627,776 bytes; an image may have at most 1,073,741,824"
    ):
        source.read(1)
    assert source.read(0)["image"].shape == (3, 5, 6)


def test_a_pipe_as_the_data_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(SitusError, match="must be a folder"):
        open_source(tmp_path / "pipe.tar")


def test_every_ending_of_an_image_is_read_and_files_without_one_by_their_bytes(tmp_path):
    kinds = {"a.jfif": "JPEG", "b.JPE": "JPEG", "c.avif": "AVIF", "d": "PNG", "e": "WEBP", "f": "JPEG", "g": "GIF"}
    kinds |= {"h": "TIFF", "i": "BMP", "j": "AVIF", "k.jp2": "JPEG2000", "l": "JPEG2000", "m.pbm": "PPM"}
    Image.init()
    kinds = {name: kind for name, kind in kinds.items() if kind in Image.SAVE}  # Pillow 11.0 writes no AVIF
    for name, kind in kinds.items():
        write(tmp_path / name, encoded(Image.new("RGB", (6, 5)), kind))
    write(tmp_path / "README", b"no image")
    write(tmp_path / "notes.txt", b"no image")
    write(tmp_path / "more.txt", b"no image")
    source = open_source(tmp_path)
    assert [source.key(index) for index in range(len(source))] == sorted(kinds)
    assert all(source.read(index)["image"].shape == (3, 5, 6) for index in range(len(source)))
    said = "left out 3 (their names are not those of images: .txt 2, no ending 1); the first: README"
    assert source.left_out() == [f"{tmp_path.name}: {said}"]


def test_heic_is_counted_and_says_what_reads_it(tmp_path):
    write(tmp_path / "a.png")
    write(tmp_path / "b.heic", b"\0\0\0\x18ftypheic" + b"\0" * 40)
    write(tmp_path / "c", b"\0\0\0\x18ftypheic" + b"\0" * 40)
    source = open_source(tmp_path)
    assert len(source) == 3
    with pytest.raises(SitusError, match=r"b\.heic: cannot be decoded as an image \(HEIC needs another package"):
        source.read(1)


def test_a_folder_of_other_files_says_what_it_holds(tmp_path):
    write(tmp_path / "clip.mov", b"x")
    with pytest.raises(SitusError, match=r"contains no images .*left out 1 \(.*: \.mov 1\); the first: clip\.mov"):
        open_source(tmp_path)


def test_a_name_of_any_bytes_can_be_printed(tmp_path):
    name = os.fsdecode(b"\xff\n.png")
    write(tmp_path / name, b"torn")
    with pytest.raises(SitusError) as caught:
        open_source(tmp_path).read(0)
    assert str(caught.value).isprintable()
    str(caught.value).encode("utf-8")
    assert printable(name) == "\\udcff\\n.png"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every folder")
def test_a_closed_folder_is_told(tmp_path):
    write(tmp_path / "a" / "x.png")
    (write(tmp_path / "b" / "x.png").parent).chmod(0)
    try:
        assert walk(tmp_path)[1].first == {CLOSED: "b/"}
    finally:
        (tmp_path / "b").chmod(0o700)


def test_what_the_system_keeps_closed_is_told_and_a_closed_file_is_named_when_it_is_read(tmp_path, monkeypatch):
    """As for a user without the rights; the tests may run as root, whom no rights stop."""
    for name in ("a/x.png", "b/x.png", "c/bare", "c/other.txt"):
        write(tmp_path / name)
    scandir, opened, closed = os.scandir, Path.open, {"b"}

    def scan(path):
        if Path(path).name in closed:
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    def open_(path, *arguments, **named):
        if path.name == "bare":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **named)

    monkeypatch.setattr("situs.data.sources.folder.os.scandir", scan)
    monkeypatch.setattr(Path, "open", open_)
    files, left_out = walk(tmp_path)
    assert files == ["a/x.png", "c/bare"]
    assert left_out.notes("here") == [
        "here: left out 1 (their names are not those of images: .txt 1); the first: c/other.txt",
        "here: left out 1 (folders that cannot be read); the first: b/",
    ]
    closed.add(tmp_path.name)
    with pytest.raises(PermissionError):
        walk(tmp_path)


def test_a_class_is_a_folder_with_images_in_every_split(tmp_path):
    write(tmp_path / "train" / "a" / "x.png")
    write(tmp_path / "train" / "b" / "x.png")
    write(tmp_path / "val" / "b" / "x.png")
    (tmp_path / "train" / "empty").mkdir()
    (tmp_path / "train" / "loop").symlink_to(".")
    assert open_source(tmp_path).classes == open_source(tmp_path, "val").classes == ("a", "b")


def test_a_class_folder_without_images_is_named(tmp_path):
    for name in ("cat", "dog", "bird"):
        (tmp_path / name).mkdir()
    for name in ("cat", "dog"):
        Image.new("RGB", (8, 8)).save(tmp_path / name / "1.png")
    (tmp_path / "bird" / "notes.txt").write_text("later")
    (tmp_path / ".cache").mkdir()
    source = open_source(tmp_path)
    assert source.classes == ("cat", "dog")
    assert f"{tmp_path.name}: 1 folder contains no images and was left out: 'bird'" in source.notes


@pytest.mark.parametrize(
    ("empty", "said"), [(1, "1 folder contains"), (3, "3 folders contain"), (4, "4 folders contain")]
)
def test_the_first_three_folders_without_images_are_named(tmp_path, empty, said):
    write(tmp_path / "cat" / "1.png")
    for name in "abcd"[:empty]:
        (tmp_path / name).mkdir()
    listed = ", ".join(map(repr, "abcd"[: min(3, empty)])) + (", …" if empty == 4 else "")
    were = "was" if empty == 1 else "were"
    assert open_source(tmp_path).notes == [f"{tmp_path.name}: {said} no images and {were} left out: {listed}"]


@pytest.mark.parametrize("kinds", [5, 6])
def test_the_five_most_frequent_endings_of_other_files_are_told(tmp_path, kinds):
    write(tmp_path / "cat" / "1.png")
    for kind in range(kinds):
        for number in range(10 - kind):
            write(tmp_path / "cat" / f"{number}.x{kind}", b"")
    total, listed = sum(10 - kind for kind in range(kinds)), ", ".join(f".x{kind} {10 - kind}" for kind in range(5))
    said = f"left out {total} (their names are not those of images: {listed}); the first: cat/0.x0"
    assert open_source(tmp_path).notes == [f"{tmp_path.name}: {said}"]


def test_an_image_that_tiny_imagenets_table_does_not_list_is_named(tmp_path):
    write(tmp_path / "train/n1/images/n1_0.png")
    for name in ("val_0.png", "val_1.png"):
        write(tmp_path / "val/images" / name)
    write(tmp_path / "val/val_annotations.txt", b"val_0.png\tn1\t0\t0\n\nval_1.png\n")
    with pytest.raises(SitusError, match=r"val/images/val_1\.png: class '' is not among the 1 classes of .*train$"):
        open_source(tmp_path, "val")
