"""Small image files that tests write."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    """An image of Pillow, or its pixels, as a file."""
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, kind, **options)
    return buffer.getvalue()


def png(value: int = 0, mode: str = "RGB") -> bytes:
    """A picture of 6 × 5 pixels of one value."""
    return encoded(Image.new(mode, (6, 5), value if mode == "L" else (value, value, value)))


def noise(seed: int, height: int = 12, width: int = 15) -> bytes:
    """A picture of random pixels."""
    return encoded(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def write(path: Path, data: bytes | None = None) -> Path:
    """A file, by default a picture, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(7) if data is None else data)
    return path
