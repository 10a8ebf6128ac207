"""What is written is whole, and for its owner alone where it is asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from situs.errors import SitusError
from situs.files import load_code, read_json, read_lines, write_bytes, write_text


def test_a_private_file_is_for_its_owner_whatever_stood_there(tmp_path: Path) -> None:
    path = tmp_path / "page"
    path.write_bytes(b"before")
    path.chmod(0o666)
    write_bytes(path, b"mine", private=True)
    assert path.read_bytes() == b"mine" and path.stat().st_mode & 0o777 == 0o600
    write_bytes(path, b"all's")
    assert path.stat().st_mode & 0o077 == 0o066 & ~_umask()


@pytest.mark.parametrize(("text", "said"), [('{"steps": ', "is not valid JSON"), ("[1]", "must contain a table")])
def test_json_that_is_torn_or_no_table_is_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SitusError, match=f"config.json: .*{said}"):
        read_json(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x" * 300, "file name too long"),
        ("a\0b", "embedded null byte"),
        ("circle", "too many levels of symbolic links"),
        ("folder", "is a directory"),
        ("latin.txt", "it is not text in UTF-8"),
        ("latin.txt/x", "not a directory"),
    ],
)
def test_a_path_that_cannot_be_read_is_a_sentence(name: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "folder").mkdir()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(SitusError, match=f"cannot be read: {said}"):
        read_json(tmp_path / name)
    with pytest.raises(SitusError, match=f"data=.*cannot be read: {said}") as caught:
        read_lines(tmp_path / name, "data")
    assert caught.value.field == "data"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.json"
    write_text(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("reason", [KeyboardInterrupt("now"), PermissionError(13, "Permission denied")])
def test_a_write_that_does_not_begin_gives_its_own_reason(
    reason: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no draft then to be removed."""

    def fails(*_: object) -> None:
        raise reason

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        with pytest.raises(type(reason)) as caught:
            write_text(tmp_path / "config.json", "new")
    assert caught.value is reason and not list(tmp_path.iterdir())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_script_that_ends_the_program_on_import_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "ends_the_program.py").write_text("import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n")
    with pytest.raises(SitusError, match=r"importing this file ends the program; .* if __name__"):
        load_code(f"{tmp_path / 'ends_the_program.py'}:build")
