"""Hundreds of seeded corruptions of every file of a lock: none opens, none hangs, each is told in one sentence."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from situs.cli.main import main
from situs.locks.key import load_key, new_key
from situs.locks.locking import lock
from situs.locks.manifest import NAME

pytest.importorskip("cryptography")

VARIANTS = {
    "plain": dict(),
    "sealed": dict(seal=True),
    "plain, withheld": dict(withhold=("embedding", "blocks=1")),
    "sealed, withheld": dict(seal=True, withhold=("embedding",)),
    "cover": dict(cover=True, withhold=("blocks=1",)),
    "passphrase": dict(),
}
PHRASE = "correct horse"
KEY, SECOND = "owner.key", "second"
LONGEST = 20.0
"""Seconds after which a case counts as hanging; one takes some hundredths."""


@pytest.fixture(autouse=True)
def phrase(monkeypatch):
    monkeypatch.setenv("SITUS_PASSPHRASE", PHRASE)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def locks(model_folder, tmp_path_factory) -> dict[str, tuple[Path, Path]]:
    """variant -> two places, each with key, locked folder and second file: the same model, locked twice."""
    made = {}
    place = tmp_path_factory.mktemp("locks")
    for number, (name, flags) in enumerate(VARIANTS.items()):
        pair = (place / f"{number}a", place / f"{number}b")
        for each in pair:
            each.mkdir()
            if each is pair[0]:
                new_key(each / KEY, PHRASE if name == "passphrase" else None)
            else:
                shutil.copy(pair[0] / KEY, each / KEY)
            second = each / SECOND if "withhold" in flags else None
            lock(model_folder("vit"), load_key(each / KEY, PHRASE), each / "locked", withheld=second, **flags)
        made[name] = pair
    return made


# --- what can happen to a file ------------------------------------------------------------------------------


def flip(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    for _ in range(draw.choice((1, 1, 1, 2, 5))):
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    return raw


def cut(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    return raw[: draw.randrange(len(raw))]


def add(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    at = draw.choice((0, len(raw), draw.randrange(len(raw))))
    return raw[:at] + draw.randbytes(draw.randint(1, 40)) + raw[at:]


def swap(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    size = min(draw.choice((1, 4, 64)), len(raw) // 2)
    a = draw.randrange(len(raw) - size)
    b = draw.randrange(len(raw) - size)
    raw[a : a + size], raw[b : b + size] = raw[b : b + size], raw[a : a + size]
    return raw


def blank(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    size = min(len(raw), draw.choice((1, 16, 512)))
    at = draw.randrange(len(raw) - size + 1)
    raw[at : at + size] = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))
    return raw


def another(_: bytearray, __: random.Random, other: bytes) -> bytes:
    """The file of the same name from another lock of the same model with the same key."""
    return other


def nothing(*_: Any) -> bytes:
    return b""


def edit(raw: bytearray, draw: random.Random, _: bytes) -> bytes:
    """JSON that is still JSON: a value changed, taken out, put in, or one exchanged for its neighbour's."""
    tables = json.loads(raw)
    node, path = tables, []
    while isinstance(node, dict | list) and node and (not path or draw.random() < 0.8):
        path.append(draw.choice(list(node)) if isinstance(node, dict) else draw.randrange(len(node)))
        node = node[path[-1]]
    parent = tables
    for step in path[:-1]:
        parent = parent[step]
    deed = draw.choice(("value", "delete", "extra", "neighbour"))
    values = [None, True, -1, 0, 2**70, 1e300, "", "x" * 64, "0" * 64, [], {}, [[1]], {"a": 1}, "é"]
    if deed == "delete":
        del parent[path[-1]]
    elif deed == "extra" and isinstance(parent, dict):
        parent[f"extra{draw.randrange(9)}"] = draw.choice(values)
    elif deed == "neighbour" and isinstance(parent, dict):
        parent[path[-1]] = parent[draw.choice(list(parent))]
    else:
        parent[path[-1]] = draw.choice(values)
    return (json.dumps(tables, indent=draw.choice((1, 1, 2, None))) + "\n").encode()


Deed = Callable[[bytearray, random.Random, bytes], bytes]
DEEDS: tuple[Deed, ...] = (flip, flip, cut, add, swap, blank, another, nothing, edit, edit)


def corrupt(place: Path, other: Path, draw: random.Random) -> str:
    """One corruption of one file; what was done. Draws again until something has changed."""
    before = contents(place)
    while True:
        name = draw.choice([*before, f"locked/{NAME}", f"locked/{NAME}", KEY])
        path = place / name
        if draw.random() < 0.08:
            path.unlink()
            return f"{name} deleted"
        if draw.random() < 0.08:
            twin = draw.choice([each for each in before if each != name])
            path.write_bytes(before[twin])
            if before[twin] != before[name]:
                return f"{name} is a copy of {twin}"
        deed = draw.choice(DEEDS)
        if deed is edit and not name.endswith((NAME, KEY)):
            continue
        theirs = (other / name).read_bytes() if (other / name).exists() else b""
        changed = bytes(deed(bytearray(before[name]), draw, theirs))
        if changed != before[name]:
            path.write_bytes(changed)
            return f"{name}: {deed.__name__}"


# --- the trial ----------------------------------------------------------------------------------------------


def trial(seed: int, locks: dict[str, tuple[Path, Path]], place: Path, source: Path, capsys: Any) -> str:
    """'refused', or 'same' where the key was only spelled in another way; anything else fails."""
    draw = random.Random(seed)
    variant = draw.choice(list(VARIANTS))
    original, other = locks[variant]
    shutil.copytree(original, place)
    done = f"seed {seed}, {variant}: {corrupt(place, other, draw)}"
    words = ["unlock", str(place / "locked"), "--key", str(place / KEY), "--out", str(place / "open")]
    if "withhold" in VARIANTS[variant]:
        words += ["--withheld", str(place / SECOND)]
    capsys.readouterr()
    start = time.monotonic()
    status = main(words)
    assert time.monotonic() - start < LONGEST, done
    shown = capsys.readouterr()
    try:
        if status == 0:
            assert load_key(place / KEY, PHRASE) == load_key(original / KEY, PHRASE), done
            assert contents(place / "locked") == contents(original / "locked"), done
            assert contents(place / "open") == contents(source), done
            return "same"
        assert status == 2, done
        assert shown.err.startswith("situs: ") and shown.err.count("\n") == 1 and len(shown.err) < 900, (
            f"{done}: {shown.err}"
        )
        assert "Traceback" not in shown.err and shown.out == "", done
        assert not (place / "open").exists() and not list(place.glob(".*")), done
        return "refused"
    finally:
        shutil.rmtree(place)


def count(seeds: range, locks: Any, tmp_path: Path, source: Path, capsys: Any) -> dict[str, int]:
    ended = [trial(seed, locks, tmp_path / "case", source, capsys) for seed in seeds]
    return {each: ended.count(each) for each in ("refused", "same")}


def test_two_dozen_corruptions(locks, model_folder, tmp_path, capsys):
    found = count(range(24), locks, tmp_path, model_folder("vit"), capsys)
    assert found["refused"] + found["same"] == 24 and found["same"] <= 2


@pytest.mark.slow
def test_four_hundred_corruptions(locks, model_folder, tmp_path, capsys):
    found = count(range(1000, 1400), locks, tmp_path, model_folder("vit"), capsys)
    assert found["refused"] + found["same"] == 400 and found["same"] <= 10
    with capsys.disabled():
        print(f"\n400 corruptions: {found}")


def test_uncorrupted_it_opens(locks, model_folder, tmp_path):
    """So that the refusals above are for the corruption."""
    for number, (variant, (place, _)) in enumerate(locks.items()):
        out = tmp_path / str(number)
        also = ["--withheld", str(place / SECOND)] if "withhold" in VARIANTS[variant] else []
        assert main(["unlock", str(place / "locked"), "--key", str(place / KEY), "--out", str(out), *also]) == 0
        assert contents(out) == contents(model_folder("vit"))
