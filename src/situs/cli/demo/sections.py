"""The sections of `situs demo`: each runs one thing that exists on the embedded images, and tells what it found.

A section is a function of a `Stage`. It writes into `stage.page`, tells of long steps through `stage.say`, and
returns its lines for the table printed at the end. Those here need no training; `situs.cli.demo.learned` trains, looks
at what was learned, and holds the dict of all of them, `SECTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import situs
from situs.analyze.vectors import principal
from situs.backbones import Backbone, Features
from situs.core.masking import BlockRule, block_mask, block_noise_shape, count_of, jigsaw
from situs.core.permutation import permute_rows, random_permutation
from situs.core.position import sincos
from situs.core.random import uniform
from situs.core.tokens import patchify, take, unpatchify
from situs.data.sources.samples import SampleSet, load_samples
from situs.report import figures, places
from situs.report.html import Page, Section
from situs.results import percent

PATCH = 4
GRID = (7, 7)
PLACES = GRID[0] * GRID[1]
MODEL = "vit_tiny_patch16_224"
MODEL_ARGS = {"embed_dim": 64, "depth": 4, "num_heads": 4}
TRAINED_ARGS = {**MODEL_ARGS, "depth": 3}
AUGMENT = {"crop": "pad", "pad": 2}
RATIOS = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
LEAD = "Position in transformers: what there is to see, on real images, in one page."

Lines = list[tuple[str, str]]
"""(what was looked at, what was found), for the printed table."""


@dataclass(frozen=True)
class Stage:
    """What the sections share. runs: the folder of the runs that they train."""

    seed: int
    quick: bool
    say: Callable[[str], None]
    runs: Path
    page: Page = field(default_factory=lambda: Page("Situs demo", lead=LEAD))

    @cached_property
    def samples(self) -> SampleSet:
        """The embedded test images."""
        return load_samples("test")

    @cached_property
    def images(self) -> Tensor:
        """One image of each class, float32 [10, 1, 28, 28] in [0, 1]."""
        return self.samples.images[:10].float() / 255.0

    @cached_property
    def backbone(self) -> Backbone:
        """A small ViT with random weights, the same for a seed."""
        shape: dict[str, Any] = {"patch_size": PATCH, "in_chans": 1, "num_classes": 10, "model_args": MODEL_ARGS}
        model = situs.open_model(MODEL, weights="random", img_size=GRID[0] * PATCH, seed=self.seed, **shape)
        return model.backbone

    def noise(self, stream: str, shape: tuple[int, ...], count: int) -> Tensor:
        """Uniform numbers [count, *shape] for the samples 0 .. count - 1."""
        return uniform(self.seed, 0, torch.arange(count), f"demo.{stream}", shape)


def show_patches(stage: Stage) -> Lines:
    """The embedded images, and one of them cut in patches and put together again."""
    section = stage.page.section("An image as a set of patches")
    section.text(
        "A vision transformer cuts an image in patches and turns each into a token. Nothing in a token says "
        "where the patch was: that is what positions are for. The images are a cut of Fashion-MNIST that comes "
        "with situs."
    )
    images, _, classes = stage.samples
    drawn = figures.image_grid(images[:20], classes, columns=10)
    section.figure(drawn, "Two images of each class of the embedded set.")
    boot = stage.images[-1:]
    same = torch.equal(unpatchify(patchify(boot, PATCH), GRID, PATCH), boot)
    section.figure(
        figures.patches(boot[0], GRID, classes[-1]),
        "One image and its patches. Places count row by row from 0; `patchify` cuts the image, `unpatchify` "
        "puts it together.",
    )
    return [("image cut in patches and put together", "the same pixels" if same else "NOT the same pixels")]


def show_masks(stage: Stage) -> Lines:
    """Block masks and jigsaw shuffles at several γ, and how well the two rules hit their target."""
    section = stage.page.section("Block masks and jigsaw shuffles")
    section.text(
        "A block mask lays rectangles until the share γ of the places is covered; the jigsaw then shuffles the "
        "covered patches among themselves. Masked jigsaw training (MJP) does this to its input and tells the "
        "model that these patches' positions are unknown."
    )
    image = stage.images[-1:]
    masks, shuffled = [], []
    for ratio in RATIOS:
        mask = block_mask(stage.noise("mask", block_noise_shape(GRID, ratio), 1), GRID, ratio)
        index = jigsaw(mask, stage.noise("jigsaw", (PLACES,), 1))
        masks.append(mask[0])
        shuffled.append(unpatchify(take(patchify(image, PATCH), index), GRID, PATCH)[0])
    drawn = figures.image_grid(
        [image[0]] * len(RATIOS) + shuffled,
        [f"γ = {ratio:g}: {int(mask.sum())} of {PLACES}" for ratio, mask in zip(RATIOS, masks, strict=True)],
        columns=len(RATIOS),
        row_titles=("block mask", "jigsaw"),
        masks=masks * 2,
        grid=GRID,
    )
    section.figure(drawn, "Above, the masked patches (tinted); below, the same patches shuffled.")
    return _count_masks(stage, section)


def _count_masks(stage: Stage, section: Section) -> Lines:
    draws = 200 if stage.quick else 1000
    rows, exact = [], True
    for ratio in RATIOS:
        target = count_of(ratio, PLACES)
        paper, official = _masked(stage, ratio, "paper", draws), _masked(stage, ratio, "official", draws)
        exact = exact and bool((paper == target).all())
        empty = (official == 0).double().mean()
        rows.append([f"{ratio:.2f}", target, f"{paper.mean():.2f}", f"{official.mean():.2f}", percent(empty)])
    section.table(
        ["γ", "target int(γN)", "`paper`, mean", "`official`, mean", "`official`, empty masks"],
        rows,
        f"Masked places of {PLACES} over {draws:,} draws. The rule `paper` hits the count; for `official`, which "
        "does what the published code did, γ is an upper bound.",
    )
    found = "always" if exact else "NOT always"
    return [("block masks hit int(γN), rule paper", f"{found}, {draws:,} draws for each γ")]


def _masked(stage: Stage, ratio: float, rule: BlockRule, draws: int) -> Tensor:
    """How many places each of `draws` masks covers, [draws] float64."""
    noise = stage.noise(f"count.{rule}", block_noise_shape(GRID, ratio, rule=rule), draws)
    return block_mask(noise, GRID, ratio, rule=rule).sum(dim=1).double()


def show_positions(stage: Stage) -> Lines:
    """The position table of a model and a sin-cos table: their PCA, and how alike the middle place is to others."""
    section = stage.page.section("Position embeddings and their PCA")
    section.text(
        f"The model is a small ViT: `{MODEL}` on 28×28 images in 4×4 patches, with 64 channels, 4 layers and 4 "
        f"heads. Its learned table adds one vector to each of {PLACES} tokens; before training these are random, "
        "and so is their picture. Sines and cosines of row and column know the grid from the start: neighbours "
        "stay neighbours."
    )
    table = stage.backbone.positions().table
    assert table is not None, f"{MODEL} has a position table"
    tables = {"sin-cos, fixed": sincos(GRID, stage.backbone.dim), "learned, before training": table.detach()}
    drawn, shares = project(tables)
    section.figure(
        drawn,
        f"The {PLACES} position vectors in the plane of their two largest principal components, with the share of the "
        "variance that each holds; neighbours in a row (coloured) and in a column are joined.",
    )
    middle = PLACES // 2
    centred = {name: values - values.mean(dim=0) for name, values in tables.items()}
    alike = {name: torch.cosine_similarity(c, c[middle], dim=-1).reshape(GRID) for name, c in centred.items()}
    drawn = figures.heatmaps(alike, "column", "row", "cosine similarity", limits=(-1, 1), diverging=True)
    section.figure(
        drawn,
        "How alike each place's vector is to the middle place's, (3, 3); the mean vector is subtracted.",
    )
    return [
        (f"position table {name}", f"2 components hold {percent(share, 0)} of its variance")
        for name, share in shares.items()
    ]


def project(tables: dict[str, Tensor]) -> tuple[figures.Figure, dict[str, float]]:
    """Position tables [N, D] in the plane of their two largest principal components, and the shares these hold."""
    panels, held = [], {}
    for name, table in tables.items():
        points, shares = principal(table, 2)
        panels.append(places.Sheet(name, points, places.component_labels(shares)))
        held[name] = sum(shares)
    return places.sheets(panels, GRID), held


def show_equivariance(stage: Stage) -> Lines:
    """blocks(P s) = P blocks(s), in float64, with and without positions, and a case where it must fail."""
    section = stage.page.section("The encoder does not mind the order")
    section.text(
        "Attention treats its tokens as a set. Permute the patch tokens that enter the blocks and the same tokens "
        "come out, permuted: `blocks(P s) = P blocks(s)`, while the CLS token stays as it was. Both hold up to "
        "rounding, with positions already in the tokens or with none. They fail, as they should, when the tokens "
        "move and their positions stay."
    )
    with torch.no_grad():
        cases = _equivariance_errors(stage)
    section.table(
        ["case", "expected", "error, patches", "error, CLS"],
        [[name, told, f"{patches:.1e}", f"{cls:.1e}"] for name, (patches, cls, told) in cases.items()],
        f"Largest absolute difference over {len(stage.images)} images, each with its own permutation, in float64. "
        "The features are about 1 in size: the final norm sees to it.",
    )
    largest = {name: max(patches, cls) for name, (patches, cls, _) in cases.items()}
    drawn = figures.bars(largest, "largest absolute error (float64, log scale)", log=True, digits=".1e")
    section.figure(drawn, "The same errors: the law holds to rounding, the control is far from it.")
    return [(f"equivariance, {name}", f"error {error:.1e}") for name, error in largest.items()]


def _equivariance_errors(stage: Stage) -> dict[str, tuple[float, float, str]]:
    """case -> (largest error in patches, in CLS, what is expected)."""
    backbone = deepcopy(stage.backbone).double()
    tokens = backbone.embed(stage.images.double())
    p = random_permutation(stage.noise("permutation", (backbone.num_tokens,), len(tokens)))
    found = {}
    for name, positions in (("with positions", backbone.positions()), ("without positions", None)):
        stream = backbone.assemble(tokens, positions)
        straight, moved = (backbone.finish(backbone.blocks(s)) for s in (stream, stream.take(p)))
        found[name] = (*_largest(straight, moved, p), "holds")
    straight, moved = (backbone.encode(t, backbone.positions()) for t in (tokens, permute_rows(tokens, p)))
    found["control: positions stay"] = (*_largest(straight, moved, p), "fails")
    return found


def _largest(straight: Features, moved: Features, p: Tensor) -> tuple[float, float]:
    """How far `moved` is from `straight` with its patches permuted by p: over patches, over prefix tokens."""
    patches = (permute_rows(straight.patches, p) - moved.patches).abs().max()
    return float(patches), float((straight.prefix - moved.prefix).abs().max())


QUICK_NOTE = "After the few steps of --quick the models know next to nothing; without it they are trained for minutes."


def summarise(stage: Stage, lines: Lines) -> None:
    """Puts the findings at the head of the page and how it was made at its end."""
    head = Section("At a glance").table(["what", "found"], lines)
    if stage.quick:
        head.note(QUICK_NOTE)
    stage.page.sections.insert(0, head)
    command = "situs demo" + " --quick" * stage.quick + f" --seed {stage.seed}"
    versions = {name: version(name) for name in ("situs", "torch", "timm")}
    made = stage.page.section("How this page was made").facts({"command": f"`{command}`", **versions})
    made.text(
        "The models it trained are beside it in `runs`. In this page's folder, verbs that look at a model take them:"
    )
    made.code("\n".join(f"situs {each}" for each in FURTHER))
    stage.page.footer = "Images: a cut of Fashion-MNIST, copyright 2017 Zalando SE, MIT licence."


FURTHER = (
    "evaluate knn runs/mp3 --count 500 --out look",
    "evaluate consistency runs/after-MP3 --out look",
    "analyze reconstruct runs/mp3 --out look",
    "report runs/mp3 runs/droppos --out look",
    "audit split runs/split --defences none,noise=0.5 --attacks order,linkage --out look",
)
"""What to try with the demo's own runs."""

LOOKS: dict[str, Callable[[Stage], Lines]] = {
    "an image in patches": show_patches,
    "block masks and jigsaw shuffles": show_masks,
    "position embeddings": show_positions,
    "equivariance of the encoder": show_equivariance,
}
"""What the demo shows without training: the name that progress shows -> the section."""
