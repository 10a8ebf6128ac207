"""Using a locked model with its key: with opened weights, or with locked weights and a permuted stream.

With locked weights the blocks may run anywhere: the owner permutes what enters them and restores what leaves them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.layout import Group
from situs.core.permutation import invert
from situs.errors import SitusError
from situs.locks.folder import all_specs, header_of, names_in_file, structure_of, weight_files
from situs.locks.groups import entrance_and_exit, invert_keys, permute_state, rename
from situs.locks.key import AnyKey, as_key
from situs.locks.locking import check, readable
from situs.locks.manifest import Manifest, permutations_of
from situs.locks.veil import Cut, set_entrance
from situs.locks.withhold import tensors_of
from situs.models.open import Unlock


def unlocking(key: AnyKey, withheld: str | Path | None = None, *, keyed: bool = False) -> Unlock:
    """The `unlock` of `situs.models.open_model` for a locked folder: the clear weights are in memory only.

    withheld: the second file, where parts were withheld. keyed: the weights stay locked, and the stream is permuted
    before the blocks and restored behind them, which is the same function.
    """
    key = as_key(key)

    @contextmanager
    def unlock(locked: Path) -> Iterator[tuple[Path, Callable[[Backbone], Backbone]]]:
        manifest = check(locked, key, withheld)

        def opened(backbone: Backbone) -> Backbone:
            groups, keys = model_groups(backbone, manifest), permutations_of(manifest, key)
            if keyed:
                return with_key(backbone, groups, keys)
            state = permute_state(backbone.model.state_dict(), groups, invert_keys(keys))
            backbone.model.load_state_dict(state)
            return backbone

        with readable(locked, manifest, key, withheld) as folder:
            yield folder, opened

    return unlock


def with_key(backbone: Backbone, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> Backbone:
    """A copy of a locked backbone that shares its weights and permutes the stream before and behind the blocks."""
    first, last = entrance_and_exit(groups)
    return set_entrance(copy.copy(backbone), Cut(channels=(keys[first], invert(keys[last]))))


def model_groups(backbone: Backbone, manifest: Manifest) -> tuple[Group, ...]:
    """The groups that the key moves, under the names in the model."""
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    return rename(manifest.groups, {in_file: in_model for in_model, in_file in names.items()})


def open_without_key(locked: Path, manifest: Manifest) -> tuple[Backbone, frozenset[str]]:
    """The model of a locked folder without key and second file, and the names of its withheld tensors.

    Withheld tensors are random, as in a new model; the others are locked, as in the folder.
    """
    if manifest.sealed:
        raise SitusError(f"{locked}: is sealed (encrypted): its weights cannot be read without the key")
    if manifest.withheld is None:
        return create_backbone(locked), frozenset()
    backbone, weights = structure_of(locked, "cpu"), weight_files(locked)
    names = names_in_file(backbone, all_specs({name: header_of(locked, name) for name in weights}, locked))
    state: dict[str, Tensor] = {}
    for name in weights:
        state |= load_file(locked / name)
    backbone.model.load_state_dict({in_model: state[in_file] for in_model, in_file in names.items()}, strict=False)
    return backbone, frozenset(tensors_of(backbone, manifest.withheld.parts))
