from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from situs.studies.folder import PIECE, READ, fingerprint


@pytest.fixture
def images(tmp_path: Path) -> Path:
    for number in range(2 * READ):
        file = tmp_path / "images" / f"class-{number % 3}" / f"{number:03d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes([number]) * (PIECE * 3 if number == 0 else 10))
    return tmp_path / "images"


def test_a_copy_with_other_dates_is_the_same(images: Path, tmp_path: Path) -> None:
    before = fingerprint(images)
    shutil.copytree(images, tmp_path / "copy")
    os.utime(tmp_path / "copy" / "class-0" / "000.png", (0, 0))
    (tmp_path / "copy" / ".cache").write_text("left by a reader")
    assert fingerprint(tmp_path / "copy") == before == fingerprint(images)


def test_another_name_another_size_a_file_more_and_another_end_are_other_data(images: Path) -> None:
    first, seen = images / "class-0" / "000.png", {fingerprint(images)}
    held = first.read_bytes()
    first.write_bytes(held[:-1] + b"x")  # of the same size, and read to its end
    seen.add(fingerprint(images))
    first.write_bytes(held + b"x")
    seen.add(fingerprint(images))
    first.write_bytes(held)
    (images / "class-1" / "more.png").write_bytes(b"")
    seen.add(fingerprint(images))
    (images / "class-1" / "more.png").rename(images / "class-2" / "more.png")
    seen.add(fingerprint(images))
    assert len(seen) == 5


@pytest.mark.parametrize(("files", "read"), [(2, (0, 1)), (READ, (0, 1, READ - 1)), (2 * READ, (0, 2, 2 * READ - 2))])
def test_of_many_files_every_so_many_is_read(files: int, read: tuple[int, ...], tmp_path: Path) -> None:
    for number in range(files):
        (tmp_path / f"{number:03d}").write_bytes(b"0")
    seen = {fingerprint(tmp_path)}
    for number in read:
        (tmp_path / f"{number:03d}").write_bytes(b"1")
        seen.add(fingerprint(tmp_path))
    assert len(seen) == 1 + len(read)


def test_of_a_large_file_its_beginning_and_its_end_are_read(tmp_path: Path) -> None:
    size = 3 * PIECE
    for at, noticed in ((0, True), (PIECE - 1, True), (PIECE, False), (size - PIECE, True), (size - 1, True)):
        (tmp_path / "a").write_bytes(bytes(size))
        (tmp_path / "b").write_bytes(bytes(at) + b"1" + bytes(size - at - 1))
        assert (fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")) == noticed, at


def test_a_linked_folder_counts_and_a_hidden_one_does_not(images: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.png").write_bytes(b"0")
    seen = [fingerprint(images)]
    (images / ".hidden").symlink_to(tmp_path / "elsewhere")
    (images / "broken.png").symlink_to(tmp_path / "none")
    seen.append(fingerprint(images))
    (images / "class-x").symlink_to(tmp_path / "elsewhere")
    seen.append(fingerprint(images))
    (tmp_path / "elsewhere" / "a.png").write_bytes(b"00")
    seen.append(fingerprint(images))
    assert seen[0] == seen[1] and len({*seen}) == 3


def test_a_file_is_data_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1234")
    (tmp_path / "b").write_bytes(b"1234")
    (tmp_path / "c").write_bytes(b"1235")
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b") != fingerprint(tmp_path / "c")
