from __future__ import annotations

import hmac
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from situs.errors import SitusError
from situs.locks import shards
from situs.locks.key import Codes
from situs.locks.shards import (
    Spec,
    codes_of,
    make_header,
    new_private_file,
    parse_header,
    plain_source,
    read_header,
    rewrite,
)

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


SECRET = bytes(range(32))


def start(name: str) -> hmac.HMAC:
    return Codes(SECRET).start("tensor", name)


def code(name: str, tensor: torch.Tensor) -> str:
    """HMAC-SHA256 over kind, name and bytes, each text behind its length, by the standard library alone."""
    text = b"".join(len(word).to_bytes(4, "big") + word for word in (b"tensor", name.encode()))
    return hmac.new(SECRET, text + raw_bytes(tensor), "sha256").hexdigest()


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


def test_codes_are_of_each_tensors_bytes(path, monkeypatch):
    monkeypatch.setattr(shards, "SMALL_CHUNK", 16)
    with plain_source(path) as source:
        header = read_header(source, "x")
    got = codes_of(path, header, start)
    assert got == {name: code(name, tensor) for name, tensor in STATE.items()}


@pytest.mark.parametrize("largest", [0, 20, 10**9])
def test_rewrite_changes_what_it_is_told(path, tmp_path, monkeypatch, largest):
    monkeypatch.setattr(shards, "CHUNK", 16)  # several chunks for one tensor
    monkeypatch.setattr(shards, "LARGEST_WHOLE", largest)
    out, seen = tmp_path / "y.safetensors", {}
    with plain_source(path) as source, out.open("wb") as sink:
        header = read_header(source, "x")
        sink.write(header.raw)
        changes = {"a": lambda t: t[:, ::-1], "b.weight": lambda t: t[[2, 0, 1, 3]]}
        got = rewrite(lambda _: source, lambda _: sink, header.tensors, changes, start, seen.__setitem__)
    wanted = STATE | {"a": STATE["a"].flip(1), "b.weight": STATE["b.weight"][[2, 0, 1, 3]]}
    loaded = load_file(out)
    assert all(torch.equal(loaded[name], wanted[name]) for name in wanted)
    assert got == {name: code(name, tensor) for name, tensor in wanted.items()}
    assert {spec.name: each for spec, each in seen.items()} == {name: code(name, STATE[name]) for name in STATE}
    with plain_source(path) as source:  # nothing to write to: the same codes
        unchanged = rewrite(lambda _: source, None, read_header(source, "x").tensors, {}, start)
        assert unchanged == {name: code(name, STATE[name]) for name in STATE}


@pytest.mark.parametrize(("largest", "pieces"), [(32, [32]), (31, [16, 16])])
def test_only_a_tensor_above_the_limit_is_copied_in_chunks(tmp_path, monkeypatch, largest, pieces):
    monkeypatch.setattr(shards, "CHUNK", 16)
    monkeypatch.setattr(shards, "LARGEST_WHOLE", largest)
    save_file({"a": torch.arange(8, dtype=torch.int32)}, tmp_path / "x.safetensors")
    sizes = []
    with plain_source(tmp_path / "x.safetensors") as source:
        sink = SimpleNamespace(write=lambda data: sizes.append(len(data)))
        rewrite(lambda _: source, lambda _: sink, read_header(source, "x").tensors, {}, start)
    assert sizes == pieces


def test_tensors_go_to_the_file_that_is_named_and_come_back_from_it(path, tmp_path):
    """One file in two, each readable by safetensors, and one again, bit for bit."""
    held = {"a", "one"}
    with plain_source(path) as source:
        whole = read_header(source, "x")
        parts = [whole.without(held), make_header([spec for spec in whole.tensors if spec.name in held], {})]
        paths = [tmp_path / "left.safetensors", tmp_path / "held.safetensors"]
        with paths[0].open("wb") as left, paths[1].open("wb") as apart:
            left.write(parts[0].raw)
            apart.write(parts[1].raw)
            rewrite(lambda _: source, lambda spec: apart if spec.name in held else left, whole.tensors, {}, start)
    got = [load_file(each) for each in paths]
    assert set(got[1]) == held and set(got[0]) == set(STATE) - held
    assert all(torch.equal(tensor, STATE[name]) for each in got for name, tensor in each.items())
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    back = tmp_path / "back.safetensors"
    with plain_source(paths[0]) as left, plain_source(paths[1]) as apart, back.open("wb") as sink:
        assert [read_header(each, "x") for each in (left, apart)] == parts
        again = parse_header(whole.raw, "x")
        assert again == whole and whole.without(()) is whole
        sink.write(again.raw)
        rewrite(lambda spec: apart if spec.name in held else left, lambda _: sink, again.tensors, {}, start)
    assert back.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("raw", [b"", b"1234567", bytes(8) + b"{}", (3).to_bytes(8, "little") + b"{}"])
def test_a_header_kept_apart_has_its_length(raw):
    with pytest.raises(SitusError, match="is not a readable safetensors"):
        parse_header(raw, "x")


def test_a_header_that_is_made_is_aligned_and_says_where_tensors_begin(tmp_path):
    header = make_header([Spec("a", "F32", (3,)), Spec("b", "U8", ()), Spec("c", "F32", (0, 2))], {"n": "x" * 5})
    assert len(header.raw) % 8 == 0 and header.notes == {"n": "x" * 5}
    assert header.places() == {"a": len(header.raw), "b": len(header.raw) + 12, "c": len(header.raw) + 13}
    (tmp_path / "x.safetensors").write_bytes(header.raw + bytes(13))
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [0, 0, 0]


def test_a_check_that_refuses_stops_before_the_change(path, tmp_path):
    def refuse(spec, digest):
        raise SitusError("no")

    def never(tensor):
        raise AssertionError("a tensor was used before it was checked")

    with plain_source(path) as source, pytest.raises(SitusError, match="no"):
        rewrite(lambda _: source, None, read_header(source, "x").tensors, dict.fromkeys(STATE, never), start, refuse)


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
        header_of({"a": {"dtype": "U8", "shape": [0, 2**48], "data_offsets": [0, 0]}}),
        header_of({"a": GOOD["a"] | {"shape": [1] * 64 + [2]}}, 8),
        header_of({"a": GOOD["a"] | {"data_offsets": [0, 8, 8]}}, 8),
        header_of({"a": GOOD["a"], "b": GOOD["a"]}, 8),
        header_of(GOOD | {"__metadata__": {"a": 1}}, 8),
        header_of(GOOD | {"__metadata__": []}, 8),
        len(b'{"a":1,"a":1}').to_bytes(8, "little") + b'{"a":1,"a":1}',
        len(b"[" * 90000).to_bytes(8, "little") + b"[" * 90000,
    ],
)
def test_malformed_headers_are_refused(tmp_path, raw):
    (tmp_path / "x").write_bytes(raw)
    with plain_source(tmp_path / "x") as source, pytest.raises(SitusError, match="is not a readable safetensors"):
        read_header(source, "x")


@pytest.mark.parametrize(
    ("raw", "shapes"),
    [
        (header_of({}), []),
        (header_of(GOOD, 8), [(2,)]),
        (header_of({"a": GOOD["a"] | {"shape": [1] * 63 + [2]}}, 8), [(1,) * 63 + (2,)]),
        (header_of({"a": {"dtype": "U8", "shape": [0, 2**48 - 1], "data_offsets": [0, 0]}}), [(0, 2**48 - 1)]),
    ],
)
def test_headers_at_the_bounds_of_what_is_allowed(tmp_path, raw, shapes):
    (tmp_path / "x").write_bytes(raw)
    with plain_source(tmp_path / "x") as source:
        assert [spec.shape for spec in read_header(source, "x").tensors] == shapes


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


def test_a_file_that_ends_too_early_or_cannot_be_read(tmp_path):
    (tmp_path / "short").write_bytes(b"12345")
    into = bytearray(5)
    with plain_source(tmp_path / "short") as source:
        source.fill(memoryview(into))
        assert (bytes(into), source.size) == (b"12345", 5)
        source.seek(3)
        with pytest.raises(SitusError, match=r"^short: the file ends too early: it is truncated"):
            source.fill(memoryview(into))
    for place, said in ((tmp_path, "is a directory"), (tmp_path / "none", "no such file")):
        with pytest.raises(SitusError, match=f"^{place}: cannot be read: {said}"), plain_source(place):
            pass


@pytest.mark.parametrize("place", ["file/x", "file/deep/x"])
def test_a_private_file_below_a_file_cannot_be_written(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with (
        pytest.raises(SitusError, match=f"^{tmp_path / place}: a key could not be written: ") as raised,
        new_private_file(tmp_path / place, "a key", "out"),
    ):
        pass
    assert raised.value.field == "out"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
