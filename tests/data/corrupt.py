"""Damages data files by a seed and reads them: `python corrupt.py SEED COUNT` prints what came of each, as JSON.

Run by test_sources_corrupted.py in a process of its own, with a limit on memory, on the time of each file and no mercy
for what is neither read nor named: a crash of a decoder would take the tests with it.
"""

from __future__ import annotations

import io
import json
import pickle
import resource
import signal
import sys
import tarfile
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.open import open_source
from situs.errors import SitusError

SECONDS = 60
MEMORY = 1 << 30
CHANCE = np.random.default_rng(3)
Image.init()
IMAGES = [kind for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP") if kind in Image.SAVE]


def picture(size: tuple[int, int] = (40, 48)) -> Image.Image:
    small = CHANCE.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def encoded(kind: str) -> bytes:
    buffer = io.BytesIO()
    exif = Image.Exif()
    exif[0x0112] = 6
    picture().save(buffer, kind, **({"exif": exif} if kind in {"JPEG", "WEBP", "PNG"} else {}))
    return buffer.getvalue()


def tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as file:
        for number in range(6):
            long = "ü" * 90 if number == 3 else ""
            for name, data in ((f"{number}{long}.jpg", encoded("JPEG")), (f"{number}{long}.cls", b"%d" % (number % 2))):
                info = tarfile.TarInfo(name)
                info.size = len(data)
                file.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def parquet(compression: str, checksum: bool) -> bytes:
    rows = [{"bytes": encoded("JPEG"), "path": None} for _ in range(6)]
    described = {"info": {"features": {"label": {"names": ["even", "odd"]}}}}
    table = pa.table({"image": rows, "label": [number % 2 for number in range(6)]})
    table = table.replace_schema_metadata({b"huggingface": json.dumps(described).encode()})
    buffer = io.BytesIO()
    pq.write_table(table, buffer, row_group_size=3, compression=compression, write_page_checksum=checksum)
    return buffer.getvalue()


def cifar(names: bool) -> bytes:
    if names:
        return pickle.dumps({b"fine_label_names": [b"even", b"odd"]}, 2)
    pixels = CHANCE.integers(0, 256, (6, 3072), dtype=np.uint8)
    return pickle.dumps({b"data": pixels, b"fine_labels": [number % 2 for number in range(6)]}, 2)


def npy() -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, CHANCE.random((3, 20, 21)).astype(np.float32))
    return buffer.getvalue()


def corpus() -> dict[str, tuple[bytes, str, int]]:
    """What is damaged: its bytes, the name it gets, and how many images it holds."""
    found = {kind: (encoded(kind), f"x.{kind.lower()}", 1) for kind in IMAGES}
    found["NPY"] = (npy(), "x.npy", 1)
    found["tar"] = (tar(), "x.tar", 6)
    for compression in ("none", "snappy", "zstd"):
        for checksum in (False, True):
            found[f"parquet {compression}{' with checksums' * checksum}"] = (
                parquet(compression, checksum),
                "x.parquet",
                6,
            )
    found["CIFAR batch"] = (cifar(names=False), "train", 6)
    found["CIFAR names"] = (cifar(names=True), "meta", 6)
    return found


def damaged(data: bytes, chance: np.random.Generator) -> bytes:
    """One of: some bits turned (anywhere, or near an end, where headers are), cut, two parts swapped, zeros, put in."""
    found = bytearray(data)
    size = len(data)
    kind = chance.integers(6)
    first, second = sorted(int(place) for place in chance.integers(0, size, 2))
    if kind in {0, 1}:
        spread = size if kind == 0 else min(size, 200)
        for place in chance.integers(0, spread, int(chance.choice([1, 3, 30]))):
            found[place if chance.random() < 0.5 else size - 1 - place] ^= 1 << int(chance.integers(8))
    elif kind == 2:
        del found[first:]
    elif kind == 3:
        width = max(1, min(64, second - first, size - second))
        found[first : first + width], found[second : second + width] = (
            found[second : second + width],
            found[first : first + width],
        )
    elif kind == 4:
        found[first : first + 32] = bytes(len(found[first : first + 32]))
    else:
        found[first:first] = bytes(chance.integers(0, 256, 5, dtype=np.uint8))
    return bytes(found)


def outcome(folder: Path, expected: int) -> str:
    """read: every image came. named: an error, a skipped image or a note says what did not."""
    try:
        source = open_source(folder, "train", channels=3)
        config = DataConfig(img_size=8, batch=4, workers=0, resident="never")
        loader = make_loader(config, None, source=source)
        came = sum(len(batch.inputs) for batch in loader)
    except SitusError as error:
        return "named" if "\n" not in str(error) else f"several lines: {error}"
    if source.left_out():
        return "named" if all("\n" not in said for said in source.left_out()) else "several lines"
    assert came == expected, f"{came} of {expected} images came and nothing was said"
    return "read"


def judge(what: tuple[bytes, str, int], chance: np.random.Generator) -> str:
    """The outcome for one damaged file."""
    data, name, count = what
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / name).write_bytes(damaged(data, chance))
        if name in {"train", "meta"}:
            other = {"train": "meta", "meta": "train"}[name]
            (folder / other).write_bytes(cifar(names=other == "meta"))
        signal.alarm(SECONDS)
        try:
            return outcome(folder, count)
        finally:
            signal.alarm(0)


def main(seed: int, count: int) -> None:
    """Damages `count` files, the kinds in turn, and prints the counts."""
    warnings.simplefilter("error", ResourceWarning)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + MEMORY, held + MEMORY))
    files = corpus()
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in files}
    wrong = []
    for number in range(count):
        kind = list(files)[number % len(files)]
        print(f"{number} {kind}", file=sys.stderr, flush=True)  # the last line names what ended the process
        try:
            outcomes[kind][judge(files[kind], np.random.default_rng([seed, number]))] += 1
        except BaseException as error:  # noqa: BLE001  (a hang, a traceback, too much memory: all are counted)
            wrong.append(f"{number} {kind}: {type(error).__name__}: {error}")
    print(
        json.dumps({"outcomes": outcomes, "wrong": wrong, "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss})
    )


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError(f"more than {SECONDS} s")))
    main(int(sys.argv[1]), int(sys.argv[2]))
