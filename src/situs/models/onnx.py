"""A model as an ONNX graph: images in any number in, classes or features out, run again by onnxruntime and compared."""

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
"""What onnxruntime's numbers may differ from torch's, over the largest of them."""

_WHAT = {
    "logits": "the logits of the classes, [batch, classes]",
    "pooled": "one vector an image, what the classifier reads, [batch, dim]",
    "patches": "one vector a patch, row by row of the grid, [batch, patches, dim]",
}


class _Graph(nn.Module):
    """What the graph computes, as the model was trained: without positions where they took no part."""

    def __init__(self, backbone: Backbone, features: OnnxFeatures, positions: bool) -> None:
        super().__init__()
        self.backbone, self.features, self.positions = backbone, features, positions

    def forward(self, images: Tensor) -> Tensor:
        backbone = self.backbone
        if "tokens" in backbone.refusals:
            return backbone(images) if self.features == "logits" else backbone.read_pixels(images)[0]
        found = backbone.encode(backbone.embed(images), backbone.positions() if self.positions else None)
        if self.features == "patches":
            return found.patches
        return backbone.head(found) if self.features == "logits" else backbone.pooled(found)


def export_onnx(model: Model, folder: Path, features: OnnxFeatures | None = None, *, force: bool = False) -> Export:
    """Writes model.onnx, model.json (how images are prepared, the classes) and a card to a new folder.

    features: logits, pooled or patches; by default the logits where there is a trained classifier, else pooled. The
    number of images at a time is free; the rest of the shape is the model's own.
    """
    if known := model.data.modality.annotations:
        raise SitusError(f"{model.name}: tells {known}, and a graph holds classes or features alone", field="model")
    features = features or ("logits" if model.classifier and model.backbone.num_classes else "pooled")
    if features == "logits":
        check_classifier(model, multi_label=True)
    elif features == "patches" or not hasattr(type(model.backbone), "read_pixels"):
        model.backbone.require("tokens")
    graph = _Graph(model.backbone.cpu(), features, model.positions).eval()
    shape = model.backbone.input.shape or model.data.size
    images = torch.randn(3, model.backbone.input.channels, *shape, generator=torch.Generator().manual_seed(0))
    with new_folder(folder, force, (GRAPH, ABOUT, CARD)) as aside, evaluating(graph):
        _write_graph(graph, images, aside / GRAPH, features)
        error = _check(graph, images, aside / GRAPH)
        about = _about(model, features, shape, list(graph(images[:1]).shape[1:]))
        write_text(aside / ABOUT, json.dumps(about, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
        write_text(aside / CARD, _card(about, model.data.modality.things))
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
            warnings.simplefilter("ignore")  # of the exporter's own inside
            batch = ({0: torch.export.Dim("batch", min=1)},)
            names: dict[str, Any] = {"input_names": [INPUT], "output_names": [name], "dynamic_shapes": batch}
            made: Any = torch.onnx.export(graph, (images,), dynamo=True, verbose=False, **names)
            size = sum(value.numel() * value.element_size() for value in graph.state_dict().values())
            made.save(str(file), external_data=size > 2**30)  # a file of its own holds at most 2 GiB
    except SitusError:
        raise
    except Exception as error:  # the exporter raises whatever the operator that it does not know raises
        said = " ".join(str(error).split())[:200] or type(error).__name__
        raise SitusError(f"the model cannot be written as an ONNX graph: {said}", field="form") from error
    finally:
        logging.getLogger("torch.onnx").setLevel(level)


def _check(graph: nn.Module, images: Tensor, file: Path) -> float:
    """Runs the file with one image and with three: the most that a number differs, over the largest."""
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise missing_extra("onnxruntime", "onnx", "Checking an export to ONNX") from error
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    worst = 0.0
    for count in (1, 3):
        (found,) = session.run(None, {INPUT: images[:count].numpy()})
        wanted = graph(images[:count])
        worst = max(worst, float((torch.from_numpy(found) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6)))
    if not worst <= TOLERANCE:
        raise SitusError(f"onnxruntime's numbers differ from the model's by {worst:.1e} of the largest", field="form")
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
    given, out = about["input"], about["output"]["name"]
    by = f", trained with {about['method']}" if about["method"] else ""
    shape = " × ".join(map(str, given["shape"][1:]))
    normalised = f"by mean {given['mean']} and deviation {given['std']}" if "mean" in given else "as model.json says"
    form = ", ".join(map(str, given["shape"][1:]))
    return f"""---
library_name: onnx
tags:
- situs
- onnx
---

# {about["model"]}{by}, as an ONNX graph

- Input `{INPUT}`: float32, any number of {things} of {shape}, normalised {normalised}
- Output `{out}`: {_WHAT[out]}
- Classes and preparation: model.json{"".join(f"{chr(10)}- {each}" for each in about.get("protected", ()))}

```python
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("PATH_OF_THIS_FOLDER/{GRAPH}")
images = np.zeros([2, {form}], dtype="float32")  # yours, normalised
{out} = session.run(None, {{"{INPUT}": images}})[0]
```

Situs {about["situs"]} wrote it and compared it with the model in onnxruntime.
"""
