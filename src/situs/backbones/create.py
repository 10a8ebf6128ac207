"""`create_backbone`: a `Backbone` from a name, a folder, a config or a module; and the outputs of the library itself
for an exported folder, to compare."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from situs.backbones.base import Backbone
from situs.backbones.config import BackboneConfig
from situs.backbones.shapes import shapes_alone
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
    **fields: Any,
) -> Backbone:
    """A backbone by timm name, by folder or configuration of either library, by `BackboneConfig`, or around a module.

    A folder has its weights; its config.json alone gives new ones. The weights that timm publishes under a name are
    those of `situs.open_model(name, pretrained=True)`.

    `fields` are those of `BackboneConfig`: patch_size, in_chans, num_classes, positions, drop_path, weights,
    model_args.

    >>> b = create_backbone("vit_small_patch16_224", img_size=(160, 224))
    >>> b.grid, b.dim
    ((10, 14), 384)
    """
    known = {field.name for field in dataclasses.fields(BackboneConfig)} - {"name"}
    unknown = sorted(set(fields) - known)
    if unknown:
        instead = "; for published weights: situs.open_model(name, pretrained=True)" * ("pretrained" in unknown)
        raise SitusError(f"{unknown[0]}: create_backbone takes {', '.join(sorted(known))}{instead}")
    if img_size is not None:
        fields["img_size"] = pair(img_size)
    if isinstance(name, BackboneConfig):
        return _create(name.name, dataclasses.replace(name, **fields))
    fields["weights"] = None if fields.get("weights") is None else str(fields["weights"])
    fields["model_args"] = {} if fields.get("model_args") is None else fields["model_args"]
    return _create(name, BackboneConfig(name=str(name) if isinstance(name, str | Path) else "", **fields))


def create_shapes(source: Any, **fields: Any) -> Backbone:
    """`create_backbone` without values, where the family can be made without them."""
    try:
        with shapes_alone():
            return create_backbone(source, **fields)
    except (SitusError, RuntimeError):  # some families compute while they are built; a user's mistake is raised here
        return create_backbone(source, **fields)


def _create(source: Any, config: BackboneConfig) -> Backbone:
    transformers = _is_transformers(source)
    if isinstance(source, nn.Module):
        for name, value in vars(config).items():
            if value != getattr(NOTHING, name) and not (transformers and name == "img_size"):
                raise SitusError(f"{name}={value}: applies only to a new model, not to your module")
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


class Reloaded(NamedTuple):
    """tokens: features after the final norm, in the library's own shape. logits: None without a classifier."""

    tokens: Tensor
    logits: Tensor | None


@torch.no_grad()
def run_reloaded(folder: Path, backbone: Backbone, images: Tensor, *, headed: bool) -> Reloaded:
    """Runs images through the model that timm or transformers loads from a folder. headed: with its classifier."""
    if backbone.source["library"] == "timm":
        import timm

        model: Any = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        return Reloaded(model.forward_features(images), model(images) if headed else None)
    from transformers import AutoModel, AutoModelForImageClassification

    from situs.backbones.hf.layers import quietly

    with quietly():
        base: Any = AutoModel.from_pretrained(folder).eval()
        whole: Any = AutoModelForImageClassification.from_pretrained(folder).eval() if headed else None
    tokens = base(pixel_values=images).last_hidden_state
    return Reloaded(tokens, None if whole is None else whole(pixel_values=images).logits)
