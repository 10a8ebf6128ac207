"""Reading weights from files, never through pickle, and saying what does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.config import PositionKind
from situs.core.position import resample_table, sincos
from situs.errors import SitusError

CONTAINERS = ("model_ema", "state_dict_ema", "model", "state_dict", "teacher")
"""Keys under which published checkpoints keep the weights, best first."""

PREFIXES = ("module.", "_orig_mod.", "backbone.model.")
"""Names that wrappers put in front of every key."""


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a torch file (`weights_only=True`), or of a folder that holds either."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise SitusError(f"weights={path}: no such file", field="weights")
    if path.suffix == ".safetensors":
        try:
            return _strip(load_file(path))
        except SafetensorError as error:
            raise SitusError(f"weights={path}: not a readable safetensors file ({error})", field="weights") from error
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different class for each kind of damage
        # Its own words would tell the user to allow the code.
        said = f"weights={path}: no torch file that can be loaded without running code from it"
        raise SitusError(said, field="weights") from error
    return _strip(_unwrap(loaded, path))


def _read_folder(path: Path) -> dict[str, Tensor]:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise SitusError(f"weights={path}: the folder holds no .safetensors file", field="weights")
    whole = [shard for shard in shards if shard.name == "model.safetensors"]
    state: dict[str, Tensor] = {}
    for shard in whole or shards:
        state.update(read_state_dict(shard))
    return state


def _unwrap(loaded: Any, path: Path) -> dict[str, Tensor]:
    for container in CONTAINERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(container), Mapping):
            loaded = loaded[container]
            break
    if not isinstance(loaded, Mapping):
        raise SitusError(f"weights={path}: holds a {type(loaded).__name__}, not named tensors", field="weights")
    state = {str(key): value for key, value in loaded.items() if isinstance(value, Tensor)}
    if not state:
        said = f"weights={path}: holds no tensors under {', '.join(CONTAINERS)} or at its top"
        raise SitusError(said, field="weights")
    return state


def _strip(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for prefix in PREFIXES:
        if state and all(key.startswith(prefix) for key in state):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return dict(state)


HEADS = (
    *("head.", "head_dist.", "fc.", "fc_norm.", "classifier.", "pooler.", "vit.pooler.", "bert.pooler."),
    *("cls.", "lm_head.", "score.", "roberta.pooler.", "albert.pooler.", "pre_classifier."),
    *("predictions.", "sop_classifier.", "vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
    *("generator_predictions.", "generator_lm_head.", "discriminator_predictions.", "embed_out."),
)
"""A head that does not fit is left as it was made: a file without one, or one for other classes."""


def load_weights(backbone: Backbone, state: Mapping[str, Tensor], what: str) -> list[str]:
    """Loads a state dict under the wrapped model's names into it; a table of another grid is resampled.

    Returns the names that were left as they were made (a head that did not fit).
    """
    name = backbone.table_name
    table, given = backbone.model.state_dict().get(name), state.get(name)
    if table is not None and given is not None and given.shape != table.shape and given.shape[-1] == table.shape[-1]:
        state = {**state, name: _fit_table(given, table, backbone.table_grid, what)}
    return load_into(backbone.model, state, what, optional=HEADS)


def _fit_table(given: Tensor, table: Tensor, grid: tuple[int, ...], what: str) -> Tensor:
    """A square table with the prefix rows of `table`, on the grid of `table`."""
    prefix = table.shape[1] - grid[0] * grid[1]
    side = math.isqrt(max(0, given.shape[1] - prefix))
    if not side or side * side != given.shape[1] - prefix:
        raise SitusError(
            f"{what}: its position table of {given.shape[1]} rows is no square grid with {prefix} prefix rows"
        )
    patches = resample_table(given[0, prefix:].float(), (side, side), grid)
    return torch.cat([given[0, :prefix].float(), patches])[None].to(given.dtype)


@torch.no_grad()
def fill_table(table: nn.Parameter, kind: PositionKind, grid: tuple[int, ...]) -> None:
    """Fills a position table [1, p + N, D] anew. The rows of prefix tokens are 0 beside fixed ones, as in MAE's."""
    table.zero_()
    if kind == "learned":
        nn.init.trunc_normal_(table, std=0.02)
    elif kind != "none":
        table[0, -math.prod(grid) :] = sincos(grid, table.shape[-1])
    table.requires_grad_(kind in ("learned", "learned_sincos"))


def load_into(module: nn.Module, state: Mapping[str, Tensor], what: str, *, optional: Iterable[str] = ()) -> list[str]:
    """Loads `state` into `module`; every key must fit except those that start with one of `optional`.

    optional: prefixes that may be missing, left over or of another shape (a classifier); they keep their present
    value. Returns the names that were left as they were. Nothing is changed when something does not fit.
    """
    optional = tuple(optional)
    own = module.state_dict()
    missing = [key for key in own if key not in state]
    extra = [key for key in state if key not in own]
    wrong = [key for key in own if key in state and own[key].shape != state[key].shape]
    shapes = [f"{key} {list(state[key].shape)} where the model has {list(own[key].shape)}" for key in wrong]
    refuse_misfits(what, "the model", missing, extra, shapes, optional)
    fitting = {key: state[key] for key in own if key in state and key not in wrong}
    module.load_state_dict(fitting, strict=False)
    return missing + wrong


def refuse_misfits(
    what: str, model: str, missing: Iterable[str], extra: Iterable[str], wrong: Iterable[str], optional: tuple[str, ...]
) -> None:
    """Says which tensors of a file do not fit a model, but for those whose names start with one of `optional`."""
    problems = {"missing": missing, "not in the model": extra, "of another shape": wrong}
    kept = {kind: [key for key in keys if not key.startswith(optional)] for kind, keys in problems.items()}
    said = [f"{len(keys)} {kind} (first: {', '.join(keys[:3])})" for kind, keys in kept.items() if keys]
    if said:
        raise SitusError(f"{what} does not fit {model}: {'; '.join(said)}")
