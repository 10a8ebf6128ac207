"""The playground's page: a model, some images and the code that runs it, in one file that loads nothing else."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from torch import Tensor

from situs.core.when import When
from situs.data.batch import Batch
from situs.data.loader import Loader
from situs.data.sources.memory import addressed
from situs.errors import SitusError
from situs.files import write_result
from situs.limits import check_value
from situs.methods.base import Method
from situs.methods.measured import SolvesPuzzles
from situs.models.data import AnyData, load_set, top1_reason
from situs.models.inference import evaluating
from situs.models.model import Model
from situs.play.pack import described, packed, rounded

MOST_MB, COUNT = 8.0, 60
TOLERANCE = 1e-3
"""The largest change of a logit by rounding."""

_SCRIPTS = ("model.js", "pictures.js", "board.js", "view.js", "lock.js", "play.js")


@dataclass(frozen=True)
class Playground:
    """A page that was written. bits: of a weight in it. error: the largest change of a logit by rounding."""

    path: Path
    megabytes: float
    weights: int
    bits: int
    error: float
    images: int
    data: str


def write_playground(
    model: Model,
    out: str | Path,
    data: AnyData = None,
    *,
    split: str | None = None,
    count: int = COUNT,
    most_mb: float = MOST_MB,
) -> Playground:
    """Writes the page; a model that cannot run there, or does not fit, is refused.

    data: its images; default: the run's, or the embedded pictures. count: number of images. most_mb: largest size of
    the page in megabytes (10⁶ bytes); weights are stored in 32 bits if they fit, else in 16.
    """
    if Path(out).suffix != ".html":
        raise SitusError(field="out", value=str(out), allowed="a file NAME.html")
    check_value("count", count, ">= 1")
    check_value("most_mb", most_mb, "> 0")
    about, tensors = described(model)
    few = replace(model, input=replace(model.data, workers=0))  # starting processes would take longer than decoding
    loader = load_set(
        few, addressed(data) or (None if model.data.path else "samples"), split=split, count=count, batch=64
    )
    pixels, inputs, labels = _images(loader)
    about |= {"labels": labels if about["kind"] == "classes" and top1_reason(model, loader) is None else None}
    about |= {"data": loader.source.name, "images": len(pixels)}
    raw, error = base64.b64encode(pixels.numpy().tobytes()).decode("ascii"), 0.0
    for bits in (32, 16):
        short = bits == 16
        if short:
            coarse = rounded(model.trained)
            with evaluating(model.trained, coarse):
                few_inputs = inputs[:16].to(model.device)
                before, after = (_logits(trained, few_inputs) for trained in (model.trained, coarse))
            error = float((before - after).abs().max())
            tensors = described(model, coarse)[1]
        weights, about["tensors"] = packed(tensors, short=short)
        page = _render(about | {"bits": bits}, weights, raw)
        megabytes = len(page) / 1e6
        if megabytes <= most_mb:
            break
    else:
        raise SitusError(
            f"{model.name}: at most {most_mb:g} MB are allowed, but with {about['weights']:,} weights in 16 bits "
            f"the page has {megabytes:.1f} MB; use a smaller model",
            field="most_mb",
        )
    if error > TOLERANCE:
        raise SitusError(
            f"{model.name}: the page fits into {most_mb:g} MB only with weights rounded to 16 bits, but this changes "
            "the "
            f"logits by {error:.1e} (at most {TOLERANCE:g} is allowed); allow a larger page",
            field="most_mb",
        )
    path = write_result(Path(out), page)
    return Playground(path, megabytes, about["weights"], bits, error, len(pixels), loader.source.name)


def _images(loader: Loader) -> tuple[Tensor, Tensor, list[int]]:
    """The images as bytes [n, H, W, C], as the model's inputs, and their labels; the classes take turns."""
    batches = list(loader)
    shown = torch.cat([loader.shown(batch.inputs).cpu() for batch in batches])
    pixels = (shown * 255).round().clamp(0, 255).to(torch.uint8)
    inputs = (pixels.float() / 255 - loader.mean.cpu().view(-1, 1, 1)) / loader.std.cpu().view(-1, 1, 1)
    label = [batch.targets["label"].cpu() for batch in batches if "label" in batch.targets]
    labels = torch.cat(label) if label else torch.zeros(len(pixels), dtype=torch.int64)
    turn = torch.tensor([int((labels[:n] == labels[n]).sum()) for n in range(len(labels))])
    order = torch.argsort(turn * (int(labels.max()) + 1) + labels, stable=True)
    return pixels[order].permute(0, 2, 3, 1).contiguous(), inputs[order], labels[order].tolist()


def _logits(trained: Any, inputs: Tensor) -> Tensor:
    if isinstance(trained, SolvesPuzzles):
        ids = torch.arange(len(inputs), device=inputs.device)
        batch = Batch(inputs, ids)
        return trained(batch, trained.draw(batch, When(seed=0, epoch=0, progress=1.0))).extras["logits"]
    if isinstance(trained, Method):
        return trained.backbone.head(trained.encode(inputs))
    return trained(inputs)


def _render(about: dict[str, Any], weights: str, pixels: str) -> bytes:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    facts = json.dumps(about, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    texts = {"script": "\n".join((here / name).read_text(encoding="utf-8") for name in _SCRIPTS)}
    texts |= {"style": (here / "play.css").read_text(encoding="utf-8"), "json": facts}
    page = environment.get_template("play.html.jinja").render(about=about, weights=weights, pixels=pixels, **texts)
    return page.encode()
