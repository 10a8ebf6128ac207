"""Which steps are measured: words such as `mp3:mask_ratio=0.75,batch=64`, times models, times batches."""

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
    """Side of the square, or height and width; by default the model's own."""

    patch_size: Count | None = None
    """Side of a patch in pixels; by default the model's own."""

    in_chans: Count = 3
    """Channels of the images."""

    num_classes: Count = 1000
    """Classes, for a method that learns labels."""

    drop_path: Annotated[float, Within("[0, 1)")] = 0.0
    """Rate of stochastic depth in the last block."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's own constructor, such as depth and embed_dim."""

    precision: Precision | None = None
    """Arithmetic of the forward; by default bf16 on a GPU and fp32 elsewhere."""

    compile: bool = True
    """Compile the method's forward; on a GPU alone, as a run does."""

    graph: bool = True
    """Record the update as a CUDA graph; on a GPU alone, as a run does."""

    accumulate: Count = 1
    """Micro-batches a step."""

    clip: Positive | None = 1.0
    """Largest norm of the gradient; none leaves it alone."""

    ema: Annotated[float, Within("(0, 1)")] | None = None
    """Decay of a running mean of the weights; by default there is none."""


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
        """The method and its settings, as they are written."""
        told = ",".join(f"{name}={_written(value)}" for name, value in self.settings.items())
        return f"{self.method}:{told}" if told else self.method

    @property
    def shape(self) -> str:
        """The model, with what is not its default."""
        size = self.img_size if self.img_size is None or isinstance(self.img_size, int) else "×".join(
            map(str, self.img_size)
        )  # fmt: skip
        told = {"px": size, "patch": self.patch_size, "channels": None if self.in_chans == 3 else self.in_chans}
        told |= {"drop_path": self.drop_path or None, **self.model_args}
        return ", ".join([self.model, *(f"{name} {value}" for name, value in told.items() if value is not None)])

    @property
    def work(self) -> dict[str, Any]:
        """What is computed, whatever it is computed with: cases that agree in this can be compared."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in MEANS}


MEANS = ("precision", "compile", "graph")
"""Fields of a case that say how it is computed, and not what."""


@dataclass(frozen=True)
class Timing(Checked):
    """How long a step is looked at."""

    warmup: Count = 10
    """Steps before the clock runs; the first compile, and the update is recorded after four."""

    steps: Count = 20
    """Steps of one repeat."""

    repeats: Count = 5
    """How often that many steps are timed; the table shows the median and the spread."""

    profiled: Natural = 8
    """Steps that are run once more under the profiler, for the GPU's busy share; 0: none."""


@dataclass(frozen=True)
class StepConfig(StepShape, Timing):
    """What is measured, and how long."""

    models: tuple[str, ...] = ("vit_base_patch16_224",)
    """Backbones: timm names, or folders with a config.json."""

    batches: tuple[Count, ...] = (256,)
    """Images per step, comma-separated."""


def make_cases(words: Iterable[str], config: StepConfig) -> list[StepCase]:
    """A case for each word, model and batch; what a word itself says of these goes before the config.

    A word is METHOD (`backbone`: the model alone), METHOD:RATIO or METHOD:FIELD=VALUE,…; a field is the method's or one
    of `StepCase`, as in `mp3:mask_ratio=.5,batch=64,img_size=28x56,model_args.depth=8`. A value may be left empty, for
    none.
    """
    shared = {each.name: getattr(config, each.name) for each in fields(StepShape)}
    found = [
        _make(word, {**shared, "model": model, "batch": batch})
        for word in words
        for model in config.models
        for batch in config.batches
    ]
    unlike = [case for number, case in enumerate(found) if case not in found[:number]]
    if not unlike:
        raise SitusError("there is no case to measure: name a method, a model and a batch", field="cases")
    return unlike


def _make(word: str, shared: dict[str, Any]) -> StepCase:
    name, _, rest = word.partition(":")
    measured_class(name)
    known = {each.name for each in fields(StepCase)} - {"method", "settings", "model_args"}
    own, settings, model_args = dict(shared), {}, dict(shared["model_args"])
    for part in filter(None, rest.split(",")):
        key, equals, text = part.partition("=")
        key, text = (key, text) if equals else ("mask_ratio", part)
        key = key.replace("-", "_")
        if key.startswith("model_args."):
            model_args[key.removeprefix("model_args.")] = _value(text)
        elif key in known:
            own[key] = _value(text)
        else:
            settings[key] = _value(text)
    try:
        return from_dict(StepCase, {**own, "method": name, "settings": settings, "model_args": model_args})
    except SitusError as error:
        raise error.prefixed(word) from None


def _value(text: str) -> Any:
    """A number, true or false, HEIGHTxWIDTH, nothing for none, or else the text itself."""
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
