"""Makes the pictures in docs/_static from the embedded images and the tables of docs/results; two of them need the
runs that `make demo` leaves.

.venv/bin/python docs/make_pictures.py              the drawings, the audit and the curves
.venv/bin/python docs/make_pictures.py demo/runs    puzzles and split learning too
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from torch import Tensor

import situs
from situs.audit import Deadline, Knowledge, PatchEmbedding, victim_gradients
from situs.audit.scores import denormalise, psnr
from situs.audit.split.joint import order_rows, public_side, read_pixels
from situs.audit.split.stage import streams
from situs.backbones import create_backbone
from situs.core.masking import block_mask, block_noise_shape, jigsaw
from situs.core.permutation import permute_rows, random_permutation
from situs.core.random import uniform
from situs.core.tokens import mask_of, patchify, take, unpatchify
from situs.data.sources.samples import load_samples
from situs.locks.veil import Veil
from situs.measure.reconstruct import place_patches
from situs.methods.base import Batch
from situs.models.data import load_set
from situs.report import figures

GRID, PATCH, STEP = (7, 7), 4, 1.16
INK, QUIET, MOVED, LOST, TOLD = "#1d2433", "#c4cad6", "#e4572e", "#1f7a8c", "#2e8b57"
BOOT = 9  # the first sample of class 9
OUT = Path(__file__).parent / "_static"
NONE = torch.zeros(49, dtype=torch.bool)


def noise(stream: str, count: int) -> Tensor:
    """[1, count]: the sample's own noise, so that the picture is the same each time."""
    return uniform(0, 0, torch.tensor([BOOT]), f"picture.{stream}", (count,))


def boot() -> Tensor:
    """[1, 49, 16]: the patches of one image."""
    return patchify(load_samples("train").images[BOOT : BOOT + 1].float() / 255, PATCH)


def panel(ax: Axes, patches: Tensor, title: str, mark: Tensor = NONE, colour: str = INK, sign: str = "") -> None:
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


def save(figure: Any, name: str) -> None:
    """Writes a picture and says how large it is."""
    path = OUT / f"{name}.png"
    OUT.mkdir(exist_ok=True)
    figure.savefig(path, dpi=100, metadata={"Software": None})
    plt.close(figure)
    print(f"{path.name}: {path.stat().st_size / 1000:.0f} kB")


def panels(count: int) -> tuple[Any, Any]:
    """A row of square panels."""
    figure, axes = plt.subplots(1, count, figsize=(4 * count, 4.5), facecolor="white")
    figure.subplots_adjust(left=0.01, right=0.99, bottom=0.02, top=0.88, wspace=0.06)
    return figure, axes


# --- drawings -----------------------------------------------------------------------------------------------


def draw_position() -> None:
    """The patches, a jigsaw in a block mask, places forgotten, all moved."""
    patches = boot()
    block = block_mask(noise("block", *block_noise_shape(GRID, 0.4)), GRID, 0.4)
    puzzle = permute_rows(patches, jigsaw(block, noise("jigsaw", 49)))
    everywhere = permute_rows(patches, random_permutation(noise("order", 49)))
    figure, axes = panels(4)
    panel(axes[0], patches[0], "cut in patches")
    panel(axes[1], puzzle[0], "jigsaw in a block mask", block[0], MOVED)
    panel(axes[2], patches[0], "places forgotten", noise("forgotten", 49)[0] < 0.5, LOST, "?")
    panel(axes[3], everywhere[0], "all moved: the features move along")
    save(figure, "position")


def draw_droppos() -> None:
    """A quarter of the patches is seen; a quarter of those is told its place."""
    patches = boot()
    visible = random_permutation(noise("visible", 49))[:, :13]
    seen, told = mask_of(visible, 49)[0], mask_of(visible[:, :4], 49)[0]
    shown = torch.where(seen[:, None], patches[0], torch.full((), 0.35))
    figure, axes = panels(3)
    panel(axes[0], patches[0], "49 patches")
    panel(axes[1], shown, "13 are seen, 36 are not")
    panel(axes[2], shown, "4 know their place (green)", seen & ~told, LOST, "?")
    for place in told.nonzero()[:, 0].tolist():
        row, column = divmod(place, GRID[1])
        axes[2].add_patch(Rectangle((column * STEP, row * STEP), 1, 1, fill=False, lw=2.5, ec=TOLD))
    save(figure, "droppos")


def draw_mjp() -> None:
    """A block of patches is shuffled and loses its places."""
    patches = boot()
    block = block_mask(noise("block", *block_noise_shape(GRID, 0.27)), GRID, 0.27)
    puzzle = permute_rows(patches, jigsaw(block, noise("jigsaw", 49)))
    figure, axes = panels(3)
    panel(axes[0], patches[0], "a block of patches", block[0], MOVED)
    panel(axes[1], puzzle[0], "shuffled", block[0], MOVED)
    panel(axes[2], puzzle[0], "one shared place instead of their own", block[0], LOST, "?")
    save(figure, "mjp")


def draw_permutations() -> None:
    """The tokens of an image as a matrix: rows in another order, channels in another order, both."""
    torch.manual_seed(0)
    small = {"embed_dim": 48, "depth": 1, "num_heads": 4}
    b = create_backbone("vit_tiny_patch16_224", img_size=28, patch_size=4, in_chans=1, model_args=small).eval()
    with torch.no_grad():
        tokens = b.embed(load_samples("train").images[BOOT : BOOT + 1].float() / 255)[0]
    rows, columns = random_permutation(noise("order", 49))[0], random_permutation(noise("channels", 48))[0]
    shown = {
        "tokens: a row a patch": tokens,
        "rows moved: a server sees this": tokens[rows],
        "columns moved: a locked model": tokens[:, columns],
        "both": tokens[rows][:, columns],
    }
    figure, axes = panels(4)
    for ax, (title, matrix) in zip(axes, shown.items(), strict=True):
        ax.imshow(matrix, cmap="bone_r")
        ax.set_title(title, fontsize=14, color=INK, pad=10)
        ax.set_axis_off()
    save(figure, "permutations")


# --- tables of docs/results ---------------------------------------------------------------------------------


def table_below(picture: str, page: str = "defences") -> list[list[str]]:
    """The cells of the table that follows a picture on a page of docs/results, a row for each strength."""
    text = (OUT.parent / "results" / f"{page}.md").read_text(encoding="utf-8").partition(f"_static/{picture}.png")[2]
    lines = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert lines is not None, picture
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[0].splitlines()[2:]]
    return [[strength, *row[1:]] for row in rows for strength in row[0].split(", ")]


def noise_series() -> tuple[list[str], dict[str, list[float]]]:
    """The strengths, and the PSNR by line."""
    rows, names = (
        table_below("defence-noise"),
        ("ViT-S/4, position gradient sent", "ViT-S/4, withheld", "DINOv2, withheld"),
    )
    return [row[0] for row in rows], {
        name: [float(row[at].split()[0]) for row in rows] for at, name in enumerate(names, start=1)
    }


def noise_series_texts() -> tuple[list[str], dict[str, list[float]]]:
    """The strengths, and what was recovered in percent by line."""
    rows, lines = table_below("defence-noise-texts"), dict[str, list[float]]()
    for _, tokens, sentences, words in rows:
        values = {}
        for name, cell in (("words", words), ("tokens at their place", tokens)):
            for beside, share in zip(("embedding's gradient sent", "withheld"), cell.split("/"), strict=True):
                values[f"{name}, {beside}"] = float(share.split()[0])
        for beside, count in zip(("sent", "withheld"), sentences.split("/"), strict=True):
            found, _, of = count.strip().partition(" of ")
            values[f"whole sentences, {beside}"] = 100 * int(found) / int(of)
        for name, value in values.items():
            lines.setdefault(name, []).append(value)
    return [row[0] for row in rows], lines


def draw_noise() -> None:
    """What attacks on gradients and on hidden states find over the noise, of images and of sentences."""
    gradient, state = "deviation of the noise over the gradient's rms", "deviation of the noise over that of the states"
    for name, (strengths, lines), deviation, label, level, limits in (
        ("defence-noise", noise_series(), gradient, "PSNR, dB", ("exact: 54.15 dB", 54.15), None),
        ("defence-noise-texts", noise_series_texts(), gradient, "recovered, %", None, (0.0, 100.0)),
        ("prompt-noise", noise_series_prompts(), state, "words read, %", None, (0.0, 100.0)),
    ):
        steps = range(len(strengths))
        series = {name: (steps, values) for name, values in lines.items()}
        asked = {"x_names": strengths, "level": level, "y_limits": limits}
        save(figures.curves(series, deviation, label, **asked), name)


def noise_series_prompts() -> tuple[list[str], dict[str, list[float]]]:
    """The strengths, and which words of prompts were read in percent by line."""
    rows = table_below("prompt-noise", "split")
    names = [
        f"{model} behind {count} blocks"
        for model, at in (("MiniLM", (0, 3, 5)), ("SmolLM2", (0, 15, 29)))
        for count in at
    ]
    return [row[0] for row in rows], {
        name: [float(row[at].split()[0]) for row in rows] for at, name in enumerate(names, start=1)
    }


def draw_training() -> None:
    """Accuracy over the epochs, by the kept curves of docs/results."""
    lines = {
        "after MP3, test images": ("whole", "test top-1"),
        "after MP3": ("whole", "training accuracy"),
        "from scratch, 400 epochs": ("supervised", "training accuracy"),
        "200 epochs, MJP's row A": ("A", "training accuracy"),
        "200 epochs, MJP's row J": ("J", "training accuracy"),
    }
    with (OUT.parent / "results" / "cifar100-curves.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    series = {
        name: zip(*[(int(row["epoch"]), 100 * float(row[column])) for row in rows if row["job"] == job], strict=True)
        for name, (job, column) in lines.items()
    }
    save(
        figures.curves({name: tuple(line) for name, line in series.items()}, "epoch", "images right, %"),
        "cifar100-curves",
    )


# --- measured -----------------------------------------------------------------------------------------------


def strip(rows: dict[str, Tensor], name: str, cell: float = 1.35) -> None:
    """rows: title -> images [n, 1, H, W], drawn below each other with the title at the left."""
    count = len(next(iter(rows.values())))
    size = (2.6 + cell * count, cell * len(rows) + 0.1)
    figure, axes = plt.subplots(len(rows), count, figsize=size, facecolor="white", squeeze=False)
    for line, (title, images) in zip(axes, rows.items(), strict=True):
        for ax, image in zip(line, images, strict=True):
            ax.imshow(image[0], cmap="bone_r", vmin=-0.02, vmax=1.2)
            ax.set_xticks([])
            ax.set_yticks([])
            for edge in ax.spines.values():
                edge.set_color(QUIET)
        line[0].set_ylabel(title, rotation=0, ha="right", va="center", fontsize=12, color=INK, labelpad=12)
    figure.subplots_adjust(left=2.5 / size[0], right=0.99, bottom=0.02, top=0.98, wspace=0.06, hspace=0.06)
    save(figure, name)


def draw_audit() -> None:
    """Images, the gradient that a client sends of each, and what one linear solve reads off it."""
    torch.manual_seed(0)
    small = {"embed_dim": 96, "depth": 2, "num_heads": 4}
    shape: dict[str, Any] = {"img_size": 28, "patch_size": 4, "in_chans": 1, "num_classes": 10}
    backbone = create_backbone("vit_tiny_patch16_224", **shape, model_args=small).eval()
    samples = load_samples("test")
    images, labels = samples.images[:6].float() / 255, samples.labels[:6]
    read, sent_as = [], []
    for image, label in zip(images, labels, strict=True):
        sent = victim_gradients(backbone, image[None], label[None])
        read.append(PatchEmbedding().recover(backbone, [sent], Knowledge(), Deadline()).images[0].clamp(0, 1))
        weight = next(grad for name, grad in sent.items() if "patch_embed" in name and grad.dim() == 4)
        square = weight.flatten()[: 28 * 28].view(1, 28, 28)
        sent_as.append((square / square.abs().max() + 1) / 2)
    found = torch.stack(read)
    print(f"audit: {psnr(found, images).min():.0f} dB at least")
    strip({"private": images, "a part of the gradient": torch.stack(sent_as), "read off the gradient": found}, "audit")


def draw_puzzles(run: Path) -> None:
    """Test images, their patches in no order, and where MP3 puts them."""
    model = situs.open_model(run)
    assert model.method is not None
    batch, images = _looked_at(model, 200)
    with torch.no_grad():
        puzzle = model.method.at(0.0).solve(batch, seed=0)
    right = puzzle.right.double().mean(dim=1)
    shown = torch.arange(10)
    mixed = shuffled(images[shown], puzzle.places[shown], puzzle.grid)
    solved, _ = place_patches(images[shown], puzzle.places[shown], puzzle.guesses[shown], puzzle.grid)
    print(f"puzzles: of {len(images)} images {100 * right.mean():.1f} % of the {len(puzzle.places[0])} patches right")
    strip({"image": images[shown], "without places": mixed, "put by MP3": solved}, "puzzles")


def draw_split(run: Path) -> None:
    """What a client has, what its server is sent, and what the server makes of it with images of its own."""
    model = situs.open_model(run)
    batch, images = _looked_at(model, 400)
    own, grid = slice(0, 50), model.backbone.grid
    size = images.shape[-1] // grid[1]
    z = streams(model.backbone, [batch.inputs])
    order = random_permutation(uniform(0, 0, torch.arange(50), "picture.rows", (z.shape[1],)))
    sent = permute_rows(z[own], order)
    side = public_side(model.backbone, z[50:], patchify(images[50:], size), Veil())
    rows = order_rows(sent, side)
    sorted_rows = torch.empty_like(sent).scatter_(1, rows[..., None].expand_as(sent), sent)[:, len(side.prefix) :]
    places = torch.arange(sorted_rows.shape[1]).repeat(len(sorted_rows))
    pixels = read_pixels(sorted_rows.flatten(0, 1), places, side).view(*sorted_rows.shape[:2], -1)
    back = unpatchify(pixels, grid, size).clamp(0, 1)
    places = (rows == order)[order > 0].double().mean()
    print(f"split: {100 * places:.1f} % of the places, {psnr(back.float(), images[own]).mean():.1f} dB")
    came = torch.stack([each[each > 0] - 1 for each in order])  # row 0 is CLS
    mixed = shuffled(images[own], came, grid)
    strip({"the client's": images[:8], "sent, in this order": mixed[:8], "the server's": back[:8]}, "split")


def _looked_at(model: Any, count: int) -> tuple[Batch, Tensor]:
    """Test images as the model sees them, and as people do, [n, 1, H, W] in [0, 1]."""
    loader = load_set(model, None, split="test", count=count, batch=count)
    batch = next(iter(loader))
    return batch, denormalise(batch.inputs, loader.mean.flatten().tolist(), loader.std.flatten().tolist())


def shuffled(images: Tensor, order: Tensor, grid: tuple[int, ...]) -> Tensor:
    """Images whose patches stand in the order [n, N]."""
    size = images.shape[-1] // grid[1]
    return unpatchify(take(patchify(images, size), order), grid, size)


def shoot_demo(page: Path) -> None:
    """The first screen of the demo's page, where there is a Chromium."""
    if chromium := shutil.which("chromium"):
        size = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1280,800"]
        shot = f"--screenshot={OUT / 'demo.png'}"
        subprocess.run([chromium, *size, shot, page.resolve().as_uri()], check=True, capture_output=True)


def main() -> None:
    """All that can be made from what is there."""
    mpl.use("Agg")
    for draw in (
        draw_position,
        draw_droppos,
        draw_mjp,
        draw_permutations,
        draw_audit,
        draw_noise,
        draw_training,
    ):
        draw()
    if len(sys.argv) > 1:
        runs = Path(sys.argv[1])
        draw_puzzles(runs / "mp3")
        draw_split(runs / "after-MP3")
        shoot_demo(runs.parent / "report.html")


if __name__ == "__main__":
    main()
