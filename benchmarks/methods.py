"""Our training step beside what others would write, in one run: `situs bench step`'s clock around both.

    python benchmarks/methods.py --cases supervised mp3:0.75 mae --peers timm timm-eager
    python benchmarks/methods.py --model vit_small_patch16_224 --img-size 32 --patch-size 4 --batch 64

A case is that of `situs bench step`, a peer one of PEERS below. All have the same images of noise, precision, clipping
and fused AdamW. Where one fails the others are still measured, and the status is 1.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import timm
import torch
from torch.nn import functional as F

from situs.bench.cases import StepCase, StepConfig, Timing, make_cases
from situs.bench.ceiling import measure_ceiling
from situs.bench.clock import Times, time_steps
from situs.bench.flops import step_flops
from situs.bench.machine import describe_machine
from situs.bench.measure import measure_case, precision_on
from situs.results import Table, percent
from situs.train.step import autocast


class Row(NamedTuple):
    name: str
    times: Times
    flops: int


def measure_timm(case: StepCase, timing: Timing, device: torch.device, compiled: bool) -> Row:
    """The loop of timm's own examples: its model, bf16 autocast, its label smoothing, clipping, fused AdamW."""
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()
    given = {"img_size": case.img_size, "patch_size": case.patch_size, **case.model_args}
    asked = {name: value for name, value in given.items() if value is not None}
    model: Any = timm.create_model(case.model, num_classes=case.num_classes, drop_path_rate=case.drop_path, **asked)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05, fused=True)
    sides = model.patch_embed.img_size
    images = torch.randn(case.batch, 3, *sides, device=device)
    labels = torch.randint(case.num_classes, (case.batch,), device=device)

    def loss_of(run: Callable[[torch.Tensor], torch.Tensor], size: int) -> torch.Tensor:
        with autocast(device, precision_on(case, device)):
            logits = run(images[:size])
        return F.cross_entropy(logits.float(), labels[:size], label_smoothing=0.1)

    flops = step_flops(lambda size: loss_of(model, size), case.batch)
    run = torch.compile(model) if compiled and device.type == "cuda" else model

    def update() -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(run, case.batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Row("timm" if compiled else "timm-eager", time_steps(update, device, timing), flops)


PEERS: dict[str, Callable[[StepCase, Timing, torch.device], Row]] = {
    "timm": lambda *told: measure_timm(*told, compiled=True),
    "timm-eager": lambda *told: measure_timm(*told, compiled=False),
}


def measure_all(args: argparse.Namespace, timing: Timing, device: torch.device) -> tuple[list[Row], list[str]]:
    """Rows, and the names of those that failed, which are told as they fail."""
    config = StepConfig(
        models=(args.model,), batches=(args.batch,), img_size=args.img_size, patch_size=args.patch_size,
        num_classes=args.classes, model_args={} if args.depth is None else {"depth": args.depth},
    )  # fmt: skip

    def ours(word: str) -> Row:
        [case] = make_cases([word], config)
        row = measure_case(case, timing, device)
        return Row(case.label, row.times, row.flops)

    [plain] = make_cases(["supervised"], config)
    tasks = [(word, lambda word=word: ours(word)) for word in args.cases]
    tasks += [(name, lambda name=name: PEERS[name](plain, timing, device)) for name in args.peers]
    rows, failed = [], []
    for name, task in tasks:
        try:
            rows.append(task())
            print(f"{name}: {args.batch / rows[-1].times.median:,.0f} img/s", file=sys.stderr, flush=True)
        except Exception:  # noqa: BLE001  (whatever it was: it is printed, and the command fails in the end)
            traceback.print_exc()
            failed.append(name)
    return rows, failed


def table(rows: list[Row], args: argparse.Namespace, device: torch.device) -> Table:
    precision = "bf16" if device.type == "cuda" else "fp32"
    ceiling = measure_ceiling(device, precision, 1.0 if device.type == "cuda" else 0.05)
    cells = []
    for name, times, flops in rows:
        spread = 500 * (max(times.seconds) - min(times.seconds))
        cells.append([
            name, f"{args.batch / times.median:,.0f}", f"{1e3 * times.median:.2f}", f"{spread:.2f}",
            f"{times.median / rows[0].times.median:.2f}", None if times.gib is None else f"{times.gib:.2f}",
            percent(flops / times.median / ceiling), None if times.busy is None else percent(times.busy),
        ])  # fmt: skip
    machine = describe_machine(device)
    title = f"{args.model}, batch {args.batch}, {precision}: {machine['device']}, torch {machine['torch']}"
    return Table(title, ["case", "img/s", "ms", "±", "time/first", "GiB", "of ceiling", "busy"], cells)


def main() -> int:
    """0, or 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["supervised", "mp3", "mae"])
    parser.add_argument("--peers", nargs="*", default=["timm"], choices=sorted(PEERS))
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--img-size", type=int, default=None)
    parser.add_argument("--patch-size", type=int, default=None)
    parser.add_argument("--depth", type=int, default=None)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    rows, failed = measure_all(args, Timing(args.warmup, args.steps, args.repeats), device)
    if rows:
        print(table(rows, args, device))
    if failed:
        print(f"failed, see above: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
