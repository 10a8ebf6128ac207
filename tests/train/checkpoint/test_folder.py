from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from situs.errors import SitusError
from situs.progress import notes_to
from situs.train.checkpoint import RunFolder, read_config, run_and_step
from situs.train.checkpoint.files import read_folder, with_checksum

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


def test_checkpoints_that_are_to_stay_outlive_the_newest(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"seed": 1})
    for step in range(1, 8):
        run.begin(step, files(step), {}, 2, {3, 99})
    run.wait()
    assert sorted(run.steps()) == [3, 6, 7]
    assert run.chosen().step == 7
    assert torch.equal(run.chosen(3).tensors("model")["w"], files(3)["model"]["w"])
    with pytest.raises(SitusError, match="has no checkpoint of step 5; steps with a checkpoint: 3, 6, 7"):
        run.chosen(5)
    assert run_and_step(tmp_path / "run") == (tmp_path / "run", None)
    assert run_and_step(tmp_path / "run" / "checkpoints" / "step-00000003") == (tmp_path / "run", 3)


def test_the_best_is_the_runs_model_where_it_is_kept(tmp_path: Path) -> None:
    for keep_best, wanted in ((True, 2), (False, 4)):
        run = RunFolder.create(tmp_path / str(keep_best), {"train": {"keep_best": keep_best}})
        for step in range(1, 5):
            run.begin(step, files(step), {"best": {"step": min(step, 2), "by": "val_top1", "value": 0.5}}, 1, {2})
        run.wait()
        assert run.chosen().step == wanted and run.newest().step == 4


def test_a_torn_newer_one_does_not_count_among_the_kept(run: RunFolder) -> None:
    for step in (1, 2, 9):
        run.save(step, files(step), {}, keep=3)
    (run.checkpoints / "step-00000009" / "state.json").unlink()
    run.save(3, files(3.0), {}, keep=2)
    assert sorted(run.steps()) == [2, 3]


def test_what_a_crash_left_half_written_is_swept_away(run: RunFolder) -> None:
    run.save(1, files(1.0), {}, keep=2)
    (run.checkpoints / ".writing-step-00000002").mkdir()
    (run.checkpoints / ".removing-step-00000000").touch()
    again = RunFolder.open(run.path)
    assert len(list(again.checkpoints.iterdir())) == 3  # a look takes nothing away
    with again.hold():
        assert [p.name for p in again.checkpoints.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(("late", "waited"), [(0, 0), (3, 3), (29, 29), (30, None)])
def test_a_folder_that_a_rank_sees_late_is_waited_for(
    run: RunFolder, late: int, waited: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    config, hidden = run.path / "config.json", run.path / "hidden"

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == late:
            hidden.rename(config)

    if late:
        config.rename(hidden)
    monkeypatch.setattr("situs.train.checkpoint.folder.time.sleep", sleep)
    if waited is None:
        with pytest.raises(
            SitusError, match="rank 0 cannot access this folder, but with parallel=fsdp every "
        ) as caught:
            run.check_shared(torch.device("cpu"))
        assert caught.value.fields == ("train.parallel", "out")
    else:
        run.check_shared(torch.device("cpu"))
    assert slept == [1] * (30 if waited is None else waited)


# --- every file is covered by a hash ------------------------------------------------------------------------


def test_each_bit_of_a_checkpoint_counts(run: RunFolder) -> None:
    """One flipped bit in each file, state.json with all of its bytes: the checkpoint before is used, or the same."""
    run.save(1, files(1.0), {"epoch": 0, "seconds": 1.5}, keep=3)
    newest = run.save(2, files(2.0), {"epoch": 1, "seconds": 2.5}, keep=3)
    intact = read_folder(newest)
    counts = {"refused": 0, "same": 0}
    for path in sorted(newest.iterdir()):
        whole = path.read_bytes()
        for place in range(0, len(whole), 1 if path.name == "state.json" else 53):
            path.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << place % 8)]) + whole[place + 1 :])
            found = run.latest()
            assert found is not None
            counts["refused" if found.step == 1 else "same"] += 1
            assert found.step == 1 or found.state == intact  # only the space between two words may differ
        path.write_bytes(whole)
    assert counts["refused"] > 500
    assert counts["same"] < 40


def test_a_checkpoint_that_was_renamed_or_is_another_run_s_is_not_taken(run: RunFolder, tmp_path: Path) -> None:
    run.save(1, files(1.0), {}, keep=3)
    shutil.copytree(run.checkpoints / "step-00000001", run.checkpoints / "step-00000031")
    other = RunFolder.create(tmp_path / "other", changed(optim__lr=0.5))
    shutil.copytree(other.save(32, files(3.0), {}, keep=1), run.checkpoints / "step-00000032")
    (run.checkpoints / "step-00000033").write_text("no folder")
    (run.checkpoints / "step-34").mkdir()
    assert latest_value(run) == 1.0
    assert sorted(run.steps()) == [1, 31, 32, 33]
    assert [str(run.look(step)).partition("(")[2] for step in (33, 32, 31)] == [
        "state.json is missing)",
        "it belongs to a run with another config)",
        "it is the checkpoint of step 1)",
    ]
    run.save(33, files(4.0), {}, keep=2)  # in the place of the file
    assert latest_value(run) == 4.0


def test_a_file_that_was_added_is_not_read(run: RunFolder) -> None:
    kept = run.save(1, {"model": {"w": torch.ones(3)}}, {}, keep=1)
    shutil.copy(kept / "model.safetensors", kept / "ema.safetensors")
    found = run.latest()
    assert found is not None
    assert found.tensors("ema") == {}


def test_a_checkpoint_of_an_older_version_is_named(run: RunFolder) -> None:
    old = run.save(1, files(1.0), {}, keep=1) / "state.json"
    state = json.loads(old.read_text())
    del state["sha256"]
    old.write_text(json.dumps(state))
    with pytest.raises(SitusError, match=r"state\.json has no checksum: it is damaged, or of an older"):
        run.newest()
    old.write_text(with_checksum(state | {"format": 1}, "state.json"))
    with pytest.raises(SitusError, match=r"state\.json has format 1, but this version reads formats 2 and 3"):
        run.newest()


# --- all of them lost ---------------------------------------------------------------------------------------


def test_a_run_that_lost_its_checkpoints_is_not_begun_again(run: RunFolder) -> None:
    for step in (1, 2):
        run.append({"step": step})
        damaged = run.save(step, files(step), {}, keep=3)
        (damaged / "model.safetensors").write_bytes(b"cut")
    content = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(SitusError, match=r"damaged or missing \(.* step 2 is damaged .*in another folder"):
        _ = RunFolder.open(run.path).start
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == content


def test_a_log_that_is_longer_than_a_run_without_checkpoints_can_be(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"train": {"save_every": 4}})
    run.append({"step": 8})
    assert RunFolder.open(run.path).start is None  # killed while it wrote its first checkpoint, which the second awaits
    run.append({"step": 9})
    assert RunFolder.open(run.path, {"train": {"save_every": 4}}).steps() == []
    with pytest.raises(SitusError, match=r"\(step 9 is logged, but no checkpoint exists\); start the run again"):
        _ = RunFolder.open(run.path).start


# --- what a crash of the machine may take -------------------------------------------------------------------


def test_bytes_are_on_the_disk_before_names_and_names_before_the_old_ones_go(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of the system's calls: what is not synced before a rename or a removal may be lost with the power."""
    calls: list[tuple[str, str]] = []
    real_fsync, real_rmtree = os.fsync, shutil.rmtree

    def name_of(handle: int) -> str:
        return Path(f"/proc/self/fd/{handle}").readlink().name

    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append(("sync", name_of(handle))), real_fsync(handle))[1])
    for name in ("rename", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda a, b, real=real, **k: (calls.append(("rename", Path(b).name)), real(a, b, **k))[1]
        )
    monkeypatch.setattr(
        shutil, "rmtree", lambda path, **k: (calls.append(("remove", Path(path).name)), real_rmtree(path, **k))[1]
    )
    run.append({"step": 1})
    run.save(1, files(1.0), {}, keep=1)
    calls.clear()
    run.append({"step": 2})
    run.save(2, files(2.0), {}, keep=1)
    aside, final = ".writing-step-00000002", "step-00000002"
    done = [call for call in calls if call != ("remove", aside)]
    there = done.index(("rename", final))
    before = done[:there]
    assert ("sync", "metrics.jsonl") in before
    for file in ("model.safetensors", "ema.safetensors"):
        assert ("sync", file) in before
    state = before.index(("rename", "state.json"))
    assert before[state - 1][0] == "sync"  # its bytes
    assert before[state + 1 :] == [("sync", aside)]  # the names in the folder, and then the folder's own name:
    gone = done.index(("rename", ".removing-step-00000001"))
    assert done[there + 1] == ("sync", "checkpoints")
    assert ("sync", "checkpoints") not in done[there + 2 : gone]
    assert ("remove", ".removing-step-00000001") in done[gone:]


# --- a full disk --------------------------------------------------------------------------------------------


# --- configs ------------------------------------------------------------------------------------------------


def changed(**fields: object) -> dict:
    new = json.loads(json.dumps(CONFIG))
    for path, value in fields.items():
        table, _, name = path.partition("__")
        if name:
            new[table][name] = value
        else:
            new[table] = value
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
    assert read_config(run.path) == CONFIG  # nothing was written


@pytest.mark.parametrize(("changed", "more"), [(1, ""), (3, ""), (4, " and 1 more field"), (6, " and 3 more fields")])
def test_of_many_changed_fields_three_are_named(changed: int, more: str, tmp_path: Path) -> None:
    names = [f"f{number}" for number in range(6)]
    run = RunFolder.create(tmp_path / "run", dict.fromkeys(names, 0))
    with pytest.raises(SitusError) as error:
        RunFolder.open(run.path, dict.fromkeys(names, 0) | dict.fromkeys(names[:changed], 1))
    listed = ", ".join(f"{name} was 0 and is now 1" for name in names[: min(3, changed)])
    assert str(error.value) == f"{run.path}: cannot resume with another config: {listed}{more}"
    assert error.value.field == "resume"


def test_facts_are_those_of_the_newest_and_the_latest_is_at_most_its_limit(run: RunFolder) -> None:
    for step in (1, 2, 10):
        run.save(step, files(step), {"seconds": float(step)}, keep=9)
    assert (run.facts()["step"], run.facts()["seconds"]) == (10, 10.0)
    for limit, step in ((None, 10), (10, 10), (9, 2), (2, 2), (1, 1)):
        found = run.latest(limit)
        assert found is not None and found.step == step
    assert run.latest(0) is None
    (run.checkpoints / "step-00000010" / "state.json").write_text("{")
    assert run.facts()["step"] == 2
    with pytest.raises(SitusError, match=r"run: the checkpoint of step 10 is damaged \(state\.json"):
        run.chosen(10)


def test_who_does_not_write_leaves_a_new_folder_to_who_does(tmp_path: Path) -> None:
    assert RunFolder.create(tmp_path / "run", CONFIG, writer=False).path == tmp_path / "run"
    assert not (tmp_path / "run").exists()
    written = RunFolder.create(tmp_path / "run", CONFIG, classes=("a", "b"))
    assert written.classes() == ("a", "b") and RunFolder.open(tmp_path / "run", writer=False).classes() == ("a", "b")
    assert RunFolder.create(tmp_path / "bare", CONFIG).classes() is None
    with pytest.raises(SitusError, match="run: already contains a run; resume this run"):
        RunFolder.create(tmp_path / "run", CONFIG)


def test_some_fields_may_change_and_are_told(run: RunFolder) -> None:
    other = changed(train__epochs=20, train__log_every=5, out="b")
    notes: list[str] = []
    with notes_to(notes.append):
        again = RunFolder.open(run.path, other)
    assert sorted(notes) == ["out: a -> b", "train.epochs: 10 -> 20", "train.log_every: 50 -> 5"]
    assert read_config(run.path) == CONFIG  # the loop may still refuse it
    again.adopt_config()
    assert RunFolder.open(run.path).config == other


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(SitusError, match=r"is not a run: it has no config"):
        RunFolder.open(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SitusError, match=r"config\.json is cut short or damaged; do not edit this file"):
        RunFolder.open(tmp_path)


# --- metrics ------------------------------------------------------------------------------------------------


def test_metrics_go_back_to_the_checkpoint(run: RunFolder) -> None:
    for step in (5, 10, 10):
        run.append({"step": step, "loss": 0.1})
    run.save(10, files(1.0), {}, keep=2)
    run.append({"step": 15, "loss": 0.1})
    with run.metrics.open("a") as file:
        file.write('{"step": 20, "lo')  # a crash
    assert [r["step"] for r in run.records()] == [5, 10, 10, 15]
    notes: list[str] = []
    with notes_to(notes.append):
        run.rewind(run.latest())
    assert run.metrics.read_text() == '{"step": 5, "loss": 0.1}\n' + 2 * '{"step": 10, "loss": 0.1}\n'
    assert not notes
    run.append({"step": 15})
    assert [r["step"] for r in run.records()] == [5, 10, 10, 15]
    run.rewind(None)  # a run that died before its first checkpoint
    assert run.metrics.read_text() == ""


def test_a_log_that_lost_lines_goes_on_behind_its_last_whole_one(run: RunFolder) -> None:
    for step in (4, 5):
        run.append({"step": step})
    run.save(5, files(1.0), {}, keep=2)
    whole, notes = run.metrics.read_bytes(), list[str]()
    for left, steps in ((whole[:16], [4]), (whole[:-1], [4]), (b"", []), (None, [])):
        run.metrics.unlink() if left is None else run.metrics.write_bytes(left)
        with notes_to(notes.append):
            run.rewind(run.latest())
        assert notes.pop() == "metrics.jsonl has lost lines: the log has a gap" and not notes
        run.append({"step": 6})
        assert [record["step"] for record in run.records()] == [*steps, 6]
    run.metrics.unlink()
    run.metrics.mkdir()
    with pytest.raises(SitusError, match=r"metrics\.jsonl: must be a file, but is a folder or something else; move"):
        run.rewind(run.latest())


def test_a_broken_line_in_the_middle_is_an_error(run: RunFolder) -> None:
    run.metrics.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(SitusError, match="line 2 is not JSON"):
        run.records()


def test_a_run_of_a_version_without_a_field_goes_on(tmp_path: Path) -> None:
    """A field that came later and is None is no other config: the checkpoints' hash of it still fits."""
    old = {"train": {"epochs": 2, "lr": 0.1}, "data": {"path": "x"}}
    run = RunFolder.create(tmp_path / "run", old)
    run.save(3, {}, {}, keep=2)
    new = {"train": {"epochs": 4, "lr": 0.1, "later": None}, "data": {"path": "x", "count": None}, "init": None}
    again = RunFolder.open(tmp_path / "run", new)
    assert again.newest().step == 3
    again.adopt_config()
    assert read_config(tmp_path / "run") == {"train": {"epochs": 4, "lr": 0.1}, "data": {"path": "x"}}
    assert RunFolder.open(tmp_path / "run", new).newest().step == 3
    with pytest.raises(SitusError, match=r"another config: data\.count was None and is now 5"):
        RunFolder.open(tmp_path / "run", {**new, "data": {"path": "x", "count": 5}})
