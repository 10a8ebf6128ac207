"""Two real jobs with two seeds, on the embedded images: killed, moved, and equal to the undisturbed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from situs.studies.reading import read_study
from situs.studies.result import StudyResult
from situs.train.checkpoint import RunFolder

STUDY = """
title = "Two jobs on the embedded images"
shows = "That a study which is killed ends as one that is not."
seeds = 2
[data]
images = "samples"
[jobs.mp3]
verb = "pretrain"
preset = "samples-mp3"
change.backbone.model_args = { embed_dim = 32, depth = 2, num_heads = 2 }
change.data = { batch = 64, count = 1024 }
change.train = { epochs = 4, log_every = 4, save_every = 4 }
[jobs.tuned]
verb = "finetune"
after = "mp3"
change.data = { batch = 64, count = 1024 }
change.optim = { lr = 1e-3, warmup_epochs = 0 }
change.train = { epochs = 4, log_every = 4, save_every = 4 }
options.validate_every = 2
[jobs.hot]
verb = "pretrain"
preset = "samples-mp3"
change.backbone.model_args = { embed_dim = 32, depth = 2, num_heads = 2 }
change.data = { batch = 64, count = 1024 }
change.optim = { lr = 1e20, warmup_epochs = 0, clip = 1e30 }
change.train = { epochs = 2, log_every = 4 }
once = true
[[tables]]
corner = "trained"
columns = [{ name = "top-1", figure = "val_top1" }, { name = "loss", figure = "loss", unit = "", digits = 3 }]
rows = [{ name = "after MP3", paper = [60.0, ""], job = "tuned" }, { name = "at a rate of 1e20", job = ["", "hot"] }]
[[curves]]
x = "epoch"
y = "top-1 of the validation split"
lines = [{ name = "after MP3", job = "tuned", figure = "log.val_top1[*].value", over = "log.val_top1[*].epoch" }]
"""


def command(study: Path, out: Path) -> list[str]:
    words = ["study", "run", str(study), "--data", "samples", "--out", str(out), "--at-once", "2", "--device", "cpu"]
    return [sys.executable, "-m", "situs", *words]


def numbers(found: StudyResult) -> dict[str, Any]:
    told = found.to_json()
    for job in told["jobs"].values():
        job.pop("seconds")
        job.pop("why")  # names the folder in which a step that was not finite is kept
    return told


@pytest.mark.slow
def test_killed_and_moved_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    study, peace, out = tmp_path / "mine.toml", tmp_path / "peace", tmp_path / "out"
    study.write_text(STUDY)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command(study, peace), env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1, done.stderr  # one job is not finite
    for number, begun in enumerate(("mp3-*", "tuned-*")):  # killed in a pretraining, and in a fine-tuning
        process = subprocess.Popen(command(study, out), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until = time.monotonic() + 600
        while not list(out.glob(f"jobs/{begun}/checkpoints/step-*")):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.01)
        process.kill()
        process.wait()
        while list(out.glob("jobs/*/.lock")) and time.monotonic() < until:  # its jobs save themselves
            time.sleep(0.1)
        moved = tmp_path / f"another-place-{number}"
        shutil.move(out, moved)
        out = moved
    done = subprocess.run(command(study, out), env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 1, done.stderr
    assert " --resume " in done.stderr
    one, two = read_study(peace), read_study(out)
    assert numbers(one) == numbers(two)
    states = {task.name: task.state for task in one.tasks}
    assert states == {**dict.fromkeys(("mp3-0", "mp3-1", "tuned-0", "tuned-1"), "done"), "hot-0": "not finite"}
    assert one.rows[0][1][1].why == "not finite (seed 0)" and len(one.rows[0][0][0].values) == 2
    for name in ("mp3-0", "tuned-1"):
        a, b = (RunFolder.open(place / "jobs" / name, writer=False).newest() for place in (peace, out))
        left, right = a.tensors("model"), b.tensors("model")
        assert left and [key for key in left if not torch.equal(left[key], right[key])] == []
    page = (out / "study.html").read_text()
    assert "not finite" in page and page.count("<img") == 1
