from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from situs.cli.model_args import read_key
from situs.errors import SitusError
from situs.locks.key import (
    LARGEST_FILE,
    Codes,
    Key,
    Wrapping,
    codes_of,
    derive,
    fisher_yates,
    load_key,
    needs_passphrase,
    new_key,
)

pytest.importorskip("cryptography")

KEY = Key(bytes(range(32)))


@dataclass(frozen=True)
class G:
    name: str
    size: int


# --- the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 16, 31, 33])
def test_a_seed_of_another_length_is_no_key(size):
    with pytest.raises(SitusError, match=f"the seed of a key has {size} bytes, but must have 32 bytes") as raised:
        Key(bytes(size))
    assert raised.value.field == "seed"


def test_file_holds_the_seed_for_its_owner_alone(tmp_path):
    path = tmp_path / "owner.key"
    key = new_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_key(path) == key and not needs_passphrase(path)
    held = json.loads(path.read_text())
    assert base64.b64decode(held["seed"]) == key.seed and held["id"] == key.id and held["version"] == 1
    assert list(tmp_path.iterdir()) == [path]
    assert new_key(tmp_path / "second.key").seed != key.seed
    assert key.seed.hex() not in repr(key) and repr(key.seed) not in repr(key)


def test_passphrase_wraps_the_seed(tmp_path):
    path = tmp_path / "owner.key"
    key = new_key(path, "correct horse")
    assert needs_passphrase(path)
    assert base64.b64encode(key.seed).decode() not in path.read_text()
    assert load_key(path, "correct horse") == key
    with pytest.raises(SitusError, match="passphrase is wrong"):
        load_key(path, "correct hors")
    with pytest.raises(SitusError, match="has a passphrase"):
        load_key(path)


def test_a_key_that_could_never_be_opened_is_not_written(tmp_path):
    with pytest.raises(SitusError) as caught:
        new_key(tmp_path / "owner.key", "")
    assert caught.value.field == "passphrase" and list(tmp_path.iterdir()) == []


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "owner.key"
    key = new_key(path)
    with pytest.raises(SitusError, match="never overwritten"):
        new_key(path)
    assert load_key(path) == key


OPEN = [0o600 | bit for bit in (0o40, 0o20, 0o10, 0o4, 0o2, 0o1)] + [
    0o640,
    0o604,
    0o660,
    0o606,
    0o644,
    0o666,
    0o440,
    0o777,
]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", OPEN, ids=oct)
@pytest.mark.parametrize("passphrase", [None, "x"], ids=["bare", "wrapped"])
def test_a_key_that_others_may_reach_is_refused(tmp_path, mode, passphrase, monkeypatch):
    """Group and others, reading, writing and running, each bit alone; at every entry that reads a key."""
    monkeypatch.setattr("situs.locks.key._cipher", _Cheap)
    path = tmp_path / "owner.key"
    key = new_key(path, passphrase)
    path.chmod(mode)
    for entry in (load_key, needs_passphrase, read_key, lambda path: load_key(path, "x")):
        with pytest.raises(SitusError, match=rf"{mode:04o}.*chmod 600"):
            entry(path)
    for good in (0o600, 0o400):
        path.chmod(good)
        assert load_key(path, passphrase) == key


class _Cheap:
    """In the place of Argon2 and AES: what is tested comes before both."""

    def __init__(self, *_):
        pass

    def encrypt(self, _nonce, data, _id):
        return data

    decrypt = encrypt


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_what_is_no_file_is_no_key_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(SitusError, match="is not a file"):
            load_key(path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(version=0), "version is 0, .* reads version 1"),
        (dict(version=True), "version is True"),
        (dict(id="0" * 16), "does not belong to its seed"),
        (dict(seed="AAAA"), "does not belong to its seed"),
        (dict(seed="A" * 42 + "B="), "base64"),  # bits that no byte holds
        (dict(seed="§"), "base64"),
        (dict(seed=5), "seed"),
        (dict(extra=1), "unknown key"),
        (dict(passphrase=dict(salt="AAAA", nonce="AAAA")), "out of range"),
    ],
)
def test_altered_file_is_refused(tmp_path, change, said):
    path = tmp_path / "owner.key"
    new_key(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SitusError, match=said):
        load_key(path, "x")


def test_costs_in_the_file_have_a_ceiling(tmp_path):
    path = tmp_path / "owner.key"
    new_key(path, "x")
    held = json.loads(path.read_text())
    for field, value in (
        ("memory", (1 << 20) + 1),
        ("memory", 31),
        ("passes", 17),
        ("passes", 0),
        ("lanes", 0),
        ("lanes", 65),
    ):
        path.write_text(json.dumps(held | {"passphrase": held["passphrase"] | {field: value}}))
        with pytest.raises(SitusError, match="out of range"):
            load_key(path, "x")


def test_costs_at_the_ends_of_what_is_allowed() -> None:
    salt, nonce = base64.b64encode(bytes(16)).decode(), base64.b64encode(bytes(12)).decode()
    for passes, memory, lanes in ((1, 8, 1), (16, 1 << 20, 4), (3, 512, 64)):
        assert Wrapping(salt, nonce, passes, memory, lanes).passes == passes
    for short in (dict(salt=base64.b64encode(bytes(15)).decode(), nonce=nonce), dict(salt=salt, nonce=salt)):
        with pytest.raises(SitusError, match="out of range"):
            Wrapping(**short)


def test_a_passphrase_is_stretched_as_rfc_9106_recommends(tmp_path, monkeypatch) -> None:
    profile = pytest.importorskip("argon2.profiles").RFC_9106_LOW_MEMORY
    monkeypatch.setattr("situs.locks.key._cipher", _Cheap)  # only the costs that are written down matter
    new_key(tmp_path / "owner.key", "x")
    made = json.loads((tmp_path / "owner.key").read_text())["passphrase"]
    assert (made["passes"], made["memory"], made["lanes"]) == (
        profile.time_cost, profile.memory_cost, profile.parallelism,
    )  # fmt: skip
    assert len(base64.b64decode(made["salt"])) == profile.salt_len


def test_a_key_file_has_a_size_limit(tmp_path) -> None:
    path = tmp_path / "owner.key"
    key = new_key(path)
    text = path.read_text()
    path.write_text(text.ljust(LARGEST_FILE))
    assert load_key(path) == key
    path.write_text(text.ljust(LARGEST_FILE + 1))
    with pytest.raises(SitusError, match="is not a key file of situs keygen: too large"):
        load_key(path)


def test_a_field_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "owner.key"
    new_key(path)
    path.write_text(path.read_text().replace('"id"', '"version": 1,\n  "id"', 1))
    with pytest.raises(SitusError, match="not valid JSON"):
        load_key(path)


@given(st.binary(max_size=200))
@settings(max_examples=100, deadline=None)
def test_no_bytes_crash_the_reader(tmp_path_factory, raw):
    path = tmp_path_factory.mktemp("keys") / "owner.key"
    path.touch(0o600)
    path.write_bytes(raw)
    with pytest.raises(SitusError):
        load_key(path)


def test_missing_file():
    with pytest.raises(SitusError, match="cannot be read"):
        load_key("nowhere/owner.key")


# --- permutations -------------------------------------------------------------------------------------------


def words_of(*values: int):
    """A source of words that are given, as many as asked for."""
    source = iter(values)
    return lambda count: np.array(list(itertools.islice(source, count)), dtype=np.uint64)


def test_every_permutation_equally_often():
    """Every combination of words once: each of the 24 permutations of 4 comes once."""
    counts = Counter(
        tuple(fisher_yates(4, words_of(a, b, c)).tolist())
        for a, b, c in itertools.product(range(4), range(3), range(2))
    )
    assert len(counts) == 24 and set(counts.values()) == {1}


def test_a_word_of_the_incomplete_multiple_is_drawn_again():
    # 2^64 = 1 mod 3: the word 2^64 - 1 alone would favour 0. 2^64 = 0 mod 4 and mod 2: nothing is redrawn there.
    top = 2**64 - 1
    redrawn = fisher_yates(4, words_of(1, top, 0, 2))
    assert redrawn.tolist() == fisher_yates(4, words_of(1, 2, 0)).tolist()
    assert redrawn.tolist() != fisher_yates(4, words_of(1, top % 3, 0)).tolist()
    assert fisher_yates(3, words_of(top - 1, 0)).tolist() == fisher_yates(3, words_of((top - 1) % 3, 0)).tolist()


def slow(key: Key, group: G, fingerprint: str, lock_id: str) -> list[int]:
    """HKDF by RFC 5869, ChaCha20 by RFC 8439, Fisher-Yates one step at a time: nothing of the code under test."""
    words = [text.encode() for text in ("situs permutation 1", group.name, fingerprint, lock_id)]
    info = b"".join(len(word).to_bytes(4, "big") + word for word in words)
    pseudorandom = hmac.new(bytes(32), key.seed, hashlib.sha256).digest()
    secret = hmac.new(pseudorandom, info + b"\x01", hashlib.sha256).digest()
    stream = b"".join(chacha_block(secret, counter) for counter in range(-(-group.size // 8)))
    order = list(range(group.size))
    for step, i in enumerate(range(group.size - 1, 0, -1)):
        word = int.from_bytes(stream[8 * step : 8 * step + 8], "little")
        assert word < 2**64 - 2**64 % (i + 1)
        j = word % (i + 1)
        order[i], order[j] = order[j], order[i]
    return order


def chacha_block(secret: bytes, counter: int) -> bytes:
    def turn(x: int, by: int) -> int:
        return ((x << by) | (x >> (32 - by))) & 0xFFFFFFFF

    def quarter(s: list[int], a: int, b: int, c: int, d: int) -> None:
        for into, add, mix, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
            s[into] = (s[into] + s[add]) & 0xFFFFFFFF
            s[mix] = turn(s[mix] ^ s[into], by)

    start = [0x61707865, 0x3320646E, 0x79622D32, 0x6B206574]
    start += [int.from_bytes(secret[4 * i : 4 * i + 4], "little") for i in range(8)] + [counter, 0, 0, 0]
    s = list(start)
    for _ in range(10):
        for i in range(4):
            quarter(s, i, 4 + i, 8 + i, 12 + i)
        for i in range(4):
            quarter(s, i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4)
    return b"".join(((x + y) & 0xFFFFFFFF).to_bytes(4, "little") for x, y in zip(s, start, strict=True))


@pytest.mark.parametrize("size", [1, 2, 3, 17, 768])
def test_derive_is_hkdf_chacha_fisher_yates(size):
    group = G("blocks.3.mlp", size)
    got = derive(KEY, [group], "ab" * 32, "cd" * 16)["blocks.3.mlp"]
    assert got.dtype == torch.int64 and sorted(got.tolist()) == list(range(size))
    assert got.tolist() == slow(KEY, group, "ab" * 32, "cd" * 16)


def test_two_models_under_one_key_share_nothing():
    """Fixed points between unrelated permutations are Poisson with mean 1: 20 would happen once in 10^18."""
    group = G("residual", 768)
    base = derive(KEY, [group, G("other", 768)], "a" * 64, "b" * 32)
    others = [
        base["other"],
        derive(KEY, [group], "c" * 64, "b" * 32)["residual"],  # another model
        derive(KEY, [group], "a" * 64, "d" * 32)["residual"],  # the same one, locked again
        derive(Key(bytes(32)), [group], "a" * 64, "b" * 32)["residual"],  # another key
    ]
    for other in others:
        assert (base["residual"] == other).sum() < 20
        assert (base["residual"][other].argsort() == torch.arange(768)).sum() < 20


def test_parts_of_the_derivation_do_not_run_into_each_other():
    assert KEY.subkey("p", "ab", "c") != KEY.subkey("p", "a", "bc")
    assert KEY.subkey("p", "a") != KEY.subkey("pa") and KEY.subkey("p") != KEY.subkey("p", "")


def test_codes_are_hmac_of_kind_name_and_bytes():
    codes = codes_of(KEY, "ab" * 16)
    assert codes == Codes(KEY.subkey("codes", "ab" * 16)) and repr(codes.secret) not in repr(codes)
    text = b"\0\0\0\4file\0\0\0\1xhello"
    assert codes.of("file", "x", b"hello") == hmac.new(codes.secret, text, "sha256").hexdigest()
    assert codes.of("file", "xh", b"ello") != codes.of("file", "x", b"hello") != codes.of("tensor", "x", b"hello")
    assert codes.of("file", "\udc80", b"")  # a name of a file that is no UTF-8
    assert len({codes_of(KEY, "a").secret, codes_of(KEY, "b").secret, codes_of(Key(bytes(32)), "a").secret}) == 3


def test_hundreds_of_groups_in_a_second():
    groups = [G(f"blocks.{i}.mlp", 8192) for i in range(50)] + [G(f"blocks.{i}.heads", 768) for i in range(300)]
    start = time.process_time()
    derive(KEY, groups, "a" * 64, "b" * 32)
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("package", ["cryptography.hazmat.primitives.hashes", "argon2.low_level"])
def test_a_missing_extra_is_named(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SitusError, match=r"pip install 'situs\[locks\]'"):
        new_key(tmp_path / "owner.key", "x")
    assert list(tmp_path.iterdir()) == []
