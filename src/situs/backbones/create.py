"""`create_backbone`: a `Backbone` from a name, a folder, a config or a module."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from torch import nn

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.core.tokens import Size, pair
from situs.errors import SitusError
from situs.files import read_json
from situs.hub import hub_address, local_folder

NOTHING = BackboneConfig(name="")
"""The config of an existing module: all defaults."""


def create_backbone(
    name: str | Path | nn.Module | BackboneConfig | Any = BackboneConfig.name,
    *,
    img_size: Size | None = None,
    pretrained: bool = False,
    **fields: Any,
) -> Backbone:
    """A backbone by timm name, by folder or configuration of either library, by `BackboneConfig`, or around a module.

    A folder has its weights; its config.json alone gives new ones. pretrained: for a timm name, the weights that timm
    publishes, from the network or its cache.

    `fields` are those of `BackboneConfig`: patch_size, in_chans, num_classes, positions, drop_path, weights,
    model_args.

    >>> b = create_backbone("vit_small_patch16_224", img_size=(160, 224))
    >>> b.grid, b.dim
    ((10, 14), 384)
    """
    if pretrained:
        return _published(name, fields.pop("weights", None), img_size=img_size, **fields)
    known = {field.name for field in dataclasses.fields(BackboneConfig)} - {"name"}
    unknown = sorted(set(fields) - known)
    if unknown:
        raise SitusError(f"{unknown[0]}: create_backbone takes {', '.join(sorted(known))}")
    if img_size is not None:
        fields["img_size"] = pair(img_size)
    if isinstance(name, BackboneConfig):
        return _create(name.name, dataclasses.replace(name, **fields))
    fields["weights"] = None if fields.get("weights") is None else str(fields["weights"])
    fields["model_args"] = dict(fields.get("model_args") or {})
    return _create(name, BackboneConfig(name=str(name) if isinstance(name, str | Path) else "", **fields))


def _published(name: Any, weights: Any, **fields: Any) -> Backbone:
    """A backbone by timm name, with the weights that timm publishes under it."""
    if not isinstance(name, str) or _config_file(name) is not None or name.startswith("hf:"):
        raise SitusError("pretrained=True: is only for the name of a timm model", field="weights")
    if weights is not None:
        raise SitusError(f"pretrained=True and weights={weights}: give one of them", field="weights")
    from situs.backbones.timm.create import pretrained_state
    from situs.backbones.weights import load_weights

    backbone = create_backbone(name, **fields)
    load_weights(backbone, pretrained_state(name, "weights"), "pretrained=True")
    return backbone


def _create(source: Any, config: BackboneConfig) -> Backbone:
    transformers = _is_transformers(source)
    if isinstance(source, nn.Module):
        for name, value in vars(config).items():
            if value != getattr(NOTHING, name) and not (transformers and name == "img_size"):
                raise SitusError(f"{name}={value}: is for a new model, not for an existing module")
    if transformers:
        from situs.backbones.hf.create import create_hf_backbone

        return create_hf_backbone(source, config)
    from situs.backbones.timm.create import create_timm, create_timm_folder, wrap_timm

    if isinstance(source, nn.Module):
        return wrap_timm(source, type(source).__name__)
    if (described := _config_file(config.name)) is not None:
        return create_timm_folder(described.parent, config, fresh=described == Path(config.name))
    return create_timm(config)


def _is_transformers(source: Any) -> bool:
    """A transformers folder or its config.json, "hf:…", or an object of that library; found without importing it."""
    if isinstance(source, str | Path):
        file = _config_file(source)
        return (str(source).startswith("hf:") and hub_address(source) is None) or (
            file is not None and "architecture" not in read_json(file)
        )
    return type(source).__module__.startswith("transformers.")


def _config_file(source: str | Path) -> Path | None:
    """The config.json that a path names, directly or by its folder; None for a model's name."""
    path = local_folder(source) if hub_address(source) else Path(source)
    file = path if path.name == "config.json" else path / "config.json"
    return file if file.is_file() else None
