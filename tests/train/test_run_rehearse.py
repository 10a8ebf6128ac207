"""A dry run: what training would do before its first step, and nothing on the disk."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path

import pytest
from PIL import Image

from situs.cli.main import main
from situs.config import from_dict
from situs.data.sources.webdataset import open_index
from situs.progress import notes_to
from situs.train.run import RunConfig, rehearse, state_bytes, train_run

TINY = {
    "method": {"name": "mp3"},
    "backbone": {
        "name": "vit_tiny_patch16_224",
        "patch_size": 7,
        "model_args": {"depth": 1, "embed_dim": 16, "num_heads": 2},
    },
    "data": {"path": "samples", "img_size": 28, "channels": 1, "batch": 50, "count": 100},
    "train": {"epochs": 3, "precision": "fp32"},
}


def test_it_says_what_the_run_then_does(tmp_path: Path) -> None:
    config = from_dict(RunConfig, TINY)
    found = rehearse(config, out=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()
    assert (found.batch, found.steps, found.steps_per_epoch, found.begins_at) == ((50, 1, 28, 28), 6, 2, 0)
    assert found.loss == pytest.approx(2.77, abs=0.4)  # log 16: it knows none of the 16 places
    said: list[str] = []
    with notes_to(said.append):
        result = train_run(config, out=tmp_path / "run", device="cpu", quiet=True)
    assert result.step == found.steps and tuple(said) == found.notes
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    again = rehearse(config, resume=tmp_path / "run", device="cpu")
    assert again.begins_at == 6 and "6 are already done" in again.lines()[-2]
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before
    shutil.rmtree(tmp_path / "run")


def test_no_index_of_shards_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("situs.data.sources.webdataset._WORTH_CACHING", 0)
    picture = io.BytesIO()
    Image.new("L", (28, 28)).save(picture, "png")
    with tarfile.open(tmp_path / "shard.tar", "w") as shard:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.png")
            member.size = len(picture.getvalue())
            shard.addfile(member, io.BytesIO(picture.getvalue()))
    data = {**TINY["data"], "path": str(tmp_path / "shard.tar"), "batch": 2}
    config = from_dict(RunConfig, {**TINY, "data": data})
    assert rehearse(config, out=tmp_path / "run", device="cpu").batch == (2, 1, 28, 28)
    assert {path.name for path in tmp_path.iterdir()} == {"shard.tar"}
    open_index([tmp_path / "shard.tar"], labels=False)  # otherwise it is
    assert list((tmp_path / "cache").rglob("*.npz"))


def test_the_memory_is_weights_gradients_moments_and_their_mean() -> None:
    config = from_dict(RunConfig, TINY)
    assert state_bytes(100, 100, config.optim) == 1600
    assert state_bytes(100, 10, config.optim) == 400 + 120
    mean = from_dict(RunConfig, {"optim": {"ema": 0.9}}).optim
    assert state_bytes(100, 100, mean) == 2000


def test_a_mistake_is_found_as_the_run_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["pretrain", "--preset", "samples-mp3", "--device", "cpu", "--dry-run"]
    assert main([*words, "--out", str(tmp_path / "run"), "--data", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    assert main(words) == 2
    assert "give either a new folder or a run to resume" in capsys.readouterr().err
    words = [*words, "--method", "supervised"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json", "--batch", "100"]) == 0
    assert json.loads(capsys.readouterr().out)["batch"] == [100, 1, 28, 28]
    assert not any(tmp_path.iterdir())
