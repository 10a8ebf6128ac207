"""How fast are block masks? The batched sampler against Python loops that draw from the same distribution.

    python benchmarks/block_masks.py                    # CPU: tensor operations
    python benchmarks/block_masks.py --device cuda      # one Triton kernel, what the library uses on a GPU
    python benchmarks/block_masks.py --device cuda --compile reduce-overhead

Two loops stand beside it. `slices` is what a careful engineer writes with numpy: counting and filling a box are one
call each. `cells` walks the cells of the box one by one, as the generators in circulation do. Both draw with Python's
own `random`. The sampler is timed twice: `mask` from noise that is there already, and `drawn` with its noise
(`core.masking.draw_block_mask`), which is what the loops do and what a method calls.

All are measured in turns, so that a busy machine slows all of them; figures are medians. On a GPU eight calls are
queued before the clock is read, as in training, where nothing waits for a mask.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from situs.core.masking import BlockRule, block_mask, block_noise_shape, count_of, draw_block_mask
from situs.core.random import uniform

LOW, HIGH = math.log(0.3), math.log(1 / 0.3)
ROUNDS = 32
Call = tuple[Callable[[], object], int]
"""What to call, and how often in a row."""


def attempt(grid: tuple[int, int], low: float, high: float) -> tuple[int, int, int, int] | None:
    area, aspect = random.uniform(low, high), math.exp(random.uniform(LOW, HIGH))
    h, w = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
    if h >= grid[0] or w >= grid[1]:
        return None
    return random.randint(0, grid[0] - h), random.randint(0, grid[1] - w), h, w


def cover(mask: np.ndarray, box: tuple[int, int, int, int], most: int, cells: bool) -> int:
    """Covers the free cells of the box, row by row and at most `most`; gives their number."""
    top, left, h, w = box
    if cells:
        new = 0
        for y in range(top, top + h):
            for x in range(left, left + w):
                if not mask[y, x] and new < most:
                    mask[y, x] = True
                    new += 1
        return new
    view = mask[top : top + h, left : left + w]
    new = h * w - int(np.count_nonzero(view))
    if new <= most:
        view[:] = True
        return new
    rows, columns = np.nonzero(~view)
    view[rows[:most], columns[:most]] = True
    return most


def loop_mask(grid: tuple[int, int], target: int, rule: BlockRule, cells: bool) -> np.ndarray:
    mask = np.zeros(grid, dtype=bool)
    wanted = target
    for _ in range(ROUNDS if rule == "paper" else target):
        if wanted == 0:
            break
        new = 0
        low, high = (min(8, wanted), wanted) if rule == "paper" else (8, min(wanted, 75))
        for _ in range(10):
            box = attempt(grid, low, high)
            if box is None:
                continue
            if rule == "official":
                top, left, h, w = box
                free = h * w - int(np.count_nonzero(mask[top : top + h, left : left + w]))
                if not 0 < free <= high:
                    continue
            new = cover(mask, box, wanted, cells)
            if new:
                break
        if new == 0 and rule == "official":
            break
        wanted -= new
    if rule == "paper" and wanted:
        mask.flat[np.random.choice(np.flatnonzero(~mask), wanted, replace=False)] = True
    return mask


def in_turns(calls: dict[str, Call], repeats: int, wait: Callable[[], None]) -> dict[str, float]:
    """Median milliseconds of each call, the calls taking turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(3 + repeats):
        for name, (call, queued) in calls.items():
            wait()
            start = time.perf_counter()
            for _ in range(queued):
                call()
            wait()
            if turn >= 3:
                times[name].append((time.perf_counter() - start) / queued)
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def measure(args: argparse.Namespace, rule: BlockRule, ratio: float) -> dict[str, float]:
    grid = (args.grid[0], args.grid[1])
    ids = torch.arange(args.batch, device=args.device)
    shape, target = block_noise_shape(grid, ratio, rule=rule), count_of(ratio, grid[0] * grid[1])
    noise = uniform(0, 0, ids, "bench", shape)
    torch.compiler.reset()
    sampler = torch.compile(block_mask, fullgraph=True, mode=args.compile) if args.compile else block_mask
    drawer = torch.compile(draw_block_mask, fullgraph=True, mode=args.compile) if args.compile else draw_block_mask
    queued = 8 if args.device == "cuda" else 1
    calls: dict[str, Call] = {
        "slices": (lambda: [loop_mask(grid, target, rule, False) for _ in range(args.batch)], 1),
        "cells": (lambda: [loop_mask(grid, target, rule, True) for _ in range(args.batch)], 1),
        "mask": (lambda: sampler(noise, grid, ratio, rule=rule), queued),
        "drawn": (lambda: drawer(0, 0, ids, "bench", grid, ratio, rule=rule), queued),
    }
    return in_turns(calls, args.repeats, torch.cuda.synchronize if args.device == "cuda" else lambda: None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--compile", nargs="?", const="default", help="compile the tensor version; a mode may follow")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--grid", type=int, nargs=2, default=(14, 14))
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.09, 0.15, 0.27, 0.5, 0.75, 0.9])
    parser.add_argument("--rules", nargs="+", default=["paper", "official"])
    parser.add_argument("--repeats", type=int, default=20)
    args = parser.parse_args()

    print(f"batch {args.batch}, grid {args.grid[0]}x{args.grid[1]}, {args.device}, torch {torch.__version__},", end=" ")
    print(f"{torch.get_num_threads()} threads, compile {args.compile or 'no'}; medians in ms")
    print("                |      loops      |     sampler     | mask: times     | drawn: times faster")
    print("rule      gamma |  slices   cells |    mask   drawn | slices   cells  | slices   cells")
    for rule in args.rules:
        for ratio in args.ratios:
            ms = measure(args, rule, ratio)
            mask, drawn = ms["mask"], ms["drawn"]
            print(
                f"{rule:9s} {ratio:5.2f} | {ms['slices']:7.2f} {ms['cells']:7.2f} | {mask:7.3f} {drawn:7.3f} |"
                f" {ms['slices'] / mask:6.1f} {ms['cells'] / mask:7.1f}  |"
                f" {ms['slices'] / drawn:6.1f} {ms['cells'] / drawn:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
