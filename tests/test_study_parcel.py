"""A study in parts: results and models come over whole, and what is done stays done."""

from __future__ import annotations

import errno
import io
import shutil
import sys
import tarfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from situs.backbones import BackboneConfig
from situs.data.config import DataConfig
from situs.errors import SitusError
from situs.methods import METHODS
from situs.models import open_model
from situs.models.model import puzzle_method
from situs.studies.folder import BEGUN, DONE, FAILED, NOT_FINITE, TAKEN, StudyFolder, Task
from situs.studies.form import Job
from situs.studies.plan import load_study
from situs.studies.reading import read_study
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import with_checksum, write_state
from situs.train.config import TrainConfig
from situs.train.run import RunConfig, train_run

spec = spec_from_file_location("study_parcel", Path(__file__).parents[1] / "scripts" / "study_parcel.py")
assert spec is not None
assert spec.loader is not None
parcel = module_from_spec(spec)
sys.modules["study_parcel"] = parcel
spec.loader.exec_module(parcel)
_lighter, pack_study, unpack_study = parcel._lighter, parcel.pack_study, parcel.unpack_study

STUDY = """
title = "two"
shows = "That it works."
seeds = 2
[jobs.pre]
verb = "pretrain"
[jobs.tuned]
verb = "finetune"
after = "pre"
[jobs.top1]
verb = "evaluate accuracy"
after = "tuned"
[[tables]]
columns = [{ name = "loss", figure = "loss", unit = "", digits = 3 }]
rows = [{ name = "pre", job = "pre" }, { name = "top-1", job = "top1", figure = "top1" }]
"""


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """pre-0 trained, pre-1 a copy of it, tuned-0 said to be done with its measurement; the rest is open."""
    base = tmp_path_factory.mktemp("parcel")
    file = base / "mine.toml"
    file.write_text(STUDY)
    path = base / "study"
    folder = StudyFolder.create(path, load_study(file), file, "paper", None)
    shape = {"depth": 2, "embed_dim": 16, "num_heads": 2}
    config = RunConfig(
        METHODS["mp3"].Config(),
        BackboneConfig("vit_tiny_patch16_224", patch_size=14, model_args=shape),
        DataConfig(path="samples", img_size=28, channels=1, batch=8, count=16),
        train=TrainConfig(epochs=1, log_every=1, save_every=1),
    )
    train_run(config, out=path / "jobs" / "pre-0", device="cpu")
    for name in ("pre-1", "tuned-0"):
        shutil.copytree(path / "jobs" / "pre-0", path / "jobs" / name)
    (path / "jobs" / "top1-0").mkdir()
    (path / "jobs" / "top1-0" / "accuracy.json").write_text('{"top1": 0.5}')
    for name in ("pre-0", "pre-1", "tuned-0", "top1-0"):
        folder.write_state(folder.tasks[name], DONE, seconds=1.0)
    return path


def test_it_comes_over_in_parts_with_the_models_that_are_still_needed(begun: Path, tmp_path: Path) -> None:
    parts = pack_study(begun, tmp_path / "parts", mib=1)
    assert all(path.stat().st_size <= 2**20 for path in parts)
    assert parts[0].name == f"study.tar.001of{len(parts):03d}"
    there = tmp_path / "there"
    assert unpack_study(tmp_path / "parts", there) == ["pre-0", "pre-1", "tuned-0", "top1-0"]
    one, two = read_study(begun), read_study(there)
    assert one.rows == two.rows and len(two.rows[0][0][0].values) == 2, "figures of a log come over"
    assert [task.state for task in two.tasks] == ["done", "done", "done", "open", "done", "open"]
    folder = StudyFolder.open(there)
    assert folder.model_here(folder.tasks["pre-1"]), "tuned-1 starts from it"
    assert not folder.model_here(folder.tasks["tuned-0"]), "nobody needs it any more"
    last = there / "jobs" / "pre-1" / "checkpoints" / "step-00000002"
    assert {tensor.dtype for tensor in load_file(last / "model.safetensors").values()} == {torch.float16}
    assert not (last / "optimizer.safetensors").exists()
    own, come = (puzzle_method(open_model(place / "jobs" / "pre-1")).state_dict() for place in (begun, there))
    assert own.keys() == come.keys() and len(own) > 20, "with the position head, for `evaluate position`"
    for name, tensor in come.items():
        assert tensor.dtype == own[name].dtype
        assert torch.allclose(own[name], tensor, rtol=1e-3, atol=1e-6), name
    assert unpack_study(tmp_path / "parts", there) == [], "what is done stays"
    again = pack_study(there, tmp_path / "again")
    assert unpack_study(again[0].parent, tmp_path / "third")
    assert read_study(tmp_path / "third").rows == one.rows
    again = puzzle_method(open_model(tmp_path / "third" / "jobs" / "pre-1")).state_dict()
    assert [name for name in come if not torch.equal(come[name], again[name])] == []


def test_what_a_run_is_known_by_goes_along_and_the_checkpoints_that_others_name(begun: Path, tmp_path: Path) -> None:
    """A model that was trained under a defence tells it in a file of its own; speech is tuned from checkpoints."""
    shutil.copytree(begun, study := tmp_path / "study")
    named = STUDY.replace('after = "pre"', 'model = "{pre}/checkpoints/step-00000001"')
    (study / "study.toml").write_text(named)
    for name in ("tuned-0", "top1-0"):
        (study / "jobs" / f"{name}.json").unlink()
    (study / "jobs" / "pre-1" / "defence.json").write_text('{"defence": "noise=1", "scale": 2.0}')
    pack_study(study, tmp_path / "parts")
    unpack_study(tmp_path / "parts", there := tmp_path / "there")
    assert (there / "jobs" / "pre-1" / "defence.json").read_text() == '{"defence": "noise=1", "scale": 2.0}'
    for step in (1, 2):
        place = f"jobs/pre-1/checkpoints/step-{step:08d}"
        one, two = (puzzle_method(open_model(where / place)).state_dict() for where in (study, there))
        assert all(torch.allclose(one[name], two[name], rtol=1e-3, atol=1e-6) for name in one)
    shutil.rmtree(study / "jobs" / "pre-1" / "checkpoints" / "step-00000001")
    assert pack_study(study, tmp_path / "more"), "who needs it says that it is not there"


def test_weights_alone_are_halved_and_those_of_the_mean_go_along(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run", {"train": {}})
    held = {
        "weight": torch.linspace(-3, 3, 7),
        "count": torch.tensor([70_001]),
        "fine": torch.tensor([1 / 3.0]).double(),
    }
    mean = {"weight": held["weight"] / 2}
    run.save(4, {"model": held, "ema": mean, "optimizer": {"weight": held["weight"]}}, {}, keep=1)
    job = Task("pre-0", "pre", Job("pretrain"), 0, run.path, {})
    found = RunFolder.open(_lighter(job, tmp_path / "out", set()), writer=False).newest()
    assert found.tensors("optimizer") == {}
    model = found.tensors("model")
    assert torch.equal(model["weight"], held["weight"].half()) and torch.equal(model["count"], held["count"])
    assert torch.equal(model["fine"], held["fine"]) and torch.equal(
        found.tensors("ema")["weight"], mean["weight"].half()
    )
    run.save(5, {"model": {"weight": torch.tensor([1e6])}}, {}, keep=1)
    with pytest.raises(SitusError, match="has weights that half precision does not hold"):
        _lighter(job, tmp_path / "more", set())


def test_of_a_run_that_keeps_its_best_the_best_goes_along(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, study := tmp_path / "study")
    run = study / "jobs" / "pre-1"
    config = RunFolder.open(run, writer=False).config
    config["train"]["keep_best"] = True
    (run / "config.json").write_text(with_checksum(config, "config.json"))
    last = RunFolder.open(run, writer=False).newest()
    state = {name: fact for name, fact in last.state.items() if name not in ("format", "files", "sha256")}
    write_state(last.path, {**state, "best": {"step": 1, "by": "val_top1", "value": 0.5}}, last.state["files"])
    pack_study(study, tmp_path / "parts")
    unpack_study(tmp_path / "parts", tmp_path / "there")
    there = RunFolder.open(tmp_path / "there" / "jobs" / "pre-1", writer=False)
    assert there.steps() == [1] and there.chosen().step == RunFolder.open(run, writer=False).chosen().step == 1


def test_without_models_what_needs_them_waits(begun: Path, tmp_path: Path) -> None:
    pack_study(begun, tmp_path / "parts", models=False)
    assert unpack_study(tmp_path / "parts", tmp_path / "there") == ["pre-0", "pre-1", "tuned-0", "top1-0"]
    task = next(task for task in read_study(tmp_path / "there").tasks if task.name == "tuned-1")
    assert (task.state, task.why) == ("waits", "the model of pre-1 is on another machine")


def test_models_of_some_jobs_alone_go_along_and_figures_in_any_case(begun: Path, tmp_path: Path) -> None:
    study = tmp_path / "study"
    shutil.copytree(begun, study)
    (study / "jobs" / "tuned-0.json").unlink()  # open again, so that both pretrainings are needed
    pack_study(study, tmp_path / "parts", only=["pre-1"])
    unpack_study(tmp_path / "parts", tmp_path / "there")
    folder = StudyFolder.open(tmp_path / "there")
    assert [folder.model_here(folder.tasks[name]) for name in ("pre-0", "pre-1")] == [False, True]
    pack_study(tmp_path / "there", tmp_path / "again", models=False)  # of an export too
    unpack_study(tmp_path / "again", tmp_path / "third")
    assert not (tmp_path / "third" / "jobs" / "pre-1" / "checkpoints").exists()
    assert read_study(tmp_path / "third").rows[0][0] == read_study(study).rows[0][0]
    with pytest.raises(SitusError, match="unknown job 'prae'"):
        pack_study(study, tmp_path / "no", only=["prae"])


def test_what_came_back_is_laid_over_what_was_left(begun: Path, tmp_path: Path) -> None:
    """The other machine made one job more: only that one is new here."""
    there = tmp_path / "there"
    shutil.copytree(begun, there)
    folder = StudyFolder.open(there)
    shutil.copytree(there / "jobs" / "pre-0", there / "jobs" / "tuned-1")
    folder.write_state(folder.tasks["tuned-1"], DONE, seconds=2.0)
    here = tmp_path / "here"
    shutil.copytree(begun, here)
    settings = (here / "settings.json").read_text()
    (here / "settings.json").write_text(settings.replace('"seeds": 2', '"seeds": 1'))
    pack_study(there, tmp_path / "parts")
    assert unpack_study(tmp_path / "parts", here) == ["tuned-1"]
    assert (here / "jobs" / "pre-0" / "checkpoints").is_dir(), "a run that is here stays a run"
    assert StudyFolder.open(here).model_here(StudyFolder.open(here).tasks["tuned-1"])


def test_mistakes_are_sentences(begun: Path, tmp_path: Path) -> None:
    pack_study(begun, tmp_path / "parts", mib=1)
    with pytest.raises(SitusError, match="holds a packed study already"):
        pack_study(begun, tmp_path / "parts")
    with pytest.raises(SitusError, match="mib=0: must be >= 1"):
        pack_study(begun, tmp_path / "none", mib=0)
    with pytest.raises(SitusError, match="holds 0 of the parts"):
        unpack_study(tmp_path, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("dear")
    (tmp_path / "file").touch()
    with pytest.raises(SitusError, match="file: is not a study's folder, and not empty"):
        unpack_study(tmp_path / "parts", tmp_path / "file")
    with pytest.raises(SitusError, match="is not a study's folder, and not empty"):
        unpack_study(tmp_path / "parts", tmp_path / "full")
    evil = io.BytesIO()
    with tarfile.open(fileobj=evil, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../outside"))
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "study.tar.001of001").write_bytes(evil.getvalue())
    with pytest.raises(SitusError, match="cannot be unpacked"):
        unpack_study(tmp_path / "evil", tmp_path / "out")
    (whole := tmp_path / "other").mkdir()
    part = pack_study(begun, tmp_path / "one")[0]
    for name, content in {"flipped": _flipped(part.read_bytes()), "short": part.read_bytes()[:-9]}.items():
        (whole / part.name).write_bytes(content)
        with pytest.raises(SitusError, match="a part of the packed study is damaged"):
            unpack_study(whole, tmp_path / name)
        assert not (tmp_path / name).exists()
    first = next((tmp_path / "parts").iterdir())
    shutil.copy(first, other := first.with_name("study.tar.002of012"))
    with pytest.raises(SitusError, match=r"holds parts of several packed studies \(of 001 and of 012\)"):
        unpack_study(tmp_path / "parts", tmp_path / "out")
    other.unlink()
    first.rename(first.with_name("study.tar.001of009"))
    with pytest.raises(SitusError, match="holds 1 of 9 parts"):
        unpack_study(tmp_path / "parts", tmp_path / "out")


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(
    begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_study(begun, tmp_path / "parts")

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for what in ("tempfile.mkdtemp", "study_parcel.write_text", "shutil.move", "shutil.copy"):
        with monkeypatch.context() as patch:
            patch.setattr(what, full)
            with pytest.raises(SitusError, match="there: cannot be written: no space left on device") as caught:
                unpack_study(tmp_path / "parts", tmp_path / "there")
            assert caught.value.field == "out"
        if "write_text" in what:
            (tmp_path / "there" / "study.toml").write_text("cut here")
    assert unpack_study(tmp_path / "parts", tmp_path / "there") == ["pre-0", "pre-1", "tuned-0", "top1-0"]
    assert read_study(tmp_path / "there").rows == read_study(begun).rows
    monkeypatch.setattr("shutil.copy", full)
    with pytest.raises(SitusError, match=r"study: cannot be packed: .*: no space left on device"):
        pack_study(begun, tmp_path / "more")


def test_what_only_its_owner_may_read_stays_so_in_the_parts(begun: Path, tmp_path: Path) -> None:
    shutil.copytree(begun, study := tmp_path / "study")
    open_parts = pack_study(study, tmp_path / "open", models=False)
    assert all(path.stat().st_mode & 0o044 for path in open_parts)
    (study / "jobs" / "top1-0" / "accuracy.json").chmod(0o600)
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in pack_study(study, tmp_path / "parts", models=False))
    unpack_study(tmp_path / "parts", tmp_path / "there")
    assert (tmp_path / "there" / "jobs" / "top1-0" / "accuracy.json").stat().st_mode & 0o777 == 0o600


def test_a_thousand_parts_and_more(begun: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a study of 1 GiB has at --mib 1; by their names the thousandth comes before the last of three digits."""
    whole = pack_study(begun, tmp_path / "one")[0].stat().st_size
    monkeypatch.setattr("study_parcel.MIB", whole // 1005)
    parts = pack_study(begun, tmp_path / "parts", mib=1)
    assert len(parts) > 1000 and parts[0].name == f"study.tar.001of{len(parts)}"
    assert unpack_study(tmp_path / "parts", tmp_path / "there") == ["pre-0", "pre-1", "tuned-0", "top1-0"]
    assert read_study(tmp_path / "there").rows == read_study(begun).rows
    parts[1000].unlink()
    with pytest.raises(SitusError, match=f"holds {len(parts) - 1} of {len(parts)} parts"):
        unpack_study(tmp_path / "parts", tmp_path / "out")


def test_models_can_follow_what_came_without_them(begun: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    pack_study(begun, tmp_path / "numbers", models=False)
    pack_study(begun, tmp_path / "parts")
    unpack_study(tmp_path / "numbers", there)
    assert unpack_study(tmp_path / "parts", there) == ["pre-1"], "of which tuned-1 starts"
    folder = StudyFolder.open(there)
    assert folder.model_here(folder.tasks["pre-1"])
    assert unpack_study(tmp_path / "numbers", there) == [] and folder.model_here(folder.tasks["pre-1"])


@pytest.mark.parametrize("state", [BEGUN, FAILED])
def test_what_was_cut_or_failed_elsewhere_does_not_undo_what_is_here(begun: Path, tmp_path: Path, state: str) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for place in (there, here):
        shutil.copytree(begun, place)
    elsewhere, own = StudyFolder.open(there), StudyFolder.open(here)
    elsewhere.write_state(elsewhere.tasks["tuned-1"], state, message="no memory")
    shutil.copytree(here / "jobs" / "pre-0", here / "jobs" / "tuned-1")
    pack_study(there, tmp_path / "parts")
    for mine in (BEGUN, NOT_FINITE):
        own.write_state(own.tasks["tuned-1"], mine, seconds=7.0)
        kept = (here / "jobs" / "tuned-1.json").read_text()
        assert unpack_study(tmp_path / "parts", here) == []
        assert (here / "jobs" / "tuned-1.json").read_text() == kept
    (here / "jobs" / "tuned-1.json").unlink()
    assert unpack_study(tmp_path / "parts", here) == (["tuned-1"] if state == FAILED else [])
    elsewhere.write_state(elsewhere.tasks["tuned-1"], NOT_FINITE, message="nan")
    own.write_state(own.tasks["tuned-1"], BEGUN)
    pack_study(there, tmp_path / "again")
    assert [unpack_study(tmp_path / "again", here) for _ in range(2)] == [["tuned-1"], []], "which here it would be too"


def test_a_run_that_was_cut_here_does_not_stand_for_a_model_that_stayed_there(begun: Path, tmp_path: Path) -> None:
    there, here = tmp_path / "there", tmp_path / "here"
    for place in (there, here):
        shutil.copytree(begun, place)
    elsewhere, own = StudyFolder.open(there), StudyFolder.open(here)
    elsewhere.write_state(elsewhere.tasks["pre-1"], TAKEN, source="export", weights="1")
    (there / "jobs" / "pre-1" / "metrics.jsonl").unlink()
    own.write_state(own.tasks["pre-1"], BEGUN)
    pack_study(there, tmp_path / "parts", models=False)
    assert unpack_study(tmp_path / "parts", here) == ["pre-1"]
    assert not StudyFolder.open(here).model_here(StudyFolder.open(here).tasks["pre-1"])


def _flipped(data: bytes) -> bytes:
    """One bit of it, in the middle of the weights."""
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_what_was_run_with_other_settings_is_not_laid_into_a_study(begun: Path, tmp_path: Path) -> None:
    pack_study(begun, tmp_path / "parts")
    file, here = tmp_path / "mine.toml", tmp_path / "here"
    file.write_text(STUDY.replace('verb = "finetune"', 'verb = "finetune"\nchange.train.epochs = 7'))
    StudyFolder.create(here, load_study(file), file, "paper", None)
    with pytest.raises(SitusError, match=r"parts: is of another study than lies in .*here: job tuned-0 was run with"):
        unpack_study(tmp_path / "parts", here)
    assert not [*(here / "jobs").iterdir()]
