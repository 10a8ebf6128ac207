"""Making timm models: names, sizes, kinds of position, weights. The classes behind them are in `backbone.py`."""

from __future__ import annotations

import contextlib
import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from timm.layers.patch_embed import PatchEmbed
from timm.models import model_entrypoint
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig, PositionKind
from situs.backbones.shapes import shapes_alone
from situs.backbones.timm.backbone import FAMILIES, RelPosBackbone, SwinBackbone, VitBackbone
from situs.backbones.timm.blocks import check_blocks, read_block
from situs.backbones.weights import fill_table, load_into, load_weights, read_published, read_state_dict
from situs.core.tokens import grid_of, pair
from situs.errors import SitusError
from situs.files import read_json

READ = {kind.__module__.rpartition(".")[2] for kind in FAMILIES}
"""timm's modules of the known classes."""


def wrap_timm(model: nn.Module, name: str) -> Backbone:
    """A backbone around a timm model that exists."""
    if type(model) not in FAMILIES:
        known = ", ".join(sorted(kind.__name__ for kind in FAMILIES))
        raise SitusError(
            f"{name}: its class {type(model).__name__} is not among the classes that Situs supports: {known}"
        )
    return FAMILIES[type(model)](model, name)


def remade(backbone: Backbone) -> dict[str, Any]:
    """The timm name and arguments that make a backbone's model again, as in `Backbone.source`.

    For a module that was made elsewhere they are inferred from it, and checked: the same weights must give the same
    outputs; otherwise it is refused.
    """
    if backbone.source:
        return backbone.source
    model: Any = backbone.model
    described: Any = getattr(model, "pretrained_cfg", None) or {}
    name = described.get("architecture") if isinstance(described, dict) else getattr(described, "architecture", None)
    if name and timm.is_model(name):
        for arguments in _guess_arguments(model, backbone.input.channels):
            with contextlib.suppress(Exception):  # arguments that this family does not take
                other = timm.create_model(name, pretrained=False, **arguments)
                if _alike(model, other, backbone):
                    return {"library": "timm", "architecture": name, "model_args": arguments}
    raise SitusError(
        f"{backbone.name}: a run with this module cannot be reopened later, because timm's create_model cannot "
        "build the module again; set `backbone` to the model's name, and `init` to the module's weights",
        field=("backbone", "init", "source"),
    )


def _guess_arguments(model: Any, channels: int) -> list[dict[str, Any]]:
    """Arguments that may have made a module, the shortest list first."""
    plain: dict[str, Any] = {"in_chans": channels, "num_classes": model.num_classes}
    stem = getattr(model, "patch_embed", None)
    if stem is None:
        return [plain]
    plain["img_size"] = tuple(stem.img_size)
    plain["patch_size"] = stem.patch_size[0] if len({*stem.patch_size}) == 1 else tuple(stem.patch_size)
    if hasattr(model, "layers"):
        heads = [layer.blocks[0].attn.num_heads for layer in model.layers]
        shape = {"depths": [len(layer.blocks) for layer in model.layers], "num_heads": heads}
        windows = {"window_size": model.layers[0].blocks[0].window_size}
        return [plain, *({**plain, "embed_dim": model.embed_dim, **shape, **more} for more in ({}, windows))]
    block = model.blocks[0]
    shape = {"embed_dim": model.embed_dim, "depth": len(model.blocks), "num_heads": block.attn.num_heads}
    more = {"class_token": model.cls_token is not None, "global_pool": model.global_pool}
    if hasattr(block.mlp, "fc1"):
        more["mlp_ratio"] = block.mlp.fc1.out_features / model.embed_dim
    return [plain, {**plain, **shape}, {**plain, **shape, **more}]


@torch.no_grad()
def _alike(model: nn.Module, other: nn.Module, backbone: Backbone) -> bool:
    """Whether two modules have the same tensors by name and shape and, with the same values, the same outputs."""
    tensors, new = model.state_dict(), other.state_dict()
    if {name: value.shape for name, value in tensors.items()} != {name: value.shape for name, value in new.items()}:
        return False
    other.load_state_dict(tensors)
    size = backbone.input.shape or (64, 64)
    like = next(model.parameters())
    images = torch.randn(1, backbone.input.channels, *size, generator=torch.Generator().manual_seed(0)).to(like)
    other.to(like)
    modes = {module: module.training for module in model.modules()}
    try:
        return torch.allclose(model.eval()(images), other.eval()(images), rtol=1e-4, atol=1e-5)
    finally:
        for module, mode in modes.items():
            module.training = mode


def create_timm(config: BackboneConfig) -> Backbone:
    """A backbone by timm name, with the size, positions and weights of `config`."""
    arguments = _arguments(config)
    model = _make(config.name, arguments)
    if config.positions == "relative" and type(model).__name__ == "VisionTransformer":
        architecture, arguments = _relative_architecture(model, config)
        model = _make(architecture, arguments)
    else:
        architecture = config.name
    backbone = wrap_timm(model, config.name)
    if config.positions is not None:
        backbone = _with_positions(backbone, config.positions)
    backbone.source = {"library": "timm", "architecture": architecture, "model_args": arguments}
    if config.weights is not None:
        state, backbone.left_out = read_published(read_state_dict(config.weights), model.state_dict())
        load_weights(backbone, state, f"weights={config.weights}")
    return backbone


def create_timm_folder(folder: Path, config: BackboneConfig, *, fresh: bool) -> Backbone:
    """A backbone from a folder that timm reads ("local-dir:…"), such as an export: its config.json, its weights.

    `config` overrides the folder. fresh: new weights, if `config` names none.
    """
    described = read_json(folder / "config.json")
    table = folder / "situs_positions.safetensors"
    backbone = create_timm(
        replace(
            config,
            name=described["architecture"],
            num_classes=config.num_classes if config.num_classes is not None else described.get("num_classes"),
            positions=config.positions or ("learned" if table.is_file() else None),
            weights=config.weights or (None if fresh else str(folder)),
            model_args={**described.get("model_args", {}), **config.model_args},
        )
    )
    if table.is_file() and config.positions is None and not fresh:
        load_into(backbone, read_state_dict(table), f"{table}", optional=("model.",))
    return backbone


def _arguments(config: BackboneConfig) -> dict[str, Any]:
    """The keyword arguments for timm, refusing early what timm would refuse obscurely."""
    if not timm.is_model(config.name):
        close = nearest(config.name)
        hint = f"; did you mean {', '.join(close)}?" if close else "; timm.list_models() lists the names"
        raise SitusError(f"{config.name!r} is neither a timm model nor a folder with a config.json{hint}")
    arguments: dict[str, Any] = {"in_chans": config.in_chans, **config.model_args}
    if config.num_classes is not None:
        arguments["num_classes"] = config.num_classes
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    default = timm.get_pretrained_cfg(config.name)
    size = config.size or (pair(default.input_size[1:]) if default is not None else None)
    if _module_of(config.name) == "resnet":
        if config.patch_size is not None:
            raise SitusError(f"patch_size={config.patch_size}: {config.name} is convolutional and has no patches")
        return arguments
    if config.size is not None:
        arguments["img_size"] = config.size
    if config.patch_size is not None:
        arguments["patch_size"] = config.patch_size
        if size is not None:
            grid_of(size, config.patch_size)
    if config.positions == "none":  # only timm's plain ViT can be made without a table
        if _module_of(config.name) != "vision_transformer":
            reason = f"positions='none': {config.name} cannot be built without positions"
            raise SitusError(f"{reason}; call encode(positions=None) to leave the positions out")
        arguments["pos_embed"] = "none"
    return arguments


SIZES = {"t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}
"""Letters by which papers name sizes (ViT-S/16)."""


def nearest(name: str) -> list[str]:
    """At most three known models that may be meant: those that share most words with the name, then the most similar
    by letters."""
    words = {SIZES.get(word, word) for word in re.findall(r"[a-z]+|[0-9]+", name.lower())}
    scores = []
    for model in dict.fromkeys(model for module in READ for model in timm.list_models(module=module)):
        shared = len(words & {*re.findall(r"[a-z]+|[0-9]+", model)})
        alike = difflib.SequenceMatcher(None, name.lower(), model).ratio()
        most = shared == len(words) or (shared > 1 and shared >= len(words) - 1)
        if most or alike >= 0.6 or (shared and alike >= 0.4):
            scores.append((-shared, -alike, model))
    return [model for *_, model in sorted(scores)[:3]]


def _make(name: str, arguments: dict[str, Any]) -> nn.Module:
    if _module_of(name) not in READ:
        _refuse_early(name, arguments)
    try:
        model: Any = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:  # timm's models check little, and fail in many ways
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SitusError(f"{name} cannot be made with {arguments}: {reason}") from error
    stem: Any = getattr(model, "patch_embed", None)
    if issubclass(type(stem), PatchEmbed) and not stem.dynamic_img_pad:
        grid_of(stem.img_size, stem.patch_size)
    return model


def _module_of(name: str) -> str:
    """The last name of timm's module that makes a model."""
    return model_entrypoint(name).__module__.rpartition(".")[2]


def _refuse_early(name: str, arguments: dict[str, Any]) -> None:
    """Refuses an unknown model before its values take memory: on the meta device, if it can be made there."""
    model = None
    with shapes_alone(), contextlib.suppress(Exception):  # some compute while they are made
        model = timm.create_model(name, pretrained=False, **arguments)
    if model is not None:
        wrap_timm(model, name)


def _relative_architecture(vit: Any, config: BackboneConfig) -> tuple[str, dict[str, Any]]:
    """timm's own relative-position class with a plain ViT's shape, so that the export loads in timm unchanged."""
    check_blocks(config.name, vit.blocks)
    block = read_block(vit.blocks[0])
    plain = block.form == "pre" and vit.reg_token is None and isinstance(vit.norm_pre, nn.Identity)
    gamma = block.gammas[0]
    if not plain or isinstance(gamma, nn.Module) or not isinstance(block.attention.head_norms[0], nn.Identity):
        raise SitusError(
            "positions='relative': needs a plain ViT (pre-norm blocks, no registers, no norm before the first "
            "block, no q/k norm), but "
            f"{config.name} is not a plain ViT"
        )
    arguments = _guess_arguments(vit, config.in_chans)[-1] | {
        "qkv_bias": block.attention.qkv[0].bias is not None,
        # 0 means no LayerScale there; timm drops a None and falls back on the architecture's own 1e-5.
        "init_values": 0.0 if gamma is None else float(gamma[0]),
        "fc_norm": not isinstance(vit.fc_norm, nn.Identity),
        "rel_pos_type": "bias",
    }
    if config.drop_path:
        arguments["drop_path_rate"] = config.drop_path
    return "vit_relpos_base_patch16_224", arguments


@torch.no_grad()
def _with_positions(backbone: Backbone, kind: PositionKind) -> Backbone:
    model = backbone.model
    if isinstance(backbone, SwinBackbone):
        return _swin_with_table(backbone, kind)
    if kind == "relative":
        if not isinstance(backbone, RelPosBackbone):
            raise SitusError(
                f"positions='relative': {backbone.name} does not support relative positions; use a plain ViT"
            )
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                nn.init.zeros_(parameter)
    elif kind in ("learned", "sincos", "learned_sincos"):
        table = backbone.positions().table if type(backbone) is VitBackbone else None
        if table is None:
            raise SitusError(
                f"positions={kind!r}: {backbone.name} has no position table that Situs can fill; use a plain ViT"
            )
        fill_table(model.pos_embed, kind, backbone.grid)
    return backbone


def _swin_with_table(backbone: SwinBackbone, kind: PositionKind) -> Backbone:
    if kind == "relative":
        raise SitusError(
            "positions='relative': Swin always keeps the relative bias of its windows; choose learned or sincos"
        )
    table = nn.Parameter(torch.empty(1, backbone.num_tokens, backbone.dim))
    fill_table(table, kind, backbone.grid)
    return SwinBackbone(backbone.model, backbone.name, table[0].detach(), learned=table.requires_grad)


def published_name(backbone: Backbone) -> str:
    """The name under which timm publishes weights of this architecture; empty if there is none."""
    entries = backbone.source
    if entries["library"] != "timm" or {"embed_dim", "depth", "depths"} & {*entries["model_args"]}:
        return ""
    return entries["architecture"] if timm.is_model_pretrained(entries["architecture"]) else ""


def pretrained_state(name: str, field: str = "init") -> dict[str, Tensor]:
    """The weights that timm publishes under a model's name; needs the network, or timm's cache.

    field: the field that names them.
    """
    if not timm.is_model(name):
        raise SitusError(f"{field}={name}: must be a run, an export, a weight file or a timm model", field=field)
    try:
        return timm.create_model(name, pretrained=True).state_dict()
    except Exception as error:  # the hub's client raises many different classes
        raise SitusError(
            f"{name}: its published weights could not be fetched and are not in timm's cache ({type(error).__name__}); "
            "connect to the network, or give a weight file",
            field=field,
        ) from error
