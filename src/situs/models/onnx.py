"""A model as an ONNX graph: any number of images in, classes or features out; checked against onnxruntime."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from situs import __version__
from situs.backbones.base import Backbone
from situs.data.preparation import Preparation
from situs.errors import SitusError, missing_extra
from situs.files import write_text
from situs.models.defended import protection
from situs.models.inference import evaluating
from situs.models.model import Model, check_classifier
from situs.train.export import Export, new_folder

OnnxFeatures = Literal["logits", "pooled", "patches"]

GRAPH, ABOUT, CARD = "model.onnx", "model.json", "README.md"
INPUT = "images"
TOLERANCE = 1e-4
"""Largest difference of onnxruntime's outputs from torch's, relative to their largest value."""

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
        raise SitusError(f"{model.name}: predicts {known}; a graph gives only classes or features", field="model")
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
        error = _check(graph, images, draft / GRAPH)
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


def _check(graph: nn.Module, images: Tensor, file: Path) -> float:
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
        raise SitusError(f"onnxruntime's outputs differ from the model's by {worst:.1e} of the largest", field="form")
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
    method = f", trained with {about['method']}" if about["method"] else ""
    shape = " × ".join(map(str, spec["shape"][1:]))
    normalised = f"by mean {spec['mean']} and deviation {spec['std']}" if "mean" in spec else "as in model.json"
    form = ", ".join(map(str, spec["shape"][1:]))
    return f"""---
library_name: onnx
tags:
- situs
- onnx
---

# {about["model"]}{method}, as an ONNX graph

- Input `{INPUT}`: float32, any number of {things} of {shape}, normalised {normalised}
- Output `{out}`: {_WHAT[out]}
- Classes and preparation: model.json{"".join(f"{chr(10)}- {sentence}" for sentence in about.get("protected", ()))}

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("PATH_OF_THIS_FOLDER/{GRAPH}")
images = np.zeros([2, {form}], dtype="float32")  # yours, normalised
{out} = session.run(None, {{"{INPUT}": images}})[0]
```

Written by Situs {about["situs"]} and compared with the model in onnxruntime.
"""
