"""A stand-in for a job's process that needs no torch: a training of small steps, and its accuracy.

    fake.py PARENT pretrain|finetune|evaluate accuracy …

A step's value comes from seed, step and the value before it, so that one that is lost or done twice shows at the end.
A rate above 100 is not finite at step 3; max_steps is the number of steps; a batch of 13 fails.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import tomllib
from pathlib import Path

from situs.folder_lock import lock_folder
from situs.studies.child import end_with

asked: list[int] = []


def train(verb: str, given: dict[str, str]) -> int:
    folder = Path(given.get("resume") or given["out"])
    if "resume" in given:
        config = json.loads((folder / "config.json").read_text())
    else:
        changes = tomllib.loads(Path(given["config"]).read_text()) if "config" in given else {}
        before = value_of(Path(given["from"])) if verb == "finetune" else 0.0
        config = {
            "seed": int(given["seed"]),
            "gpu": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "start": before,
            "data": given.get("data"),
            **changes,
        }
        (folder / "config.json").write_text(json.dumps(config))
    if isinstance(config["data"], dict):
        print("situs:", os.environ.get("FAKE_WORDS", "no memory for a batch of 13"))
        return 2
    if "FAKE_CHILD" in os.environ:
        import subprocess  # which takes a third of this process's time to import, as shutil does

        (folder / "child").write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    log = folder / "metrics.jsonl"
    saved = sorted(folder.glob("checkpoints/step-*"))
    lines = log.read_text().splitlines()[: int(saved[-1].name[5:])] if saved else []
    value = json.loads(lines[-1])["loss"] if lines else config["start"]
    for step in range(len(lines) + 1, config["train"]["max_steps"] + 1):
        if config.get("optim", {}).get("lr", 0) > 100 and step == 3:
            (folder / "nan").mkdir()
            print("situs: step 3 was not finite (loss nan)")
            return 2
        value = (value * 31 + step + config["seed"]) % 1009 / 7
        lines.append(json.dumps({"step": step, "epoch": float(step), "loss": value}))
        aside = folder / f".step-{step}"
        aside.mkdir(parents=True, exist_ok=True)
        log.write_text("\n".join(lines) + "\n")
        (folder / "checkpoints").mkdir(exist_ok=True)
        place = folder / "checkpoints" / f"step-{step:08d}"
        if place.exists():
            place.rmdir()
        aside.rename(place)
        print(f"step {step}/{config['train']['max_steps']} · loss {value:.4g} · 0:00 left", flush=True)
        time.sleep(float(os.environ.get("FAKE_STEP", "0.002")))
        if asked:
            return 130
    return 0


def value_of(folder: Path) -> float:
    if (folder / "export.json").is_file():  # what was taken in a run's place
        return json.loads((folder / "export.json").read_text())
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["loss"]


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda n, _: asked.append(n))
    end_with(int(sys.argv[1]))
    words = sys.argv[2:]
    given = {words[i][2:]: words[i + 1] for i in range(len(words) - 1) if words[i].startswith("--")}
    if words[0] != "evaluate":
        place = Path(given.get("resume") or given["out"])
        place.mkdir(parents=True, exist_ok=True)
        with lock_folder(place):
            return train(words[0], given)
    out = Path(given["out"])
    out.mkdir(parents=True)
    (out / "accuracy.json").write_text(json.dumps({"top1": value_of(Path(words[2])) / 1000}))
    return 0


raise SystemExit(main())
