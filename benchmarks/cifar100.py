"""The studies on CIFAR-100 behind docs/results.md: the commands of each, run in order, several at once.

    python benchmarks/cifar100.py --data PATH --out runs --study positions jigsaw long

positions: MP3, DropPos and MAE, each fine-tuned, beside training from scratch at the same number of epochs.
jigsaw: a plain classifier and MJP's parts added one by one, with their consistency under shuffled patches.
long: MP3 for 100 epochs and fine-tuning for 60, with the recipe for few epochs; beside it the same 60 from scratch,
plain and with MJP.
order: MP3 on streamed images in exact order, and in blocks of which a tenth is mixed at a time; loss and nearest
neighbours of each.

Every job is one `situs` command, printed before it runs; its output is in OUT/NAME.log. With --seconds the jobs are
interrupted in time (a run saves itself) and the same command goes on with them. The tables come last, from the JSON
files that the evaluations wrote.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Jobs = dict[str, "Job"]

LIGHT = "--augment.mixup 0 --augment.cutmix 0 --augment.erasing 0"
"""What the -short presets leave out."""


@dataclass(frozen=True)
class Job:
    """A `situs` command; {name} in it is another job's folder, which must be there first. trains: makes a run."""

    command: str
    after: str | None = None
    trains: bool = True


def pretrain(preset: str, epochs: int, more: str = "") -> Job:
    return Job(f"pretrain --preset {preset} --epochs {epochs} {more}")


def finetune(source: str, epochs: int, preset: str = "cifar100-finetune") -> Job:
    return Job(f"finetune --preset {preset} --from {{{source}}} --epochs {epochs}", source)


def look(verb: str, at: str, more: str = "") -> Job:
    return Job(f"evaluate {verb} {{{at}}} {more}", at, trains=False)


def positions_study(pretraining: int, tuning: int) -> Jobs:
    jobs: Jobs = {"scratch": pretrain("cifar100-supervised", tuning)}
    for name in ("mp3", "droppos", "mae"):
        jobs[name] = pretrain(f"cifar100-{name}", pretraining)
        jobs[f"{name}-ft"] = finetune(name, tuning)
    jobs["mp3-places"], jobs["droppos-places"] = look("position", "mp3"), look("position", "droppos")
    return jobs


def jigsaw_study(epochs: int) -> Jobs:
    jobs = {
        "plain": pretrain("cifar100-supervised", epochs),
        "jp": pretrain("cifar100-mjp", epochs, "--method.no-unknown --method.dal none"),
        "jp-unk": pretrain("cifar100-mjp", epochs, "--method.dal none"),
        "jp-unk-dal": pretrain("cifar100-mjp", epochs),
    }
    return jobs | {f"{name}-shuffled": look("consistency", name) for name in jobs}


def long_study(pretraining: int, tuning: int) -> Jobs:
    return {
        "mp3-long": pretrain("cifar100-mp3", pretraining),
        "mp3-long-ft": finetune("mp3-long", tuning, "cifar100-finetune-short"),
        "plain-short": pretrain("cifar100-supervised-short", tuning, "--backbone.positions learned"),
        "mjp-short": pretrain("cifar100-mjp", tuning, LIGHT),
    }


def order_study(pretraining: int) -> Jobs:
    ways = {"exact": "exact", "blocks": "blocks --data.window-gib 0.0085"}  # 5 of the 50 row groups of 1,000 images
    jobs = {
        f"order-{name}": pretrain("cifar100-mp3", pretraining, f"--data.resident never --data.order {flags}")
        for name, flags in ways.items()
    }
    return jobs | {f"{name}-knn": look("knn", name) for name in jobs}


def scored(jobs: Jobs) -> Jobs:
    """With the accuracy of each classifier."""
    made = {name: job for name, job in jobs.items() if job.trains}
    classifiers = [n for n, job in made.items() if "supervised" in job.command or "mjp" in job.command or job.after]
    return jobs | {f"{name}-top1": look("accuracy", name) for name in classifiers}


# --- running --------------------------------------------------------------------------------------------------


def words_of(name: str, job: Job, args: argparse.Namespace) -> list[str]:
    folder = args.out / name
    if job.trains and folder.exists():
        return [*job.command.split()[:1], "--resume", str(folder)]
    words = job.command.format(**{key: args.out / key for key in args.jobs}).split()
    target = folder / "scores.json" if words[1] == "accuracy" else folder
    extra = args.flags.split() if job.trains else []
    return [*words, *extra, "--data", str(args.data), "--out", str(target)]


def run_all(args: argparse.Namespace) -> bool:
    """Runs what is not done yet, `at_once` at a time; whether all are done."""
    began = time.monotonic()
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: set[str] = set()

    def done(name: str | None) -> bool:
        return name is None or (args.out / f"{name}.done").exists()

    while True:
        for name in [name for name, process in running.items() if process.poll() is not None]:
            status = running.pop(name).returncode
            print(f"[{time.monotonic() - began:5.0f} s] {name} ended with {status}", flush=True)
            if status == 0:
                (args.out / f"{name}.done").touch()
            else:
                failed.add(name)
        waiting = [n for n, job in args.jobs.items() if not done(n) and n not in running and n not in failed]
        ready = [n for n in waiting if done(args.jobs[n].after)]
        if args.seconds and time.monotonic() - began > args.seconds:
            break
        for name in ready[: args.at_once - len(running)]:
            words = words_of(name, args.jobs[name], args)
            print(f"[{time.monotonic() - began:5.0f} s] situs {' '.join(words)}", flush=True)
            with (args.out / f"{name}.log").open("ab") as log:
                running[name] = subprocess.Popen(
                    [sys.executable, "-m", "situs", *words], stdout=log, stderr=subprocess.STDOUT
                )
        if not running:
            break
        time.sleep(0.2)
    for process in running.values():
        process.send_signal(signal.SIGINT)
    for process in running.values():
        process.wait()
    return all(done(name) for name in args.jobs)


# --- tables ---------------------------------------------------------------------------------------------------


def numbers(folder: Path) -> dict[str, Any]:
    """What an evaluation wrote."""
    return (
        {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))} if folder.is_dir() else {}
    )


def print_tables(args: argparse.Namespace) -> None:
    looks = {name: numbers(args.out / name) for name, job in args.jobs.items() if not job.trains}
    print("\nrun              top-1    top-5")
    for name, found in looks.items():
        if "scores" in found:
            scores = found["scores"]
            print(f"{name.removesuffix('-top1'):<14}{100 * scores['top1']:7.2f} %{100 * scores['top5']:7.2f} %")
    for name in (name for name in args.jobs if name.startswith("order-") and args.jobs[name].trains):
        last = [line for line in (args.out / name / "metrics.jsonl").read_text().splitlines() if '"loss"' in line][-1]
        print(f"{name:<14} {last}")
    for name, found in looks.items():
        for result in () if "scores" in found else found.values():
            print(f"\n{name}: {json.dumps(result)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-100 as parquet files or python batches")
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--study", nargs="+", default=["positions"], choices=["positions", "jigsaw", "long", "order"])
    parser.add_argument("--epochs", type=int, nargs=3, default=(40, 30, 60), metavar=("PRE", "TUNE", "MJP"))
    parser.add_argument("--long", type=int, nargs=2, default=(100, 60), metavar=("PRE", "TUNE"))
    parser.add_argument("--at-once", type=int, default=1, help="jobs that share the device")
    parser.add_argument("--seconds", type=float, default=0, help="interrupt what still runs then")
    parser.add_argument("--flags", default="", help="more flags for every training, as for a dry run")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    studies = {
        "positions": positions_study(*args.epochs[:2]),
        "jigsaw": jigsaw_study(args.epochs[2]),
        "long": long_study(*args.long),
        "order": order_study(args.epochs[0]),
    }
    args.jobs = scored({name: job for study in args.study for name, job in studies[study].items()})
    complete = run_all(args)
    print_tables(args)
    return 0 if complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
