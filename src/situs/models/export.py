"""Export of a run's model to a folder that timm, transformers or an ONNX runtime loads without Situs.

An ONNX graph takes any number of images and gives classes or features; it is checked against onnxruntime.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from situs import __version__
from situs.backbones.base import Backbone, join
from situs.backbones.create import run_reloaded
from situs.config import to_dict
from situs.data.preparation import Preparation
from situs.errors import SitusError, missing_extra
from situs.files import names_code, write_text
from situs.methods.base import Method
from situs.models.inference import evaluating
from situs.models.model import Model, check_classifier, feature_defence_of, protection
from situs.models.open import is_locked, model_folder, open_model, spent_of
from situs.train.export import Export, ModelProvenance, last_metrics, new_folder, write_export
from situs.train.run import is_run, load_run

Form = Literal["timm", "hf", "onnx"]

TOLERANCE = 1e-4
"""Largest difference of an export's outputs from the model's, relative to their largest value."""


def export_run(source: str | Path, to: str | Path, *, ema: bool | None = None, force: bool = False) -> Export:
    """Writes the run's model to the new folder `to`; any other source is refused with the reason.

    ema: the mean of the weights; None takes it if there is one. force: replace an export that is already there.
    """
    method, provenance = _read(source, ema)
    return write_export(method, to, provenance, force=force)


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
            f"features={features}: applies only to an ONNX graph; the other formats always have all outputs",
            field="features",
        )
    if form == "onnx":
        if is_locked(source):
            raise SitusError(f"{source}: {_instead(str(source))}")
        return export_onnx(open_model(source, ema=ema), Path(to), features, force=force)
    method, provenance = _read(source, ema)
    backbone = method.backbone
    if form == "timm" and backbone.source.get("library") != "timm":
        raise SitusError(
            f"{backbone.name}: is not a model of the library timm, so it cannot be exported for timm", field="form"
        )
    expected = _outputs(method)
    if form == "hf":
        from situs.backbones.hf.convert import as_transformers

        method.backbone = as_transformers(backbone)
    check = partial(_check, method=method, expected=expected)
    return write_export(method, to, provenance, force=force, check=check)


def _read(source: str | Path, ema: bool | None) -> tuple[Method, ModelProvenance]:
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
    return method, provenance


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
        raise SitusError(
            f"{method.backbone.name}: in {written.library}, the outputs of the export differ from the outputs of the "
            f"model by {error:.1e} (relative to the largest value), so nothing was written; please report this"
        )
    return error


def _instead(source: str) -> str:
    if is_locked(source):
        return "it is a locked folder; unlock it first (situs unlock)"
    if model_folder(source) is not None:
        return "it is already a model folder, and its library loads the folder directly"
    if names_code(source):
        return "it is your own module, which no library can load"
    if Path(source).exists():
        return "the folder has no config.json with checkpoints beside it"
    return "the folder does not exist; a model name needs no export, because its library loads the model by its name"


OnnxFeatures = Literal["logits", "pooled", "patches"]

GRAPH, ABOUT, CARD = "model.onnx", "model.json", "README.md"
INPUT = "images"
_WHAT = {
    "logits": "the logits of the classes, [batch, classes]",
    "pooled": "one vector per image, the classifier's input, [batch, dim]",
    "patches": "one vector per patch, row by row of the grid, [batch, patches, dim]",
}


class _Graph(nn.Module):
    """What the graph computes, as in training: without positions where the training used none."""

    def __init__(self, backbone: Backbone, features: OnnxFeatures, positions: bool) -> None:
        super().__init__()
        self.backbone, self.features, self.positions = backbone, features, positions

    def forward(self, images: Tensor) -> Tensor:
        backbone = self.backbone
        if "tokens" in backbone.refusals:
            return backbone(images) if self.features == "logits" else backbone.read_pixels(images)[0]
        features = backbone.encode(backbone.embed(images), backbone.positions() if self.positions else None)
        if self.features == "patches":
            return features.patches
        return backbone.head(features) if self.features == "logits" else backbone.pooled(features)


def export_onnx(model: Model, folder: Path, features: OnnxFeatures | None = None, *, force: bool = False) -> Export:
    """Writes model.onnx, model.json (how images are prepared, the classes) and a card to a new folder.

    features: logits, pooled or patches; by default the logits where there is a trained classifier, else pooled. The
    batch size is free; the rest of the shape is the model's.
    """
    if known := model.data.modality.annotations:
        raise SitusError(
            f"{model.name}: predicts {known}, but Situs exports only classes or features to ONNX", field="model"
        )
    features = features or ("logits" if model.classifier and model.backbone.num_classes else "pooled")
    if features == "logits":
        check_classifier(model, multi_label=True)
    elif features == "patches" or not hasattr(type(model.backbone), "read_pixels"):
        model.backbone.require("tokens")
    graph = _Graph(model.backbone.cpu(), features, model.positions).eval()
    shape = model.backbone.input.shape or model.data.size
    images = torch.randn(3, model.backbone.input.channels, *shape, generator=torch.Generator().manual_seed(0))
    with new_folder(folder, force, (GRAPH, ABOUT, CARD)) as draft, evaluating(graph):
        _write_graph(graph, images, draft / GRAPH, features)
        error = _check_graph(graph, images, draft / GRAPH)
        about = _about(model, features, shape, list(graph(images[:1]).shape[1:]))
        write_text(draft / ABOUT, json.dumps(about, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(draft / CARD, _card(about, model.data.modality.things))
    return Export(folder, "onnx", [], str(model.facts.get("model") or model.name), model.facts.get("step"), error)


def _write_graph(graph: nn.Module, images: Tensor, file: Path, name: str) -> None:
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]  # torch's exporter asks for it
    except ImportError as error:
        raise missing_extra("onnxscript", "onnx", "An export to ONNX") from error
    level = logging.getLogger("torch.onnx").level
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # about the exporter's own code
            batch = ({0: torch.export.Dim("batch", min=1)},)
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": [name], "dynamic_shapes": batch}
            program: Any = torch.onnx.export(graph, (images,), dynamo=True, verbose=False, **names)
            size = sum(value.numel() * value.element_size() for value in graph.state_dict().values())
            program.save(str(file), external_data=size > 2**30)  # one file has at most 2 GiB
    except SitusError:
        raise
    except Exception as error:  # the exporter raises many classes for unknown operators
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise SitusError(f"the model cannot be written as an ONNX graph: {reason}", field="form") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _check_graph(graph: nn.Module, images: Tensor, file: Path) -> float:
    """Runs the file with one image and with three; gives the largest relative difference."""
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("onnxruntime", "onnx", "Checking an export to ONNX") from error
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for count in (1, 3):
        (output,) = session.run(None, {INPUT: images[:count].numpy()})
        expected, outputs = graph(images[:count]), torch.from_numpy(output)
        worst = max(worst, float((outputs - expected).abs().max() / expected.abs().max().clamp(min=1e-6)))
    if not worst <= TOLERANCE:
        raise SitusError(
            f"in onnxruntime, the outputs of the graph differ from the outputs of the model by {worst:.1e} (relative "
            "to the largest value), so nothing was written",
            field="form",
        )
    return worst


def _about(model: Model, features: str, shape: tuple[int, ...], out: list[int]) -> dict[str, Any]:
    prepared = Preparation(model.data).to_onnx()
    about = {
        "model": str(model.facts.get("model") or model.name),
        "method": model.facts.get("method"),
        "input": {"name": INPUT, "shape": ["batch", model.backbone.input.channels, *shape], **prepared},
        "output": {"name": features, "shape": ["batch", *out]},
        "situs": __version__,
    }
    if protected := protection(model.spent, model.facts.get("defence")):
        about["protected"] = protected
    if features == "logits":
        about |= {"classes": None if model.classes is None else list(model.classes), "multi_label": model.multi_label}
    return about


def _card(about: dict[str, Any], things: str) -> str:
    spec, out = about["input"], about["output"]["name"]
    method = f", trained with the method {about['method']}" if about["method"] else ""
    shape = " × ".join(map(str, spec["shape"][1:]))
    normalised = "as in model.json"
    if "mean" in spec:
        normalised = f"by mean {spec['mean']} and standard deviation {spec['std']}"
    form = ", ".join(map(str, spec["shape"][1:]))
    protected = "".join(f"\n- {sentence}" for sentence in about.get("protected", ()))
    return f"""---
library_name: onnx
tags:
- situs
- onnx
---

# {about["model"]}{method}, as an ONNX graph

- Input `{INPUT}`: float32, any number of {things} of {shape}, normalised {normalised}
- Output `{out}`: {_WHAT[out]}
- Classes and preprocessing: see model.json{protected}

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("PATH_OF_THIS_FOLDER/{GRAPH}")
images = np.zeros([2, {form}], dtype="float32")  # yours, normalised
{out} = session.run(None, {{"{INPUT}": images}})[0]
```

Written by Situs {about["situs"]} and compared with the model in onnxruntime.
"""
