"""The findings of `situs demo`.

A finding is a function of a `Stage`: it puts one sentence, one number and one picture on the page, and a section with
the details below. Each sentence follows from the figures of this run, also when they are weak.
"""

from __future__ import annotations

import math
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import situs
from situs.audit.split.audit import audit_split
from situs.cli.demo.stage import AFTER, ALONE, GRID, PATCH, PLACES, Stage, classify, pretrain
from situs.core.tokens import patchify, take, unpatchify
from situs.data.sources.samples import load_samples
from situs.errors import counted
from situs.measure.reconstruct import PuzzleRatios, analyze_reconstruct, paint_places
from situs.pages.reconstruct import mix_figure, one_image_figure, placed_panel, unordered_panel
from situs.progress import took
from situs.report import figures
from situs.report.figures import pixel_rows
from situs.report.html import Finding, Section, Tone
from situs.report.puzzles import Panel
from situs.results import percent
from situs.train.checkpoint import RunFolder

SHOWN = 3
"""Images in a finding's picture: always the first of the test set."""

ATTACKED, PUBLIC = 50, 300
"""Images sent to the server of split learning, and images that the server owns."""

TIMES = 4
"""A model has learned positions if it is right more often than this many times chance."""

LEFT_OUT = "left out"


def find_places(stage: Stage) -> Finding:
    """MP3 learns where patches belong."""
    history = pretrain(stage)
    puzzles = analyze_reconstruct(stage.runs / "mp3", show=5, pairs=1, **stage.test_images)
    whole = PuzzleRatios(0.0)
    right, puzzle = puzzles.scores[whole].right, puzzles.solved[whole]
    images = list(enumerate(puzzles.images[:SHOWN]))
    pieces = [unordered_panel(image, puzzle, row, stage.seed) for row, image in images]
    placed = [placed_panel(image, puzzle, row) for row, image in images]
    drawn = pixel_rows([[_picture(panel) for panel in row] for row in (pieces, placed)], grid=GRID, gap=4)
    alt = "Three images as shuffled patches. Below each image is the model's reconstruction."
    picture = Section("").figure(
        drawn, "Shuffled patches, and the model's reconstruction, which is grey where the model placed no patch.", alt
    )
    section = stage.page.section("How MP3 learns positions")
    section.text(
        f"The pretraining method MP3 removes the positions of all {PLACES} patches of an image. The model predicts the "
        "position of every patch, and each patch attends only to a random half of the patches. A small ViT learns "
        f"this on {stage.length.images:,} images, without "
        f"labels. "
        "Patches with the same content, such as two black patches, cannot be distinguished."
    )
    rows = [row for row in history if "position_accuracy" in row]
    steps = [row["step"] for row in rows]
    lines = {
        "MP3": (steps, [100 * row["position_accuracy"] for row in rows]),
        "chance": (steps, [100 / PLACES for _ in steps]),
    }
    drawn = figures.curves(lines, "step", "correctly placed patches, %")
    section.figure(
        drawn, f"Training for {counted(stage.length.epochs, 'epochs')}. Each patch attends to half of the patches."
    )
    drawn = one_image_figure(puzzles.images[0], puzzles.solved, stage.seed)
    section.figure(
        drawn, "One image, rebuilt at several mask ratios η (the fraction of patches that no patch attends to)."
    )
    section.figure(
        mix_figure(puzzles.pairs[0], puzzles.mixes[0]),
        "The patches of two images are shuffled together and divided into two sets of equal size. Each set contains "
        "patches of both images. From each set, the model assembles one image, a mixture of the two.",
    )
    learned = right > TIMES / PLACES
    return stage.add(
        Finding(
            "A model can learn where patches belong, without labels."
            if learned
            else "In this run the model learned little about where patches belong.",
            f"{right * PLACES:.1f} of {PLACES}",
            "patches at their true position, on average",
            "Above: the input of the model. Below: each patch at its predicted position. The number of correct "
            "patches is an average "
            f"over {puzzles.scores[whole].images:,} test images. Random guesses are right for 1 of {PLACES} patches.",
            picture,
            ("How MP3 learns this", section.title),
        )
    )


def _picture(panel: Panel) -> Tensor:
    """A panel's image, light grey where no patch is."""
    return paint_places(torch.as_tensor(panel.image)[None], torch.as_tensor(panel.empty)[None], GRID, 0.85)[0]


def find_labels(stage: Stage) -> Finding:
    """Pretraining on position helps with few labels."""
    names = {"pretrained on position": AFTER, "from random weights": ALONE}
    curves = {}
    for name, run in names.items():
        classify(stage, run)
        log = [row for row in RunFolder.open(stage.runs / run, writer=False).records() if "val_top1" in row]
        curves[name] = [round(row["epoch"]) for row in log], [100 * row["val_top1"] for row in log]
    after, alone = (accuracies[-1] for _, accuracies in curves.values())
    labels, tests = f"{stage.length.labelled:,} labels", len(load_samples("test").images)
    spread = math.sqrt(sum(share * (100 - share) for share in (after, alone)) / tests)  # of the difference, in points
    helped = after - alone > 2 * spread
    bars: dict[str, tuple[float, Tone]] = {
        f"pretrained on position, {labels}": (after, "good" if helped else ""),
        f"from random weights, {labels}": (alone, ""),
    }
    section = stage.page.section("A classifier with and without the weights of MP3")
    section.text(
        "Both classifiers have the same hyperparameters and see the same labelled images in the same order. One "
        "classifier starts from weights that were pretrained to predict patch positions (with MP3), the other from "
        f"random weights. Accuracy is measured on {tests:,} test images that were not used for training. Differences "
        f"above {2 * spread:.1f} points are significant. The result comes from one random seed."
    )
    drawn = figures.curves(curves, "epoch", "correctly classified test images, %")
    section.figure(drawn, f"Fine-tuning with {labels}.")
    return stage.add(
        Finding(
            "Pretraining on position saves labels."
            if helped
            else "In this run, pretraining on position did not improve the accuracy significantly.",
            f"{after - alone:+.1f}".replace("-", "−"),
            "points of accuracy",
            f"Both classifiers were trained on the same {stage.length.labelled:,} labelled images. Only one "
            "classifier was first pretrained to predict patch positions.",
            Section("").bars(bars, "%"),
            ("The curves", section.title),
        )
    )


def find_gradients(stage: Stage) -> Finding:
    """One training step gives an image away."""
    count = 8
    began = time.perf_counter()
    options: dict[str, Any] = {"count": count, "split": "test", "seed": stage.seed, "device": "cpu"}
    audit = situs.audit_gradients(stage.runs / ALONE, "samples", attacks=("patchembed",), defences=("none",), **options)
    [outcome] = audit.findings
    seconds = (time.perf_counter() - began) / count
    section = stage.page.section("What one training step reveals")
    section.text(audit.summary().sentence).text(
        "The server of federated learning sees the gradient of every parameter. The gradients of the "
        "position table and of the patch embedding give a linear system for the pixels. The server "
        "solves this system once, without a search and without other images."
    )
    section.note("This command shows which defences help: `situs audit sweep MODEL --data FOLDER --find psnr=20`.")
    if outcome.shown is None:
        reason = outcome.why("refused") or "the attack does not apply"
        return stage.add(Finding("No training step was attacked.", "–", reason, reason, Section("").text(reason)))
    pairs = [audit.images[:SHOWN], outcome.shown[:SHOWN]]
    caption = "Above: private images. Below: images that a server computed from one gradient."
    whole = outcome.to_the_byte == outcome.count
    title = (
        {
            True: "One training step reveals the image exactly.",
            False: "One training step reveals much of the image.",
        }[whole]
        if outcome.exact or outcome.worst_psnr > 20
        else "This attack recovered little from one training step."
    )
    return stage.add(
        Finding(
            title,
            f"{outcome.to_the_byte} of {outcome.count}",
            "images recovered byte for byte",
            f"Above: private images. Below: what a server computed from the gradient of one step, in "
            f"{took(seconds)} per image.",
            Section("").figure(pixel_rows(pairs), caption, "Private images. Below each image is the recovered image."),
            ("How the attack works, and which defences help", section.title),
        )
    )


def find_lock(stage: Stage) -> Finding:
    """A model locked with a key, and what attackers without it get."""
    title = "Which attackers open the lock"
    if gone := [package for package in ("cryptography",) if find_spec(package) is None]:
        return stage.add(left_out("A model can be locked with a key.", gone, "locks"))
    from situs.locks.key import draw_key

    key, options = draw_key(), {"data": "samples", "base": stage.runs / "mp3", "images": "samples", "device": "cpu"}
    with tempfile.TemporaryDirectory(dir=stage.runs, prefix=".lock-") as folder:
        locked, withheld = Path(folder) / "locked", Path(folder) / "withheld"
        situs.lock(stage.runs / AFTER, key, locked)
        audit = situs.audit_lock(locked, key=key, attacker=("no-base", "images", "public-base"), **options)
        situs.lock(stage.runs / AFTER, key, withheld, withhold="embedding")
        without_embedding = situs.audit_lock(withheld, key=key, images="samples", device="cpu")
    table = audit.summary().tables[0]
    section = stage.page.section(title).text(
        "The lock uses a key to change the order of the channels in all blocks of the model. With the key, the model "
        "runs as before. Without the key, the blocks do not match the channel order of the embedding, so the accuracy "
        "falls. A lock is obfuscation, not encryption."
    )
    section.table(table.header, table.rows, "Results of each attacker. " + audit.verdict)
    section.text(f"If the owner also withholds the embedding: {without_embedding.verdict}")
    attacks = {attack.attacker: attack for attack in audit.attacks}
    best = max((attacks["images"], attacks["public-base"]), key=lambda attack: (attack.bits == 0, attack.right or 0))
    who = "24 unlabelled images" if best.attacker == "images" else "the model before fine-tuning"
    bars: dict[str, tuple[float, Tone]] = {
        "with the key": (100 * (best.owner or 0.0), "good"),
        "without": (100 * (best.before or 0.0), ""),
        f"attacker with {who}": (100 * (best.after or 0.0), "bad" if best.bits == 0 else ""),
    }
    outcome = "The attacks tried here did not open the lock, but a better attack may open it."
    if best.bits == 0:
        outcome = f"An attacker with {who} opens the lock."
    return stage.add(
        Finding(
            f"A model can be locked with a key. {outcome}",
            f"{best.right} of {best.size}",
            "channels of the key found",
            f"The bars show accuracy on test images. The attack took {took(best.seconds)}. If the owner "
            "also withholds the embedding, the attack `images` cannot start. Other attacks can still start.",
            Section("").bars(bars, "%"),
            ("The result of every attacker", section.title),
        )
    )


def find_order(stage: Stage) -> Finding:
    """What a server of split learning recovers from tokens with permuted rows and channels."""
    options: dict[str, Any] = {"split": "test", "count": ATTACKED, "public": PUBLIC, "seed": stage.seed}
    audit = audit_split(stage.runs / AFTER, defences=("none",), attacks=("order",), pictures=True, **options)
    [finding] = audit.settings[-1].findings  # rows and channels permuted
    assert finding.shown is not None
    assert audit.pictures is not None
    scores, pictures = finding.figures, finding.shown.float()
    orders = torch.rand(len(pictures), PLACES, generator=torch.Generator().manual_seed(stage.seed)).argsort(dim=1)
    mixed = unpatchify(take(patchify(pictures, PATCH), orders), GRID, PATCH)
    rows = [mixed[:SHOWN], pictures[:SHOWN], audit.pictures[:SHOWN]]
    section = stage.page.section("What the server of split learning sees")
    section.text(
        "In split learning a client keeps images and labels, and a server computes the blocks. Here the client sends "
        "the tokens of each image in a new random order, and permutes their channels with a key. The server "
        f"receives the tokens of {audit.samples} images. The server has the public model that training started from, "
        f"so the server knows the embedding. The server also has {PUBLIC} other images. From the distribution of the "
        f"token values, the server finds the original place of {percent(scores['channels'])} of the channels. From the "
        f"position embeddings, the server finds the position of {percent(scores['places'])} of the tokens. A linear "
        f"map that the server fits on its {PUBLIC} other images then recovers the pixels of the client's images with a "
        f"PSNR of {scores['psnr']:.1f} dB. "
        f"The best guess without any token has a PSNR of {audit.guess('psnr') or 0.0:.1f} dB."
    )
    section.note("`situs audit split` shows how noise and blur change these numbers and the accuracy.")
    caption = (
        "Above: patches in the random order of the received tokens. Middle: the patches in the order that the server "
        "found. Below: the client's images."
    )
    alt = (
        "Above: three images as shuffled patches. Middle: the same patches in the order that the server found. Below: "
        "the client's images."
    )
    return stage.add(
        Finding(
            "A server that sees only shuffled tokens can restore their order."
            if scores["places"] > 0.95
            else "A server that saw only shuffled tokens restored part of their order.",
            percent(scores["places"], 0),
            "of tokens put in order",
            "Split learning. Above: patches in random order. Middle: the patches in the order that the server found. "
            "Below: the client's images.",
            Section("").figure(pixel_rows(rows, grid=GRID, gap=4), caption, alt),
            ("What the server knew, and how to test noise", section.title),
        )
    )


def left_out(title: str, packages: list[str], extra: str) -> Finding:
    """A finding that needs a missing extra."""
    why = f"needs {' and '.join(packages)}: pip install 'situs[{extra}]'"
    return Finding(title, LEFT_OUT, why, "Skipped: " + why, Section("").text("No picture."))
