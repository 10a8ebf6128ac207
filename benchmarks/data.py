"""Images a second of each stage: decoding, and the augmentation of a resident set for every recipe.

    python benchmarks/data.py                         # 50,000 synthetic 32-pixel images; the machine's devices
    python benchmarks/data.py --data ../shared/data/cifar100 --photos ../shared/data/imagenet-samples
    python benchmarks/data.py --size 224 --count 2000 --batch 256

Prints one line a stage: stage, device, images a second, milliseconds a batch, and the host's share of it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator

import torch

from situs.data.augment.recipes import RECIPES
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.modalities.image import ImagePipeline
from situs.data.open import open_source
from situs.data.resident import load_resident
from situs.data.sources.base import Source, TensorSource


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def say(stage: str, device: str, images: int, seconds: float, batch: int, host: float | None = None) -> None:
    share = "" if host is None else f"   host {host / seconds:5.1%}"
    each = seconds / (images / batch) * 1e3
    print(
        f"{stage:<34} {device:<5} {images / seconds:>12,.0f} img/s {each:>9.2f} ms a batch of {batch}{share}",
        flush=True,
    )


def endless(loader: Loader) -> Iterator[int]:
    epoch = 0
    while True:
        for batch in loader.iterate(epoch):
            yield len(batch.ids)
        epoch += 1


def measure(loader: Loader, device: str, seconds: float) -> tuple[int, float, float]:
    """Images, seconds and the seconds of the host, after a warm-up."""
    counts = endless(loader)
    for _ in range(loader.steps_per_epoch + 20 if device == "cuda" else 2):  # a whole epoch: all sizes compiled
        next(counts)
    synchronise(device)
    loader.data_wait, images, started = 0.0, 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        images += next(counts)
    host = loader.data_wait
    synchronise(device)
    return images, time.perf_counter() - started, host


def resident(source: Source, args: argparse.Namespace, device: str) -> None:
    for name, augment in RECIPES.items():
        config = DataConfig(img_size=args.size, batch=args.batch, resident="always", resident_gib=64.0)
        loader = make_loader(config, augment, device, source=source)
        images, seconds, host = measure(loader, device, args.seconds)
        say(f"resident {name}", device, images, seconds, args.batch, host)
        if args.compile and device == "cuda" and name.startswith("deit"):
            images, seconds, host = measure(loader.compile(), device, args.seconds)
            say(f"resident {name}, compiled", device, images, seconds, args.batch, host)


def decoding(path: str, args: argparse.Namespace) -> None:
    source = open_source(path, channels=3)
    started = time.perf_counter()
    size = args.size, args.size
    held = load_resident(ImagePipeline(source, size, 0, None, resident=size), "cpu", 64 << 30)
    say(f"decode {source.name}", "cpu", len(held.index), time.perf_counter() - started, args.batch)


def streaming(path: str, args: argparse.Namespace, device: str) -> None:
    for workers in sorted({0, args.workers}):
        config = DataConfig(path=path, img_size=args.photo_size, batch=64, workers=workers, resident="never")
        loader = make_loader(config, RECIPES["deit-pretrain"], device)
        images, seconds, host = measure(loader, device, args.seconds)
        say(f"stream deit-pretrain, {workers} workers", device, images, seconds, 64, host)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="a set of small images to decode")
    parser.add_argument("--photos", help="a set of photographs to stream")
    parser.add_argument("--count", type=int, default=50000, help="synthetic images")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--photo-size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each measurement")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: all there are")
    parser.add_argument("--compile", action="store_true", help="also time the compiled graph on the GPU")
    args = parser.parse_args()
    devices = [args.device] if args.device else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    images = torch.randint(0, 256, (args.count, 3, args.size, args.size), dtype=torch.uint8)
    source = TensorSource(images, torch.arange(args.count) % 100, tuple(map(str, range(100))), "synthetic")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, devices {', '.join(devices)}")
    for device in devices:
        resident(source, args, device)
        if args.photos:
            streaming(args.photos, args, device)
    if args.data:
        decoding(args.data, args)


if __name__ == "__main__":
    main()
