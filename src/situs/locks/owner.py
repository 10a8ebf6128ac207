"""Using a locked model with its key: opened, as an ordinary model; or locked, the key holder turning the stream.

Locked, the blocks run as they are, here or elsewhere: the owner permutes what enters them and un-permutes what leaves.
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
from situs.locks.veil import Cut, Veil, stand_before
from situs.locks.withhold import tensors_of
from situs.models.open import Unlock


def unlocking(key: AnyKey, withheld: str | Path | None = None, *, keyed: bool = False) -> Unlock:
    """What opens a locked folder for `situs.models.open_model`: the clear weights are in memory only.

    withheld: the second file, where parts were withheld. keyed: the weights stay locked, and the owner permutes the
    stream before the blocks and back behind them: the same function.
    """
    key = as_key(key)

    @contextmanager
    def unlock(locked: Path) -> Iterator[tuple[Path, Callable[[Backbone], Backbone]]]:
        manifest = check(locked, key, withheld)

        def opened(backbone: Backbone) -> Backbone:
            groups, keys = own_groups(backbone, manifest), permutations_of(manifest, key)
            if keyed:
                return with_key(backbone, groups, keys)
            state = permute_state(backbone.model.state_dict(), groups, invert_keys(keys))
            backbone.model.load_state_dict(state)
            return backbone

        with readable(locked, manifest, key, withheld) as folder:
            yield folder, opened

    return unlock


def with_key(backbone: Backbone, groups: Sequence[Group], keys: Mapping[str, Tensor]) -> Backbone:
    """A view of a locked backbone, sharing its weights, whose stream is permuted before the blocks and back after."""
    first, last = entrance_and_exit(groups)
    return stand_before(copy.copy(backbone), Cut(Veil(columns=True), channels=(keys[first], invert(keys[last]))))


def own_groups(backbone: Backbone, manifest: Manifest) -> tuple[Group, ...]:
    """What the key moves, under the names that the tensors have in the model."""
    names = names_in_file(backbone, {spec.name: spec for spec in manifest.specs()})
    return rename(manifest.groups, {name: own for own, name in names.items()})


def left_of(locked: Path, manifest: Manifest) -> tuple[Backbone, frozenset[str]]:
    """What a locked folder gives to those without its second file: a model, and which of its tensors are withheld.

    Those are random, as in a new model; the others are as they lie in the folder, locked.
    """
    if manifest.sealed:
        raise SitusError(f"{locked}: is sealed: its weights cannot be read without the key")
    if manifest.withheld is None:
        return create_backbone(locked), frozenset()
    backbone, weights = structure_of(locked, "cpu"), weight_files(locked)
    names = names_in_file(backbone, all_specs({name: header_of(locked, name) for name in weights}, locked))
    state: dict[str, Tensor] = {}
    for name in weights:
        state |= load_file(locked / name)
    backbone.model.load_state_dict({own: state[name] for own, name in names.items()}, strict=False)
    gone = tensors_of(backbone, manifest.withheld.parts)
    return backbone, frozenset(gone)
