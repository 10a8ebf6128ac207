"""Images a second of the loader on photographs: where they lie × how they are decoded, beside decoding alone.

    python benchmarks/photographs.py --photos ../shared/data/imagenet-samples --workers 16
    python benchmarks/photographs.py --photos DIR --enlarge 2        # photographs of ImageNet's own size

The photographs are packed into a temporary folder in every form and repeated to --count samples by their numbers, so
that they lie in the machine's memory: the loader is measured and not the disk. "packed" is `situs data pack` as it
stands (short side 256, JPEG, parquet); the other forms hold the photographs as they are.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import tempfile
import time
from pathlib import Path

import torch
from PIL import Image

from situs.data.augment.recipes import recipe
from situs.data.late import decode_on
from situs.data.loader import DataConfig, make_loader
from situs.data.pack import PackConfig, pack
from situs.data.sources import open_source
from situs.data.sources.base import EncodedSource, Source
from situs.data.sources.images import decode
from situs.data.work import cores
from situs.errors import SitusError
from situs.results import Table

FORMS = ("folder", "parquet", "webdataset", "packed")
DECODERS = ("cpu", "scaled", "gpu")


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


def prepare(photos: Path, root: Path, enlarge: float, most: int) -> dict[str, Path]:
    """The photographs in every form, below `root`."""
    (root / "folder").mkdir()
    for file in sorted(file for file in photos.rglob("*") if file.is_file())[:most]:
        data = file.read_bytes()
        if enlarge != 1:
            image = Image.open(io.BytesIO(data)).convert("RGB")
            buffer = io.BytesIO()
            image.resize([round(side * enlarge) for side in image.size], Image.Resampling.BICUBIC).save(
                buffer, "JPEG", quality=90
            )
            data = buffer.getvalue()
        (root / "folder" / file.name).write_bytes(data)
    for form in ("parquet", "webdataset"):
        pack(root / "folder", root / form, PackConfig(format=form, short_side=0))
    pack(root / "folder", root / "packed", PackConfig())
    return {form: root / form for form in FORMS}


def speed(source: Source, args: argparse.Namespace, decoder: str, **more: object) -> tuple[float, float]:
    """Images a second, and the share of the time that the loader kept its caller waiting."""
    config = DataConfig(img_size=args.size, batch=args.batch, workers=args.workers, decode=decoder, **more)
    loader = make_loader(config, recipe(args.augment), args.device, source=source)
    batches = loader.iterate(0)
    for _ in range(min(args.warm, loader.steps_per_epoch - 2)):
        next(batches)
    if args.device == "cuda":
        torch.cuda.synchronize()
    loader.data_wait, images, started, epoch = 0.0, 0, time.perf_counter(), 0
    while time.perf_counter() - started < args.seconds:
        batch = next(batches, None)
        if batch is None:
            epoch += 1
            batches = loader.iterate(epoch)
            continue
        images += len(batch.ids)
    if args.device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    found = images / seconds, loader.data_wait / seconds
    batches.close()
    del batches, loader
    gc.collect()  # its workers end before those of the next one are forked
    return found


def alone(source: EncodedSource, args: argparse.Namespace) -> Table:
    """One thread, and the GPU by batches: decoding and nothing else."""
    files = [source.payload(index) for index in range(min(200, len(source)))]
    ways = {f"Pillow, 1/{part} of the sides": part for part in (1, 2, 4)}
    rows: list[list[str]] = []
    torch.set_num_threads(1)
    for name, part in ways.items():
        started = time.perf_counter()
        for data in files:
            decode(data, "x", 3, reduce=part)
        rows.append([name, f"{len(files) / (time.perf_counter() - started):,.0f}"])
    if args.device == "cuda":
        held = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in files]
        decode_on(torch.device("cuda"), held)
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(5):
            decode_on(torch.device("cuda"), held)
        torch.cuda.synchronize()
        rows.append([f"nvJPEG, {len(files)} at once", f"{5 * len(files) / (time.perf_counter() - started):,.0f}"])
    return Table("Decoding alone", ["way", "img/s"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of JPEG files")
    parser.add_argument("--most", type=int, default=1000, help="so many of them at most")
    parser.add_argument("--enlarge", type=float, default=1.0, help="make the photographs larger by this factor first")
    parser.add_argument("--count", type=int, default=200_000, help="samples they are repeated to")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=cores())
    parser.add_argument("--augment", default="deit-pretrain")
    parser.add_argument("--warm", type=int, default=20, help="batches before the clock starts")
    parser.add_argument("--seconds", type=float, default=4.0, help="time of each measurement")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--decoders", nargs="+", choices=DECODERS, default=DECODERS)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as root:
        places = prepare(args.photos, Path(root), args.enlarge, args.most)
        one = open_source(places["folder"], channels=3)
        assert isinstance(one, EncodedSource)
        print(
            f"torch {torch.__version__}, {cores()} cores, {args.workers} workers, {args.device}, {len(one)} photographs"
        )
        print(alone(one, args))
        rows = []
        for form in args.forms:
            source = open_source(places[form], channels=3)
            assert isinstance(source, EncodedSource)
            row = [form]
            for decoder in args.decoders:
                try:
                    found, wait = speed(Repeated(source, args.count), args, decoder, resident="never")
                    row.append(f"{found:,.0f} ({wait:.0%})")
                    print(f"{form}, {decoder}: {row[-1]}", flush=True)
                except SitusError as error:
                    row.append("–" if decoder == "gpu" else str(error))
            rows.append(row)
        held, wait = speed(one, args, "cpu", resident="always", resident_gib=64.0)
        rows.append(["held in memory", f"{held:,.0f} ({wait:.0%})", *["–"] * (len(args.decoders) - 1)])
        print(Table("img/s (share of the time in the loader)", ["source", *args.decoders], rows))


if __name__ == "__main__":
    main()
