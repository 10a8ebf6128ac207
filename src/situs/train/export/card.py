"""The model card of an export: what it is, what made it, how to load it. It names no place on any machine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from situs import __version__
from situs.backbones.base import Backbone
from situs.data.preparation import Preparation


@dataclass(frozen=True)
class ModelProvenance:
    """Where a model comes from.

    method: its name. data: what the set is called. recipe: the run's config as plain tables. metrics: the last
    numbers of its log. step: updates made. ema: whether the weights are the mean of the run's. prepared: how its
    samples are. classes: their names. protected: how the training protected its samples, one sentence each.
    """

    method: str
    data: str = ""
    recipe: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    step: int | None = None
    ema: bool = False
    prepared: Preparation = field(default_factory=Preparation)
    classes: Sequence[str] | None = None
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
    if not provenance.prepared.modality.pixels or provenance.prepared.modality.each:
        return ""
    trained = provenance.classes is not None and provenance.method in ("supervised", "mjp", "mjp-official")
    return f"pipeline_tag: image-{'classification' if trained else 'feature-extraction'}\n"


def _what(backbone: Backbone, provenance: ModelProvenance) -> str:
    count = sum(parameter.numel() for parameter in backbone.model.parameters())
    facts = [f"- Parameters: {count:,}"]
    facts += [f"- {line}" for line in provenance.prepared.facts(backbone.input.shape, backbone.input.channels)]
    if provenance.data:
        facts.append(f"- Data: {last_name(provenance.data)}")
    if provenance.prepared.multi_label and provenance.classes is not None:
        many = "any number of them an image (multi-label): the sigmoid of an output is its class's probability"
        facts.append(f"- Classes: {len(provenance.classes)}, {many}")
    if (each := provenance.prepared.modality.each) and provenance.classes is not None:
        facts.append(f"- Classes: {len(provenance.classes)}, one for each {each}")
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
