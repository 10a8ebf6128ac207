"""The golden numbers of `keep.py`: the code computes today what it computed when they were kept."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # beside the other tests, whose helpers stand one folder above

import keep
import training
import verbs

pytest.importorskip("transformers")
pytest.importorskip("soundfile")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return training.write_world(tmp_path_factory.mktemp("golden") / "world")


@pytest.fixture(scope="module")
def looked_at(world: Path) -> Path:
    return verbs.write_runs(world)


def check(kind: str, name: str, world: Path, out: Path) -> None:
    kept = json.loads(keep.file_of(kind, name).read_text(encoding="utf-8"))
    lines = keep.differences(kind, kept, keep.compute(kind, name, world, out / "out"))
    assert not lines, "\n".join(lines)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", training.CASES)
def test_three_steps_of_training(name: str, world: Path, tmp_path: Path) -> None:
    check("training", name, world, tmp_path)


@pytest.mark.thin(2)
@pytest.mark.parametrize("name", keep.EXPORTED)
def test_exports(name: str, world: Path, tmp_path: Path) -> None:
    check("export", name, world, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in verbs.SLOW)) for each in verbs.VERBS]
)
def test_what_a_verb_prints(name: str, looked_at: Path, tmp_path: Path) -> None:
    check("verb", name, looked_at, tmp_path)


@pytest.mark.parametrize("name", verbs.FILES)
def test_what_a_verb_writes(name: str, looked_at: Path, tmp_path: Path) -> None:
    check("verb", name, looked_at, tmp_path)


def test_the_defaults_of_configs(tmp_path: Path) -> None:
    check("defaults", "configs", tmp_path, tmp_path)


def test_every_case_is_kept_and_nothing_else() -> None:
    files = {keep.file_of(*case) for case in keep.names()}
    assert files == set(keep.FOLDER.rglob("*.json"))


@pytest.mark.parametrize(
    ("kept", "now", "lines"),
    [
        ({"loss": 1.0}, {"loss": 1.0 + 2e-9}, 1),
        ({"loss": 1.0}, {"loss": 1.0 + 5e-10}, 0),
        ({"loss": [1.0, 0.1]}, {"loss": 1.05}, 0),
        ({"draw": "ab"}, {"draw": "ac"}, 1),
        ({"count": 3}, {"count": 4}, 1),
        ({"passed": True}, {"passed": False}, 1),
        ({"loss": 1.0}, {"loss": None}, 1),
        ({"loss": 1.0}, {"other": 1.0}, 2),
    ],
)
def test_a_change_is_noticed(kept: dict[str, Any], now: dict[str, Any], lines: int) -> None:
    assert len(keep.differences("training", kept, now)) == lines
