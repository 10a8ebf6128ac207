"""How a client hides features from its server: the options, the content of `split.json`, the veil of one backbone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from situs.backbones.base import Backbone
from situs.backbones.halves import enter
from situs.config import Checked, from_dict
from situs.core.permutation import invert
from situs.data.config import DataConfig
from situs.data.loader import make_loader
from situs.data.sources.base import Source
from situs.data.sources.subset import Subset
from situs.errors import SitusError
from situs.limits import NotNegative
from situs.locks.groups import entrance_and_exit, residual_only
from situs.locks.key import AnyKey, Key, as_key, derive, load_key
from situs.locks.manifest import permutations_of, read_manifest
from situs.locks.owner import model_groups
from situs.locks.veil import Cut, Veil, check_veil, deviation, parse_veil
from situs.split.client import Call, Client
from situs.split.parts import layout
from situs.train.checkpoint.files import read_table
from situs.train.run import CLIENTS_PART

FACTS, KEY = CLIENTS_PART, "owner.key"
SAMPLES, PIECE = 256, 32
"""Samples that the unit of σ is measured on, and their batch size."""


@dataclass(frozen=True)
class Hide(Checked):
    """How the client hides its features from the server."""

    permute: tuple[Literal["rows", "columns"], ...] = ()
    """Permutations of the features. rows: permute the tokens of every sample in a secret order. columns: permute the
    channels with a key."""

    defence: str = "none"
    """Defence: none, noise=σ, lowpass=r, batch-shuffle or batch-shuffle=B."""

    wire: Literal["own", "bf16"] = "own"
    """Number format of messages. own: as computed. bf16: rounded to bfloat16."""

    def check(self) -> None:
        parse_veil(self.defence, self.permute)

    @property
    def veil(self) -> Veil:
        """What is done to the features."""
        return parse_veil(self.defence, self.permute)

    @property
    def secret(self) -> bool:
        """Whether a key is needed."""
        return self.veil != Veil()


@dataclass(frozen=True)
class Hiding(Hide):
    """The same for one session, the content of split.json.

    scale: the unit of σ (`noise_scale`). locked: the locked folder whose blocks the server has.
    """

    session: str = ""
    scale: NotNegative = 1.0
    key_id: str = ""
    locked: str | None = None

    def cut(self, backbone: Backbone, key: Key | None) -> Cut:
        """The veil before the blocks of one backbone."""
        return make_cut(backbone, self.veil, key, run=self.session, locked=self.locked, scale=self.scale)

    def client(self, call: Call) -> Client:
        """The client of this session."""
        return Client(call, self.session, wire=torch.bfloat16 if self.wire == "bf16" else None)


def read_hiding(run: Path) -> Hiding:
    """The split.json of a client's run."""
    table = read_table(run / FACTS)
    if isinstance(table, str):
        raise SitusError(f"{run}: does not contain the client's part of a split training: {table}")
    return from_dict(Hiding, table, where=f"{run}/{FACTS}")


def key_of(run: Path, hiding: Hiding, key: AnyKey | None) -> Key | None:
    """The key of a run: `key`, or the one in its folder; None if it needs none."""
    if not hiding.secret:
        return None
    if key is None and not (run / KEY).exists():
        raise SitusError(f"{run}: does not contain the key {hiding.key_id} of its training; give this key", field="key")
    chosen = load_key(run / KEY) if key is None else as_key(key)
    if chosen.id != hiding.key_id:
        raise SitusError(f"{run}: was trained with the key {hiding.key_id}, but this key is {chosen.id}", field="key")
    return chosen


def make_cut(
    backbone: Backbone,
    veil: Veil,
    key: Key | None = None,
    *,
    run: str = "",
    locked: str | Path | None = None,
    scale: float = 1.0,
) -> Cut:
    """The veil before a backbone's blocks; refused if the backbone does not support it.

    run: names the run, so no other has its orders. locked: the locked folder whose blocks the server has; without one,
    the key gives a new permutation, for blocks that were never clear.
    """
    check_veil(veil, backbone)
    if key is None and veil != Veil():
        raise SitusError("permutations and defences need a key, and none is given", field="key")
    channels = None
    if veil.columns:
        assert key is not None
        keys = column_permutations(backbone, key, run, locked)
        first, last = entrance_and_exit(backbone.groups())
        channels = keys[first], invert(keys[last])
    return Cut(veil, backbone.num_prefix, backbone.grid, scale, channels, key)


def column_permutations(backbone: Backbone, key: Key, run: str, locked: str | Path | None) -> dict[str, Tensor]:
    """group name -> permutation [size] of the residual channels of the server's blocks."""
    if locked is not None:
        manifest = read_manifest(Path(locked), key)
        names = {group.name for group in residual_only(model_groups(backbone, manifest))}
        return {name: p for name, p in permutations_of(manifest, key).items() if name in names}
    return derive(key, residual_only(backbone.groups()), layout(backbone), run)


@torch.no_grad()
def noise_scale(backbone: Backbone, source: Source, data: DataConfig, device: torch.device | str = "cpu") -> float:
    """The standard deviation of the patch tokens' entries over `SAMPLES` images or sentences (without padding), which
    are chosen at random with a fixed seed.

    Images are not augmented. It is measured once, with the initial weights of a training, and never sent.
    """
    plain = replace(data, batch=PIECE, count=None, workers=0)
    batches = make_loader(plain, None, device, source=Subset(source, SAMPLES))
    tokens = ((enter(backbone, batch.inputs).z[:, backbone.num_prefix :], batch.mask) for batch in batches)
    return deviation(z if mask is None else z[mask] for z, mask in tokens)
