"""Each attacker on one setting: what it must know, what it found, or why it was not tried."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from situs.audit.split.cluster import cluster_rows, name_clusters
from situs.audit.split.decoder import learn
from situs.audit.split.grid import lay_out, symmetries
from situs.audit.split.labels import (
    labels_with_head,
    labels_without_head,
    place_rows,
    read_rows,
    share_up_to_names,
)
from situs.audit.split.linkage import average, link
from situs.audit.split.order import PublicSide, assign_places, order_rows, put_together, read_pixels, set_apart
from situs.audit.split.stage import Scene
from situs.audit.split.view import Setting, View, counted_words, send
from situs.core.tokens import unpatchify
from situs.errors import SitusError
from situs.locks.attacks.columns import recover_columns

SENDINGS = 16
LAYOUT_NEEDS = 100
"""Samples from which the grid is laid out without an embedding; with 50 it failed on the model it was tried on."""

DECODER_STEPS = 300

OLD, NOTHING = "the embedding before fine-tuning", "nothing"


@dataclass(frozen=True)
class Reading:
    """What one attacker found. scores: by name, shares in [0, 1] and dB. images: what it made of the samples."""

    attack: str
    knows: str
    status: Literal["done", "not tried"]
    scores: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""
    images: Tensor | None = None


class Found(NamedTuple):
    """scores: beside those of the pictures [n, C, H, W] that were made, if any were."""

    scores: Mapping[str, float]
    pictures: Tensor | None = None


def order(scene: Scene) -> Found:
    """Puts channels, then rows in order, then reads the pixels."""
    seen, scores = clear_channels(scene, scene.side)
    if scene.setting.defence.kind == "batch-shuffle":
        return _exchanged(scene, seen, scores)
    return _read(scene, seen, order_rows(seen, scene.side) if scene.setting.rows else None, scene.side, scores)


def old_embedding(scene: Scene) -> Found:
    """Clusters rows by place, then names the clusters."""
    if scene.old is None:
        raise NotTriedError("no base model was given")
    _check_clusters(scene)
    seen, scores = clear_channels(scene, scene.old)
    prefix = len(scene.side.prefix)
    found = name_clusters(cluster_rows(seen, prefix), scene.old.places, prefix)
    return _read(scene, seen, found, scene.old, scores)


def no_embedding(scene: Scene) -> Found:
    """Clusters rows by place and lays the clusters out on the grid, up to its symmetries."""
    _check_clusters(scene)
    height, width = scene.stage.grid
    if height != width:
        raise NotTriedError(f"a grid of {height} × {width} is no square")
    if (count := len(scene.view.seen)) < LAYOUT_NEEDS:
        raise NotTriedError(f"{count} samples are too few; it needs {LAYOUT_NEEDS}")
    prefix = len(scene.side.prefix)
    clusters = cluster_rows(scene.view.seen, prefix)
    place = lay_out(scene.view.seen, clusters, prefix)
    turned = (torch.cat([torch.arange(prefix), prefix + turn[place]])[clusters.of] for turn in symmetries(height))
    return Found({"places": max(_right(named, scene) for named in turned)})


def decoder(scene: Scene) -> Found:
    """The paper's: learned on public images under the same defence, and never puts rows in order."""
    side, stage = scene.side, scene.stage
    made = {"prefix": len(side.prefix), "steps": DECODER_STEPS, "seed": stage.seed}
    decode = learn(scene.send, side.tokens, stage.patches, **made)
    return Found({}, _pictures(scene, decode(scene.view.seen)))


def linkage(scene: Scene) -> Found:
    """Finds each sample again among all when it is sent once more."""
    if len(scene.stage.z) < 2:
        raise NotTriedError("one sample is always found again")
    found = link(scene.view.seen, scene.send(scene.stage.z, 1))
    return Found({"linked": float((found == torch.arange(len(found))).double().mean())})


def repeats(scene: Scene) -> Found:
    """Averages the noise of several sendings away, then does as `order` does."""
    if scene.setting.defence.kind != "noise":
        raise NotTriedError("there is no noise to average away")
    others = [scene.send(scene.stage.z, number) for number in range(1, SENDINGS)]
    sendings = torch.stack([scene.view.seen, *others], dim=1)
    # Rows that stay where they are need no linking.
    means = torch.stack([average(each) for each in sendings]) if scene.setting.rows else sendings.mean(dim=1)
    quiet = replace(scene.side, noise=scene.side.noise / SENDINGS)
    return order(replace(scene, view=View(means, scene.view.truth), side=quiet))


def labels(scene: Scene) -> Found:
    """Reads the class off the gradient that comes back to the blocks' output, with the head and without."""
    stage, truth = scene.stage, scene.view.truth
    if stage.labels is None or stage.unlabelled is not None:
        raise NotTriedError(stage.unlabelled or "the images have none")
    read = read_rows(stage.backbone, *scene.view.seen.shape[1:])
    if scene.setting.defence.kind == "batch-shuffle" and bool(read[len(scene.side.prefix) :].any()):
        raise NotTriedError("its head pools patches, and a sample's are not its own")
    back = stage.returned(scene.setting.defence)
    out, gradient = (each[truth.sample, truth.row][..., truth.channels] for each in back)
    if scene.setting.columns:
        clear = _order_of_channels(scene, scene.side).argsort()
        out, gradient = out[..., clear], gradient[..., clear]
    rows = place_rows(gradient, read)[..., None].expand_as(gradient)
    device = stage.model.device
    named = labels_with_head(stage.backbone, out.gather(1, rows).to(device), gradient.gather(1, rows).to(device)).cpu()
    scores = {"labels": float((named == stage.labels).double().mean())}
    if 1 < (classes := len(stage.labels.unique())) < len(stage.labels):
        numbered = labels_without_head(gradient, classes, stage.seed)
        scores["unnamed labels"] = share_up_to_names(numbered, stage.labels)
    return Found(scores)


ATTACKS: dict[str, tuple[Callable[[Scene], Found], str]] = {
    "order": (order, "the embedding"),
    "old-embedding": (old_embedding, OLD),
    "no-embedding": (no_embedding, NOTHING),
    "decoder": (decoder, "the embedding"),
    "linkage": (linkage, NOTHING),
    "repeats": (repeats, f"the embedding, {SENDINGS} sendings"),
    "labels": (labels, "the head; unnamed: nothing"),
}
"""attacker -> (what it does, what it must know beside public images)."""


class NotTriedError(SitusError):
    """The attack says nothing of this setting, and why. That is no protection."""


def attack(name: str, scene: Scene) -> Reading:
    """What an attacker finds of a setting."""
    attacker, knows = ATTACKS[name]
    try:
        scores, pictures = attacker(scene)
    except NotTriedError as why:
        return Reading(name, knows, "not tried", reason=str(why))
    seen = {} if pictures is None else scene.stage.scores(pictures)
    return Reading(name, knows, "done", {**scores, **seen}, images=pictures)


def clear_channels(scene: Scene, side: PublicSide) -> tuple[Tensor, dict[str, float]]:
    """What arrived with its channels in the order that the column attacker finds, and the share that is right."""
    if not scene.setting.columns:
        return scene.view.seen, {}
    found = _order_of_channels(scene, side)
    share = float((found == scene.view.truth.channels).double().mean())
    return scene.view.seen[..., found.argsort()], {"channels": share}


def _order_of_channels(scene: Scene, side: PublicSide) -> Tensor:
    given = {"prefix": len(side.prefix), "grid": scene.stage.grid, "scale": side.scale}
    public = send(side.tokens, Setting(scene.setting.defence), counted_words(scene.stage.seed, 3), **given).seen
    return recover_columns(scene.view.seen, public, side.prefix).q


def _exchanged(scene: Scene, seen: Tensor, scores: dict[str, float]) -> Found:
    """Tokens of several samples: places, then whose patch fits beside whose."""
    count, side, truth, stage = len(seen), scene.side, scene.view.truth, scene.stage
    size = int(scene.setting.defence.strength) or count
    images, places, grouped = [], [], []
    for start in range(0, count, size):
        span = slice(start, min(start + size, count))
        rest = torch.stack([set_apart(each, side.prefix)[1] for each in seen[span]])
        tokens = seen[span].gather(1, rest[..., None].expand(-1, -1, seen.shape[2])).flatten(0, 1)
        row, sample = (each[span].gather(1, rest).flatten() for each in (truth.row, truth.sample))
        found = assign_places(tokens, side, len(rest))
        pixels = read_pixels(tokens, found, side)
        group = stage.borders.group(pixels, found, len(rest))
        places.append(found == row - len(side.prefix))
        grouped += [share_up_to_names(group, sample - start)] * len(rest)
        images.append(pixels.new_empty(len(rest), *stage.patches.shape[1:]).index_put_((group, found), pixels))
    pictures = _pictures(scene, torch.cat(images))
    # Which picture is whose is not known to the server, and does not matter to whoever is in it: the best match counts.
    names = torch.cdist(stage.pictures.flatten(1).double(), pictures.flatten(1)).argmin(dim=1)
    more = {"places": float(torch.cat(places).double().mean()), "samples": float(torch.tensor(grouped).mean())}
    return Found({**scores, **more}, pictures[names])


def _read(scene: Scene, seen: Tensor, found: Tensor | None, side: PublicSide, scores: Mapping[str, float]) -> Found:
    """Pictures from rows and what each is believed to be; None where they are in their order."""
    if found is None:
        found = torch.arange(seen.shape[1]).expand(seen.shape[:2])
    else:
        scores = {**scores, "places": _right(found, scene)}
    return Found(scores, _pictures(scene, put_together(seen, found, side)))


def _check_clusters(scene: Scene) -> None:
    if not scene.setting.rows:
        raise NotTriedError("the rows are in their order")
    if scene.setting.defence.kind == "batch-shuffle":
        raise NotTriedError("a sample's tokens are not its own, and a cluster needs one of each sample")
    if len(scene.view.seen) < 2:
        raise NotTriedError("one sample has no rows that recur")


def _right(found: Tensor, scene: Scene) -> float:
    """The share of patch rows that were put where they belong."""
    row = scene.view.truth.row
    return float((found == row)[row >= len(scene.side.prefix)].double().mean())


def _pictures(scene: Scene, patches: Tensor) -> Tensor:
    return unpatchify(patches, scene.stage.grid, scene.stage.patch).clamp(0, 1)
