"""Cuts the embedded sample set from Fashion-MNIST: `python scripts/cut_fashion_mnist.py FOLDER`.

FOLDER holds the four idx files; Debian's package `dataset-fashion-mnist` installs them in
usr/share/datasets/fashion-mnist. The same files give the same bytes: the images are chosen by a hash, and the
sha256 printed at the end is the one that `situs.data.sources.samples` checks.

The file is an xz stream of two .npy arrays, train then test, each uint8 [class, index, column, row]: no
pickle, and no labels, which are the first axis. Bytes an image, measured on 5,000 images: npz 434, PNG mosaic
403, lossless WebP 385, xz 373, xz by class 371, xz by class and column by column 356 (what is done here).
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import lzma
from pathlib import Path

import numpy as np

SEED = 0
CLASSES = 10
PER_CLASS = {"train": 900, "test": 200}
FILES = {"train": "train", "test": "t10k"}
MOST_BYTES = 4_000_000
TARGET = Path(__file__).resolve().parent.parent / "src" / "situs" / "data" / "fashion_sample.npy.xz"
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 4, "lp": 0, "pb": 0}]


def read_idx(path: Path) -> np.ndarray:
    """One idx file: two zero bytes, the type (8 is uint8), the number of axes, the axes, then the data."""
    raw = gzip.decompress(path.read_bytes())
    if raw[:3] != b"\0\0\x08":
        raise SystemExit(f"{path}: not an idx file of unsigned bytes")
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def choose(labels: np.ndarray, split: str) -> np.ndarray:
    """[class, index] places of the chosen images: those of smallest hash, whatever numpy's generators do."""

    def draw(place: int) -> bytes:
        return hashlib.sha256(f"{SEED}/{split}/{place}".encode()).digest()

    chosen = []
    for label in range(CLASSES):
        places = np.flatnonzero(labels == label).tolist()
        chosen.append(sorted(sorted(places, key=draw)[: PER_CLASS[split]]))
    return np.array(chosen)


def cut(folder: Path) -> bytes:
    """The compressed file."""
    buffer = io.BytesIO()
    for split, name in FILES.items():
        images = read_idx(folder / f"{name}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{name}-labels-idx1-ubyte.gz")
        columns_first = images[choose(labels, split)].swapaxes(-1, -2)
        np.save(buffer, np.ascontiguousarray(columns_first), allow_pickle=False)
    return lzma.compress(buffer.getvalue(), check=lzma.CHECK_NONE, filters=FILTERS)


def main() -> None:
    """Reads the folder, writes the file, prints its size and checksum."""
    parser = argparse.ArgumentParser(description="Cut the embedded sample set from Fashion-MNIST.")
    parser.add_argument("folder", type=Path, help="holds train-images-idx3-ubyte.gz and the other three")
    parser.add_argument("--out", type=Path, default=TARGET)
    arguments = parser.parse_args()
    data = cut(arguments.folder)
    if len(data) > MOST_BYTES:
        raise SystemExit(f"{len(data):,} bytes: the package carries at most {MOST_BYTES:,}; lower PER_CLASS")
    temporary = arguments.out.with_suffix(".tmp")
    temporary.write_bytes(data)
    temporary.replace(arguments.out)
    print(f"{arguments.out}\n{len(data):,} bytes\nsha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main()
