"""The same small labelled pictures in every form that is taken in memory, and as files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SIDE, CLASSES = 16, ("cat", "dog", "eel")


def pictures(count: int, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """Pixels [n, 16, 16, 3] uint8 whose shade tells the class, and the class numbers."""
    labels = [index % len(CLASSES) for index in range(count)]
    noise = np.random.default_rng(seed).integers(0, 60, (count, SIDE, SIDE, 3))
    return (noise + 80 * np.array(labels)[:, None, None, None]).astype(np.uint8), labels


class TorchSet(Dataset[Any]):
    """A torch dataset of Pillow images, as torchvision's are."""

    def __init__(self, pixels: np.ndarray, labels: list[int]) -> None:
        self.pixels, self.labels = pixels, labels
        self.classes = list(CLASSES)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return Image.fromarray(self.pixels[index]), self.labels[index]


class _Names:
    """Hugging Face's ClassLabel."""

    def __init__(self) -> None:
        self.names = list(CLASSES)


class HuggingFaceSet:
    """What Situs asks of a Hugging Face dataset: rows by number, columns by name, features."""

    def __init__(self, pixels: np.ndarray, labels: list[int]) -> None:
        self.pixels, self.labels = pixels, labels
        self.column_names, self.features = ["image", "label"], {"image": object(), "label": _Names()}

    def __len__(self) -> int:
        return len(self.pixels)

    def __iter__(self) -> Any:
        return (self[index] for index in range(len(self)))

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            return self.labels if key == "label" else [Image.fromarray(each) for each in self.pixels]
        return {"image": Image.fromarray(self.pixels[key]), "label": self.labels[key]}


KINDS: dict[str, Callable[[np.ndarray, list[int]], Any]] = {
    "torch dataset": TorchSet,
    "hugging face dataset": HuggingFaceSet,
    "list of pairs": lambda x, y: [(Image.fromarray(a), CLASSES[b]) for a, b in zip(x, y, strict=True)],
    "arrays": lambda x, y: (x, np.array([CLASSES[label] for label in y])),
    "tensors": lambda x, y: (torch.from_numpy(x).permute(0, 3, 1, 2), torch.tensor(y)),
    "list of dicts": lambda x, y: [{"image": a, "label": CLASSES[b]} for a, b in zip(x, y, strict=True)],
}


def write_folder(root: Path, pixels: np.ndarray, labels: list[int]) -> Path:
    """The same as PNG files in a folder a class, named so that a class keeps its order."""
    for index, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = root / CLASSES[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{index:03}.png")
    return root
