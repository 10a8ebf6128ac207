"""What a feature defence costs a model that is trained with it, and what it hides: the fourth paper's Table 6.

    python benchmarks/split_defences.py --data PATH --out runs/defences      # CIFAR-100, ViT-S/4, 60 epochs each

Every model is trained in a process of its own, its blocks given defended tokens (`situs.split.local`: what split
training gives), then judged under its defence on the test set, then attacked (`situs.audit.split`) as it sends its
tokens and with rows, columns and both permuted. Permutations change no number of a training, so that they inherit its
accuracy. An attacker who knows the permutations has what the order attacker has of unpermuted rows; who knows a
batch's exchange, what it has of undefended tokens (`known`). OUT/results.json and OUT/table.md are written anew after
every job, so that whatever is done by then is kept when the time is up (--seconds, or Ctrl-C). The same command then
goes on: a training from its last checkpoint, an audit from its beginning.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from situs.files import write_text


class Trained(NamedTuple):
    """A model of the table. pool: what its head reads, token (CLS) or avg."""

    defence: str
    pool: str = "token"


class Group(NamedTuple):
    """Attackers that share a process. kinds: the defences they say something of. bare: under no defence instead.

    threads: of the process.
    """

    attacks: tuple[str, ...] = ()
    permute: tuple[str, ...] = ("rows", "columns")
    kinds: tuple[str, ...] = ("none", "noise", "lowpass", "batch-shuffle")
    bare: bool = False
    threads: int = 1


MODELS = {
    "SL": Trained("none"),
    "GN": Trained("noise=1"),
    "LP": Trained("lowpass=0.3"),
    "BS": Trained("batch-shuffle=8"),
    "BS-mean": Trained("batch-shuffle=8", "avg"),
}
GROUPS = {
    "order": Group(),  # all that stand in no other group
    "decoder": Group(("decoder", "ordered-decoder"), threads=3),
    "labels": Group(("labels",)),
    "repeats": Group(("repeats",), ("rows",), ("noise",)),
    "known": Group(("order",), (), ("batch-shuffle",), bare=True),
}
NO_BASE = "old-embedding"
"""Trained from random weights: there is no earlier embedding to know."""

LATIN = {"places": 0, "channels": 0, "samples": 0, "linked": 0, "labels": 0, "unnamed_labels": 0}
GRACE = 30
"""Seconds that a job has to write what it has when the time is up."""

STOPPED = 3
"""What a job exits with that was asked to stop and can go on."""

DECIBELS = {"psnr": "PSNR", "best_psnr": "best", "patch_psnr": "best match"}
SHARES = {"ssim": "SSIM", "fsim": "similarity"}


# --- one job, in its own process ------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> dict[str, Any]:
    from situs.config import choices_of, from_dict, merge
    from situs.presets import load_preset
    from situs.split.local import evaluate_defended, train_defended
    from situs.train.run import RunConfig

    asked, run = MODELS[args.name], args.out / args.name
    tables = merge(load_preset(args.preset), json.loads(args.settings), choices_of(RunConfig))
    config = from_dict(RunConfig, tables)
    more = {**config.backbone.model_args, **({} if asked.pool == "token" else {"global_pool": asked.pool})}
    config = replace(
        config,
        backbone=replace(config.backbone, model_args=more),
        data=replace(config.data, path=str(args.data), batch=args.batch),
        train=replace(config.train, epochs=args.epochs),
    )
    began, again = time.perf_counter(), (run / "config.json").exists()
    done = train_defended(config, asked.defence, run, resume=again, say=lambda line: print(line, flush=True))
    if done.step < done.total:
        raise SystemExit(STOPPED)
    trained = time.perf_counter() - began
    scores = evaluate_defended(run, args.data, count=args.judged, train_count=args.judged)
    told = {"pool": asked.pool, "steps": done.step, "resumed": again, "seconds": trained}
    return {**asdict(scores), **told, **done.metrics}


def audit(args: argparse.Namespace) -> dict[str, Any]:
    from situs.audit.deadline import Deadline, first_ctrl_c
    from situs.audit.split.attackers import ATTACKS
    from situs.audit.split.audit import audit_split

    group, made = GROUPS[args.group], json.loads((args.out / f"{args.name}.train.json").read_text())
    elsewhere = {NO_BASE, *(name for each in GROUPS.values() if not each.bare for name in each.attacks)}
    attacks = tuple(name for name in ATTACKS if name in (group.attacks or ATTACKS.keys() - elsewhere))
    defence = "none" if group.bare else made["now"]
    deadline = Deadline(lambda line: print(line, flush=True))
    with first_ctrl_c(deadline):
        found = audit_split(
            args.out / args.name, args.data, defences=(defence,), permute=group.permute, attacks=attacks,
            public=args.public, count=args.attacked, deadline=deadline,
        )  # fmt: skip
        return found.numbers()


# --- all of them ----------------------------------------------------------------------------------------------


class Board:
    """The jobs: runs each as a process of its own until the time is up, and keeps what is known so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began, self.lock = args, time.monotonic(), threading.Lock()
        self.ends = self.began + (args.seconds or float("inf"))
        self.failed: list[str] = []

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s] {line}\n", end="", flush=True)

    def run(self, name: str, group: str | None, threads: int) -> bool:
        """Whether a job was done, now or before; its output is in OUT/NAME.log."""
        job, args = f"{name}.{group or 'train'}", self.args
        if self.has(job):
            return True
        words = [sys.executable, __file__, *sys.argv[1:], "--name", name, *(["--group", group] if group else [])]
        told: dict[str, str] = dict.fromkeys(
            ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), str(threads)
        )
        if group is not None:
            told["CUDA_VISIBLE_DEVICES"] = ""  # attacks are work for the CPU
        status, late = None, time.monotonic() >= self.ends
        if not late:
            self.say(f"{job} begins")
            with (args.out / f"{job}.log").open("ab") as log:
                # In a group of its own, so that Ctrl-C reaches it once, from here.
                process = subprocess.Popen(
                    words, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **told}, start_new_session=True
                )
                late = self.wait(process)
            status = process.returncode if self.has(job) else process.returncode or STOPPED
        self.say(f"{job} {'done' if status == 0 else 'out of time' if late else 'FAILED'}")
        with self.lock:
            if status != 0:
                self.failed.append(job)
            if status != 0 and not late:
                print("    " + "\n    ".join((args.out / f"{job}.log").read_text().splitlines()[-12:]), flush=True)
            self.write()
        return status == 0

    def has(self, job: str) -> bool:
        """Whether a job is done; an audit that was stopped has written what it had."""
        file = self.args.out / f"{job}.json"
        return file.exists() and json.loads(file.read_text()).get("stopped") is None

    def wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Waits for a job to end; whether it had to be asked to."""
        while time.monotonic() < self.ends:
            try:
                process.wait(0.5)
            except subprocess.TimeoutExpired:
                continue
            return False
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return True

    def write(self) -> None:
        results = {path.stem: json.loads(path.read_text()) for path in sorted(self.args.out.glob("*.*.json"))}
        results = {name: found for name, found in results.items() if found}
        write_text(self.args.out / "results.json", json.dumps({"not done": self.failed, **results}, indent=1))
        left = f"\nNot done: {', '.join(self.failed)}.\n" if self.failed else ""
        write_text(self.args.out / "table.md", table(results) + left)


def run_all(args: argparse.Namespace) -> int:
    board, audits = Board(args), ThreadPoolExecutor(args.cores)

    def pipeline(name: str) -> None:
        threads = max(1, args.cores // args.at_once)
        if board.run(name, None, threads):
            kind = MODELS[name].defence.partition("=")[0]
            for group in (group for group, each in GROUPS.items() if kind in each.kinds):
                audits.submit(board.run, name, group, GROUPS[group].threads)

    def stop(*_: object) -> None:
        board.ends = time.monotonic()

    for asked in (signal.SIGINT, signal.SIGTERM):
        signal.signal(asked, stop)
    board.write()
    with ThreadPoolExecutor(args.at_once) as trainings:
        list(trainings.map(pipeline, args.models))
    audits.shutdown(wait=True)
    print((args.out / "table.md").read_text())
    return 1 if board.failed else 0


# --- the table ------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """A row an attacker, below what is sent; percent and dB."""
    scores = {**dict.fromkeys(LATIN), **DECIBELS, **SHARES}
    head = ["trained", "sent", "top-1", "kNN", "attacker", *(name or key for key, name in scores.items())]
    rows: list[list[str]] = []
    for name, asked in MODELS.items():
        made = results.get(f"{name}.train")
        kept = ["", ""] if made is None else [f"{100 * made['top1']:.1f} %", f"{100 * made['knn']:.1f} %"]
        found = {group: results[f"{name}.{group}"] for group in GROUPS if f"{name}.{group}" in results}
        for guess, held in next((each["blind_guesses"] for each in found.values()), {}).items() if name == "SL" else ():
            rows.append(["", "nothing", "", "", guess, *(cell(held, key) for key in scores)])
        sent: dict[str, list[dict[str, Any]]] = {}
        for group, each in found.items():
            for setting in each["settings"]:
                place = "exchange known" if GROUPS[group].bare else setting["setting"]
                sent.setdefault(place, []).extend(attack for attack in setting["attacks"] if attack["status"] == "done")
        lead = [f"{name}: {asked.defence}", "", *kept]
        for setting, attacks in sent.items():
            for attack in attacks:
                lead[1] = setting
                rows.append([*lead, attack["attack"], *(cell(attack, key) for key in scores)])
                lead = ["", "", "", ""]
        if not sent and made is not None:
            rows.append([*lead, "", *("" for _ in scores)])
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def cell(held: dict[str, Any], key: str) -> str:
    if key not in held:
        return ""
    if key in LATIN:
        return f"{100 * held[key]:.0f} %"
    return f"{held[key]:.1f}" if key in DECIBELS else f"{held[key]:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="CIFAR-100 as parquet files or python batches")
    parser.add_argument("--out", type=Path, default=Path("runs/defences"))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--preset", default="cifar100-supervised-short")
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--judged", type=int, default=None, help="test images, and training images for kNN, at most")
    parser.add_argument("--attacked", type=int, default=104, help="test images that are attacked")
    parser.add_argument("--public", type=int, default=300, help="further test images, the attacker's own")
    parser.add_argument("--at-once", type=int, default=1, help="trainings that share the device")
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="for audits, one each")
    parser.add_argument("--seconds", type=float, default=0, help="end what still runs then")
    parser.add_argument("--settings", default="{}", help="JSON laid over the preset, as for a dry run")
    parser.add_argument("--name", choices=MODELS, help=argparse.SUPPRESS)
    parser.add_argument("--group", choices=GROUPS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.name is None:
        return run_all(args)
    found = train(args) if args.group is None else audit(args)
    write_text(args.out / f"{args.name}.{args.group or 'train'}.json", json.dumps(found))  # whole or not at all
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
