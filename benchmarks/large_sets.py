"""Sets larger than memory: payloads a second, bytes read a sample, seconds to the first batch and peak memory.

    python benchmarks/large_sets.py --out sets                       # 1.3 million samples of 1.5 KB, 8 GB of files
    python benchmarks/large_sets.py --out sets --count 100000 --payload 19000 --workers 4

Writes the shards once (parquet with row groups of 100 and of 1,000 rows, which are not held; tar), then measures each
in a process of its own. Nothing is decoded: what is measured is how encoded images come to a batch. Bytes are those
that were asked of the system, from the disk or from its cache; memory is the peak of each process over what it had
after its imports, all added. "a CPU second" leaves out the time that a busy machine gave to others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from situs.data.batch import Batch
from situs.data.config import DataConfig
from situs.data.loader import Loader, with_order
from situs.data.pipeline import Pipeline
from situs.data.sampler import BatchPlan
from situs.data.sources.base import Blocks, EncodedSource, Source
from situs.data.sources.parquet import ParquetSource
from situs.data.sources.webdataset import TarSource

SHARD = 50_000  # samples of a file


class Payloads(Source):
    """The encoded samples of a source."""

    def __init__(self, source: EncodedSource) -> None:
        super().__init__(source.name, source.classes, None, strict=True)
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def read(self, index: int) -> dict[str, Any]:
        return {"size": len(self.source.payload(index)), "label": self.source.label(index)}

    def blocks(self) -> Blocks | None:
        return self.source.blocks()

    def release(self, index: int | None = None) -> None:
        self.source.release(index)


class Sizes(Pipeline):
    """A batch is how long its samples are."""

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        return {name: torch.tensor([sample[name] for sample in samples]) for name in ("size", "label")}

    def finish(self, values: Any, ids: Tensor, noise: Any) -> Batch:  # noqa: ARG002
        return Batch(values["size"], ids, {"label": values["label"]})


def write_parquet(folder: Path, count: int, payload: int, rows: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for start in range(0, count, SHARD):
        size = min(SHARD, count - start)
        data = pa.py_buffer(chance.bytes(size * payload))
        offsets = pa.py_buffer((np.arange(size + 1, dtype=np.int64) * payload).tobytes())
        images = pa.Array.from_buffers(pa.large_binary(), size, [None, offsets, data]).cast(pa.binary())
        table = pa.table(
            {
                "image": pa.StructArray.from_arrays([images, pa.nulls(size, pa.string())], ["bytes", "path"]),
                "label": pa.array(np.arange(start, start + size) % 1000),
            }
        )
        pq.write_table(
            table,
            folder / f"train-{start:09}.parquet",
            row_group_size=rows,
            use_dictionary=["label"],  # pyright: ignore[reportArgumentType]
            compression="none",
        )


def write_tar(folder: Path, count: int, payload: int) -> None:
    """As `tar` writes them; all members of a shard at once, for a loop would take minutes."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    blocks = -(-payload // 512)
    for start in range(0, count, SHARD):
        numbers = np.arange(start, min(start + SHARD, count))
        out = np.zeros((len(numbers), (blocks + 3) * 512), np.uint8)
        out[:, 512 : 512 + payload] = np.frombuffer(chance.bytes(payload * 64), np.uint8).reshape(64, -1)[numbers % 64]
        for place, ending, size in ((0, ".jpg", payload), ((blocks + 1) * 512, ".cls", 3)):
            fill_headers(out[:, place : place + 512], [f"{number:09}{ending}" for number in numbers], size)
        labels = "".join(f"{number % 1000:03}" for number in numbers).encode()
        out[:, (blocks + 2) * 512 :][:, :3] = np.frombuffer(labels, np.uint8).reshape(-1, 3)
        (folder / f"train-{start:09}.tar").write_bytes(out.tobytes() + bytes(10240))


def fill_headers(block: np.ndarray, names: list[str], size: int) -> None:
    block[:, : len(names[0])] = np.frombuffer("".join(names).encode(), np.uint8).reshape(len(names), -1)
    fields = {100: "0000644\0", 108: "0000000\0", 116: "0000000\0", 124: f"{size:011o}\0", 136: "00000000000\0"}
    for place, text in (fields | {148: " " * 8, 156: "0", 257: "ustar\x0000"}).items():
        block[:, place : place + len(text)] = np.frombuffer(text.encode(), np.uint8)
    sums = "".join(f"{number:06o}\0 " for number in block.sum(1).tolist())
    block[:, 148:156] = np.frombuffer(sums.encode(), np.uint8).reshape(-1, 8)


def processes() -> list[int]:
    return [os.getpid(), *(process.pid for process in multiprocessing.active_children() if process.pid)]


def bytes_read() -> int:
    lines = [line for pid in processes() for line in Path(f"/proc/{pid}/io").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def cpu_seconds() -> float:
    ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in processes()]
    return sum(int(tick) for pair in ticks for tick in pair) / os.sysconf("SC_CLK_TCK")


def peak_mib(pid: int, name: str = "VmHWM") -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float | str]:
    """One set, in this process."""
    base = peak_mib(os.getpid())
    started = time.perf_counter()
    source = TarSource(folder) if folder.name.startswith("tar") else ParquetSource(folder, memory_bytes=0)
    opened = time.perf_counter() - started
    config = DataConfig(order=args.order, window_gib=args.window_gib, batch=args.batch)
    sizes = Sizes(Payloads(source), training=True)
    plan, note = with_order(BatchPlan(len(source), args.batch), sizes, config)
    loader = Loader(sizes, plan, torch.device("cpu"), args.workers, note)
    batches = loader.iterate(0)
    next(batches)
    first = time.perf_counter() - started
    for _ in range(args.window_batches):  # till blocks are opened as they are used up
        next(batches)
    before, busy, count, mark = bytes_read(), cpu_seconds(), 0, time.perf_counter()
    for batch in batches:
        count += len(batch.ids)
        assert int(batch.inputs.min()) == args.payload
        if time.perf_counter() - mark > args.seconds and count >= args.least:
            break
    spent = time.perf_counter() - mark
    read, busy = bytes_read() - before, cpu_seconds() - busy
    memory = sum(max(0.0, peak_mib(pid) - base) for pid in processes())
    return {
        "set": folder.name,
        "order": note.partition(" ")[2].split(":")[0].strip(" ;,").split(";")[0],
        "open_s": opened,
        "first_s": first,
        "payloads_per_s": count / spent,
        "payloads_per_cpu_s": count / busy,
        "bytes_per_sample": read / count,
        "peak_mib": memory,
        "samples": count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the shards; kept for the next time")
    parser.add_argument("--count", type=int, default=1_300_000)
    parser.add_argument("--payload", type=int, default=1500, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--order", choices=["auto", "exact", "blocks"], default="auto")
    parser.add_argument("--window-gib", type=float, default=0.03, help="1.5 %% of the set, as 2 GiB are of ImageNet")
    parser.add_argument("--seconds", type=float, default=10.0, help="time of each measurement")
    parser.add_argument("--least", type=int, default=0, help="samples of each measurement at least")
    parser.add_argument("--sets", default="parquet-100,parquet-1000,tar", help="which, with commas")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.window_batches = int(args.window_gib * 2**30 / args.payload / args.batch) + 1
    if args.measure is not None:
        print(json.dumps(measure(args.measure, args)))
        return
    home = args.out / f"{args.count}x{args.payload}"
    os.environ.setdefault("XDG_CACHE_HOME", str(args.out / "cache"))
    print(f"{args.count:,} samples of {args.payload:,} bytes, batch {args.batch}, {args.workers} workers")
    for name in args.sets.split(","):
        folder = home / name
        if not folder.exists():
            aside = home / f".{name}"
            write_tar(aside, args.count, args.payload) if name == "tar" else write_parquet(
                aside, args.count, args.payload, int(name.split("-")[1])
            )
            aside.rename(folder)
        for again in range(2 if name == "tar" else 1):
            done = subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], "--measure", str(folder)],
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                sys.exit(done.stderr)
            row = json.loads(done.stdout)
            print(
                f"{name + (', index kept' if again else ''):<18} {row['order']:<18} open {row['open_s']:>7.2f} s   "
                f"first batch {row['first_s']:>7.2f} s   {row['payloads_per_s']:>9,.0f} payloads/s "
                f"({row['payloads_per_cpu_s']:,.0f} a CPU second)   "
                f"{row['bytes_per_sample']:>11,.0f} bytes a sample   peak {row['peak_mib']:>7,.0f} MiB",
                flush=True,
            )


if __name__ == "__main__":
    main()
