from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from launch import torchrun

from situs.errors import SitusError
from situs.train.assemble import begun_there, mark_start
from situs.train.checkpoint import RunFolder, check_target

TIMES = {"seconds", "images_per_second", "data_wait", "memory_gib"}


def under(monkeypatch: pytest.MonkeyPatch, job: str, starts: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(starts))


def test_a_restart_knows_its_own_run_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, "job 7", 0)
    mark_start(tmp_path / "run")
    check_target(tmp_path / "run")  # nothing is there yet
    RunFolder.create(tmp_path / "run", {})
    assert not begun_there(tmp_path / "run")  # a first start goes on with nothing
    under(monkeypatch, "job 7", 1)
    assert begun_there(tmp_path / "run")
    under(monkeypatch, "job 8", 1)
    assert not begun_there(tmp_path / "run")
    with pytest.raises(SitusError, match="already contains a run"):
        check_target(tmp_path / "run")
    RunFolder.create(tmp_path / "other", {})  # without torchrun
    assert not begun_there(tmp_path / "other")


def test_a_torchrun_without_a_name_is_known_by_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, "none", 1)
    mark_start(tmp_path)
    RunFolder.create(tmp_path, {})
    assert begun_there(tmp_path)
    other = os.getppid() + 1
    monkeypatch.setattr(os, "getppid", lambda: other)
    assert not begun_there(tmp_path)


def test_a_folder_half_made_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under(monkeypatch, "job", 1)
    mark_start(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "classes.json").touch()
    assert not begun_there(tmp_path)
    RunFolder.create(tmp_path, {})
    assert begun_there(tmp_path)


def test_without_torchrun_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    mark_start(tmp_path)
    assert list(tmp_path.iterdir()) == []


def started(out: Path, kind: str, *kills: str) -> str:
    script = Path(__file__).with_name("restarted.py")
    return "".join(torchrun("--max-restarts", 3, script, out, kind, *kills, timeout=600))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_torchrun_goes_on_after_ranks_were_killed(tmp_path: Path, kind: str) -> None:
    """First rank 1 is killed before any checkpoint, then rank 0, which holds the folder's lock, then rank 1 again."""
    started(tmp_path / "peace", kind)
    said = started(tmp_path / "killed", kind, "2:1", "7:0", "10:1")
    assert said.count("): the run is resumed") == 3
    assert (tmp_path / "killed.kills").read_text() == "xxx"
    peace, killed = RunFolder.open(tmp_path / "peace"), RunFolder.open(tmp_path / "killed")
    a, b = peace.newest(), killed.newest()
    assert a.step == b.step == 12
    for file in ("model", "optimizer", "generators"):
        left, right = a.tensors(file), b.tensors(file)
        assert left.keys() == right.keys()
        assert left
        assert [name for name in left if not torch.equal(left[name], right[name])] == []
    lines = [[{k: v for k, v in each.items() if k not in TIMES} for each in run.records()] for run in (peace, killed)]
    assert lines[0] == lines[1]
