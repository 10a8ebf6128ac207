"""What is written is whole, and for its owner alone where it is asked for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from situs.errors import SitusError
from situs.files import (
    absolute,
    cache_folder,
    load_code,
    make_folder,
    missing_reason,
    names_code,
    read_json,
    read_lines,
    write_bytes,
    write_result,
    write_text,
)


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


def test_a_path_that_is_there_is_made_absolute_and_links_stay_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert [absolute(text) for text in ("data", "~/link", "data/../link")] == [
        str(tmp_path / name) for name in ("data", "link", "link")
    ]
    assert [absolute(text) for text in ("samples", "~/none", "")] == ["samples", "~/none", str(tmp_path)]
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder("hub") == tmp_path / ".cache" / "situs" / "hub" and not (tmp_path / ".cache").exists()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    assert cache_folder("hub") == tmp_path / "own" / "situs" / "hub"


def test_a_sealed_file_is_not_called_missing(tmp_path: Path) -> None:
    assert missing_reason(tmp_path, "config.json") == "has no config.json"
    (tmp_path / "config.json.sealed").touch()
    assert missing_reason(tmp_path, "config.json") == "its config.json is sealed (situs unlock opens the folder)"


def test_lines_are_read_without_blanks_and_a_table_is_not_read_as_lines(tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("\ufeff one \n\n  \ntwo words\n", encoding="utf-8")
    assert read_lines(file, "data") == ["one", "two words"]
    file.write_text(" \n")
    with pytest.raises(SitusError, match=r"^data=.*lines\.txt: has no text$"):
        read_lines(file, "data")
    for ending in ("csv", "tsv", "json", "jsonl", "parquet"):
        with pytest.raises(
            SitusError, match=f"^secrets=lines.{ending}: is a table file; give a plain text file"
        ) as caught:
            read_lines(Path(f"lines.{ending}"), "secrets")
        assert caught.value.field == "secrets"


def test_what_a_user_names_is_made_with_its_folder_and_a_failure_knows_its_field(tmp_path: Path) -> None:
    page = tmp_path / "a" / "b" / "page.html"
    for content in (b"one", b"two"):
        assert write_result(page, content) == page and page.read_bytes() == content
    assert page.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert write_result(page, b"own", private=True).stat().st_mode & 0o777 == 0o600
    make_folder(tmp_path / "c" / "d")
    make_folder(tmp_path / "c" / "d")
    assert (tmp_path / "c" / "d").is_dir()
    for act, said in (
        (lambda: write_result(page / "below", b"", field="plot"), "page.html/below: could not be written: "),
        (lambda: make_folder(page, "plot"), "page.html: cannot be created: file exists$"),
    ):
        with pytest.raises(SitusError, match=said) as caught:
            act()
        assert caught.value.field == "plot"


@pytest.mark.parametrize(
    ("source", "is_code"),
    [
        ("package.module:Name", True), ("module:name", True), ("folder/my file.py:Name", True), ("~/a.py:b", True),
        ("hf:model", False), ("module", False), ("module:not a name", False), ("module:", False), (":name", False),
        ("folder/file:name", False), ("file.txt:name", True), ("C:\\models:name", False), ("1st.module:name", False),
    ],
)  # fmt: skip
def test_code_is_named_by_a_module_or_a_file_and_a_name(source: str, is_code: bool) -> None:
    assert names_code(source) is is_code


def test_a_users_own_file_comes_before_a_module_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it lies is looked at first and once, and stays there for what it imports itself."""
    monkeypatch.setattr("sys.path", [str(tmp_path / "later"), *sys.path])
    monkeypatch.setenv("HOME", str(tmp_path))
    for place, value in (("later", 1), ("mine", 2)):
        (tmp_path / place).mkdir()
        (tmp_path / place / "of_two_places.py").write_text(f"from beside_{place} import VALUE\n")
        (tmp_path / place / f"beside_{place}.py").write_text(f"VALUE = {value}\n")
    assert load_code("~/mine/of_two_places.py:VALUE") == load_code(f"{tmp_path}/mine/of_two_places.py:VALUE") == 2
    assert sys.path[0] == str(tmp_path / "mine") and sys.path.count(str(tmp_path / "mine")) == 1
    monkeypatch.chdir(tmp_path / "later")
    assert load_code("beside_later:VALUE") == 1 and sys.path.count(str(tmp_path / "later")) == 1
    for name, said in (
        ("none.py:VALUE", "there is no file none.py"),
        ("beside_later:NONE", "no attribute 'NONE'"),
        ("no_such_module:VALUE", "No module named 'no_such_module'"),
    ):
        with pytest.raises(SitusError, match=f"^MODEL {name}: cannot be imported as package.*{said}$"):
            load_code(name, "MODEL ")
    for name in ("of_two_places", "beside_mine", "beside_later"):
        sys.modules.pop(name, None)
