"""The model card of an export: what it is, what made it, how to load it. It names no place on any machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from situs import __version__
from situs.backbones.base import Backbone
from situs.errors import counted


@dataclass(frozen=True)
class ModelProvenance:
    """Where a model comes from.

    method: its name. data: what the set is called. recipe: the run's config as plain tables. metrics: the last
    numbers of its log. step: updates made. ema: whether the weights are the mean of the run's. mean, std, crop: how
    its images were normalised, and the share of their shorter side that the centre crop keeps. classes: their names.
    multi_label: whether an image has any number of them. audio: of a model of clips, in place of mean, std and crop,
    what `situs.data.config.DataConfig.told` says; masks, objects: likewise, of one that tells the class of pixels or of
    objects; text: of one that reads sentences, and tokeniser: the folder whose tokeniser turns them into ids, which is
    copied. protected: how the training protected its samples, one sentence each.
    """

    method: str
    data: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    ema: bool = False
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    crop: float = 1.0
    classes: Sequence[str] | None = None
    multi_label: bool = False
    audio: Mapping[str, Any] | None = None
    masks: Mapping[str, Any] | None = None
    objects: Mapping[str, Any] | None = None
    text: Mapping[str, Any] | None = None
    tokeniser: str | None = None
    protected: Sequence[str] = ()


_UNTOLD = frozenset(
    {"step", "epoch", "lr", "seconds", "images_per_second", "data_wait", "memory_gib", "loss_scale", "epsilon"}
)
"""Entries of the log that say how the run went, not what came of it; ε is that of all steps where one was chosen."""


def last_metrics(records: Iterable[Mapping[str, Any]], step: int) -> dict[str, float]:
    """The newest value of each number in a log's records, up to update `step`."""
    found: dict[str, float] = {}
    for record in records:
        if record["step"] <= step:
            found |= {n: v for n, v in record.items() if isinstance(v, int | float) and n not in _UNTOLD}
    return found


def card(backbone: Backbone, provenance: ModelProvenance, notes: Sequence[str]) -> str:
    """The card in Markdown, with the head that model hubs read."""
    library, architecture = backbone.source["library"], backbone.source["architecture"]
    parts = [
        f"---\nlibrary_name: {library}\n{_task(provenance)}tags:\n- situs\n- {provenance.method}\n---",
        f"# {architecture}, trained with {provenance.method}",
        _what(backbone, provenance),
        *notes,
        "## Loading it",
        _loading(library, architecture),
    ]
    if provenance.metrics:
        rows = [f"| {name.replace('_', ' ')} | {value:.4g} |" for name, value in provenance.metrics.items()]
        parts += ["## Last numbers of its log", "\n".join(["| what | value |", "|---|---|", *rows])]
    if provenance.recipe:
        recipe = json.dumps(public(provenance.recipe), indent=2, ensure_ascii=False)
        parts += ["## Recipe", f"Situs {__version__}, with this config:", f"```json\n{recipe}\n```"]
    return "\n\n".join(parts) + "\n"


def _task(provenance: ModelProvenance) -> str:
    """What a hub files it under, where it has a name for it."""
    if provenance.audio is not None or provenance.text is not None or provenance.masks is not None:
        return ""
    trained = provenance.classes is not None and provenance.method in ("supervised", "mjp", "mjp-official")
    return f"pipeline_tag: image-{'classification' if trained else 'feature-extraction'}\n"


def _what(backbone: Backbone, provenance: ModelProvenance) -> str:
    count = sum(parameter.numel() for parameter in backbone.model.parameters())
    facts = [f"- Parameters: {count:,}"]
    if provenance.audio is not None and backbone.input.shape is not None:
        clip, (numbers_of_one, frames) = provenance.audio, backbone.input.shape
        what = "MFCCs" if clip["kind"] == "mfcc" else "log-mels"
        facts.append(f"- Clips: {clip['seconds']:g} s at {clip['rate']:,} samples a second, {clip['level']} in level")
        facts.append(f"- Features: {numbers_of_one} {what} of each of {frames} frames, [1, {numbers_of_one}, {frames}]")
        facts.append("- Normalised by the mean and deviation of each, which config.json holds under situs.audio")
    elif provenance.text is not None:
        facts.append(f"- Sentences: at most {provenance.text['longest']} ids of the tokeniser beside it")
    elif backbone.input.shape is not None:
        height, width = backbone.input.shape
        facts.append(f"- Images: {counted(backbone.input.channels, 'channels')}, {height} × {width} pixels")
    if provenance.mean is not None and provenance.std is not None:
        facts.append(f"- Normalised by mean {numbers(provenance.mean)} and deviation {numbers(provenance.std)}")
    if provenance.data:
        facts.append(f"- Data: {last_name(provenance.data)}")
    if provenance.multi_label and provenance.classes is not None:
        told = "any number of them an image (multi-label): the sigmoid of an output is its class's probability"
        facts.append(f"- Classes: {len(provenance.classes)}, {told}")
    for dense, said in ((provenance.masks, "pixel (segmentation)"), (provenance.objects, "object (detection)")):
        if dense is not None:
            facts.append(f"- Classes: {len(dense['classes'])}, one for each {said}")
    if provenance.step is not None:
        facts.append(f"- Updates: {provenance.step:,}")
    facts.append(
        f"- Weights: {'the running mean (EMA) of' if provenance.ema else 'those of'} the run's last checkpoint"
    )
    return "\n".join([*facts, *(f"- {each}" for each in provenance.protected)])


def _loading(library: str, architecture: str) -> str:
    if library == "timm":
        code = 'import timm\n\nmodel = timm.create_model("local-dir:PATH_OF_THIS_FOLDER", pretrained=True)'
    else:
        code = (
            f'from transformers import {architecture}\n\nmodel = {architecture}.from_pretrained("PATH_OF_THIS_FOLDER")'
        )
    return f"```python\n{code}\n```"


def numbers(values: Sequence[float]) -> str:
    """Numbers with a few digits, in brackets."""
    return f"[{', '.join(f'{value:.4g}' for value in values)}]"


def public(value: Any) -> Any:
    """A config's tables with every path cut to its last name: where things lay is nobody's business."""
    if isinstance(value, Mapping):
        return {key: public(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [public(item) for item in value]
    return last_name(value) if isinstance(value, str) else value


def last_name(text: str) -> str:
    """The last part of a path, / or \\ between them; text that is no path stays."""
    return text.replace("\\", "/").rstrip("/").rpartition("/")[2] or text
