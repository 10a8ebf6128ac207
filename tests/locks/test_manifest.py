from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from situs.backbones.layout import Group, Member
from situs.errors import SitusError
from situs.locks import manifest as module
from situs.locks.key import Key, codes_of
from situs.locks.manifest import (
    NAME,
    Entry,
    Manifest,
    fingerprint_of,
    layout_of,
    permutations_of,
    read_manifest,
    write_manifest,
)
from situs.locks.shards import Spec

pytest.importorskip("cryptography")

KEY = Key(bytes(range(32)))
TENSORS = {
    "blocks.0.fc1.weight": Entry("F32", (8, 6), "a" * 64),
    "blocks.0.qkv.weight": Entry("BF16", (18, 6), "b" * 64),
    "freqs": Entry("F32", (2, 2, 3, 4), "c" * 64),
    "head.weight": Entry("F32", (3, 6), "d" * 64),
}
GROUPS = (
    Group("residual", "residual", 6, (Member("blocks.0.fc1.weight", 1), Member("blocks.0.qkv.weight", 1))),
    Group("blocks.0.mlp", "hidden", 4, (Member("blocks.0.fc1.weight", 0, outer=2),)),
    Group("blocks.0.heads", "heads", 3, (Member("blocks.0.qkv.weight", 0, inner=2, start=12, length=6),)),
    Group("blocks.0.rope", "heads", 3, (Member("freqs", 2, at=(1, 1)),)),
)


def manifest() -> Manifest:
    specs = [Spec(name, entry.dtype, entry.shape) for name, entry in TENSORS.items()]
    return Manifest(
        version=2,
        situs="0.1",
        model="vit",
        key_id=KEY.id,
        lock_id="12" * 16,
        sealed=False,
        layout=layout_of(specs),
        fingerprint="f" * 64,
        groups=GROUPS,
        shards={"model.safetensors": "e" * 64},
        tensors=dict(TENSORS),
        files={"config.json": "1" * 64, "1_Pooling/config.json": "2" * 64},
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    write_manifest(tmp_path, manifest(), KEY)
    return tmp_path


def test_there_and_back(folder):
    got = read_manifest(folder, KEY)
    assert got.hmac and re.fullmatch("[0-9a-f]{64}", got.hmac)
    assert got == read_manifest(folder, None)
    assert got.groups == GROUPS and got.tensors == TENSORS and got.keyed() == set(TENSORS) - {"head.weight"}
    assert {name: len(p) for name, p in permutations_of(got, KEY).items()} == {g.name: g.size for g in GROUPS}
    assert KEY.seed.hex() not in (folder / NAME).read_text()


def test_layout_is_of_names_shapes_and_dtypes_in_any_order():
    a, b = Spec("a", "F32", (2, 3)), Spec("b", "F32", (2,))
    assert layout_of([a, b]) == layout_of([b, a])
    others = [[a], [a, Spec("c", "F32", (2,))], [a, Spec("b", "F16", (2,))], [a, Spec("b", "F32", (1, 2))]]
    assert len({layout_of(each) for each in ([a, b], *others)}) == 5


def test_fingerprint_is_of_every_tensor_and_of_the_key():
    codes, two = codes_of(KEY, "12" * 16), {"x": "1", "y": "2"}
    base = fingerprint_of(codes, "a" * 64, two)
    assert base == fingerprint_of(codes, "a" * 64, {"y": "2", "x": "1"})
    others = [
        fingerprint_of(codes, "a" * 64, {"x": "2", "y": "1"}),
        fingerprint_of(codes, "b" * 64, two),
        fingerprint_of(codes_of(Key(bytes(32)), "12" * 16), "a" * 64, two),
        fingerprint_of(codes_of(KEY, "34" * 16), "a" * 64, two),
    ]
    assert len({base, *others}) == 5


def rewrite(folder: Path, change) -> None:
    tables = json.loads((folder / NAME).read_text())
    change(tables)
    (folder / NAME).write_text(json.dumps(tables))


def test_wrong_key_and_altered_manifest(folder):
    with pytest.raises(SitusError, match=f"locked with the key {KEY.id}"):
        read_manifest(folder, Key(bytes(32)))
    rewrite(folder, lambda tables: tables.update(key_id=Key(bytes(32)).id))
    with pytest.raises(SitusError, match="HMAC is wrong"):  # signed by another, claimed to be ours
        read_manifest(folder, Key(bytes(32)))


LEAVES = [
    ("situs", "9"),
    ("model", "other"),
    ("lock_id", "34" * 16),
    ("fingerprint", "0" * 64),
    ("sealed", True),
    (("shards", "model.safetensors"), "0" * 64),
    (("files", "config.json"), "0" * 64),
    (("tensors", "head.weight", "code"), "0" * 64),
    (("groups", 0, "name"), "residual.9"),
    (("groups", 0, "kind"), "hidden"),
    (("groups", 1, "members", 0, "outer"), 1),
    (("groups", 1, "size"), 8),
    (("hmac",), "0" * 64),
]


@pytest.mark.parametrize(("where", "value"), LEAVES, ids=str)
def test_no_field_can_be_altered(folder, where, value):
    def change(tables):
        *path, last = (where,) if isinstance(where, str) else where
        for step in path:
            tables = tables[step]
        assert tables[last] != value
        tables[last] = value

    rewrite(folder, change)
    with pytest.raises(SitusError):
        read_manifest(folder, KEY)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(version=0), "version is 0, .* reads version 2"),
        (dict(version=1), "version is 1, .* reads version 2: open it with the version"),
        (dict(version=3), "version is 3"),
        (dict(version=True), "version is True"),
        (dict(format="other"), "not in the format"),
        (dict(extra=1), "unknown key"),
        (dict(key_id="xyz"), "key_id must be 16"),
        (dict(lock_id=5), "lock_id"),
        (dict(layout="0" * 64), "hash of tensor names"),
        (dict(hmac=""), "no HMAC"),
        (dict(shards={}), "no weight file"),
        (dict(shards={"../model.safetensors": "e" * 64}), "not the name of a file"),
        (dict(files={"/etc/passwd": "e" * 64}), "not the name of a file"),
        (dict(files={"a/../b": "e" * 64}), "not the name of a file"),
        (dict(files={"a//b": "e" * 64}), "not the name of a file"),
        (dict(files={NAME: "e" * 64}), "not the name of a file"),
        (dict(files={"model.safetensors": "e" * 64}), "a file twice"),
        (dict(groups=[]), "no group"),
    ],
)
def test_malformed_manifests_say_why(folder, change, said):
    rewrite(folder, lambda tables: tables.update(change))
    with pytest.raises(SitusError, match=said):
        read_manifest(folder, KEY)
    with pytest.raises(SitusError, match=said):
        read_manifest(folder, None)


WITHHELD = {"parts": ["embedding", "blocks=1"], "tensors": ["freqs"], "header": "7" * 64}
CODES = [
    ("key_id",), ("lock_id",), ("layout",), ("fingerprint",), ("hmac",), ("shards", "model.safetensors"),
    ("files", "config.json"), ("files", "1_Pooling/config.json"), ("tensors", "head.weight", "code"),
    ("tensors", "freqs", "code"), ("withheld", "header"),
]  # fmt: skip


@pytest.mark.parametrize("where", CODES, ids=".".join)
@pytest.mark.parametrize(
    "wrong", [lambda c: c[:-1], lambda c: c + "0", lambda c: c[:-1] + "g", lambda c: "A" + c[1:], lambda c: "²" + c[1:],
              lambda c: c[:-1] + "\n", lambda _: ""],
)  # fmt: skip
def test_every_code_is_so_many_lower_case_digits(folder, where, wrong):
    """Also where nobody has the key to find the HMAC wrong."""

    def change(tables):
        tables["withheld"] = dict(WITHHELD)
        *path, last = where
        for step in path:
            tables = tables[step]
        tables[last] = wrong(tables[last])

    rewrite(folder, change)
    said = "no HMAC|hexadecimal digits" if where == ("hmac",) else "must be (16|32|64) hexadecimal digits"
    with pytest.raises(SitusError, match=said):
        read_manifest(folder, None)


@pytest.mark.parametrize(
    "change",
    [
        dict(parts=[]), dict(parts=["head"]), dict(parts=["blocks=0"]), dict(parts=["blocks"]), dict(tensors=[]),
        dict(tensors=["nothing"]), dict(tensors=["freqs", "freqs"]), dict(tensors=[*TENSORS]), dict(more=1),
    ],
)  # fmt: skip
def test_what_is_withheld_fits_the_tensors(folder, change):
    rewrite(folder, lambda tables: tables.update(withheld=dict(WITHHELD)))
    assert read_manifest(folder, None).withheld_names() == {"freqs"}
    rewrite(folder, lambda tables: tables["withheld"].update(change))
    with pytest.raises(SitusError, match=r"withheld|unknown key"):
        read_manifest(folder, None)


def test_no_byte_of_the_file_can_change(folder):
    """Not even white space, or the order of keys: what is signed is the text."""
    text = (folder / NAME).read_text()
    tables = json.loads(text)
    assert text == json.dumps(tables, indent=1) + "\n"
    swapped = tables | {"files": dict(reversed(tables["files"].items()))}
    others = [
        text + "\n",
        text[:-1],
        " " + text,
        text.replace('": ', '":  ', 1),
        json.dumps(tables),
        text.replace("v", "\\u0076", 1),
    ]
    for other in (
        *others,
        json.dumps(swapped, indent=1) + "\n",
        json.dumps(dict(reversed(tables.items())), indent=1) + "\n",
    ):
        assert json.loads(other) == tables
        (folder / NAME).write_text(other)
        with pytest.raises(SitusError, match="altered"):
            read_manifest(folder, KEY)
    (folder / NAME).write_text(text)
    assert read_manifest(folder, KEY)


def test_shares_are_counted():
    whole = manifest()
    assert whole.count(whole.tensors) == 8 * 6 + 18 * 6 + 2 * 2 * 3 * 4 + 3 * 6 and whole.count([]) == 0
    assert whole.withheld_names() == frozenset()


MEMBER = {"tensor": "head.weight", "axis": 1, "outer": 1, "inner": 1, "start": 0, "length": None, "at": None}


@pytest.mark.parametrize(
    "change",
    [
        dict(tensor="nothing"),
        dict(axis=2),
        dict(axis=-1),
        dict(outer=0),
        dict(inner=2),
        dict(inner=0),
        dict(start=-1),
        dict(start=-1, length=6),
        dict(start=1),
        dict(start=3, length=6),
        dict(length=5),
        dict(at=[1, 0]),
        dict(at=[0, 3]),
        dict(at=[0, -1]),
        dict(at=[2, 0]),
        dict(at=[-1, 0]),
        dict(at=[5, 0]),
    ],
)
def test_groups_that_do_not_fit_are_refused(folder, change):
    rewrite(folder, lambda tables: tables["groups"][0].update(members=[MEMBER | change]))
    with pytest.raises(SitusError, match="group"):
        read_manifest(folder, None)


@pytest.mark.parametrize(
    ("size", "change"),
    [
        (6, {}),
        (6, dict(length=6)),
        (5, dict(start=1)),  # to the end of its axis
        (5, dict(start=1, length=5)),
        (3, dict(start=0, length=3)),
        (1, dict(start=5, length=1)),
        (2, dict(inner=3)),
        (1, dict(outer=2, inner=3)),
        (3, dict(axis=0)),
        (3, dict(axis=0, at=[1, 5])),
        (6, dict(at=[0, 0])),
        (6, dict(at=[0, 2])),
    ],
)
def test_groups_that_fit_to_the_last_entry_are_taken(folder, size, change):
    rewrite(folder, lambda tables: tables["groups"][0].update(size=size, members=[MEMBER | change]))
    (member,) = read_manifest(folder, None).groups[0].members
    assert member == Member(**MEMBER | change | ({"at": tuple(change["at"])} if "at" in change else {}))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_a_pipe_or_a_folder_in_its_place_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / NAME)
    (tmp_path / "a" / NAME).mkdir(parents=True)
    for place in (tmp_path, tmp_path / "a"):
        with pytest.raises(SitusError, match="is not a file"):
            read_manifest(place, KEY)


@pytest.mark.parametrize("entry", [{"dtype": "X9"}, {"dtype": ""}, {"shape": [-1, 6]}, {"shape": [3, 2**48]}], ids=str)
def test_a_tensor_has_a_dtype_and_a_shape(folder, entry):
    rewrite(folder, lambda tables: tables["tensors"]["head.weight"].update(entry))
    with pytest.raises(SitusError, match=r"'head\.weight' has an invalid dtype or shape"):
        read_manifest(folder, None)


def test_a_manifest_has_a_size_limit(folder, monkeypatch):
    size = (folder / NAME).stat().st_size
    monkeypatch.setattr(module, "LARGEST_FILE", size)
    assert read_manifest(folder, KEY).model == "vit"
    monkeypatch.setattr(module, "LARGEST_FILE", size - 1)
    with pytest.raises(SitusError, match="is not a valid manifest: it is too large"):
        read_manifest(folder, KEY)


def test_a_folder_that_is_none_cannot_be_read(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SitusError, match=f"{tmp_path / 'file' / NAME}: cannot be read: not a directory"):
        read_manifest(tmp_path / "file", KEY)


def test_not_a_locked_folder(tmp_path):
    with pytest.raises(SitusError, match="not a locked model"):
        read_manifest(tmp_path, KEY)
    (tmp_path / NAME).write_bytes(b'{"format": "situs-lock", "version": 2, "version": 2}')
    with pytest.raises(SitusError, match="not valid JSON"):
        read_manifest(tmp_path, KEY)
    (tmp_path / NAME).write_bytes(b"[" * 200_000)
    with pytest.raises(SitusError, match="not valid JSON"):
        read_manifest(tmp_path, KEY)


@given(raw=st.binary(max_size=300))
@example(raw=b"\xff\xfe")
@example(raw=b'{"format":"situs-lock","version":1e400}')
@example(raw=b'{"format":"situs-lock","version":' + b"9" * 5000 + b"}")
def test_no_bytes_crash_or_load(tmp_path_factory, raw):
    place = tmp_path_factory.mktemp("manifest")
    (place / NAME).write_bytes(raw)
    with pytest.raises(SitusError):
        read_manifest(place, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
def test_any_value_in_the_place_of_any_other(tmp_path_factory, data):
    """A random node of the tables replaced by random JSON: read as the same manifest or refused, never a crash."""
    place = tmp_path_factory.mktemp("manifest")
    signed = write_manifest(place, manifest(), KEY)
    tables = json.loads((place / NAME).read_text())
    node, broken = tables, copy.deepcopy(tables)
    step = into = broken
    last: object = None
    while isinstance(node, dict | list) and node and (last is None or data.draw(st.booleans())):
        last = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else list(range(len(node)))))
        into, step, node = step, step[last], node[last]
    into[last] = data.draw(JSON)
    (place / NAME).write_text(json.dumps(broken))
    said = ""
    try:
        assert read_manifest(place, KEY) == signed
    except SitusError as error:
        said = str(error)
    assert len(said) < 600 and "\n" not in said
