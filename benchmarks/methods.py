"""Speed and memory of a training step, method by method, in one run: the real step on synthetic images.

    python benchmarks/methods.py --cases supervised mp3:0.3 mp3:0.5 mp3:0.75 mp3:0.9 mae:0.75
    python benchmarks/methods.py --at-once --cases supervised mjp droppos droppos:affinity=visible droppos:affinity=

A case is METHOD, METHOD:RATIO or METHOD:FIELD=VALUE,… of the method's config; an empty value is none. With --at-once
each case compiles in a process of its own, and a lock lets one of them be timed at a time. The step is
`situs.train.step.Stepper`'s: draws, forward, backward, clipping and the fused optimiser, everything that a run does but
its data. Each case is warmed up (compilation included) and then timed with the device synchronised; img/s is the median
of the repeats, with the spread beside it. Where a case fails the others are still measured, and the status is 1.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from situs.backbones import create_backbone
from situs.methods import METHODS, Batch, Method, create_method
from situs.train.optim import OptimConfig
from situs.train.step import Moment, Stepper


def make(case: str, args: argparse.Namespace) -> Method:
    name, _, words = case.partition(":")
    settings: dict[str, Any] = {}
    for word in filter(None, words.split(",")):
        key, equals, value = word.rpartition("=")
        settings[key if equals else "mask_ratio"] = number(value)
    labelled = "label" in METHODS[name].needs_targets
    backbone = create_backbone(
        args.model,
        img_size=args.img_size,
        patch_size=args.patch_size,
        num_classes=args.classes if labelled else 0,
        drop_path=args.drop_path,
        model_args=args.model_args,
    )
    return create_method(name, backbone, METHODS[name].Config(**settings)).to(args.device).train()


def number(value: str) -> float | str | None:
    try:
        return float(value)
    except ValueError:
        return value or None


def measure(case: str, args: argparse.Namespace) -> dict[str, float]:
    torch.manual_seed(0)
    cuda = args.device == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.compiler.reset()
    method = make(case, args)
    stepper = Stepper(
        method, OptimConfig(clip=1.0), seed=0, precision=args.precision, accumulate=1, parallel="ddp",
        compiled=args.compile, graph=args.graph, say=lambda line: print(f"{case}: {line}", file=sys.stderr),
    )  # fmt: skip
    size = method.backbone.input.shape or (224, 224)
    images = torch.randn(args.batch, method.backbone.input.channels, *size, device=args.device)
    labels = torch.randint(args.classes, (args.batch,), device=args.device)
    data = Batch(images, torch.arange(args.batch, device=args.device), {"label": labels})

    def run(steps: int) -> float:
        began = time.perf_counter()
        for step in range(steps):
            stepper.update(data, Moment(step, step, 0.5), 1e-4, ragged=False)
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    warm = run(args.warmup)
    with alone(args.lock, args.crowd):
        run(args.warmup)
        times = [run(args.steps) / args.steps for _ in range(args.repeats)]
    rates = [args.batch / each for each in times]
    return {
        "img/s": statistics.median(rates),
        "spread": max(rates) - min(rates),
        "ms/step": 1e3 * statistics.median(times),
        "GiB": torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan"),
        "warm s": warm,
    }


@contextmanager
def alone(folder: str | None, crowd: int) -> Iterator[None]:
    """Waits until all `crowd` processes are warm, then lets one in at a time; the others leave the device alone."""
    if folder is None:
        yield
        return
    (Path(folder) / f"{os.getpid()}.warm").touch()
    patience = time.monotonic() + 120  # a process that failed must not hold up the others for good
    while len(list(Path(folder).glob("*.warm"))) < crowd and time.monotonic() < patience:
        time.sleep(0.05)
    with (Path(folder) / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def measure_in_turn(cases: list[str], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """One case after the other; one that fails is told and the others go on."""
    rows = {}
    for case in cases:
        try:
            rows[case] = measure(case, args)
        except Exception:  # noqa: BLE001  (whatever it was: it is printed, and the command fails in the end)
            traceback.print_exc()
        else:
            print(f"{case}: {rows[case]['img/s']:.0f} img/s", flush=True)
    return rows


def measure_at_once(cases: list[str]) -> dict[str, dict[str, float]]:
    """Each case in a process of its own, given the words of this command line and one case."""
    words = [word for word in sys.argv[1:] if word != "--at-once"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *words, "--lock", folder, "--crowd", str(len(cases)), "--cases"]
        running = {case: subprocess.Popen([*command, case], stdout=subprocess.PIPE, text=True) for case in cases}
        answers = {case: process.communicate()[0].splitlines() for case, process in running.items()}
    return {case: json.loads(lines[-1]) for case, lines in answers.items() if running[case].returncode == 0}


def main() -> int:
    """0, or 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["supervised", "mp3:0.75", "mae:0.75"])
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--img-size", type=int, default=224)
    parser.add_argument("--patch-size", type=int, default=None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--drop-path", type=float, default=0.0)
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp16", "fp32"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--no-graph", dest="graph", action="store_false", help="launch every kernel from Python")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--at-once", action="store_true", help="compile the cases in parallel processes")
    parser.add_argument("--lock", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--crowd", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--depth", type=int, default=None, help="fewer blocks, for a dry run")
    args = parser.parse_args()
    args.model_args = {} if args.depth is None else {"depth": args.depth}
    torch.set_float32_matmul_precision("high")
    where = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(
        f"{args.model} {args.img_size} px, batch {args.batch}, {args.precision}, compiled {args.compile}, "
        f"graph {args.graph}, {where}"
    )
    print(f"torch {torch.__version__}")
    if args.lock is not None:
        print(json.dumps(measure(args.cases[0], args)))
        return 0
    rows = measure_at_once(args.cases) if args.at_once else measure_in_turn(args.cases, args)
    failed = [case for case in args.cases if case not in rows]
    if rows:
        print_rows(rows)
    if failed:
        print(f"failed, see above: {', '.join(failed)}")
    return 1 if failed else 0


def print_rows(rows: dict[str, dict[str, float]]) -> None:
    first = next(iter(rows.values()))
    print(f"\n{'case':<28}{'img/s':>8}{'±':>6}{'ms/step':>9}{'GiB':>7}{'time/first':>12}{'warm-up s':>11}")
    for case, row in rows.items():
        share = row["ms/step"] / first["ms/step"]
        print(
            f"{case:<28}{row['img/s']:>8.0f}{row['spread'] / 2:>6.0f}{row['ms/step']:>9.1f}{row['GiB']:>7.1f}"
            f"{share:>12.2f}{row['warm s']:>11.0f}"
        )


if __name__ == "__main__":
    sys.exit(main())
