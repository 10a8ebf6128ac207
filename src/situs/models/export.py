"""Export of a run's model to a folder that timm, transformers or an ONNX runtime loads without Situs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from situs.backbones.base import join
from situs.backbones.reload import run_reloaded
from situs.config import to_dict
from situs.data.preparation import Preparation
from situs.errors import SitusError
from situs.files import names_code
from situs.methods.base import Method
from situs.models.defended import feature_defence_of, protection
from situs.models.inference import evaluating
from situs.models.onnx import OnnxFeatures, export_onnx
from situs.models.open import is_locked, model_folder, open_model, spent_of
from situs.train.export import Export, ModelProvenance, last_metrics, write_export
from situs.train.run import is_run, load_run

Form = Literal["timm", "hf", "onnx"]

TOLERANCE = 1e-4
"""Largest difference of an export's outputs from the model's, relative to their largest value."""


class _Exported(NamedTuple):
    method: Method
    provenance: ModelProvenance


def export_run(source: str | Path, to: str | Path, *, ema: bool | None = None, force: bool = False) -> Export:
    """Writes the run's model to the new folder `to`; any other source is refused with the reason.

    ema: the mean of the weights; None takes it if there is one. force: replace an export that is already there.
    """
    exported = _read(source, ema)
    return write_export(exported.method, to, exported.provenance, force=force)


def export_model(
    source: str | Path,
    to: str | Path,
    *,
    form: Form | None = None,
    features: OnnxFeatures | None = None,
    ema: bool | None = None,
    force: bool = False,
) -> Export:
    """`export_run` in any form; the export is loaded again without Situs and its outputs are compared.

    form: timm, hf (transformers) or onnx; None: the library of the run's model. A plain ViT of timm can go to
    transformers; ONNX takes any model of images. features: the output of the ONNX graph.
    """
    if features is not None and form != "onnx":
        raise SitusError(
            (f"features={features}: applies only to an ONNX graph; the other formats have all outputs"),
            field="features",
        )
    if form == "onnx":
        if is_locked(source):
            raise SitusError(f"{source}: {_instead(str(source))}")
        return export_onnx(open_model(source, ema=ema), Path(to), features, force=force)
    exported = _read(source, ema)
    backbone = exported.method.backbone
    if form == "timm" and backbone.source.get("library") != "timm":
        raise SitusError(f"{backbone.name}: is a model of transformers, which timm does not have", field="form")
    expected = _outputs(exported.method)
    if form == "hf":
        from situs.backbones.hf.convert import as_transformers

        exported.method.backbone = as_transformers(backbone)
    check = partial(_check, method=exported.method, expected=expected)
    return write_export(exported.method, to, exported.provenance, force=force, check=check)


def _read(source: str | Path, ema: bool | None) -> _Exported:
    if not is_run(source):
        raise SitusError(f"{source}: is not a run; {_instead(str(source))}")
    config, method, folder, classes, checkpoint, averaged = loaded = load_run(source, ema=ema)
    defence = feature_defence_of(folder.path)
    provenance = ModelProvenance(
        method=config.method_name,
        data=config.data.path,
        recipe=to_dict(config),
        metrics=last_metrics(folder.records(), checkpoint.step),
        step=checkpoint.step,
        ema=averaged,
        classes=classes,
        protected=protection(spent_of(loaded), None if defence is None else defence.defence),
        prepared=Preparation(config.data),
    )
    return _Exported(method, provenance)


class _Outputs(NamedTuple):
    """Images, and the method's outputs for them: features in the library's own shape, and logits."""

    images: Tensor
    tokens: Tensor
    logits: Tensor


def _outputs(method: Method) -> _Outputs | None:
    """The method's outputs for two random images; None for sentences and for clips of transformers."""
    backbone = method.backbone
    clips = backbone.source.get("library") == "transformers" and backbone.model.main_input_name != "pixel_values"
    if backbone.input.words or not backbone.input.channels or clips:
        return None
    shape = backbone.input.shape or (64, 64)
    images = torch.randn(2, backbone.input.channels, *shape, generator=torch.Generator().manual_seed(0))
    with evaluating(method):
        if "tokens" in backbone.refusals:
            return _Outputs(images, backbone.model.forward_features(images), backbone(images))
        features = backbone.encode(backbone.embed(images), backbone.positions() if method.sees_positions else None)
        whole = backbone.out_grid == backbone.grid
        tokens = join(features) if whole else features.patches.unflatten(1, backbone.out_grid)
        return _Outputs(images, tokens, backbone.head(features))


def _check(written: Export, method: Method, expected: _Outputs | None) -> float | None:
    """The largest relative difference of the export's features and logits from the method's; too much is refused.

    None where nothing is expected, or the export's own notes say that it differs.
    """
    if expected is None or written.differs:
        return None
    loaded = run_reloaded(written.path, method.backbone, expected.images, headed="label" in method.needs_targets)
    pairs = [(loaded.tokens, expected.tokens)] + ([] if loaded.logits is None else [(loaded.logits, expected.logits)])
    error = max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) for one, other in pairs)
    if not error <= TOLERANCE:
        reason = f"{method.backbone.name}: the outputs of the export in {written.library} differ from the model's by"
        raise SitusError(f"{reason} {error:.1e} of the largest value, so nothing was written; please report this")
    return error


def _instead(source: str) -> str:
    if is_locked(source):
        return "it is a locked folder, and situs unlock writes its model"
    if model_folder(source) is not None:
        return "it is a model's folder already, which its library loads as it is"
    if names_code(source):
        return "it is your own module, which no library can load"
    if Path(source).exists():
        return "there is no config.json with checkpoints beside it"
    return "there is no such folder; a model's name needs no export, its library loads it"
