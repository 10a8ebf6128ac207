from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from situs.errors import SitusError
from situs.locks import shards
from situs.locks.shards import digests, plain_source, read_header, rewrite

STATE = {
    "a": torch.randn(3, 5),
    "b.weight": torch.randn(4, 2, dtype=torch.bfloat16),
    "c": torch.arange(7),
    "empty": torch.zeros(0, 3),
    "one": torch.tensor(2.5, dtype=torch.float64),
}


@pytest.fixture
def path(tmp_path) -> Path:
    save_file(STATE, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_header_says_what_safetensors_says(path):
    with plain_source(path) as source:
        header = read_header(source, "x")
    with safe_open(path, "pt") as file:
        for spec in header.tensors:
            assert tuple(file.get_slice(spec.name).get_shape()) == spec.shape
            assert file.get_slice(spec.name).get_dtype() == spec.dtype
    assert {spec.name for spec in header.tensors} == set(STATE)


def test_digests_are_of_each_tensors_bytes(path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL_CHUNK", 16)
    with plain_source(path) as source:
        header = read_header(source, "x")
    got = digests(path, header)
    assert got == {name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in STATE.items()}


@pytest.mark.parametrize("largest", [0, 20, 10**9])
def test_rewrite_changes_what_it_is_told(path, tmp_path, monkeypatch, largest):
    monkeypatch.setattr(shards, "CHUNK", 16)  # several chunks for one tensor
    monkeypatch.setattr(shards, "LARGEST_WHOLE", largest)
    out, seen = tmp_path / "y.safetensors", {}
    with plain_source(path) as source, out.open("wb") as sink:
        header = read_header(source, "x")
        got = rewrite(
            source, sink, header, {"a": lambda t: t[:, ::-1], "b.weight": lambda t: t[[2, 0, 1, 3]]}, seen.__setitem__
        )
    wanted = STATE | {"a": STATE["a"].flip(1), "b.weight": STATE["b.weight"][[2, 0, 1, 3]]}
    loaded = load_file(out)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert got == {name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in wanted.items()}
    assert {spec.name: digest for spec, digest in seen.items()} == {
        name: hashlib.sha256(raw_bytes(tensor)).hexdigest() for name, tensor in STATE.items()
    }
    with plain_source(path) as source:  # nothing to write to: the same digests
        assert rewrite(source, None, read_header(source, "x"), {})["a"] != got["a"]


def test_a_check_that_refuses_stops_before_the_change(path, tmp_path):
    def refuse(spec, digest):
        raise SitusError("no")

    def never(tensor):
        raise AssertionError("a tensor was used before it was checked")

    with plain_source(path) as source, pytest.raises(SitusError, match="no"):
        rewrite(source, None, read_header(source, "x"), dict.fromkeys(STATE, never), refuse)


def header_of(tables: object, body: int = 0) -> bytes:
    text = json.dumps(tables).encode()
    return len(text).to_bytes(8, "little") + text + bytes(body)


GOOD = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\x01" * 7,
        (2**63).to_bytes(8, "little") + bytes(20),
        header_of([]),
        header_of({"a": 1}),
        header_of(GOOD, 7),
        header_of(GOOD, 9),
        header_of({"a": GOOD["a"] | {"dtype": "F99"}}, 8),
        header_of({"a": GOOD["a"] | {"dtype": ["F32"]}}, 8),
        header_of({"a": GOOD["a"] | {"shape": [3]}}, 8),
        header_of({"a": GOOD["a"] | {"shape": [-2]}}, 8),
        header_of({"a": GOOD["a"] | {"shape": [2.0]}}, 8),
        header_of({"a": GOOD["a"] | {"shape": [True, 2]}}, 8),
        header_of({"a": GOOD["a"] | {"shape": [2**60, 2**60]}}, 8),
        header_of({"a": GOOD["a"] | {"data_offsets": [8, 16]}}, 16),
        header_of({"a": GOOD["a"] | {"data_offsets": [8, 0]}}, 8),
        header_of({"a": GOOD["a"] | {"data_offsets": [0]}}, 8),
        header_of({"a": GOOD["a"] | {"more": 1}}, 8),
        header_of({"a": GOOD["a"], "b": GOOD["a"]}, 8),
        header_of(GOOD | {"__metadata__": {"a": 1}}, 8),
        header_of(GOOD | {"__metadata__": []}, 8),
        len(b'{"a":1,"a":1}').to_bytes(8, "little") + b'{"a":1,"a":1}',
        len(b"[" * 90000).to_bytes(8, "little") + b"[" * 90000,
    ],
)
def test_malformed_headers_are_refused(tmp_path, raw):
    (tmp_path / "x").write_bytes(raw)
    with plain_source(tmp_path / "x") as source, pytest.raises(SitusError, match="no readable safetensors"):
        read_header(source, "x")


@given(data=st.data())
def test_what_we_accept_safetensors_accepts(tmp_path_factory, data):
    """Bytes of the header replaced at random: no crash, and nothing read that the reference reader refuses."""
    place = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    save_file(STATE, place, metadata={"format": "pt"})
    raw = bytearray(place.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.none(), st.integers(0, len(raw))))
    place.write_bytes(raw[:cut])
    try:
        with plain_source(place) as source:
            specs = read_header(source, "x").tensors
    except SitusError:
        return
    try:
        with safe_open(place, "pt") as file:
            assert set(file.keys()) == {spec.name for spec in specs}
    except SafetensorError:
        pytest.fail("accepted what safetensors refuses")
