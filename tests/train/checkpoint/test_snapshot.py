from __future__ import annotations

import pytest
import torch

from situs.train.checkpoint import snapshot
from situs.train.checkpoint.snapshot import Snapshot, spare_of


def test_what_comes_later_does_not_change_it() -> None:
    weights = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.tensor(2.5), "d": torch.empty(0, 3)}
    files = {"model": weights | {"turned": weights["a"].T, "tied": weights["a"]}, "log": {"sums": torch.arange(3)}}
    before = {file: {name: t.clone() for name, t in held.items()} for file, held in files.items()}
    held = Snapshot(files)
    for tensors in files.values():
        for tensor in tensors.values():
            tensor.zero_()
    held.wait()
    assert {file: set(tensors) for file, tensors in held.files.items()} == {f: set(t) for f, t in files.items()}
    for file, tensors in before.items():
        for name, tensor in tensors.items():
            assert torch.equal(held.files[file][name], tensor), name
            assert held.files[file][name].dtype == tensor.dtype
            assert held.files[file][name].is_contiguous()
    assert held.files["model"]["tied"] is held.files["model"]["a"]  # still one tensor
    assert held.boxes == {}
    assert held.gpu is None


def test_a_step_needs_no_spare_on_the_host() -> None:
    assert spare_of(torch.device("cpu")) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fits", [True, False], ids=["device", "host"])
def test_a_graph_that_is_replayed_at_once_does_not_change_it(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is in the order of the device's work; where its memory is full, on the host before the replay."""
    if not fits:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (0, 0))
        monkeypatch.setattr(torch.cuda, "memory_reserved", torch.cuda.memory_allocated)
    weights = [torch.full((1 << 22,), 1.0, device="cuda") for _ in range(8)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            weight.mul_(2.0)
    for value in (2.0, 8.0, 32.0):
        graph.replay()
        held = Snapshot({"model": {str(n): weight for n, weight in enumerate(weights)}})
        graph.replay()
        held.wait()
        assert (held.gpu is not None) == fits
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            found = [t.cpu() for t in held.files["model"].values()]
        assert all(torch.equal(t, torch.full_like(t, value)) for t in found)


def test_memory_is_aligned() -> None:
    held = Snapshot({"model": {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(2, dtype=torch.float64)}})
    first = held.files["model"]["a"].untyped_storage().data_ptr()
    assert (held.files["model"]["b"].data_ptr() - first) % snapshot.ALIGNED == 0
