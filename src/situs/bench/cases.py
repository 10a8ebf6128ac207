"""The cases to measure: words such as `mp3:mask_ratio=0.75,batch=64`, for each model and batch size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar

from situs.backbones.base import Backbone
from situs.config import Checked, from_dict
from situs.core.when import When
from situs.errors import SitusError
from situs.limits import Count, Natural, Positive, Within
from situs.methods import Batch, Draws, Method, Output, method_class
from situs.train.distributed import Precision


@dataclass(frozen=True)
class StepShape(Checked):
    """The model's shape and the precision of a step."""

    img_size: Count | tuple[Count, Count] | None = None
    """Image size in pixels: a side, or height and width. Default: the model's own image size."""

    patch_size: Count | None = None
    """Patch size in pixels. Default: the model's patch size."""

    in_chans: Count = 3
    """Channels of the images."""

    num_classes: Count = 1000
    """Number of classes, for a method that learns labels."""

    drop_path: Annotated[float, Within("[0, 1)")] = 0.0
    """Rate of stochastic depth in the last block."""

    model_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the model's constructor, such as depth and embed_dim."""

    precision: Precision | None = None
    """Precision of the forward pass. Default: bf16 on a GPU, fp32 on other devices."""

    compile: bool = True
    """Compile the method's forward pass. This works on a GPU only, as in training."""

    graph: bool = True
    """Record the update as a CUDA graph. This works on a GPU only, as in training."""

    accumulate: Count = 1
    """Micro-batches per step."""

    clip: Positive | None = 1.0
    """Clip the gradient to this norm. With "none", the gradient is not clipped."""

    ema: Annotated[float, Within("(0, 1)")] | None = None
    """Decay of an exponential moving average (EMA) of the weights. Default: no average."""


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
    """How many steps are measured."""

    warmup: Count = 10
    """Number of steps before the timing. The first steps compile. The CUDA graph is recorded after four steps."""

    steps: Count = 20
    """Number of steps in one repeat of the timing."""

    repeats: Count = 5
    """Number of repeats of the timing. The table shows their median and spread."""

    profiled: Natural = 8
    """Number of steps under the profiler, which measures how long the GPU is busy. With 0, nothing is profiled."""


@dataclass(frozen=True)
class StepConfig(StepShape, Timing):
    """What is measured, and how many steps."""

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
        raise SitusError("nothing to measure; give a method, a model and a batch", field="cases")
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


# --- a backbone alone as a case ---------------------------------------------------------------------------------------


BARE = "backbone"
"""The name of this case, beside those of methods."""


@dataclass(frozen=True)
class BareConfig(Checked):
    """This case has no settings."""


class Bare(Method):
    """The mean square of the backbone's features, whose gradient reaches every block."""

    Config: ClassVar[type[BareConfig]] = BareConfig

    def __init__(self, backbone: Backbone, config: BareConfig) -> None:
        super().__init__(backbone)
        self.config = config

    def draw(self, batch: Batch, when: When) -> Draws:  # noqa: ARG002
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:  # noqa: ARG002
        features = self.backbone.encode(self.backbone.embed(batch.inputs), self.backbone.positions())
        return Output(features.patches.float().square().mean(), {}, {})


def measured_class(name: str) -> type[Method]:
    """A method by name, or the backbone alone."""
    return Bare if name == BARE else method_class(name)
