"""Joining both parts: an ordinary run from the two folders, or a model whose blocks stay on the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.errors import SitusError
from situs.files import write_bytes, write_text
from situs.folder_lock import lock_folder
from situs.locks.groups import invert_keys, permute_state, residual_only
from situs.locks.key import AnyKey, Key
from situs.models.model import DEFENCE_FILE, Model, folder_name, identity_of
from situs.split.client import Call, Client, RewoundError
from situs.split.hiding import Hiding, column_permutations, key_of, read_hiding
from situs.split.parts import cut, layout, side_names, trained_order
from situs.split.remote import attach
from situs.split.run import recorded_config
from situs.split.server import agreed
from situs.train.assemble import RunConfig, make_method
from situs.train.checkpoint import Checkpoint, RunFolder
from situs.train.checkpoint.state import fill
from situs.train.optim import BACKBONE

FRONT = f"{BACKBONE}model."


def session_folder(server: Path, session: str) -> RunFolder:
    """The server's folder with the blocks of a session."""
    for path in (server / "sessions" / session, server / "shared", server):
        if (path / "config.json").is_file():
            return RunFolder.open(path, writer=False)
    raise SitusError(f"{server}: contains no blocks of the session {session}")


def merge(client: str | Path, server: str | Path, out: str | Path, *, key: AnyKey | None = None) -> int:
    """Joins a client's run and its server's blocks to an ordinary run in `out`; returns its step.

    The run has the newest step for which both have a checkpoint. key: needed if channels were permuted and the key is
    not in
    the client's folder.
    """
    client, server, out = Path(client), Path(server), Path(out)
    hiding, config = read_hiding(client), recorded_config(client)
    secret = key_of(client, hiding, key) if "columns" in hiding.permute else None
    ours, theirs = RunFolder.open(client, writer=False), session_folder(server, hiding.session)
    mine, blocks = _common(ours, theirs)
    classes = ours.classes()
    bare = replace(config, init=None, backbone=replace(config.backbone, weights=None))
    backbone = make_method(bare, classes).backbone
    files = {name: dict(mine.tensors(name)) for name in ("model", "optimizer", "ema", "log")}
    for name in ("model", "optimizer", "ema"):
        files[name] |= opened(blocks.tensors(name), backbone, secret, hiding)
    files["generators"] = blocks.tensors("generators")
    run = RunFolder.create(out, config, classes=classes)
    length = mine.state["metrics"]["bytes"]
    if length and ours.metrics.exists():
        write_bytes(run.metrics, ours.metrics.read_bytes()[:length])
    written_anew = ("step", "config", "metrics", "files", "format")
    state = {name: value for name, value in mine.state.items() if name not in written_anew}
    if hiding.defence != "none":
        rows = [name for name in hiding.permute if name == "rows"]
        write_text(out / DEFENCE_FILE, json.dumps({"defence": hiding.defence, "scale": hiding.scale, "permute": rows}))
    with run.hold():
        run.save(mine.step, {name: tensors for name, tensors in files.items() if tensors}, state, 1)
    return mine.step


def _common(ours: RunFolder, theirs: RunFolder) -> tuple[Checkpoint, Checkpoint]:
    if theirs.path.name == "shared":
        return ours.newest(), theirs.newest()
    for step in sorted({*ours.steps()} & {*theirs.steps()}, reverse=True):
        mine, blocks = ours.whole(step), theirs.whole(step)
        if mine is not None and blocks is not None:
            return mine, blocks
    have = [", ".join(map(str, sorted(folder.steps()))) or "none" for folder in (ours, theirs)]
    raise SitusError(
        f"client and server have no checkpoint in common: the client has the steps {have[0]}, and the "
        f"server has {have[1]}"
    )


def opened(tensors: dict[str, Tensor], backbone: Backbone, key: Key | None, hiding: Hiding) -> dict[str, Tensor]:
    """A server's tensors (weights, means or moments) with the permutation of their channels undone."""
    if key is None:
        return tensors
    keys = invert_keys(column_permutations(backbone, key, hiding.session, hiding.locked))
    groups, restored = residual_only(backbone.groups()), {}
    for name, value in tensors.items():
        full_name, _, kind = name.partition("/")
        inner = full_name.removeprefix(FRONT)
        restored[name] = value if kind == "step" else permute_state({inner: value}, groups, keys)[inner]
    return restored


@contextmanager
def open_split(run: str | Path, call: Call, *, key: AnyKey | None = None, device: str = "cpu") -> Iterator[Model]:
    """A client's run as a model whose blocks are on the server, in eval mode; features are hidden as in training.

    The server goes back to the newest common checkpoint, so `run` must not be in training; afterwards the session is
    closed.
    """
    run = Path(run)
    hiding, config = read_hiding(run), recorded_config(run)
    secret, client = key_of(run, hiding, key), hiding.client(call)
    with lock_folder(run):
        try:
            yield _opened(run, config, hiding, secret, client, torch.device(device))
        except RewoundError as error:
            raise SitusError(f"the server restarted meanwhile: {error}; try again") from None
        finally:
            with suppress(RewoundError, SitusError):
                client.bye()


def _opened(
    run: Path, config: RunConfig, hiding: Hiding, secret: Key | None, client: Client, device: torch.device
) -> Model:
    folder = RunFolder.open(run, writer=False)
    classes = folder.classes()
    bare = replace(config, init=None, backbone=replace(config.backbone, weights=None))
    method = make_method(bare, classes).to(device)
    order, served = trained_order(method, config.optim), side_names(method, "server")
    whole = [step for step in folder.steps() if folder.whole(step) is not None]
    facts: dict[str, Any] = agreed(config.optim, config.train.precision_on(device))
    step = client.hello(layout(method.backbone), facts, whole).step
    checkpoint = folder.whole(step)
    if checkpoint is None:
        raise SitusError(f"{run}: the server and this run have no checkpoint in common")
    entrance = hiding.cut(method.backbone, secret)
    cut(method, "client")
    state = method.state_dict()
    fill("model", state, checkpoint)
    if mean := checkpoint.tensors("ema"):
        for name, value in mean.items():
            state[name].copy_(value)
        client.mean = True
    attach(method.backbone, client, entrance, sum(name in served for name in order))
    name = config.method_name
    about = {"kind": "run", "model": config.backbone.name, "method": name, "step": step, "ema": bool(mean)}
    options = {"identity": identity_of(run.resolve().as_posix()), "classifier": "label" in method.needs_targets}
    return Model(folder_name(run), method.eval().backbone, method, config.data, classes, about, **options)
