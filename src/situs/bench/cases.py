"""The cases to measure: words such as `mp3:mask_ratio=0.75,batch=64`, for each model and batch size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from situs.bench.bare import measured_class
from situs.config import Checked, from_dict
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within
from situs.train.distributed import Precision


@dataclass(frozen=True)
class StepShape(Checked):
    """The model's shape and the arithmetic of a step."""

    img_size: Count | tuple[Count, Count] | None = None
    """Side of the square, or height and width; default: the model's."""

    patch_size: Count | None = None
    """Side of a patch in pixels; default: the model's."""

    in_chans: Count = 3
    """Channels of the images."""

    num_classes: Count = 1000
    """Classes, for a method that learns labels."""

    drop_path: Annotated[float, Within("[0, 1)")] = 0.0
    """Rate of stochastic depth in the last block."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor, such as depth and embed_dim."""

    precision: Precision | None = None
    """Arithmetic of the forward; default: bf16 on a GPU, fp32 elsewhere."""

    compile: bool = True
    """Compile the method's forward; on a GPU only, as in a run."""

    graph: bool = True
    """Record the update as a CUDA graph; on a GPU only, as in a run."""

    accumulate: Count = 1
    """Micro-batches per step."""

    clip: Positive | None = 1.0
    """Largest norm of the gradient; none: no clipping."""

    ema: Annotated[float, Within("(0, 1)")] | None = None
    """Decay of an exponential moving average of the weights; default: none."""


@dataclass(frozen=True)
class StepCase(StepShape):
    """One step to measure. settings: fields of the method's config that are not its defaults."""

    method: str = "supervised"
    settings: dict[str, Any] = field(default_factory=dict)
    model: str = "vit_base_patch16_224"
    batch: Count = 256

    def check(self) -> None:
        from_dict(measured_class(self.method).Config, self.settings)

    @property
    def label(self) -> str:
        """The method and its settings, as in a word."""
        settings = ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())
        return f"{self.method}:{settings}" if settings else self.method

    @property
    def shape(self) -> str:
        """The model, with what is not its default."""
        size = self.img_size if self.img_size is None or isinstance(self.img_size, int) else "×".join(
            map(str, self.img_size)
        )  # fmt: skip
        details = {"px": size, "patch": self.patch_size, "channels": None if self.in_chans == 3 else self.in_chans}
        details |= {"drop_path": self.drop_path or None, **self.model_args}
        return ", ".join([self.model, *(f"{name} {value}" for name, value in details.items() if value is not None)])

    @property
    def work(self) -> dict[str, Any]:
        """What is computed, apart from `MEANS`: cases that agree in this can be compared."""
        return {field_.name: getattr(self, field_.name) for field_ in fields(self) if field_.name not in MEANS}


MEANS = ("precision", "compile", "graph")
"""Fields of a case that say how it is computed, not what."""


@dataclass(frozen=True)
class Timing(Checked):
    """How long a step is measured."""

    warmup: Count = 10
    """Steps before the timing; the first ones compile, and the graph is recorded after four."""

    steps: Count = 20
    """Steps of one repeat."""

    repeats: Count = 5
    """Repeats; the table shows their median and spread."""

    profiled: Natural = 8
    """Steps under the profiler, for the GPU's busy share; 0: none."""


@dataclass(frozen=True)
class StepConfig(StepShape, Timing):
    """What is measured, and how long."""

    models: tuple[str, ...] = ("vit_base_patch16_224",)
    """Backbones: timm names, or folders with a config.json."""

    batches: tuple[Count, ...] = (256,)
    """Images per step, comma-separated."""


def make_cases(words: Iterable[str], config: StepConfig) -> list[StepCase]:
    """A case for each word, model and batch; settings in a word override the config.

    A word is METHOD (`backbone`: the model alone), METHOD:RATIO or METHOD:FIELD=VALUE,…; a field is the method's or one
    of `StepCase`, as in `mp3:mask_ratio=.5,batch=64,img_size=28x56,model_args.depth=8`. An empty value means none.
    """
    shared = {field_.name: getattr(config, field_.name) for field_ in fields(StepShape)}
    cases = [
        _make(word, {**shared, "model": model, "batch": batch})
        for word in words
        for model in config.models
        for batch in config.batches
    ]
    unlike = [case for number, case in enumerate(cases) if case not in cases[:number]]
    if not unlike:
        raise SitusError("nothing to measure: name a method, a model and a batch", field="cases")
    return unlike


def _make(word: str, shared: dict[str, Any]) -> StepCase:
    name, _, options = word.partition(":")
    measured_class(name)
    names = {field_.name for field_ in fields(StepCase)} - {"method", "settings", "model_args"}
    values, settings, model_args = dict(shared), {}, dict(shared["model_args"])
    for part in filter(None, options.split(",")):
        key, equals, text = part.partition("=")
        key, text = (key, text) if equals else ("mask_ratio", part)
        key = key.replace("-", "_")
        if key.startswith("model_args."):
            model_args[key.removeprefix("model_args.")] = _value(text)
        elif key in names:
            values[key] = _value(text)
        else:
            settings[key] = _value(text)
    try:
        return from_dict(StepCase, {**values, "method": name, "settings": settings, "model_args": model_args})
    except SitusError as error:
        raise error.prefixed(word) from None


def _value(text: str) -> Any:
    """A number, true or false, HEIGHTxWIDTH, None for an empty text, or the text itself."""
    if not text or text == "none":
        return None
    sides = text.split("x")
    if len(sides) == 2 and all(side.isdecimal() for side in sides):
        return [int(side) for side in sides]
    for read in (json.loads, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _written(value: Any) -> str:
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
