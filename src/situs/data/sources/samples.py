"""The embedded sample set: a class-balanced part of Fashion-MNIST, so that the demo has real images anywhere.

9,000 training and 2,000 test images of 28×28 pixels in ten classes, copyright 2017 Zalando SE, MIT licence
(FASHION_MNIST_LICENSE beside this file). scripts/cut_fashion_mnist.py made the file and documents its layout.
"""

from __future__ import annotations

import io
import lzma
from functools import cache
from importlib import resources
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from situs.errors import SitusError, unknown_name

Split = Literal["train", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)  # in the file's order
CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
FILE = "fashion_sample.npy.xz"


class SampleSet(NamedTuple):
    """images: uint8 [n, 1, 28, 28]; labels: int64 [n]; classes: the labels' names.

    Classes take turns (0, 1, ... 9, 0, 1, ...), so any first part of the set is balanced too.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]


def load_samples(split: Split = "train") -> SampleSet:
    """One split of the embedded set. The tensors are copies, which the caller may change."""
    if split not in SPLITS:
        raise unknown_name("split of the sample images", split, SPLITS)
    stored = _read()[SPLITS.index(split)]  # [class, index, column, row]
    classes, per_class, width, height = stored.shape
    images = np.ascontiguousarray(stored.transpose(1, 0, 3, 2)).reshape(classes * per_class, 1, height, width)
    return SampleSet(torch.from_numpy(images), torch.arange(classes).repeat(per_class), CLASSES)


@cache
def _read() -> tuple[np.ndarray, ...]:
    """The arrays of the file, one for each split."""
    file = resources.files("situs.data").joinpath(FILE)
    try:
        stream = io.BytesIO(lzma.decompress(file.read_bytes()))  # xz keeps a checksum of its own
    except (OSError, lzma.LZMAError) as error:
        raise SitusError(f"the sample images {FILE} are not readable ({error}): install situs again") from error
    return tuple(np.load(stream, allow_pickle=False) for _ in SPLITS)
