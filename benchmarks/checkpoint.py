"""How long a checkpoint holds a run up, and how long until it is on the disk.

    python benchmarks/checkpoint.py --models vit_base_patch16_224 vit_large_patch16_224 --dir /path/on/the/disk

A supervised run of each model makes steps (AdamW, its moments, a mean of the weights) and saves. "waiting" is how it
was before checkpoints were written in the background: everything is brought to the host, written by safetensors, synced
and read again for its hash, while the run waits. "background" is how it is: `RunFolder.begin`, and steps until the
checkpoint is on the disk. Held: milliseconds in which no next step could be queued; with the device: until the device
is free for one. The first save allocates; the figures are of the later ones, the median.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from situs.backbones import create_backbone
from situs.core.when import When
from situs.methods import create_method
from situs.methods.base import Batch
from situs.train.checkpoint import RunFolder
from situs.train.checkpoint.files import digest, sync
from situs.train.checkpoint.state import Files, capture
from situs.train.optim import OptimConfig
from situs.train.step import Stepper


class Training:
    """One model's run: steps on one batch, and what a checkpoint of it holds."""

    def __init__(self, name: str, batch: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.device = device
        method = create_method("supervised", create_backbone(name, num_classes=1000)).to(device)
        self.stepper = Stepper(
            method, OptimConfig(ema=0.999), seed=0, precision="bf16" if device.type == "cuda" else "fp32",
            accumulate=1, parallel="ddp", compiled=False, graph=True,
        )  # fmt: skip
        size = method.backbone.input.shape
        assert size is not None
        images, ids = torch.randn(batch, 3, *size, device=device), torch.arange(batch, device=device)
        self.batch, self.count = Batch(images, ids, {"label": ids % 1000}), 0

    def step(self) -> None:
        """One update, queued."""
        self.stepper.update(self.batch, When(step=self.count), 1e-4, ragged=False)
        self.count += 1

    def files(self) -> Files:
        return capture(self.stepper.method, self.stepper.optimizer, self.stepper.ema, self.device)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def write_waiting(files: Files, folder: Path) -> None:
    """As it was: the run waits for the host's copy, the file, the disk and the hash."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, tensors in files.items():
        path = folder / f"{name}.safetensors"
        save_file({key: tensor.detach().cpu().contiguous().clone() for key, tensor in tensors.items()}, path)
        sync(path)
        digest(path)
    sync(folder)


def measure(name: str, batch: int, saves: int, place: Path, device: torch.device) -> None:
    training = Training(name, batch, device)
    for _ in range(8):
        training.step()
    training.wait()
    began = time.perf_counter()
    for _ in range(8):
        training.step()
    training.wait()
    alone = (time.perf_counter() - began) / 8
    size = sum(t.numel() * t.element_size() for tensors in training.files().values() for t in tensors.values())
    waiting, blocked, busy, until, beside = ([] for _ in range(5))
    for _ in range(saves):
        began = time.perf_counter()
        write_waiting(training.files(), place / "waiting")
        waiting.append(time.perf_counter() - began)
    shutil.rmtree(place / "waiting", ignore_errors=True)
    run = RunFolder.create(place / "run", {})
    for number in range(saves + 1):
        training.step()
        training.wait()  # as the loop does, to know that the step was finite
        began = time.perf_counter()
        run.begin(number + 1, training.files(), {}, keep=1)
        queued = time.perf_counter()
        training.wait()
        free = time.perf_counter()
        done = training.count
        while not run._background._pending.done():  # nobody else needs to know without waiting
            training.step()
            training.wait()
        ended = time.perf_counter()
        run.wait()
        if number:  # the first allocates
            blocked.append(queued - began)
            busy.append(free - began)
            until.append(time.perf_counter() - began)
            beside.append((ended - free) / max(1, training.count - done))
    shutil.rmtree(place / "run")
    middle = statistics.median
    print(f"{name}: {size / 2**30:.2f} GiB a checkpoint, {1e3 * alone:.1f} ms a step of {batch} images on {device}")
    print(f"  waiting      held {1e3 * middle(waiting):9,.1f} ms, on the disk after {middle(waiting):6.2f} s")
    print(f"  background   held {1e3 * middle(blocked):9,.1f} ms ({1e3 * middle(busy):,.1f} with the device), on the "
          f"disk after {middle(until):6.2f} s; a step meanwhile {1e3 * middle(beside):.1f} ms")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["vit_base_patch16_224", "vit_large_patch16_224"])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the disk to measure")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    for name in args.models:
        measure(name, args.batch, args.saves, args.dir, torch.device(args.device))


if __name__ == "__main__":
    main()
