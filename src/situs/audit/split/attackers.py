"""Each attacker on one setting: what it must know, what it found, or why it was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from situs.audit.scores.metrics import psnr, ssim
from situs.audit.split.borders import Borders
from situs.audit.split.cluster import cluster_rows, name_clusters
from situs.audit.split.decoder import learn
from situs.audit.split.grid import lay_out, symmetries
from situs.audit.split.labels import share_up_to_names
from situs.audit.split.linkage import average, link
from situs.audit.split.order import PublicSide, assign_places, order_rows, put_together, read_pixels, set_apart
from situs.audit.split.view import Setting, View, counted_words, send
from situs.core.tokens import unpatchify
from situs.locks.attacks.columns import recover_columns

SENDINGS = 16
LAYOUT_NEEDS = 100
"""Samples from which the grid is laid out without an embedding; with 50 it failed on every model tried."""

DECODER_STEPS = 300


@dataclass(frozen=True)
class Reading:
    """What one attacker found. scores: by name, shares in [0, 1] and dB. images: what it made of the samples, or None."""

    attack: str
    knows: str
    status: Literal["done", "not tried"]
    scores: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    images: Tensor | None = None


class Scene(NamedTuple):
    """Everything an attack on one setting is given, and what it is judged by.

    z: [n, R, D] private streams. pictures: [n, C, H, W] in [0, 1]. side: public knowledge under the defence. old: that of
    a base model, or None. borders: fits on public images. send(z, number): what the client sends at another step.
    """

    setting: Setting
    view: View
    z: Tensor
    pictures: Tensor
    side: PublicSide
    old: PublicSide | None
    borders: Borders
    patches: Tensor
    grid: tuple[int, int]
    patch: tuple[int, int]
    send: Callable[[Tensor, int], Tensor]
    seed: int


def clear_channels(scene: Scene, side: PublicSide) -> tuple[Tensor, dict[str, float]]:
    """What arrived with its channels in the order that the column attacker finds, and the share that is right."""
    seen = scene.view.seen
    if not scene.setting.columns:
        return seen, {}
    plain = Setting(scene.setting.defence)
    words = counted_words(scene.seed, 3)
    public = send(side.tokens, plain, words, prefix=len(side.prefix), grid=scene.grid, scale=side.scale).seen
    found = recover_columns(seen, public, side.prefix)
    share = float((found.q == scene.view.truth.channels).double().mean())
    return seen[..., found.q.argsort()], {"channels": share}


def order(scene: Scene) -> Reading:
    """Knows the embedding: puts channels, then rows in order, then reads the pixels."""
    seen, scores = clear_channels(scene, scene.side)
    if scene.setting.defence.kind == "batch-shuffle":
        return _exchanged(scene, seen, scores)
    found = order_rows(seen, scene.side) if scene.setting.rows else scene.view.truth.row
    images = _pictures(scene, put_together(seen, found, scene.side))
    right = _right(found, scene.view.truth.row, len(scene.side.prefix))
    return _done("order", "the embedding", scene, images, {**scores, "places": right})


def _exchanged(scene: Scene, seen: Tensor, scores: dict[str, float]) -> Reading:
    """Tokens of several samples: places, then whose patch fits beside whose."""
    count, side, truth = len(seen), scene.side, scene.view.truth
    size = int(scene.setting.defence.strength) or count
    images = torch.empty(count, *scene.patches.shape[1:], dtype=torch.float64)
    places, grouped = [], []
    for start in range(0, count, size):
        span = range(start, min(start + size, count))
        rest = [set_apart(seen[i], side.prefix)[1] for i in span]
        tokens = torch.cat([seen[i][each] for i, each in zip(span, rest, strict=True)])
        row = torch.cat([truth.row[i][each] for i, each in zip(span, rest, strict=True)]) - len(side.prefix)
        sample = torch.cat([truth.sample[i][each] for i, each in zip(span, rest, strict=True)]) - start
        found = assign_places(tokens, side, len(span))
        pixels = read_pixels(tokens, found, side)
        group = scene.borders.group(pixels, found, len(span))
        places.append((found == row).double())
        grouped.append(share_up_to_names(group, sample))
        put = torch.zeros(len(span), *images.shape[1:], dtype=torch.float64)
        put[group, found] = pixels
        images[start : start + len(span)] = put
    pictures = _pictures(scene, images)
    # Which picture is whose is not known to the server, and does not matter to whoever is in it: the best match counts.
    names = torch.cdist(scene.pictures.flatten(1).double(), pictures.flatten(1)).argmin(dim=1)
    more = {"places": float(torch.cat(places).mean()), "samples": float(torch.tensor(grouped).mean())}
    return _done("order", "the embedding", scene, pictures[names], {**scores, **more})


def old_embedding(scene: Scene) -> Reading:
    """Knows the embedding before fine-tuning: clusters rows by place, then names the clusters."""
    name, knows = "old embedding", "the embedding before fine-tuning"
    if scene.old is None:
        return Reading(name, knows, "not tried", reason="no base model was given")
    if (why := _unclustered(scene)) is not None:
        return Reading(name, knows, "not tried", reason=why)
    seen, scores = clear_channels(scene, scene.old)
    prefix = len(scene.side.prefix)
    found = name_clusters(cluster_rows(seen, prefix), scene.old.places, prefix)
    right = _right(found, scene.view.truth.row, prefix)
    return _done(name, knows, scene, _pictures(scene, put_together(seen, found, scene.old)), {**scores, "places": right})


def no_embedding(scene: Scene) -> Reading:
    """Knows nothing: clusters rows by place and lays the clusters out on the grid, up to its symmetries."""
    name, knows, count = "no embedding", "nothing", len(scene.z)
    if (why := _unclustered(scene)) is not None:
        return Reading(name, knows, "not tried", reason=why)
    if scene.grid[0] != scene.grid[1]:
        return Reading(name, knows, "not tried", reason=f"a grid of {scene.grid[0]} × {scene.grid[1]} is no square")
    if count < LAYOUT_NEEDS:
        return Reading(name, knows, "not tried", reason=f"{count} samples are too few; it needs {LAYOUT_NEEDS}")
    prefix = len(scene.side.prefix)
    clusters = cluster_rows(scene.view.seen, prefix)
    place = lay_out(scene.view.seen, clusters, prefix)
    named = torch.cat([torch.arange(prefix), prefix + place])[clusters.of]
    turns = symmetries(scene.grid[0])
    tables = [torch.cat([torch.arange(prefix), prefix + turn]) for turn in turns]
    right = max(_right(table[named], scene.view.truth.row, prefix) for table in tables)
    return Reading(name, knows, "done", {"places": right})


def decoder(scene: Scene) -> Reading:
    """The paper's: learned on public images under the same defence, and never puts rows in order."""
    side = scene.side
    decode = learn(
        scene.send, side.tokens, scene.patches, prefix=len(side.prefix), steps=DECODER_STEPS, seed=scene.seed
    )
    return _done("decoder", "the embedding", scene, _pictures(scene, decode(scene.view.seen)), {})


def linkage(scene: Scene) -> Reading:
    """Knows nothing: finds each sample again among all when it is sent once more."""
    if len(scene.z) < 2:
        return Reading("linkage", "nothing", "not tried", reason="one sample is always found again")
    again = scene.send(scene.z, 1)
    found = link(scene.view.seen, again)
    return Reading("linkage", "nothing", "done", {"linked": float((found == torch.arange(len(found))).double().mean())})


def repeats(scene: Scene) -> Reading:
    """Knows the embedding and sees every sample several times: averages the noise away, then puts rows in order."""
    name, knows = "repeats", f"the embedding, {SENDINGS} sendings"
    if scene.setting.defence.kind != "noise":
        return Reading(name, knows, "not tried", reason="there is no noise to average away")
    sendings = torch.stack([scene.view.seen, *(scene.send(scene.z, number) for number in range(1, SENDINGS))], dim=1)
    # Rows that stay where they are need no linking.
    means = torch.stack([average(each) for each in sendings]) if scene.setting.rows else sendings.mean(dim=1)
    quiet = Scene(*scene)._replace(view=View(means, scene.view.truth), side=scene.side.with_noise(1 / SENDINGS))
    found = order(quiet)
    return Reading(name, knows, found.status, found.scores, found.reason, found.images)


ATTACKS: dict[str, Callable[[Scene], Reading]] = {
    "order": order,
    "old-embedding": old_embedding,
    "no-embedding": no_embedding,
    "decoder": decoder,
    "linkage": linkage,
    "repeats": repeats,
}


def _unclustered(scene: Scene) -> str | None:
    if not scene.setting.rows:
        return "the rows are in their order"
    if scene.setting.defence.kind == "batch-shuffle":
        return "a sample's tokens are not its own, and clusters need one token of each place from each sample"
    return "one sample has no rows that recur" if len(scene.z) < 2 else None


def _right(found: Tensor, row: Tensor, prefix: int) -> float:
    """The share of patch rows that were put where they belong."""
    patches = row >= prefix
    return float((found == row)[patches].double().mean())


def _pictures(scene: Scene, patches: Tensor) -> Tensor:
    return unpatchify(patches, scene.grid, scene.patch).clamp(0, 1)


def _done(attack: str, knows: str, scene: Scene, images: Tensor, scores: Mapping[str, float]) -> Reading:
    real = scene.pictures.double()
    quality = psnr(images, real)
    seen = {**scores, "psnr": float(quality.mean()), "worst psnr": float(quality.max())}
    if min(real.shape[-2:]) >= 11:  # the size of its window
        seen["ssim"] = float(ssim(images, real).mean())
    return Reading(attack, knows, "done", seen, images=images)
