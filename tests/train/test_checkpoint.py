from __future__ import annotations

import errno
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from situs.errors import SitusError
from situs.train import checkpoint
from situs.train.checkpoint import RunFolder

CONFIG = {"train": {"epochs": 10, "seed": 0, "log_every": 50}, "optim": {"lr": 1e-3, "betas": [0.9, 0.95]}, "out": "a"}


def files(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((100,), value)}, "ema": {"w": torch.zeros(3)}}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "run", CONFIG)


def latest_value(run: RunFolder) -> float:
    found = run.latest()
    assert found is not None
    return float(found.tensors("model")["w"][0])


def test_a_checkpoint_comes_back(run: RunFolder) -> None:
    run.save(7, files(1.5), {"epoch": 2, "names": ["loss"]}, keep=2)
    found = run.latest()
    assert found is not None
    assert (found.step, found.state["epoch"], found.state["names"]) == (7, 2, ["loss"])
    assert latest_value(run) == 1.5
    assert found.tensors("absent") == {}


def test_only_the_newest_are_kept(run: RunFolder) -> None:
    for step in (9, 10, 100, 1000):
        run.save(step, files(step), {}, keep=2)
    assert sorted(run.steps()) == [100, 1000]
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["step-00000100", "step-00001000"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "state", "empty"])
def test_a_torn_checkpoint_is_passed_over(run: RunFolder, damage: str) -> None:
    run.save(1, files(1.0), {}, keep=3)
    torn = run.save(2, files(2.0), {}, keep=3)
    weights = torn / "model.safetensors"
    data = weights.read_bytes()
    if damage == "truncate":
        weights.write_bytes(data[:-100])
    elif damage == "flip":
        weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    elif damage == "delete":
        (torn / "ema.safetensors").unlink()
    elif damage == "state":
        (torn / "state.json").write_text((torn / "state.json").read_text()[:-20])
    else:
        shutil.rmtree(torn)
        torn.mkdir()
    assert latest_value(run) == 1.0
    assert "step 2 is torn" in run.notes[0]
    # The run comes past it again: the torn one gives way, nothing else is lost.
    run.save(2, files(2.5), {}, keep=3)
    assert latest_value(run) == 2.5
    assert sorted(run.steps()) == [1, 2]


def test_a_torn_newer_one_does_not_count_among_the_kept(run: RunFolder) -> None:
    for step in (1, 2, 9):
        run.save(step, files(step), {}, keep=3)
    (run.checkpoints / "step-00000009" / "state.json").unlink()
    run.save(3, files(3.0), {}, keep=2)
    assert sorted(run.steps()) == [2, 3]


def test_what_a_crash_left_half_written_is_swept_away(run: RunFolder) -> None:
    run.save(1, files(1.0), {}, keep=2)
    (run.checkpoints / ".writing-step-00000002").mkdir()
    again = RunFolder.open(run.path)
    assert [p.name for p in again.checkpoints.iterdir()] == ["step-00000001"]


# --- a full disk --------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_last_checkpoint(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    run.save(1, files(1.0), {}, keep=2)
    real = checkpoint.write_tensors

    def full(path: Path, tensors: dict) -> None:
        if path.name == "ema.safetensors":  # the second file: the first is already there
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, tensors)

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises(SitusError) as caught:
        run.save(2, files(2.0), {}, keep=2)
    sentence = str(caught.value)
    assert "checkpoint of step 2" in sentence
    assert "no space left on device" in sentence
    assert "that of step 1 is whole" in sentence
    assert "\n" not in sentence
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000001"]
    assert latest_value(run) == 1.0


def test_a_really_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("no mount")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        run = RunFolder.create(disk / "run", CONFIG)
        run.save(1, files(1.0), {}, keep=2)
        big = {"model": {"w": torch.zeros(50_000)}, "optimizer": {"w": torch.zeros(50_000)}}
        with pytest.raises(SitusError, match=r"step 2 could not be written: no space left on device.*step 1 is whole"):
            run.save(2, big, {}, keep=2)
        assert [p.name for p in run.checkpoints.iterdir()] == ["step-00000001"]
        assert latest_value(run) == 1.0
        with pytest.raises(SitusError, match=r"metrics\.jsonl could not be written: no space left"):
            run.append({"step": 1, "text": "x" * 300_000})
    finally:
        subprocess.run(["umount", disk], check=True)


# --- configs ------------------------------------------------------------------------------------------------


def changed(**fields: object) -> dict:
    new = json.loads(json.dumps(CONFIG))
    for path, value in fields.items():
        room, _, name = path.partition("__")
        if name:
            new[room][name] = value
        else:
            new[room] = value
    return new


def test_another_config_is_refused_in_one_sentence(run: RunFolder) -> None:
    other = changed(optim__lr=2e-3, train__seed=1, train__epochs=20)
    with pytest.raises(SitusError) as caught:
        RunFolder.open(run.path, other)
    sentence = str(caught.value)
    assert "train.seed was 0 and is now 1" in sentence
    assert "optim.lr was 0.001 and is now 0.002" in sentence
    assert "epochs" not in sentence
    assert "\n" not in sentence
    assert json.loads((run.path / "config.json").read_text()) == CONFIG  # nothing was written


def test_many_differences_are_counted(run: RunFolder) -> None:
    other = changed(optim__lr=1, optim__betas=[0.5, 0.5], train__seed=1, optim__a=1, optim__b=2)
    with pytest.raises(SitusError, match="and 2 more fields"):
        RunFolder.open(run.path, other)


def test_some_fields_may_change_and_are_told(run: RunFolder) -> None:
    other = changed(train__epochs=20, train__log_every=5, out="b")
    again = RunFolder.open(run.path, other)
    assert sorted(again.notes) == ["out: a -> b", "train.epochs: 10 -> 20", "train.log_every: 50 -> 5"]
    assert json.loads((run.path / "config.json").read_text()) == CONFIG  # the loop may still refuse it
    again.adopt_config()
    assert RunFolder.open(run.path).config == other


def test_a_folder_that_holds_a_run_is_not_overwritten(run: RunFolder) -> None:
    with pytest.raises(SitusError, match="already holds a run; go on with --resume"):
        RunFolder.create(run.path, CONFIG)


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match=r"holds no run.*--resume"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SitusError, match=r"config\.json cannot be read"):
        RunFolder.open(tmp_path)


def test_another_rank_writes_nothing(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", CONFIG, writer=False)
    assert not (tmp_path / "run").exists()


# --- metrics ------------------------------------------------------------------------------------------------


def test_metrics_go_back_to_the_checkpoint(run: RunFolder) -> None:
    for step in (5, 10, 10, 15):
        run.append({"step": step, "loss": 0.1})
    with run.metrics.open("a") as file:
        file.write('{"step": 20, "lo')  # a crash
    assert [r["step"] for r in run.records()] == [5, 10, 10, 15]
    run.truncate(10)
    assert run.metrics.read_text() == '{"step": 5, "loss": 0.1}\n' + 2 * '{"step": 10, "loss": 0.1}\n'
    run.append({"step": 15})
    assert [r["step"] for r in run.records()] == [5, 10, 10, 15]


def test_a_broken_line_in_the_middle_is_an_error(run: RunFolder) -> None:
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(SitusError, match="line 2 is no JSON"):
        run.records()
