from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from situs.train.checkpoint.storage import fingerprint, read_sealed, sealed

TABLE = {"step": 30, "rate": 1e-3, "names": ["loss", "ä"], "deep": {"b": None, "a": True}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_text(sealed(TABLE, "state.json"), encoding="utf-8")
    return path


def test_a_table_comes_back_without_its_seal(file: Path) -> None:
    assert read_sealed(file) == TABLE
    assert json.loads(file.read_text())["sha256"] == fingerprint(TABLE, "state.json")
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    assert read_sealed(file) == TABLE  # order and space are not content


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("30", "31", "state.json is not as it was written"),
        ("true", "false", "state.json is not as it was written"),
        ('"rate"', '"rbte"', "state.json is not as it was written"),
        ('"sha256": "', '"sha256": "0', "state.json is not as it was written"),
        ('"sha256"', '"sha257"', "state.json has no hash of itself: it is damaged, or of a version before hashes"),
        ("null", "NaN", "state.json is not as it was written"),
        ("null", "nill", "state.json is cut short or damaged"),
        ("null", "[" * 100_000, "state.json is cut short or damaged"),
        ("null", "9" * 5000, "state.json is cut short or damaged"),
        ("ä", "\udcff", "state.json is cut short or damaged"),
    ],
)
def test_what_is_changed_is_said(file: Path, old: str, new: str, said: str) -> None:
    text = sealed(TABLE, "state.json").replace(old, new, 1)
    assert text != sealed(TABLE, "state.json")
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert read_sealed(file) == said


def test_a_file_in_another_s_place_is_said(file: Path) -> None:
    other = file.rename(file.with_name("config.json"))
    assert read_sealed(other) == "config.json is not as it was written"


def test_what_is_no_file_is_said(file: Path, tmp_path: Path) -> None:
    assert read_sealed(tmp_path / "none.json") == "none.json is missing"
    assert read_sealed(tmp_path) == f"{tmp_path.name} is missing"
    os.mkfifo(tmp_path / "pipe.json")
    assert read_sealed(tmp_path / "pipe.json") == "pipe.json is missing"
    file.write_text("[1]")
    assert read_sealed(file) == "state.json has no hash of itself: it is damaged, or of a version before hashes"


def test_no_number_that_json_lacks_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        sealed({"a": float("nan")}, "a.json")
