"""Reading weights from files without pickle, with clear errors for what does not fit.

Checkpoints of the papers' own codes (DropPos, MAE, MJP, Swin) have the model among the parts of its method: decoders,
mask tokens, heads that predict places. `read_published` leaves these out, and `left_out` says which. MJP keeps its
table in an `nn.Embedding`, whose last row is the unknown place.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.config import PositionKind
from situs.core.position import resample_table, sincos
from situs.errors import SitusError, counted

CONTAINERS = ("model_ema", "state_dict_ema", "model", "state_dict", "teacher")
"""Keys under which published checkpoints keep the weights, best first."""

SETTINGS = [argparse.Namespace, (OrderedDict, "yacs.config.CfgNode")]
"""Classes of settings that published checkpoints keep beside the weights: they hold values and run no code."""

PREFIXES = ("module.", "_orig_mod.", "backbone.model.")
"""Names that wrappers put in front of every key."""


def read_state_dict(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of a torch file (`weights_only=True`), or of a folder of safetensors."""
    path = Path(path).expanduser()
    if path.is_dir():
        return _read_folder(path)
    if not path.exists():
        raise SitusError(f"weights={path}: no such file", field="weights")
    if path.suffix == ".safetensors":
        try:
            return _strip(load_file(path))
        except SafetensorError as error:
            raise SitusError(
                f"weights={path}: is not a readable safetensors file ({error})", field="weights"
            ) from error
    try:
        with torch.serialization.safe_globals(SETTINGS):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a different class for each kind of damage
        # torch's own message would tell the user to allow the code.
        reason = f"weights={path}: is not a torch file that can be loaded without running code from it"
        raise SitusError(reason, field="weights") from error
    return _strip(_unwrap(loaded, path))


def _read_folder(path: Path) -> dict[str, Tensor]:
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise SitusError(f"weights={path}: the folder has no .safetensors file", field="weights")
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
        raise SitusError(
            f"weights={path}: contains a {type(loaded).__name__} instead of named tensors", field="weights"
        )
    state = {str(key): value for key, value in loaded.items() if isinstance(value, Tensor)}
    if not state:
        reason = f"weights={path}: has no tensors under {', '.join(CONTAINERS)} or at its top level"
        raise SitusError(reason, field="weights")
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
"""Names of heads: one that is missing or has other classes keeps its initial weights."""


def load_weights(backbone: Backbone, state: Mapping[str, Tensor], what: str) -> list[str]:
    """Loads a state dict with the wrapped model's names; a table of another grid is resampled.

    Returns the names that keep their initial weights (a head that did not fit).
    """
    name = backbone.table_name
    table, loaded = backbone.model.state_dict().get(name), state.get(name)
    if table is not None and loaded is not None and loaded.shape != table.shape and loaded.shape[-1] == table.shape[-1]:
        state = {**state, name: _fit_table(loaded, table, backbone.table_grid, what)}
    return load_into(backbone.model, state, what, optional=HEADS)


def _fit_table(loaded: Tensor, table: Tensor, grid: tuple[int, ...], what: str) -> Tensor:
    """A loaded table of a square grid, resampled to the grid of `table`; both have the same prefix rows."""
    prefix = table.shape[1] - grid[0] * grid[1]
    side = math.isqrt(max(0, loaded.shape[1] - prefix))
    if not side or side * side != loaded.shape[1] - prefix:
        raise SitusError(
            f"{what}: its position table has {loaded.shape[1]} rows. The model needs {counted(prefix, 'rows')} for "
            "prefix tokens. The other rows must form a square grid, so their number must be a square number"
        )
    patches = resample_table(loaded[0, prefix:].float(), (side, side), grid)
    return torch.cat([loaded[0, :prefix].float(), patches])[None].to(loaded.dtype)


@torch.no_grad()
def fill_table(table: nn.Parameter, kind: PositionKind, grid: tuple[int, ...]) -> None:
    """Initialises a position table [1, p + N, D]. With fixed rows, those of prefix tokens are 0, as in MAE's."""
    table.zero_()
    if kind == "learned":
        nn.init.normal_(table, std=0.02)
    elif kind != "none":
        table[0, -math.prod(grid) :] = sincos(grid, table.shape[-1])
    table.requires_grad_(kind in ("learned", "learned_sincos"))


def load_into(module: nn.Module, state: Mapping[str, Tensor], what: str, *, optional: Iterable[str]) -> list[str]:
    """Loads `state` into `module`; every key must fit except those that start with one of `optional`.

    optional: prefixes of tensors that may be missing, superfluous or of another shape (a classifier); they keep their
    present value. Returns the names that were not loaded. Nothing is changed when something does not fit.
    """
    optional = tuple(optional)
    target = module.state_dict()
    missing = [key for key in target if key not in state]
    extra = [key for key in state if key not in target]
    wrong = [key for key in target if key in state and target[key].shape != state[key].shape]
    shapes = [f"{key} {list(state[key].shape)} where the model has {list(target[key].shape)}" for key in wrong]
    refuse_misfits(what, "the model", missing, extra, shapes, optional)
    fitting = {key: state[key] for key in target if key in state and key not in wrong}
    module.load_state_dict(fitting, strict=False)
    return missing + wrong


def refuse_misfits(
    what: str, model: str, missing: Iterable[str], extra: Iterable[str], wrong: Iterable[str], optional: tuple[str, ...]
) -> None:
    """Raises if tensors of a file do not fit a model, except those whose names start with one of `optional`."""
    problems = {"missing": missing, "not in the model": extra, "of another shape": wrong}
    required = {kind: [key for key in keys if not key.startswith(optional)] for kind, keys in problems.items()}
    reasons = [
        f"{counted(len(keys), 'tensors')} {kind} (first: {', '.join(keys[:3])})"
        for kind, keys in required.items()
        if keys
    ]
    if reasons:
        raise SitusError(f"{what} does not fit {model}: {'; '.join(reasons)}")


METHOD_PARTS = re.compile(
    r"^(aux_decoder|decoder|mask_token|mask_pos_token|projector|predictor|position_head|sigma|dino_head|ibot|dlocr)"
)
"""Names in published checkpoints that belong to a method, not to the model."""

UNKNOWN_PLACE = "unknown position"
"""How `left_out` calls the last row of MJP's table."""

TABLES = ("pos_embed", "absolute_pos_embed")
"""Position tables of a ViT and of a Swin."""

MADE_AGAIN = ("relative_position_index", "attn_mask")
"""Buffers of a Swin that timm makes itself."""


class Published(NamedTuple):
    """The model's tensors under timm's names, and the names of those that were left out."""

    state: dict[str, Tensor]
    left_out: tuple[str, ...]


def read_published(state: Mapping[str, Tensor], known: Container[str] = ()) -> Published:
    """The model in a checkpoint; a state dict of timm or of transformers is unchanged. known: names of the model."""
    left_out = [name for name in state if METHOD_PARTS.match(name) and name not in known]
    model = {name: value for name, value in state.items() if name not in left_out}
    for table in TABLES:
        if (rows := model.pop(f"{table}.weight", None)) is not None and rows.dim() == 2:
            model[table] = rows[None, :-1]
            left_out.append(UNKNOWN_PLACE)
        if table in model and "index_embed" in model:  # MJP's second table, which is always added
            model[table] = model[table] + model.pop("index_embed")
    return Published(_from_swin(model), tuple(left_out))


def _from_swin(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the published Swin code, which merges patches at the end of a stage and timm before the next."""
    if not any(name.startswith("layers.0.downsample.") for name in state):
        return state
    renamed = {}
    for name, value in state.items():
        if name.endswith(MADE_AGAIN):
            continue
        later = re.sub(r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample", name)
        renamed[re.sub(r"^head\.(?=weight|bias)", "head.fc.", later)] = value
    return renamed


def describe_left_out(names: Iterable[str]) -> str:
    """The left-out tensors by their parts, for one line: decoder_blocks (24), mask_token."""
    parts = Counter(name.partition(".")[0] for name in names)
    return ", ".join(part if count == 1 else f"{part} ({count})" for part, count in parts.items())
