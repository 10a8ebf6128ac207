from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from situs.train.checkpoint import tensors
from situs.train.checkpoint.storage import digest
from situs.train.checkpoint.tensors import DTYPES, Parts, read_tensors, write_tensors
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
    found = read_tensors(tmp_path / "x.safetensors")
    assert found.keys() == given.keys()
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert "tied" not in load_file(tmp_path / "x.safetensors")  # written once


def test_a_failure_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="directory"):
        write_tensors(tmp_path / "missing" / "x.safetensors", {"a": torch.zeros(2)})


def test_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"abc")
    assert digest(tmp_path / "x") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


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
    monkeypatch.setattr(tensors, "CHUNK", 7)
    asked: list[int] = []
    given = {"a": torch.randn(5, 4), "b": torch.arange(9, dtype=torch.uint8)}
    fact = write_tensors(tmp_path / "x", given, check=lambda: asked.append(1))
    assert len(asked) == -(-80 // 7) + 2
    assert fact["sha256"] == digest(tmp_path / "x")
    found = read_tensors(tmp_path / "x")
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
        assert tuple(parts.entries[name].shape) == (10, 3, 2)
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
