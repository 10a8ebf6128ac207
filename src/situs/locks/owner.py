"""Using a locked model with its key: opened, as an ordinary model; or locked, the key holder turning the stream.

Locked, the blocks run as they are, here or elsewhere: the owner permutes what enters them and un-permutes what leaves.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.base import Backbone, Stream
from situs.core.permutation import invert
from situs.locks.folder import names_in_file
from situs.locks.groups import entrance_and_exit, invert_keys, permute_state
from situs.locks.key import Key
from situs.locks.lock import check, rename, unseal
from situs.locks.manifest import Manifest, permutations_of
from situs.locks.members import Group


def open_locked(locked: str | Path, key: Key) -> Backbone:
    """The opened model: an ordinary backbone. The clear weights are in memory only; nothing is written."""
    backbone, groups, keys = _load(Path(locked), key)
    backbone.model.load_state_dict(permute_state(backbone.model.state_dict(), groups, invert_keys(keys)))
    return backbone


def keyed_blocks(locked: str | Path, key: Key) -> Backbone:
    """The locked model with its owner around it: the same function as the opened one, from locked weights."""
    backbone, groups, keys = _load(Path(locked), key)
    return with_key(backbone, groups, keys)


def with_key(backbone: Backbone, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> Backbone:
    """A view of a locked backbone, sharing its weights, whose stream is permuted before the blocks and back after."""
    first, last = entrance_and_exit(groups)
    into, back = keys[first], invert(keys[last])
    owner = copy.copy(backbone)

    def run_layers(stream: Stream, context: int | None) -> Tensor:
        z = stream.z.index_select(-1, into.to(stream.z.device))
        z = backbone.run_layers(replace(stream, z=z), context)
        return z.index_select(-1, back.to(z.device))

    # Every way through the blocks (blocks, encode, forward) goes by this one step.
    object.__setattr__(owner, "run_layers", run_layers)
    return owner


def _load(locked: Path, key: Key) -> tuple[Backbone, tuple[Group, ...], dict[str, Tensor]]:
    """The locked model as it is, the groups under its own names, and the permutations."""
    manifest = check(locked, key)
    if manifest.sealed:
        with tempfile.TemporaryDirectory() as place:
            unseal(locked, manifest, key, Path(place))
            backbone = create_backbone(place)
    else:
        backbone = create_backbone(locked)
    return backbone, _own_groups(backbone, manifest), permutations_of(manifest, key)


def _own_groups(backbone: Backbone, manifest: Manifest) -> tuple[Group, ...]:
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    return rename(manifest.groups, {name: own for own, name in names.items()})
