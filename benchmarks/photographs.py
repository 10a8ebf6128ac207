"""Images a second of the loader alone on photographs: where they lie, beside the step's own.

    python benchmarks/photographs.py --photos ../shared/data/imagenet-samples --workers 16
    python benchmarks/photographs.py --photos DIR --sides 500 --forms folder packed --cases mae --seconds 10

The photographs are brought to each of --sides (their shorter side; 375 is ImageNet's own), laid into a temporary folder
in every form and repeated to --count samples by their numbers, so that they lie in the machine's memory: the loader is
measured and not the disk. "packed" is `situs data pack` as it stands (short side 256, JPEG, parquet); the other forms
hold the photographs as they are. "on the device" decodes the set once and holds it there. --cases are measured first,
by `situs bench`. Each figure is printed as it comes, and none of them may take longer than --limit.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import io
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from PIL import Image

from situs.bench.step import read_steps
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.data.loader import Loader, make_loader
from situs.data.open import open_source
from situs.data.pack import PackConfig, pack
from situs.data.sources.base import EncodedSource, Source
from situs.data.sources.images import decode
from situs.data.work import cores
from situs.errors import SitusError
from situs.results import Table

FORMS = ("folder", "parquet", "webdataset", "packed", "on the device")
CASES = ("supervised", "mp3:mask_ratio=.75", "droppos:affinity=visible")
PACKED = PackConfig()


class Repeated(EncodedSource):
    """A source over and over, up to `count` samples."""

    def __init__(self, source: EncodedSource, count: int) -> None:
        super().__init__(source.name, source.classes, source.channels, source.strict)
        self.source, self.count = source, count

    def __len__(self) -> int:
        return self.count

    def payload(self, index: int) -> bytes:
        return self.source.payload(index % len(self.source))

    def label(self, index: int) -> int | None:
        return self.source.label(index % len(self.source))

    def entry(self, index: int) -> str:
        return self.source.entry(index % len(self.source))


class TooLongError(Exception):
    """A part of the benchmark has used up its time."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises `TooLongError` in the main thread when the time is over, whatever Python waits for."""

    def stop(*_: object) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


AUGMENTS = {
    "none": AugmentConfig(crop="none", flip=0.0),
    "crop": AugmentConfig(scale=(0.2, 1.0)),
    "deit-pretrain": AugmentConfig(operations=2),
}


def brought_to(data: bytes, side: int) -> bytes:
    """A photograph whose shorter side is `side`; as it is where it has that already."""
    with Image.open(io.BytesIO(data)) as image:
        if min(image.size) == side:
            return data
        sides = [max(side, round(length * side / min(image.size))) for length in image.size]
        buffer = io.BytesIO()
        image.convert("RGB").resize(sides, Image.Resampling.BICUBIC).save(buffer, "JPEG", quality=95)
        return buffer.getvalue()


def prepare(args: argparse.Namespace, side: int, root: Path) -> dict[str, Path]:
    """The photographs of a size in every form that is asked for, below `root`."""
    (root / "folder").mkdir(parents=True)
    files = sorted(file for file in args.photos.rglob("*") if file.is_file())[: args.most]

    def write(file: Path) -> None:
        (root / "folder" / file.name).write_bytes(brought_to(file.read_bytes(), side))

    with ThreadPoolExecutor(cores()) as pool:
        list(pool.map(write, files))
    for form in ("parquet", "webdataset"):
        if form in args.forms:
            pack(root / "folder", root / form, PackConfig(format=form, short_side=0), workers=0)
    if "packed" in args.forms and side > PACKED.short_side:  # else it would be the parquet row again
        pack(root / "folder", root / "packed", PACKED, workers=args.workers)
    places = {form: root / form for form in FORMS if form in args.forms and (root / form).exists()}
    return places | ({"on the device": root / "folder"} if "on the device" in args.forms else {})


def without_end(loader: Loader) -> Iterator[Batch]:
    """Epoch after epoch."""
    epoch = 0
    while True:
        yield from loader.iterate(epoch)
        epoch += 1


def speed(source: Source, args: argparse.Namespace, resident: str) -> float:
    """Images a second after a warm-up: of two batches a worker, or of half the limit where that comes first."""
    config = DataConfig(
        img_size=args.size,
        batch=args.batch,
        workers=args.workers,
        resident=resident,
        resident_gib=64.0,
    )
    began = time.perf_counter()
    loader = make_loader(config, AUGMENTS[args.augment], args.device, source=source)
    batches = without_end(loader)
    try:
        for _ in range(2 * max(1, args.workers)):
            next(batches)
            if time.perf_counter() - began > args.limit / 2:
                break
        settle(args)
        images, started = 0, time.perf_counter()
        while time.perf_counter() - started < args.seconds:
            images += len(next(batches).ids)
        settle(args)
        return images / (time.perf_counter() - started)
    finally:
        batches.close()
        del batches, loader
        if args.workers:
            gc.collect()  # they end before those of the next one are forked


def settle(args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.synchronize()


def cell(source: EncodedSource, args: argparse.Namespace, form: str) -> str:
    """One figure, or the reason why there is none."""
    on_device = form == "on the device"
    if time.perf_counter() > args.end:
        return f"not begun within {args.total:g} s"
    try:
        with within(args.limit):
            taken = source if on_device else Repeated(source, args.count)
            return f"{speed(taken, args, 'always' if on_device else 'never'):,.0f}"
    except TooLongError:
        return f"stopped after {args.limit:g} s"
    except SitusError as error:
        return str(error)


def alone(source: EncodedSource, side: int) -> Table:
    """One thread: decoding and nothing else."""
    files = [source.payload(index) for index in range(min(100, len(source)))]
    rows: list[list[str]] = []
    for part in (1, 2):
        started = time.perf_counter()
        for data in files:
            decode(data, "x", 3, reduce=part)
        name = f"Pillow, one thread, 1/{part} of the sides"
        rows.append([name, f"{len(files) / (time.perf_counter() - started):,.0f}"])
    kib = sum(map(len, files)) / len(files) / 1024
    return Table(f"Decoding alone, shorter side {side}, {kib:.0f} KiB a file", ["way", "img/s"], rows)


def steps(args: argparse.Namespace, root: Path) -> Table | None:
    """The step's own speed, compiled in processes of their own."""
    if not args.cases:
        return None
    command = [sys.executable, "-m", "situs", "bench", *args.cases, "--models", args.model]
    command += ["--batches", str(args.batch), "--at-once", "--device", args.device, "--out", str(root / "step")]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        running.wait(args.step_limit)
    except subprocess.TimeoutExpired:
        os.killpg(running.pid, signal.SIGKILL)  # with those that compile for it
        running.wait()
        print(f"the steps were stopped after {args.step_limit:g} s", flush=True)
    try:
        rows = read_steps(root / "step" / "step.json").rows
    except SitusError as error:
        print(f"no figures of steps: {error}", flush=True)
        return None
    cells = [[row.case.label, f"{1e3 * row.times.median:.1f}", f"{row.images_per_second:,.0f}"] for row in rows]
    return Table(f"The step alone: {args.model}, batch {args.batch}", ["case", "ms", "img/s"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--photos", type=Path, required=True, help="a folder of JPEG files")
    parser.add_argument("--most", type=int, default=1000, help="so many of them at most")
    parser.add_argument("--sides", type=int, nargs="+", default=[224, 375], help="shorter sides of the photographs")
    parser.add_argument("--count", type=int, default=200_000, help="samples they are repeated to")
    parser.add_argument("--size", type=int, default=224, help="side of what the model sees")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--augment", choices=AUGMENTS, default="deit-pretrain")
    parser.add_argument("--seconds", type=float, default=3.0, help="time of each measurement, after its warm-up")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds after which a figure is given up")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--cases", nargs="*", default=CASES if device == "cuda" else (), help="steps; none: leave out")
    parser.add_argument("--model", default="vit_base_patch16_224", help="of the steps")
    parser.add_argument("--step-limit", type=float, default=140.0, help="seconds for all steps, compiling included")
    parser.add_argument("--total", type=float, default=300.0, help="seconds after which no further figure is begun")
    parser.add_argument("--device", default=device)
    args = parser.parse_args()
    if args.count < args.batch or args.most < 1:
        parser.error("--count must be at least --batch, and --most at least 1")
    # Even out of a call that no signal ends.
    faulthandler.dump_traceback_later(args.total + 2 * args.limit + 60, exit=True, file=sys.__stderr__)
    args.end = (began := time.perf_counter()) + args.total
    machine = torch.cuda.get_device_name() if args.device == "cuda" else "no GPU"
    print(f"torch {torch.__version__}, {machine}, {cores()} cores, {args.workers} workers", flush=True)
    with tempfile.TemporaryDirectory() as name:
        root, tables = Path(name), []
        tables.append(steps(args, root))
        rows = []
        for side in args.sides:
            if time.perf_counter() > args.end:
                print(f"shorter side {side}: not begun within {args.total:g} s", flush=True)
                continue
            places = prepare(args, side, root / str(side))
            for form, place in places.items():
                source = open_source(place, channels=3)
                assert isinstance(source, EncodedSource)
                if not rows or rows[-1][0] != str(side):
                    tables.append(alone(source, side))
                rows.append([str(side), form, cell(source, args, form)])
                print(f"{time.perf_counter() - began:5.0f} s  {side}, {form}: {rows[-1][-1]}", flush=True)
        tables.append(Table("The loader alone, img/s", ["shorter side", "source", "img/s"], rows))
        for table in filter(None, tables):
            print(table)
    faulthandler.cancel_dump_traceback_later()
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
