"""A model's folder: its weight files, the model that its config.json describes, and new folders, written atomically."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from situs.backbones import create_backbone
from situs.backbones.base import Backbone
from situs.backbones.shapes import shapes_alone
from situs.data.preparation import Preparation
from situs.errors import SitusError, reason_of
from situs.files import read_json, write_text
from situs.locks.shards import Header, Spec, plain_source, read_header, unique
from situs.models import Model, open_model
from situs.models.data import AnyModel
from situs.models.open import samples_for
from situs.train.checkpoint.files import sync
from situs.train.export import PREPARED, ModelProvenance, timm_config

CONFIG, WHOLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def weight_files(folder: Path) -> list[str]:
    """The names of the folder's weight files: model.safetensors, or the shards that its index names."""
    if (folder / INDEX).is_file():
        names = _indexed(folder / INDEX)
    elif (folder / WHOLE).is_file():
        names = [WHOLE]
    else:
        raise SitusError(f"{folder}: holds neither {WHOLE} nor {INDEX}; only safetensors can be locked")
    for name in names:
        if not (folder / name).is_file():
            raise SitusError(f"{folder}: its weight file {name} is missing")
    return names


def _indexed(index: Path) -> list[str]:
    try:
        tables = json.loads(index.read_bytes(), object_pairs_hook=unique)
        names = sorted(set(tables["weight_map"].values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise SitusError(f"{index}: is not a valid index of shards") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise SitusError(f"{index}: {name!r:.80} is not the name of a shard in this folder")
    if not names:
        raise SitusError(f"{index}: names no shard")
    return names


def header_of(folder: Path, name: str) -> Header:
    """The header of a weight file."""
    with plain_source(folder / name) as reader:
        return read_header(reader, str(folder / name))


def all_specs(headers: Mapping[str, Header], folder: Path) -> dict[str, Spec]:
    """The tensors of all shards by name; the same name in two shards is refused."""
    specs: dict[str, Spec] = {}
    for header in headers.values():
        for spec in header.tensors:
            if spec.name in specs:
                raise SitusError(f"{folder}: {spec.name} is in two of its weight files")
            specs[spec.name] = spec
    return specs


def stamps(folder: Path, names: Sequence[str]) -> list[tuple[int, int, int]]:
    """Inode, size and time of each file: they change when a file is written to."""
    return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in ((folder / name).stat() for name in names)]


def structure_of(folder: Path, device: str = "meta", changed: Mapping[str, Any] | None = None) -> Backbone:
    """A new backbone as the folder's config.json describes it; on the meta device it takes no memory for weights.

    changed: `model_args` that override those of the file.
    """
    described = read_json(folder / CONFIG)
    with shapes_alone() if device == "meta" else torch.device(device):
        if "architecture" not in described:
            return create_backbone(f"hf:{folder / CONFIG}", model_args=changed)
        return create_backbone(
            described["architecture"],
            num_classes=described.get("num_classes"),
            model_args={**(described.get("model_args") or {}), **(changed or {})},
        )


def backbone_of(source: AnyModel, **opening: Any) -> Backbone:
    """The backbone of anything that `open_model` takes; a module of timm or transformers keeps its precision."""
    if isinstance(source, Backbone):
        return source
    if isinstance(source, nn.Module):
        with suppress(SitusError):  # the user's own module, which `open_model` wraps
            return create_backbone(source)
    return open_model(source, **opening).backbone


def names_in_file(backbone: Backbone, specs: Mapping[str, Spec]) -> dict[str, str]:
    """Names in the model -> names in the file, for equal shapes; two tensors for one name are refused."""
    state = backbone.model.state_dict()
    file_names: dict[str, str] = {}
    for name, model_name in backbone.own_names(specs).items():
        if model_name in file_names:
            raise SitusError(
                f"{backbone.name}: the tensors {file_names[model_name]} and {name} of the weight files would both be "
                f"loaded as {model_name}"
            )
        if model_name in state and tuple(state[model_name].shape) == specs[name].shape:
            file_names[model_name] = name
    return file_names


def write_model(source: Backbone | Model, folder: Path) -> None:
    """Writes a model as a folder that its library loads, with the preparation of its images as far as it is known."""
    backbone = source if isinstance(source, Backbone) else source.backbone
    library, model = backbone.source.get("library"), backbone.model
    if set(backbone.state_dict()) != {f"model.{name}" for name in backbone.model.state_dict()}:
        raise SitusError(
            f"{backbone.name}: its position table is not part of the wrapped model, so the table would be missing in "
            "the locked folder; export the model and lock the export"
        )
    if library not in ("timm", "transformers"):
        raise SitusError(
            f"{backbone.name}: was given as a PyTorch module, so it cannot be rebuilt from a config; lock a model "
            "folder instead"
        )
    if isinstance(source, Model):
        data, classes = source.input, source.classes
    else:
        data, classes = samples_for(backbone, {"pretrained_cfg": getattr(model, "pretrained_cfg", {})}), None
    prepared = Preparation(data)
    if library == "transformers":
        if not prepared.modality.pixels and not prepared.modality.ids:  # transformers has no processor for them
            model.config.situs = {**getattr(model.config, "situs", {}), **prepared.to_situs()}
        model.save_pretrained(folder)
        if isinstance(source, Model) and data is not None and model.main_input_name == "pixel_values":
            assert backbone.input.shape is not None
            processor = prepared.to_hf(backbone.input.shape, backbone.input.channels)
            write_text(folder / PREPARED, json.dumps(processor, indent=2) + "\n")
        return
    assert data is not None  # all models of timm take images
    config = timm_config(backbone, model.num_classes, ModelProvenance("", prepared=prepared, classes=classes))
    write_text(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / WHOLE, metadata={"format": "pt"})


@contextmanager
def new_folder(out: str | Path) -> Iterator[Path]:
    """A temporary folder beside `out`: renamed to it on success, removed on failure."""
    out = Path(out)
    if out.exists() or out.is_symlink():
        raise SitusError(f"{out}: exists already; choose a new folder", field="out")
    aside = out.with_name(f".{out.name}.{os.getpid()}.writing")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for parent, _, names in os.walk(aside):
            for name in names:
                sync(Path(parent) / name)
            sync(Path(parent))
        aside.rename(out)
        sync(out.parent)
    except OSError as error:
        where = f" ({error.filename})" if error.filename else ""
        raise SitusError(f"{out}: could not be written: {reason_of(error)}{where}", field="out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
