"""Makes docs/_static/position.png, the README's picture, from one image of the embedded sample.

.venv/bin/python docs/make_picture.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

from situs.core.masking import block_mask, block_noise_shape, jigsaw
from situs.core.permutation import permute_rows, random_permutation
from situs.core.random import uniform
from situs.core.tokens import patchify
from situs.data.sources.samples import load_samples

GRID, PATCH, STEP = (7, 7), 4, 1.16
INK, QUIET, MOVED, LOST = "#1d2433", "#c4cad6", "#e4572e", "#1f7a8c"
BOOT = 9  # the first sample of class 9
OUT = Path(__file__).parent / "_static" / "position.png"


def noise(stream: str, count: int) -> Tensor:
    """[1, count]: the sample's own noise, so that the picture is the same each time."""
    return uniform(0, 0, torch.tensor([BOOT]), f"picture.{stream}", (count,))


def panel(ax: Axes, patches: Tensor, title: str, mark: Tensor, colour: str, sign: str = "") -> None:
    """patches: [49, 16] on their grid, a gap between them; those in `mark` [49] get a frame and a sign."""
    for place, patch in enumerate(patches):
        row, column = divmod(place, GRID[1])
        x, y, on = column * STEP, row * STEP, bool(mark[place])
        ax.imshow(patch.reshape(PATCH, PATCH), cmap="bone_r", vmin=-0.04, vmax=1.5, extent=(x, x + 1, y + 1, y))
        frame = {"lw": 2.0, "ec": colour} if on else {"lw": 0.8, "ec": QUIET}
        ax.add_patch(Rectangle((x, y), 1, 1, fill=False, **frame))
        if on and sign:
            ax.add_patch(Rectangle((x, y), 1, 1, fc="white", alpha=0.6, ec="none"))
            ax.text(x + 0.5, y + 0.52, sign, ha="center", va="center", color=colour, fontsize=15, weight="bold")
    ax.set_xlim(-0.1, GRID[1] * STEP)
    ax.set_ylim(GRID[0] * STEP, -0.1)
    ax.set_title(title, fontsize=14, color=INK, pad=10)
    ax.set_axis_off()


def main() -> None:
    """Four panels: the patches, a jigsaw in a block mask, places forgotten, all moved."""
    mpl.use("Agg")
    image = load_samples("train").images[BOOT : BOOT + 1].float() / 255
    patches = patchify(image, PATCH)
    none = torch.zeros(1, 49, dtype=torch.bool)
    block = block_mask(noise("block", *block_noise_shape(GRID, 0.4)), GRID, 0.4)
    puzzle = permute_rows(patches, jigsaw(block, noise("jigsaw", 49)))
    forgotten = noise("forgotten", 49) < 0.5
    everywhere = permute_rows(patches, random_permutation(noise("order", 49)))

    figure, axes = plt.subplots(1, 4, figsize=(16, 4.5), facecolor="white")
    panel(axes[0], patches[0], "cut in patches", none[0], INK)
    panel(axes[1], puzzle[0], "jigsaw in a block mask", block[0], MOVED)
    panel(axes[2], patches[0], "places forgotten", forgotten[0], LOST, "?")
    panel(axes[3], everywhere[0], "all moved: the features move along", none[0], INK)
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.88, wspace=0.06)
    OUT.parent.mkdir(exist_ok=True)
    figure.savefig(OUT, dpi=100, metadata={"Software": None})
    print(OUT.relative_to(Path.cwd()) if OUT.is_relative_to(Path.cwd()) else OUT)


if __name__ == "__main__":
    main()
