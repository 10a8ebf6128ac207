from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from situs.train.checkpoint.storage import digest
from situs.train.checkpoint.tensors import read_tensors, write_tensors


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
