"""What `situs.audit.guard` costs a training step in a plain loop: without it, between two looks, and at a look.

    python benchmarks/guard.py                       # ViT-S/4 at 32 px, batch 1, random bytes
    python benchmarks/guard.py --batch 8 --every 50

Seconds are processor time on a CPU and waited for on a GPU; medians. "a step at --every" spreads a look over its steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import timm
import torch
from torch.nn import functional as F

from situs.audit import guard
from situs.audit.public import ATTACKED

GUARDS: dict[str, Sequence[str]] = {"patchembed": ["patchembed"], "all closed forms": ATTACKED}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_small_patch16_224")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--patch", type=int, default=4)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--steps", type=int, default=5, help="of each kind that are timed")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    asked = {"img_size": args.size, "patch_size": args.patch, "num_classes": 100}
    model = timm.create_model(args.model, **asked).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    images = (torch.randint(256, (args.batch, 3, args.size, args.size)) / 255 - 0.5).to(args.device) / 0.5
    labels = torch.arange(args.batch, device=args.device)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    shape = f"{args.model}, {args.size} px, patches of {args.patch}, batch {args.batch}"
    print(f"{shape}, {args.device}, {torch.get_num_threads()} CPU threads, torch {torch.__version__}\n")
    print("| guard | ms a step between looks | ms more at a look | ms more a step at every " + f"{args.every} |")
    print("|---|---|---|---|")
    plain = timed(step, args.steps, args.device)
    print(f"| none | {1e3 * plain:.0f} | | |", flush=True)
    for name, attacks in GUARDS.items():
        watch = guard(model, optimizer, img_size=args.size, every=10**9, act=lambda _: None, attacks=attacks)
        step()  # the first is looked at, and reads the model
        between = timed(step, args.steps, args.device)
        watch.every = 1
        look = timed(step, args.steps, args.device) - between
        watch.close()
        print(f"| {name} | {1e3 * between:.0f} | {1e3 * look:.0f} | {1e3 * look / args.every:.1f} |", flush=True)


def timed(step: Callable[[], None], count: int, device: str) -> float:
    """Median seconds of a step, one before them left out."""
    clock = time.perf_counter if device.startswith("cuda") else time.process_time
    wait = torch.cuda.synchronize if device.startswith("cuda") else (lambda: None)
    taken: list[float] = []
    for _ in range(count + 1):
        wait()
        begun = clock()
        step()
        wait()
        taken.append(clock() - begun)
    return median(taken[1:])


if __name__ == "__main__":
    main()
