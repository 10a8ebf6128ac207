from __future__ import annotations

import hashlib
import json
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from situs.train.checkpoint import files
from situs.train.checkpoint.files import (
    DTYPES,
    Parts,
    delete,
    digest,
    fingerprint,
    read_folder,
    read_table,
    remove,
    with_checksum,
    write_state,
    write_tensors,
)
from situs.train.distributed import Box


def test_ties_views_and_shapes_come_back(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    given = {
        "base": base,
        "tied": base,
        "turned": base.T,  # the same storage in another order
        "part": base[1:3],
        "scalar": torch.tensor(3.5),
        "nothing": torch.empty(0, 2),
        "nothing_else": torch.empty(0, 2),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "half": torch.randn(3, dtype=torch.bfloat16),
    }
    write_tensors(tmp_path / "x.safetensors", given)
    found = Parts([tmp_path / "x.safetensors"]).all()
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert "tied" not in load_file(tmp_path / "x.safetensors")  # written once


def test_the_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    given = {f"{n}": torch.randn(n, 3).to(dtype) for n, dtype in enumerate(DTYPES.values())}
    given |= {"é": torch.tensor(1.5), "none": torch.empty(0), "large": torch.randn(1000)}
    fact = write_tensors(tmp_path / "ours", given)
    save_file(given, tmp_path / "theirs", {"situs.shared": "{}"})
    data = (tmp_path / "ours").read_bytes()

    def tensors_in(raw: bytes) -> dict[str, object]:
        """Every entry of the header with the bytes it names."""
        start = int.from_bytes(raw[:8], "little") + 8
        assert start % 8 == 0
        table = json.loads(raw[8:start])
        notes = table.pop("__metadata__")
        ends = {name: [start + end for end in entry.pop("data_offsets")] for name, entry in table.items()}
        assert max(end for _, end in ends.values()) == len(raw)
        return {name: (entry, raw[slice(*ends[name])]) for name, entry in table.items()} | notes

    assert tensors_in(data) == tensors_in((tmp_path / "theirs").read_bytes())
    assert fact == {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_chunks_are_all_written_and_each_is_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 7)
    asked: list[int] = []
    given = {"a": torch.randn(5, 4), "b": torch.arange(9, dtype=torch.uint8)}
    fact = write_tensors(tmp_path / "x", given, check=lambda: asked.append(1))
    assert len(asked) == -(-80 // 7) + 2
    assert fact["sha256"] == digest(tmp_path / "x")
    found = Parts([tmp_path / "x"]).all()
    assert all(torch.equal(found[name], given[name]) for name in given)


@pytest.mark.parametrize("cuts", [(0, 4, 7, 7, 10), (0, 10)])
@pytest.mark.parametrize("wanted", [(0, 10), (3, 8), (4, 7), (9, 10), (5, 5)])
def test_a_part_is_put_together_from_the_files_that_have_some(
    tmp_path: Path, cuts: tuple[int, ...], wanted: tuple[int, int]
) -> None:
    whole, scalar = torch.randn(10, 3, 2), torch.tensor(4.0)
    paths = []
    for rank, (begin, end) in enumerate(pairwise(cuts)):
        paths.append(tmp_path / f"{rank}.safetensors")
        held = {"w": whole[begin:end], "also": whole[begin:end]} if end > begin else {}
        boxes = dict.fromkeys(held, Box((10, 3, 2), (begin, 0, 0), (end - begin, 3, 2)))
        write_tensors(paths[-1], held | ({"s": scalar} if rank == 0 else {}), boxes)
    parts = Parts(paths)
    begin, end = wanted
    for name in ("w", "also"):
        assert parts.shapes[name] == (10, 3, 2)
        assert torch.equal(parts.read(name, Box((10, 3, 2), (begin, 0, 0), (end - begin, 3, 2))), whole[begin:end])
        inner = parts.read(name, Box((10, 3, 2), (begin, 1, 0), (end - begin, 2, 1)))
        assert torch.equal(inner, whole[begin:end, 1:, :1])
    every = parts.all()
    assert torch.equal(every["w"], whole)
    assert every["also"] is every["w"]
    assert torch.equal(every["s"], scalar)
    if len(paths) > 1:
        with pytest.raises(OSError, match="w lacks 24 of 60 numbers"):
            Parts(paths[1:]).read("w")


# --- folders --------------------------------------------------------------------------------------------------


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    place = tmp_path / "step"
    place.mkdir()
    tensors = {"model.safetensors": torch.zeros(5), "rank1.safetensors": torch.ones(2)}
    write_state(
        place, {"step": 3}, {name: write_tensors(place / name, {"w": value}) for name, value in tensors.items()}
    )
    return place


def test_all_that_lies_in_the_folder_is_vouched_for(whole: Path) -> None:
    state = read_folder(whole)
    assert isinstance(state, dict)
    assert state["step"] == 3
    assert state["files"].keys() == {"model.safetensors", "rank1.safetensors"}
    for name in state["files"]:
        other = shutil.copytree(whole, whole.parent / f"without-{name}")
        data = (other / name).read_bytes()
        (other / name).write_bytes(data[:-1] + bytes([data[-1] ^ 128]))
        assert read_folder(other) == f"{name} has changed since it was written"
        (other / name).write_bytes(data[:7])
        assert read_folder(other) == f"{name} has 7 of {len(data)} bytes"
        (other / name).unlink()
        assert read_folder(other) == f"{name} has 0 of {len(data)} bytes"
        (other / name).mkdir()
        assert read_folder(other) == f"{name} has 0 of {len(data)} bytes"


def test_a_file_that_the_disk_does_not_give_is_said(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "digest", broken)
    assert read_folder(whole) == "model.safetensors cannot be read: input/output error"


def test_what_is_removed_loses_its_name_first(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole.parent / ".removing-step").touch()  # of another kind than it will be
    seen = []
    monkeypatch.setattr(files, "delete", lambda path: (seen.append((path.name, whole.exists())), delete(path)))
    remove(whole)
    assert seen == [(".removing-step", True), (".removing-step", False)]
    assert list(whole.parent.iterdir()) == []
    (whole.parent / "file").touch()
    delete(whole.parent / "file")
    delete(whole.parent / "file")
    assert list(whole.parent.iterdir()) == []


# --- tables ---------------------------------------------------------------------------------------------------

TABLE = {"step": 30, "rate": 1e-3, "names": ["loss", "ä"], "deep": {"b": None, "a": True}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "state.json"
    path.write_text(with_checksum(TABLE, "state.json"), encoding="utf-8")
    return path


def test_a_table_comes_back_without_its_checksum(file: Path) -> None:
    assert read_table(file) == TABLE
    assert json.loads(file.read_text())["sha256"] == fingerprint(TABLE, "state.json")
    file.write_text(json.dumps(dict(reversed(json.loads(file.read_text()).items()))))
    assert read_table(file) == TABLE  # order and space are not content


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("30", "31", "state.json has changed since it was written"),
        ("true", "false", "state.json has changed since it was written"),
        ('"rate"', '"rbte"', "state.json has changed since it was written"),
        ('"sha256": "', '"sha256": "0', "state.json has changed since it was written"),
        ('"sha256"', '"sha257"', "state.json has no checksum: it is damaged, or of an older version"),
        ("null", "NaN", "state.json has changed since it was written"),
        ("null", "nill", "state.json is cut short or damaged"),
        ("null", "[" * 100_000, "state.json is cut short or damaged"),
        ("null", "9" * 5000, "state.json is cut short or damaged"),
        ("ä", "\udcff", "state.json is cut short or damaged"),
    ],
)
def test_what_is_changed_is_said(file: Path, old: str, new: str, said: str) -> None:
    text = with_checksum(TABLE, "state.json").replace(old, new, 1)
    assert text != with_checksum(TABLE, "state.json")
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert read_table(file) == said


def test_a_file_in_another_s_place_is_said(file: Path) -> None:
    other = file.rename(file.with_name("config.json"))
    assert read_table(other) == "config.json has changed since it was written"


def test_what_is_no_file_is_said(file: Path, tmp_path: Path) -> None:
    assert read_table(tmp_path / "none.json") == "none.json is missing"
    assert read_table(tmp_path) == f"{tmp_path.name} is missing"
    os.mkfifo(tmp_path / "pipe.json")
    assert read_table(tmp_path / "pipe.json") == "pipe.json is missing"
    file.write_text("[1]")
    assert read_table(file) == "state.json has no checksum: it is damaged, or of an older version"


def test_no_number_that_json_lacks_is_written() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        with_checksum({"a": float("nan")}, "a.json")
