"""The demo's training, and its looks at what was learned: puzzles, places, position vectors and attention."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import situs
from situs.analyze.attention import analyze_attention
from situs.analyze.reconstruct import PuzzleRatios, analyze_reconstruct
from situs.analyze.vectors import decode_places
from situs.cli.demo.sections import AUGMENT, GRID, LOOKS, MODEL, PATCH, PLACES, TRAINED_ARGS, Lines, Stage, project
from situs.cli.demo.split import show_split
from situs.evaluate.position import PositionCurve, PositionGrid, evaluate_position
from situs.pages.evaluate import position_lines, position_map
from situs.pages.reconstruct import mix_figure, one_image_figure, placed_figure, verdict_figure
from situs.report import figures
from situs.report.attention import attention_over_images, relative_maps
from situs.results import percent
from situs.train.checkpoint import RunFolder


@dataclass(frozen=True)
class Length:
    """How long is trained, on how many images: all of them, or those with labels.

    looks: how often a classifier is judged on the way. looked_at: images that the sections look at.
    """

    images: int = 9000
    epochs: int = 10
    labelled: int = 1000
    finetune_epochs: int = 24
    looks: int = 6
    looked_at: int = 500


QUICK = Length(images=256, epochs=1, labelled=100, finetune_epochs=2, looks=1, looked_at=50)

RATE = {"lr": 2e-3, "warmup_epochs": 1, "min_lr": 1e-5, "clip": 1.0}
"""Of both pretrainings."""

_LOOK = 1.0  # seconds between two looks at a training's log


def length_of(stage: Stage) -> Length:
    """The demo's own, or that of --quick."""
    return QUICK if stage.quick else Length()


def train(stage: Stage, what: str, name: str, images: int, **given: Any) -> list[dict[str, Any]]:
    """Trains the demo's small ViT on some of the embedded images, as the run `name`, and gives its log."""
    stage.say(what)
    backbone = {"name": MODEL, "patch_size": PATCH, "model_args": TRAINED_ARGS, **given.pop("backbone", {})}
    data = {"path": "samples", "img_size": GRID[0] * PATCH, "channels": 1, "count": images}
    fixed: dict[str, Any] = {"augment": AUGMENT, "device": "cpu", "quiet": True}
    with (
        torch.random.fork_rng(devices=[]),
        _followed(stage, what, stage.runs / name / "metrics.jsonl", given["epochs"]),
    ):
        run = situs.pretrain(data, out=stage.runs / name, backbone=backbone, seed=stage.seed, **fixed, **given)
    return RunFolder.open(run, writer=False).records()


@contextmanager
def _followed(stage: Stage, what: str, log: Path, epochs: int) -> Iterator[None]:
    """Says at each quarter of a training how far its log has come, so that nobody waits for minutes without a word."""
    done = threading.Event()

    def follow() -> None:
        told = 0
        while not done.wait(_LOOK):
            with suppress(OSError, ValueError, LookupError):  # not there yet, or its last line is being written
                epoch = int(json.loads(log.read_text(encoding="utf-8").splitlines()[-1])["epoch"])
                if epoch >= told + max(1, epochs // 4):
                    told = epoch
                    stage.say(f"{what}, epoch {epoch} of {epochs}")

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def show_training(stage: Stage) -> Lines:
    """Pretrains with MP3, and trains a classifier with it and without it."""
    length = length_of(stage)
    section = stage.page.section("MP3 learns where patches were")
    section.text(
        f"MP3 takes the positions away from all {PLACES} patches of an image, shows a random half of them to the "
        "others, and asks each patch where it was. No label is needed. Below, a small ViT is trained so on "
        f"{length.images:,} images; then a classifier learns from {length.labelled:,} labelled ones, once on top of it "
        "and once from random weights, everything else being equal."
    )
    log = {"log_every": 2 if stage.quick else 35}
    mp3: dict[str, Any] = {"method": {"name": "mp3", "mask_ratio": 0.5}, "optim": RATE, "train": log, "batch": 128}
    history = train(stage, "pretraining", "mp3", length.images, epochs=length.epochs, **mp3)
    history = [row for row in history if "position_accuracy" in row]
    starts: dict[str, dict[str, Any]] = {
        "after MP3": {"init": str(stage.runs / "mp3"), "init_positions": False},
        "from random weights": {},
    }
    curves = {name: _classify(stage, length, name, start) for name, start in starts.items()}
    steps = [row["step"] for row in history]
    right = {
        "MP3": (steps, [100 * row["position_accuracy"] for row in history]),
        "chance": (steps, [100 / PLACES for _ in steps]),
    }
    section.figure(
        figures.curves(right, "update", "patches placed right, %", title="Pretraining: where was each patch?"),
        f"{length.epochs} epochs with a context of half the patches; chance is 1/{PLACES}.",
    )
    tops = {name: (epochs, [100 * top for top in found]) for name, (epochs, found) in curves.items()}
    section.figure(
        figures.curves(tops, "epoch", "test images classified right, %", title="Fine-tuning with few labels"),
        f"{length.labelled:,} labelled images, the same recipe and order for both.",
    )
    final = {name: found[-1] for name, (_, found) in curves.items()}
    if final["after MP3"] > final["from random weights"]:  # not after the few steps of --quick
        section.title += ", and that helps"
    section.table(
        ["classifier", "test accuracy"],
        [[name, percent(top)] for name, top in final.items()],
        f"On {len(stage.samples.images):,} test images that neither training saw.",
    )
    return [
        ("MP3, patches placed right", f"{percent(history[-1]['position_accuracy'])} (chance {percent(1 / PLACES)})"),
        *((f"top-1 {name}", percent(top)) for name, top in final.items()),
    ]


def _classify(stage: Stage, length: Length, name: str, start: dict[str, Any]) -> tuple[list[int], list[float]]:
    """Trains a classifier with few labels: epochs, and the test accuracy after each."""
    fixed: dict[str, Any] = {
        "method": "supervised",
        "optim": {"lr": 1e-3, "warmup_epochs": 2, "clip": 1.0},
        "epochs": length.finetune_epochs,
        "batch": 50,
        "train": {"log_every": 100},
        "probe_every": length.finetune_epochs // length.looks,
    }
    rows = train(stage, f"classifier {name}", name.replace(" ", "-"), length.labelled, **fixed, **start)
    rows = [row for row in rows if "val_top1" in row]
    return [round(row["epoch"]) for row in rows], [row["val_top1"] for row in rows]


def show_puzzles(stage: Stage) -> Lines:
    """MP3's Figures 2 and 14: puzzles at several η, and two images in one."""
    found = analyze_reconstruct(stage.runs / "mp3", show=5, pairs=1, **_images(stage))
    section = stage.page.section("Jigsaw puzzles")
    section.text(
        "Test images in pieces: the patches come in no order and without positions, a share 1 − η of them (outlined in "
        "green) as keys, and each is put where the model says it was. Patches that meet are averaged, and hatched "
        "places got none. Much of these images is black, and one black patch is like another."
    )
    section.figure(one_image_figure(found.images[0], found.solved), "One image at four η.")
    section.figure(placed_figure(found.images, found.solved), "More images; over each its right guesses.")
    section.figure(
        mix_figure(found.pairs[0], found.mixes[0]),
        "The patches of two images, shuffled together and dealt out in two sets: of each the model builds one image.",
    )
    whole = found.scores[PuzzleRatios(0.0)]
    return [("MP3, puzzles without a mask", f"{percent(whole.right)} of patches right")]


def show_places(stage: Stage) -> Lines:
    """MP3 over η and, after a short DropPos training, the grid of γ and γ_pos with Figure 3."""
    section = stage.page.section("Who knows where a patch was")
    section.text(
        "MP3 is asked for every patch's place, DropPos for the places of those that it sees and whose place it is not "
        "told. Here is how well each does when more is hidden than in its training, or less."
    )
    method = {"name": "droppos", "decoder_width": 64, "decoder_heads": 4, "affinity": "visible"}
    asked: dict[str, Any] = {"method": method, "backbone": {"positions": "sincos"}, "optim": RATE, "batch": 128}
    length, log = length_of(stage), {"log_every": 100}
    train(stage, "training DropPos", "droppos", length.images, epochs=length.epochs, train=log, **asked)
    asked_for = evaluate_position(stage.runs / "mp3", **_images(stage))
    grid = evaluate_position(stage.runs / "droppos", **_images(stage))
    assert isinstance(asked_for, PositionCurve)
    assert isinstance(grid, PositionGrid)
    section.figure(position_lines(asked_for), "MP3, trained with η = 0.5, at other shares of queries.")
    section.figure(
        position_map(grid),
        f"DropPos, trained with γ = γ_pos = 0.75: right guesses in percent. Chance is {percent(1 / PLACES)}.",
    )
    tried: dict[str, Any] = {"ratios": (0.0, 0.25, 0.5, 0.75), "position_ratios": (0.75,)}
    found = analyze_reconstruct(stage.runs / "droppos", **tried, show=4, **_images(stage))
    section.figure(
        verdict_figure(found.images, found.solved),
        "DropPos at γ_pos = 0.75. Black and hatched: not seen. Green: told where it is. White: guessed wrong.",
    )
    return [("DropPos, mean of the position grid", f"{percent(grid.mean)} (chance {percent(1 / PLACES)})")]


def show_learned_positions(stage: Stage) -> Lines:
    """Two tables that were learned: the classifier's positions, and MP3's vector for each place it can name."""
    section = stage.page.section("A map of the image that nobody drew")
    own = situs.open_model(stage.runs / "after-MP3").backbone.positions().table
    mp3: Any = situs.open_model(stage.runs / "mp3").method
    assert own is not None
    tables = {"the classifier's positions": own.detach(), "MP3's position head": mp3.position_head.weight.detach()}
    found = {name: decode_places(table, GRID, seed=stage.seed) for name, table in tables.items()}
    errors = [f"{each.two.mean:.2f} patches for {name}" for name, each in found.items()]
    blind = next(iter(found.values())).chance_two
    section.text(
        "MP3's head holds one vector for each place that it can name, and the classifier above has learned one vector "
        "for each place that it adds to the patch there. Both began as random numbers; no one told either which place "
        "is beside which. A linear map fitted on four fifths of the places reads row and column of the others off "
        f"their vectors with a mean error of {' and '.join(errors)}; who knows nothing errs by {blind:.2f}."
    )
    if found["MP3's position head"].two.mean < blind / 2:  # not after the few steps of --quick
        section.text(
            "MP3 finds the grid because neighbours are easily mistaken for each other, and so are left and right of "
            "clothes that are symmetric: its sheet may be folded in the middle. The classifier needs places less, and "
            "has seen few images."
        )
    drawn, _ = project(tables)
    section.figure(drawn, f"The {PLACES} vectors in the plane of their two largest principal components.")
    return [(f"row and column read off {name}", f"error {each.two.mean:.2f} patches") for name, each in found.items()]


def show_attention(stage: Stage) -> Lines:
    """The classifier's heads: over images and by relative offset."""
    looked = analyze_attention(stage.runs / "after-MP3", show=5, **_images(stage))
    shown, found = looked.shown, looked.survey
    section = stage.page.section("Where the classifier looks")
    section.text(looked.summary().sentence)
    section.figure(
        attention_over_images(shown.images.numpy(), shown.maps.numpy()),
        "Attention of the fine-tuned classifier; each map has its own scale.",
    )
    section.figure(
        relative_maps(found.relative.numpy(), found.entropy.numpy()),
        f"What a patch takes on average from the patch at each offset, up to {GRID[0] - 1} patches each way, the "
        "query in the middle; under each map its entropy in nats. Each offset is averaged over the pairs of patches "
        "that have it.",
    )
    return [("sharpest head of the classifier", f"{found.entropy.min():.2f} nats of {found.uniform_entropy:.2f}")]


def _images(stage: Stage) -> dict[str, Any]:
    """The test images that a run is looked at with."""
    count = length_of(stage).looked_at
    return {"split": "test", "count": count, "batch": count}


SECTIONS: dict[str, Callable[[Stage], Lines]] = {
    **LOOKS,
    "MP3, and a classifier with and without it": show_training,
    "puzzles": show_puzzles,
    "DropPos, and who knows where a patch was": show_places,
    "what a vector knows of its place": show_learned_positions,
    "attention": show_attention,
    "split learning, and what its server sees": show_split,
}
"""All that the demo shows, in this order: the name that progress shows -> the section."""
