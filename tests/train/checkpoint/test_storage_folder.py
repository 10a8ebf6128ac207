from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from situs.train.checkpoint import storage as folder
from situs.train.checkpoint.storage import delete, read_folder, remove, write_folder
from situs.train.checkpoint.tensors import write_tensors


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    place = tmp_path / "step"
    place.mkdir()
    write_tensors(place / "rank1.safetensors", {"x": torch.ones(2)})  # another rank's, there before
    write_folder(place, {"model": {"w": torch.zeros(5)}}, {"step": 3})
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
        assert read_folder(other) == f"{name} has other bytes than were written"
        (other / name).write_bytes(data[:7])
        assert read_folder(other) == f"{name} has 7 of {len(data)} bytes"
        (other / name).unlink()
        assert read_folder(other) == f"{name} has 0 of {len(data)} bytes"
        (other / name).mkdir()
        assert read_folder(other) == f"{name} has 0 of {len(data)} bytes"


def test_a_file_that_the_disk_does_not_give_is_said(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Path) -> str:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder, "digest", broken)
    assert read_folder(whole) == "model.safetensors cannot be read: input/output error"


def test_what_is_removed_loses_its_name_first(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (whole.parent / ".removing-step").touch()  # of another kind than it will be
    seen = []
    monkeypatch.setattr(folder, "delete", lambda path: (seen.append((path.name, whole.exists())), delete(path)))
    remove(whole)
    assert seen == [(".removing-step", True), (".removing-step", False)]
    assert list(whole.parent.iterdir()) == []
    (whole.parent / "file").touch()
    delete(whole.parent / "file")
    delete(whole.parent / "file")
    assert list(whole.parent.iterdir()) == []
