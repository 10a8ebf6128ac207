"""Sets of images with masks that tests write: a disc on a ground, at any place, of which both are known everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def disc(height: int, width: int, number: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A picture [H, W, 3] and its classes [H, W]: 0 the ground, 1 the disc, whose place and size follow its number."""
    draw = np.random.default_rng(number)
    y, x = np.mgrid[:height, :width] + 0.5
    top, left = draw.uniform(0.3, 0.7, 2) * (height, width)
    inside = (y - top) ** 2 + (x - left) ** 2 < (draw.uniform(0.2, 0.35) * min(height, width)) ** 2
    picture = np.where(inside[..., None], (200, 90, 60), (40, 120, 160)) + draw.normal(0, 8, (height, width, 3))
    return picture.clip(0, 255).astype(np.uint8), inside.astype(np.uint8)


def write_ade(root: Path, counts: dict[str, int], *, names: bool = True) -> Path:
    """ADE20K's folders: classes 1 and 2, and a row of 0, which is no class, at the top."""
    for split, count in counts.items():
        for number in range(count):
            picture, inside = disc(36 + 4 * (number % 3), 40 - 4 * (number % 2), number + 100 * len(split))
            mask = inside + 1
            mask[:2] = 0
            for kind, array, end in (("images", picture, "png"), ("annotations", mask, "png")):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(root / kind / split / f"ADE_{number:08}.{end}")
    if names:
        lines = ["Idx\tRatio\tTrain\tVal\tName", "1\t0.6\t8\t4\tground, floor", "2\t0.4\t8\t4\tdisc"]
        (root / "objectInfo150.txt").write_text("\n".join(lines) + "\n")
    return root
