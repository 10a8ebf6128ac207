"""The model of a run in a folder of its own that timm, transformers or an ONNX runtime loads without Situs."""

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
from situs.models.defended import protection, trained_under
from situs.models.inference import evaluating
from situs.models.onnx import OnnxFeatures, export_onnx
from situs.models.open import is_locked, model_folder, open_model, spent_of
from situs.train.export import Export, ModelProvenance, last_metrics, write_export
from situs.train.run import is_run, load_run

Form = Literal["timm", "hf", "onnx"]

TOLERANCE = 1e-4
"""What a folder's numbers may differ from the model's, over the largest of them."""


class _Story(NamedTuple):
    method: Method
    provenance: ModelProvenance


def export_run(source: str | Path, to: str | Path, *, ema: bool | None = None, force: bool = False) -> Export:
    """Writes the run's model to the new folder `to`; any other model is refused with what it is instead.

    ema: the mean of the weights; None takes it where there is one. force: replace an export that is already there.
    """
    story = _read(source, ema)
    return write_export(story.method, to, story.provenance, force=force)


def export_model(
    source: str | Path,
    to: str | Path,
    *,
    form: Form | None = None,
    features: OnnxFeatures | None = None,
    ema: bool | None = None,
    force: bool = False,
) -> Export:
    """`export_run` for people: in another form too, and read again where Situs is not there, to the same numbers.

    form: timm, hf (transformers) or onnx; None is that of the library which the run's model is of. A plain ViT of timm
    goes to transformers; ONNX takes any model of images. features: what the ONNX graph gives.
    """
    if features is not None and form != "onnx":
        raise SitusError(f"features={features}: are for an ONNX graph; the other forms hold all", field="features")
    if form == "onnx":
        if is_locked(source):
            raise SitusError(f"{source}: {_instead(str(source))}")
        return export_onnx(open_model(source, ema=ema), Path(to), features, force=force)
    story = _read(source, ema)
    backbone = story.method.backbone
    if form == "timm" and backbone.source.get("library") != "timm":
        raise SitusError(f"{backbone.name}: is a model of transformers, and timm does not make it", field="form")
    wanted = _wanted(story.method)
    if form == "hf":
        from situs.backbones.hf.convert import as_transformers

        story.method.backbone = as_transformers(backbone)
    check = partial(_check, method=story.method, wanted=wanted)
    return write_export(story.method, to, story.provenance, force=force, check=check)


def _read(source: str | Path, ema: bool | None) -> _Story:
    if not is_run(source):
        raise SitusError(f"{source}: holds no run; {_instead(str(source))}")
    config, method, folder, classes, checkpoint, averaged = loaded = load_run(source, ema=ema)
    under = trained_under(folder.path)
    provenance = ModelProvenance(
        method=config.method_name,
        data=config.data.path,
        recipe=to_dict(config),
        metrics=last_metrics(folder.records(), checkpoint.step),
        step=checkpoint.step,
        ema=averaged,
        classes=classes,
        protected=protection(spent_of(loaded), None if under is None else under.defence),
        prepared=Preparation(config.data),
    )
    return _Story(method, provenance)


class _Wanted(NamedTuple):
    """Images, and what the method makes of them: features in the library's own shape, and logits."""

    images: Tensor
    tokens: Tensor
    logits: Tensor


def _wanted(method: Method) -> _Wanted | None:
    """None for what is not measured: sentences, and clips of transformers."""
    backbone = method.backbone
    clips = backbone.source.get("library") == "transformers" and backbone.model.main_input_name != "pixel_values"
    if backbone.input.words or not backbone.input.channels or clips:
        return None
    shape = backbone.input.shape or (64, 64)
    images = torch.randn(2, backbone.input.channels, *shape, generator=torch.Generator().manual_seed(0))
    with evaluating(method):
        if "tokens" in backbone.refusals:
            return _Wanted(images, backbone.model.forward_features(images), backbone(images))
        features = backbone.encode(backbone.embed(images), backbone.positions() if method.sees_positions else None)
        whole = backbone.out_grid == backbone.grid
        tokens = join(features) if whole else features.patches.unflatten(1, backbone.out_grid)
        return _Wanted(images, tokens, backbone.head(features))


def _check(written: Export, method: Method, wanted: _Wanted | None) -> float | None:
    """The most that the folder's features and logits differ from the method's, over the largest; too much is refused.

    None where nothing is wanted, or the folder's own notes say that it differs.
    """
    if wanted is None or written.differs:
        return None
    found = run_reloaded(written.path, method.backbone, wanted.images, headed="label" in method.needs_targets)
    pairs = [(found.tokens, wanted.tokens)] + ([] if found.logits is None else [(found.logits, wanted.logits)])
    error = max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-6)) for one, other in pairs)
    if not error <= TOLERANCE:
        said = f"{method.backbone.name}: what {written.library} makes of the export differs from the model by"
        raise SitusError(f"{said} {error:.1e} of its largest number, so none was written; please report this")
    return error


def _instead(source: str) -> str:
    if is_locked(source):
        return "it is a locked folder, and situs unlock writes the model that it holds"
    if model_folder(source) is not None:
        return "it is a model's folder already, which its library loads as it is"
    if names_code(source):
        return "it is your own module, which no library makes again"
    if Path(source).exists():
        return "there is no config.json with checkpoints beside it"
    return "there is no such folder, and a model's name is all that its library needs to make it"
