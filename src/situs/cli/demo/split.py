"""The demo's split learning: a client and a server in two processes with certificates, and what the server makes of it.

The server keeps the first features that it is sent. It knows the embedding of the classifier that the training starts
from and has images of its own; the attackers of `situs.locks` and `situs.audit.split` do the rest.
"""

from __future__ import annotations

import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

import situs
from situs.audit.scores.metrics import denormalise, psnr
from situs.audit.split.order import order_rows, public_side, put_together
from situs.audit.split.stage import streams
from situs.backbones import Backbone
from situs.cli.demo.findings import left_out
from situs.cli.demo.server import SEEN, Server
from situs.cli.demo.stage import AFTER, AUGMENT, GRID, MODEL, MODEL_ARGS, PATCH, PLACES, Stage
from situs.config import from_dict
from situs.core.tokens import patchify, take, unpatchify
from situs.locks import lock, unlocking
from situs.locks.attacks.columns import recover_columns
from situs.locks.key import Key, draw_key
from situs.locks.veil import Veil
from situs.models.data import load_set
from situs.models.initialise import starting
from situs.report.html import Finding, Section
from situs.report.pixels import pixel_rows
from situs.results import percent
from situs.split.hiding import Hide, read_hiding
from situs.split.run import train_split
from situs.split.transport.certificates import make_certificates, read_credentials
from situs.split.transport.connect import Connection
from situs.split.whole import merge
from situs.train.assemble import RunConfig, make_training_loader
from situs.train.distributed import Ranks

NEEDS = {"grpc": "grpcio", "cryptography": "cryptography"}
"""Modules of the extra `split` -> the packages that have them."""

BATCH, STEPS, SHOWN, PUBLIC = 50, 12, 3, 300
"""Samples a step, steps, images in the picture, and images that the server has of its own."""


class Sent(NamedTuple):
    """What the server has, and the truth about it: of each row and channel that came, which it is.

    seen: [B, R, D]. images: [B, C, H, W] in [0, 1]. rows: [B, R]. channels: [D].
    """

    seen: Tensor
    images: Tensor
    rows: Tensor
    channels: Tensor


class Got(NamedTuple):
    """What the server made of it. pictures: [B, C, H, W]. rows: [B, R], which row it takes each for.

    places, channels: shares that are right. quality, blind: PSNR in dB, of the pictures and of the mean image.
    """

    pictures: Tensor
    rows: Tensor
    places: float
    channels: float
    quality: float
    blind: float


def find_order(stage: Stage) -> Finding:
    """Trains on with a server in a second process, and shows what that server makes of what it was sent."""
    if gone := [package for module, package in NEEDS.items() if find_spec(module) is None]:
        return stage.add(left_out("A server that sees only shuffled tokens.", gone, "split"))
    with tempfile.TemporaryDirectory(dir=stage.runs, prefix=".split-") as aside:
        sent = train(stage, Path(aside))
        stage.say("the server attacks")
        got = attack(stage, sent)
    section = _details(stage, sent, got)
    prefix = sent.seen.shape[1] - PLACES
    came = torch.stack([each[each >= prefix] - prefix for each in got.rows])
    mixed = unpatchify(take(patchify(got.pictures, PATCH), came), GRID, PATCH)
    rows = [mixed[:SHOWN], got.pictures[:SHOWN], sent.images[:SHOWN]]
    caption = "What was sent, read by the server; sorted by the server; and the client's own images."
    alt = "Three images in shuffled patches, the same sorted by the server, and the client's own."
    sorted_all = got.places > 0.95
    return stage.add(
        Finding(
            "A server that sees only shuffled tokens can sort them."
            if sorted_all
            else "A server that saw only shuffled tokens sorted some of them.",
            percent(got.places, 0),
            "of tokens put in order",
            "Split learning over a real connection. Above: what was sent. Middle: what the server made of it. Below: "
            "the client's images.",
            Section("").figure(pixel_rows(rows, grid=GRID, gap=4), caption, alt),
            ("What the server knew, and what noise would cost", section.title),
        )
    )


def _details(stage: Stage, sent: Sent, got: Got) -> Section:
    section = stage.page.section("What the server of split learning sees")
    section.text(
        "A client trains the classifier further on images and labels that it shows to nobody. A server in a second "
        "process computes the blocks; both show each other certificates, and the line is encrypted. The client sends "
        f"the {sent.seen.shape[1]} tokens of an image in an order that is new for every image and step, and their "
        f"{sent.seen.shape[2]} channels in the order of a key: {4 * sent.seen[0].nbytes / 1024:.0f} KiB a sample and "
        "step, there and back, features and gradients."
    )
    section.text(
        f"The server kept the first {len(sent.seen)} samples. It knows the embedding, as anyone does who knows the "
        f"model that the training started from, and has {PUBLIC} images of its own. It finds {percent(got.channels)} "
        f"of the channels by how their values are spread, {percent(got.places)} of the places by the vectors that "
        f"positions add, and reads the pixels by a linear map fitted on its own images: {got.quality:.1f} dB, where "
        f"the mean image has {got.blind:.1f}."
    )
    low, high = sent.seen.quantile(0.01), sent.seen.quantile(0.99)
    tokens = ((sent.seen - low) / (high - low)).clamp(0, 1)[:SHOWN, None]
    section.figure(pixel_rows([tokens]), "The tokens of the same images as they arrived, a row each.")
    section.note(
        "Encryption keeps others out and not the server. What noise and blur change about it, and at which price, says "
        "`situs audit split`."
    )
    return section


def train(stage: Stage, place: Path) -> Sent:
    """A few steps with the server, from the classifier locked by a key; what the server has of the first."""
    key, locked, certs = draw_key(), place / "locked", place / "certs"
    start = situs.open_model(stage.runs / AFTER)
    lock(start, key, locked)
    make_certificates(certs)
    shape = {"name": MODEL, "patch_size": PATCH, "model_args": MODEL_ARGS, "num_classes": 10}
    data = {"path": "samples", "img_size": GRID[0] * PATCH, "channels": 1, "batch": BATCH, "count": BATCH * STEPS}
    config = from_dict(
        RunConfig,
        {"method": {"name": "supervised"}, "backbone": shape, "data": data, "init": str(locked),
         "augment": AUGMENT, "optim": {"lr": 1e-4, "clip": 1.0}, "train": {"epochs": 1, "seed": stage.seed}},
    )  # fmt: skip
    stage.say("the server starts")
    shown = read_credentials(certs, "client")
    with Server(config, place / "server", certs) as server, Connection(server.address, shown) as call:
        stage.say("client and server train")
        given: dict[str, Any] = {"key": key, "start": starting(unlocking(key, None)), "device": "cpu", "quiet": True}
        result = train_split(config, call, Hide(("rows", "columns")), out=place / "client", **given)
    if result.interrupted:
        raise KeyboardInterrupt
    merge(place / "client", place / "server", stage.runs / "split", key=key)
    return _truth(place, config, start.backbone, key)


def _truth(place: Path, config: RunConfig, backbone: Backbone, key: Key) -> Sent:
    """What the server kept, beside the images that it came from: the client knows its own rows again."""
    seen = load_file(place / "server" / SEEN)["z"]
    view = read_hiding(place / "client").view(backbone, key)
    assert view.columns is not None
    loader = make_training_loader(config, Ranks(0, 1, torch.device("cpu")))
    inputs = next(iter(loader.iterate(0, 0))).inputs
    clear = seen.double()[..., view.columns[0].argsort()]
    rows = torch.cdist(clear, streams(backbone, [inputs])).argmin(dim=-1)
    assert torch.equal(rows.sort().values, torch.arange(seen.shape[1]).expand_as(rows)), "these are other images"
    return Sent(seen, denormalise(inputs, *_scale(loader)), rows, view.columns[0])


def _scale(loader: Any) -> tuple[list[float], list[float]]:
    return loader.mean.flatten().tolist(), loader.std.flatten().tolist()


def attack(stage: Stage, sent: Sent) -> Got:
    """Channels, then rows, then pixels. The truth is for the scores alone."""
    model = situs.open_model(stage.runs / AFTER)
    loader = load_set(model, None, split="test", count=PUBLIC, batch=PUBLIC)
    inputs = torch.cat([batch.inputs for batch in loader])
    public, known = denormalise(inputs, *_scale(loader)), streams(model.backbone, [inputs])
    side = public_side(model.backbone, known, patchify(public, PATCH), Veil())
    channels = recover_columns(sent.seen, known, side.prefix).q
    clear = sent.seen.double()[..., channels.argsort()]
    rows = order_rows(clear, side)
    pictures = unpatchify(put_together(clear, rows, side), GRID, PATCH).clamp(0, 1)
    right = (rows == sent.rows)[sent.rows >= len(side.prefix)]
    blind = public.mean(dim=0, keepdim=True).expand_as(sent.images)
    quality, least = (float(psnr(each, sent.images).mean()) for each in (pictures, blind))
    return Got(pictures, rows, _share(right), _share(channels == sent.channels), quality, least)


def _share(right: Tensor) -> float:
    return float(right.double().mean())
