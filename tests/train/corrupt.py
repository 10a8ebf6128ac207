"""Damage to run folders, drawn by a seed, and what resuming them comes to.

Each case copies a run that was stopped half way, harms it in one way and resumes it. There are three fair ends: one
sentence that refuses it, the same weights as without the harm, and nothing else. A run that goes on from an older
checkpoint must say so. Everything runs in one process, on the toy method, without a console.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from toy import ToyLoader, toy

from situs.errors import SitusError
from situs.measure.runs import read_runs
from situs.progress import notes_to
from situs.train.checkpoint import RunFolder
from situs.train.config import TrainConfig
from situs.train.contract import RunState
from situs.train.loop import fit
from situs.train.optim import OptimConfig

TRAIN = TrainConfig(epochs=2, precision="fp32", log_every=2, save_every=3, keep=2)
OPTIM = OptimConfig(lr=1e-2, warmup_epochs=0, ema=0.9)
CONFIG = {"train": {"epochs": 2, "save_every": 3, "seed": 0}, "optim": {"lr": 1e-2, "ema": 0.9}, "data": {"path": "x"}}
STOP, LAST = 7, 10


class Stop:
    """Breaks the run off after a step, as a crash would: no checkpoint is written there."""

    def after_step(self, state: RunState) -> None:
        if state.step == STOP:
            raise RuntimeError("crash")

    def after_epoch(self, state: RunState) -> None:
        pass


def go(run: RunFolder, hooks: tuple[Any, ...] = ()) -> dict[str, torch.Tensor]:
    """Trains to the end; the weights and their mean."""
    method = toy(drop_path=0.3)
    fit(method, ToyLoader(), TRAIN, OPTIM, run, hooks=hooks)
    found = run.latest()
    assert found is not None
    assert found.step == LAST
    return {**method.state_dict(), **{f"ema.{k}": v for k, v in found.tensors("ema").items()}}


def prepare(folder: Path) -> tuple[Path, dict[str, torch.Tensor], list[dict[str, Any]]]:
    """A run that crashed after step 7 with whole checkpoints of steps 3 and 6; weights and log of one that did not."""
    peace = RunFolder.create(folder / "peace", CONFIG, classes=["a", "b", "c"])
    weights = go(peace)
    broken = RunFolder.create(folder / "broken", CONFIG, classes=["a", "b", "c"])
    with contextlib.suppress(RuntimeError):
        go(broken, (Stop(),))
    assert sorted(broken.steps()) == [3, 6]
    return broken.path, weights, timeless(peace)


def timeless(run: RunFolder) -> list[dict[str, Any]]:
    """The log without what a clock had a hand in."""
    aside = {"seconds", "images_per_second", "data_wait", "memory_gib"}
    return [{k: v for k, v in record.items() if k not in aside} for record in run.records()]


# --- harm ---------------------------------------------------------------------------------------------------


def flip(data: bytes, chance: random.Random) -> bytes:
    """One bit."""
    place = chance.randrange(len(data))
    return data[:place] + bytes([data[place] ^ (1 << chance.randrange(8))]) + data[place + 1 :]


def swap(data: bytes, chance: random.Random) -> bytes:
    """Two neighbouring bytes."""
    place = chance.randrange(len(data) - 1)
    return data[:place] + data[place + 1 : place + 2] + data[place : place + 1] + data[place + 2 :]


def zero(data: bytes, chance: random.Random) -> bytes:
    """A block that the disk lost."""
    place = chance.randrange(len(data))
    return data[:place] + bytes(len(data[place : place + 512])) + data[place + 512 :]


BYTES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "flip": flip,
    "swap": swap,
    "zero": zero,
    "cut": lambda data, chance: data[: chance.randrange(len(data))],
    "grow": lambda data, chance: data + chance.randbytes(chance.randrange(1, 100)),
    "repeat": lambda data, chance: data + data[chance.randrange(len(data)) :],
}


def edit(table: Any, chance: random.Random) -> Any:
    """A value of a JSON table changed, added or taken away, at any depth."""
    if isinstance(table, dict) and table:
        key = chance.choice(sorted(table))
        what = chance.randrange(4)
        if what == 0:
            return {k: v for k, v in table.items() if k != key}
        if what == 1:
            return {**table, "more": chance.choice([None, 1, "x", [], {}])}
        return {**table, key: edit(table[key], chance)}
    if isinstance(table, bool) or table is None:
        return chance.choice([not table, 0, "x"])
    if isinstance(table, (int, float)):
        return chance.choice([table + 1, -table - 1, table * 2 + 1, str(table), 10**30])
    return chance.choice([None, 7, f"{table}x", [table]])


def edit_json(path: Path, chance: random.Random) -> None:
    """One value of a JSON file (or of one line of a log)."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    place = chance.randrange(len(lines))
    lines[place] = json.dumps(edit(json.loads(lines[place]), chance))
    path.write_text("\n".join(lines) + "\n")


def files(folder: Path) -> list[Path]:
    """The run's files. JSON comes as often as tensors, though it has a thousandth of the bytes."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def free_name(path: Path, chance: random.Random) -> Path:
    """The name of another step, of which there is no checkpoint."""
    names = [path.with_name(f"step-{step:08d}") for step in range(1, 20)]
    return chance.choice([name for name in names if not name.exists()])


def harm(folder: Path, kind: str, chance: random.Random) -> str:
    """Harms the run in one way; says where."""
    path = chance.choice(files(folder))
    if kind in BYTES:
        path.write_bytes(BYTES[kind](path.read_bytes(), chance))
    elif kind == "edit":
        path = chance.choice([path for path in files(folder) if path.suffix in (".json", ".jsonl")])
        edit_json(path, chance)
    elif kind == "delete":
        path.unlink()
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "exchange":
        other = chance.choice([each for each in files(folder) if each != path])
        mine, theirs = path.read_bytes(), other.read_bytes()
        path.write_bytes(theirs)
        other.write_bytes(mine)
        kind = f"exchange {other.name},"
    elif kind == "both":  # one file in each checkpoint: nothing whole is left
        for step in sorted((folder / "checkpoints").iterdir()):
            path = chance.choice(files(step))
            path.write_bytes(flip(path.read_bytes(), chance))
    elif kind == "rename":
        path = chance.choice(sorted((folder / "checkpoints").iterdir()))
        path.rename(free_name(path, chance))
    elif kind == "copy":
        path = chance.choice(sorted((folder / "checkpoints").iterdir()))
        shutil.copytree(path, free_name(path, chance))
    elif kind == "checkpoints":
        path = folder / "checkpoints"
        shutil.rmtree(path)
    else:
        raise AssertionError(kind)
    return f"{kind} {os.path.relpath(path, folder)}"


KINDS = (*BYTES, "edit", "edit", "delete", "empty", "folder", "exchange", "both", "rename", "copy", "checkpoints")


# --- what comes of it ---------------------------------------------------------------------------------------


def refused(error: SitusError) -> str:
    """One sentence, no more and no less."""
    said = str(error)
    assert said, "no word"
    assert "\n" not in said, f"more than a sentence: {said}"
    return "refused"


def outcome(done: str, folder: Path, weights: dict[str, torch.Tensor], log: list[dict[str, Any]]) -> str:
    """How resuming ends: "refused", "same" or "older"; anything else is an error that names itself."""
    said = io.StringIO()
    try:
        with notes_to(said.write), contextlib.redirect_stderr(said):
            run = RunFolder.open(folder)
            found = go(run)
        records = timeless(run)
        run.classes()
    except SitusError as error:
        return refused(error)
    different = [name for name in weights if not torch.equal(weights[name], found[name])]
    assert not different, f"other weights: {different[:2]}"
    notes = said.getvalue()
    assert "metrics.jsonl" in done or records == log
    if "resumed after step 6" in notes:
        return "same"
    assert "is damaged" in notes or not (folder / "checkpoints" / "step-00000006").exists(), (
        f"went back in silence: {notes}"
    )
    assert "resumed after step 3" in notes
    return "older"


def looked_at(folder: Path) -> None:
    """What only looks at a run, `situs report`, gives its numbers or one sentence."""
    try:
        for record in read_runs([folder])[0].records:
            assert isinstance(record["step"], int)
    except SitusError as error:
        refused(error)


def cases(base: Path, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """`count` harmed runs: (what was done, how it ended)."""
    chance = random.Random(seed)
    broken, weights, log = prepare(base)
    for number in range(count):
        folder = base / "case"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(broken, folder)
        done = harm(folder, KINDS[number % len(KINDS)], chance)
        try:
            looked_at(folder)
            yield done, outcome(done, folder, weights, log)
        except Exception as error:
            raise AssertionError(f"case {number} of seed {seed}: {done}: {type(error).__name__}: {error}") from error


def tally(base: Path, count: int, seed: int) -> Counter[tuple[str, str]]:
    """How many harmed runs of each kind ended how."""
    return Counter((done.split()[0], ended) for done, ended in cases(base, count, seed))
