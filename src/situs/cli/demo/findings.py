"""The findings of `situs demo`.

A finding is a function of a `Stage`: it puts one sentence, one number and one picture on the page, and below a section
with the details. Each sentence follows from the figures of this very run, and says plainly where they do not bear it.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import situs
from situs.audit.split.audit import audit_split
from situs.cli.demo.aside import Aside
from situs.cli.demo.stage import AFTER, ALONE, GRID, PATCH, PLACES, Stage, classify, pretrain
from situs.core.tokens import patchify, take, unpatchify
from situs.data.sources.samples import load_samples
from situs.measure.reconstruct import PuzzleRatios, analyze_reconstruct, paint_places
from situs.pages.reconstruct import mix_figure, one_image_figure, placed_panel, unordered_panel
from situs.progress import took
from situs.report import figures
from situs.report.html import Finding, Section, Tone
from situs.report.pixels import pixel_rows
from situs.report.puzzles import Panel
from situs.results import percent
from situs.train.checkpoint import RunFolder

SHOWN = 3
"""Images in a finding's picture: the first of the test set, whatever came of them."""

ATTACKED, PUBLIC = 50, 300
"""Images that the server of split learning is sent, and those that it has of its own."""

TIMES = 4
"""How many times chance a model must do before it is said to have learned places."""

LEFT_OUT = "left out"


def find_places(stage: Stage) -> Finding:
    """Patches know where they belong: MP3, while a second process trains the classifier without it."""
    with Aside(_classify_aside, stage.seed, stage.quick, str(stage.runs)) as aside:
        history = pretrain(stage)
        stage.say("a classifier on top of it")
        classify(stage, AFTER)
        aside.wait()
    found = analyze_reconstruct(stage.runs / "mp3", show=5, pairs=1, **stage.looked_at)
    whole = PuzzleRatios(0.0)
    right, puzzle = found.scores[whole].right, found.solved[whole]
    images = list(enumerate(found.images[:SHOWN]))
    pieces = [unordered_panel(image, puzzle, row, stage.seed) for row, image in images]
    placed = [placed_panel(image, puzzle, row) for row, image in images]
    drawn = pixel_rows([[_picture(panel) for panel in row] for row in (pieces, placed)], grid=GRID, gap=4)
    alt = "Three images in loose pieces, and under each what the model makes of them."
    picture = Section("").figure(drawn, "In pieces, and put together; grey places got no patch.", alt)
    section = stage.page.section("How MP3 learns where a patch was")
    section.text(
        f"MP3 takes the positions away from all {PLACES} patches of an image, shows a random half of them to the "
        f"others, and asks each patch where it was. A small ViT is trained so on {stage.length.images:,} images, "
        f"without a label. Patches that look alike, such as two black ones, cannot be told apart."
    )
    rows = [row for row in history if "position_accuracy" in row]
    steps = [row["step"] for row in rows]
    lines = {
        "MP3": (steps, [100 * row["position_accuracy"] for row in rows]),
        "chance": (steps, [100 / PLACES for _ in steps]),
    }
    drawn = figures.curves(lines, "update", "patches placed right, %")
    section.figure(drawn, f"{stage.length.epochs} epochs, half of the patches shown.")
    drawn = one_image_figure(found.images[0], found.solved, stage.seed)
    section.figure(drawn, "One image, and a share η of its patches that no patch sees.")
    section.figure(
        mix_figure(found.pairs[0], found.mixes[0]),
        "The patches of two images, shuffled together and dealt out in two sets: of each the model builds one image.",
    )
    learned = right > TIMES / PLACES
    return stage.add(
        Finding(
            "A model can learn where patches belong, without a label."
            if learned
            else "In this run the model has learned little of where patches belong.",
            f"{right * PLACES:.1f} of {PLACES}",
            "patches put back, on average",
            f"Above: what the model sees. Below: where it thinks each patch was. Over "
            f"{found.scores[whole].images:,} test images; chance is 1 of {PLACES}.",
            picture,
            ("How MP3 learns this", section.title),
        )
    )


def _picture(panel: Panel) -> Tensor:
    """A panel's image, light grey where no patch is."""
    return paint_places(torch.as_tensor(panel.image)[None], torch.as_tensor(panel.empty)[None], GRID, 0.85)[0]


def _classify_aside(seed: int, quick: bool, runs: str, _: Callable[[str], None]) -> None:
    """What the second process does."""
    classify(Stage(seed, quick, lambda _: None, Path(runs)), ALONE)


def find_labels(stage: Stage) -> Finding:
    """Pretraining on places helps with few labels."""
    names = {"pretrained on position": AFTER, "from random weights": ALONE}
    curves = {}
    for name, run in names.items():
        log = [row for row in RunFolder.open(stage.runs / run, writer=False).records() if "val_top1" in row]
        curves[name] = [round(row["epoch"]) for row in log], [100 * row["val_top1"] for row in log]
    after, alone = (found[-1] for _, found in curves.values())
    labels, tests = f"{stage.length.labelled:,} labels", len(load_samples("test").images)
    spread = math.sqrt(sum(share * (100 - share) for share in (after, alone)) / tests)  # of the difference, in points
    helped = after - alone > 2 * spread
    bars: dict[str, tuple[float, Tone]] = {
        f"pretrained on position, {labels}": (after, "good" if helped else ""),
        f"from random weights, {labels}": (alone, ""),
    }
    section = stage.page.section("With and without what MP3 learned")
    section.text(
        "The same classifier, recipe, order and labelled images; one begins with the weights that MP3 learned. Judged "
        f"on {tests:,} test images that no training saw, which tell a difference of {2 * spread:.1f} points from "
        "chance. This is one seed."
    )
    drawn = figures.curves(curves, "epoch", "test images classified right, %")
    section.figure(drawn, f"Fine-tuning with {labels}.")
    return stage.add(
        Finding(
            "Learning that first saves labels."
            if helped
            else "In this run, learning that first did not help for sure.",
            f"{after - alone:+.1f}".replace("-", "−"),
            "points of accuracy",
            f"The same classifier, the same {stage.length.labelled:,} labelled images; one was first asked where "
            "patches were.",
            Section("").bars(bars, "%"),
            ("The curves", section.title),
        )
    )


def find_gradients(stage: Stage) -> Finding:
    """One training step gives a picture away."""
    count = 8
    began = time.perf_counter()
    asked: dict[str, Any] = {"count": count, "split": "test", "seed": stage.seed}
    audit = situs.audit_gradients(
        stage.runs / ALONE, "samples", attacks=("patchembed",), defences=("none",), device="cpu", **asked
    )
    [outcome] = audit.findings
    seconds = (time.perf_counter() - began) / count
    section = stage.page.section("What one training step gives away")
    section.text(audit.summary().sentence).text(
        "The server of federated training sees the gradient of every parameter. That of the position table and that of "
        "the patch embedding are linear in the pixels: one system of equations, solved once. No search, no guess, no "
        "other image is needed."
    )
    section.note("Which defences help, and which do not: `situs audit sweep MODEL --data FOLDER --find psnr=20`.")
    if outcome.shown is None:
        reason = outcome.why("refused") or "the attack does not apply"
        return stage.add(Finding("One training step was not attacked.", "–", reason, reason, Section("").text(reason)))
    pairs = [audit.images[:SHOWN], outcome.shown[:SHOWN]]
    caption = "Above: private images. Below: computed from one gradient."
    whole = outcome.to_the_byte == outcome.count
    title = (
        {
            True: "One training step gives the picture away, exactly.",
            False: "One training step gives much of the picture away.",
        }[whole]
        if outcome.exact or outcome.worst_psnr > 20
        else "One training step gave little away to this attack."
    )
    return stage.add(
        Finding(
            title,
            f"{outcome.to_the_byte} of {outcome.count}",
            "images read byte for byte",
            f"Above: private images. Below: what a server computed from the gradient of one step, in "
            f"{took(seconds)} an image.",
            Section("").figure(pixel_rows(pairs), caption, "Private images, and under each the same image recovered."),
            ("How, and which defences help", section.title),
        )
    )


def find_lock(stage: Stage) -> Finding:
    """A model locked with a key, and what attackers without it get."""
    title = "A lock, and who opens it"
    if gone := [package for package in ("cryptography",) if find_spec(package) is None]:
        return stage.add(left_out("A model can be locked with a key.", gone, "locks"))
    from situs.locks.key import draw_key

    key, told = draw_key(), {"data": "samples", "base": stage.runs / "mp3", "images": "samples", "device": "cpu"}
    with tempfile.TemporaryDirectory(dir=stage.runs, prefix=".lock-") as aside:
        place = Path(aside)
        situs.lock(stage.runs / AFTER, key, place / "locked")
        audit = situs.audit_lock(place / "locked", key=key, attacker=("no-base", "images", "public-base"), **told)
        situs.lock(stage.runs / AFTER, key, place / "kept", withhold="embedding")
        kept = situs.audit_lock(place / "kept", key=key, images="samples", device="cpu")
    said = audit.summary()
    section = stage.page.section(title).text(
        "The lock moves the channels between the blocks by a key. Who has it runs the model as before; the others run "
        "weights that do not fit together. A lock is obfuscation, not encryption."
    )
    section.table(said.tables[0].header, said.tables[0].rows, "What each attacker got. " + audit.verdict)
    section.text(f"With the embedding kept back from the file: {kept.verdict}")
    attacks = {each.attacker: each for each in audit.attacks}
    chosen = max((attacks["images"], attacks["public-base"]), key=lambda each: (each.bits == 0, each.right or 0))
    who = "24 unlabelled photographs" if chosen.attacker == "images" else "the public model that it was made from"
    bars: dict[str, tuple[float, Tone]] = {
        "with the key": (100 * (chosen.owner or 0.0), "good"),
        "without": (100 * (chosen.before or 0.0), ""),
        f"attacker with {who}": (100 * (chosen.after or 0.0), "bad" if chosen.bits == 0 else ""),
    }
    fallen = f"The lock falls to {who}." if chosen.bits == 0 else "The attackers tried here did not open it: no proof."
    return stage.add(
        Finding(
            f"A model can be locked with a key. {fallen}",
            f"{chosen.right} of {chosen.size}",
            "channels of the key found",
            f"Test images classified right; the attack took {took(chosen.seconds)}. Keep the embedding back, and an "
            "attacker with photographs has nothing to start from.",
            Section("").bars(bars, "%"),
            ("Every attacker, and what is left of the lock", section.title),
        )
    )


def find_order(stage: Stage) -> Finding:
    """What a server of split learning makes of tokens whose rows and channels the client permutes."""
    stage.say("the server attacks")
    asked: dict[str, Any] = {"split": "test", "count": ATTACKED, "public": PUBLIC, "seed": stage.seed}
    audit = audit_split(stage.runs / AFTER, defences=("none",), attacks=("order",), pictures=True, **asked)
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
        f"the tokens of an image in an order that is new for every image, and their channels in the order of a key. "
        f"The server is sent {audit.samples} images. It knows the embedding, as anyone does who knows the model that a "
        f"training starts from, and has {PUBLIC} images of its own. It finds {percent(scores['channels'])} of the "
        f"channels by how their values are spread, {percent(scores['places'])} of the places by the vectors that "
        f"positions add, and reads the pixels by a linear map fitted on its own images: {scores['psnr']:.1f} dB, where "
        f"the best guess without a token has {audit.guess('psnr') or 0.0:.1f}."
    )
    section.note("What noise and blur change about it, and at which price, says `situs audit split`.")
    caption = "Patches as they arrive, in any order; sorted by the server; and the client's own images."
    alt = "Three images in shuffled patches, the same sorted by the server, and the client's own."
    return stage.add(
        Finding(
            "A server that sees only shuffled tokens can sort them."
            if scores["places"] > 0.95
            else "A server that saw only shuffled tokens sorted some of them.",
            percent(scores["places"], 0),
            "of tokens put in order",
            "Split learning. Above: patches in any order. Middle: what the server made of them. Below: the client's "
            "images.",
            Section("").figure(pixel_rows(rows, grid=GRID, gap=4), caption, alt),
            ("What the server knew, and what noise would cost", section.title),
        )
    )


def left_out(title: str, packages: list[str], extra: str) -> Finding:
    """A finding that an extra is missing for."""
    why = f"needs {' and '.join(packages)}: pip install 'situs[{extra}]'"
    return Finding(title, LEFT_OUT, why, "This finding was not made: " + why, Section("").text("No picture."))
