"""What a modality is: everything that the rest of the library needs to know of one kind of sample, in one place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from situs.config import Checked, from_dict, to_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.pipeline import Pipeline
from situs.data.sources.base import Source, Wanted
from situs.data.sources.subset import Subset
from situs.errors import BrokenSampleError, DataError, SitusError

DataConfig = Any
"""`data.config.DataConfig`, which holds the settings of every modality and therefore imports them."""

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation."""


class ModelInput(NamedTuple):
    """What a model takes. name: its own. size, channels: of its arrays, None and 0 if unknown. words: size of its
    vocabulary, 0 for a model of arrays. places: most ids of a sample. home: the folder of its tokeniser. next_words:
    whether it is a language model."""

    name: str
    size: tuple[int, ...] | None
    channels: int = 0
    words: int = 0
    places: int = 0
    home: str = ""
    next_words: bool = False


class Modality(ABC):
    """One kind of sample. It has no state: a user's choices are in `DataConfig`.

    kind: its name in `DataConfig.kind`. targets: its values of `DataConfig.target`. things: what samples are called, in
    the plural. annotations: what they come with, where that is more than classes; labelled_unit: what has a class,
    where it is not the sample. table, Config: the field of `DataConfig` with its settings, and their class. suffixes:
    of sample files. low_priority: its files are often beside samples of other kinds (tables of sentences), and count
    only where the user asks for this kind or nothing else is there. whole_set: only `is_at` recognises it, not single
    files. ids: whether a sample is a row of ids, not an array [C, H, W]. pixels: whether a sample is an image. unused:
    fields of `DataConfig` that do not apply. augments, crops: what of `AugmentConfig` applies (None: all).
    label_fields: what to change where labels are missing. reading_option: the argument of measurements that changes how
    samples are read; `read_as` takes its value.
    """

    kind: ClassVar[str]
    things: ClassVar[str]
    annotations: ClassVar[str] = ""
    labelled_unit: ClassVar[str] = ""
    targets: ClassVar[tuple[str, ...]] = ("class",)
    table: ClassVar[str] = ""
    Config: ClassVar[type[Checked]] = Checked
    suffixes: ClassVar[frozenset[str]] = frozenset()
    low_priority: ClassVar[bool] = False
    whole_set: ClassVar[bool] = False
    ids: ClassVar[bool] = False
    pixels: ClassVar[bool] = False
    unused: ClassVar[tuple[str, ...]] = ()
    augments: ClassVar[frozenset[str] | None] = None
    crops: ClassVar[tuple[str, ...]] = ("none", "resized", "pad")
    label_fields: ClassVar[tuple[str, ...]] = ("data",)
    reading_option: ClassVar[str] = ""

    # --- its settings ---------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        """Its samples and their annotations, in words."""
        return f"{self.things} with {self.annotations}" if self.annotations else self.things

    def settings(self, data: DataConfig) -> Any:
        """Its own table of a config; None where it has none."""
        return getattr(data, self.table) if self.table else None

    def check(self, data: DataConfig) -> None:
        """Refuses fields that do not apply."""
        for field in fields(data):
            if field.name in self.unused and (value := getattr(data, field.name)) != field.default:
                reason = f"does not apply to {self.description}, which {data.path or 'the set'} contains"
                raise SitusError(f"{field.name}={value}: {reason}", field=field.name)

    def check_augment(self, augment: AugmentConfig) -> None:
        """Refuses an augmentation that does not apply."""
        for field in fields(augment):
            value = getattr(augment, field.name)
            default = type(value)() if isinstance(value, Checked) else field.default
            if self.augments is not None and field.name not in self.augments and value != default:
                reason = f"{field.name}={value}: does not apply to {self.description}"
                raise SitusError(reason, field=f"augment.{field.name}")
        if (self.augments is None or "crop" in self.augments) and augment.crop not in self.crops:
            allowed = f"{', '.join(self.crops[:-1])} or {self.crops[-1]} for {self.description}"
            raise SitusError(field="augment.crop", value=augment.crop, allowed=allowed)

    def resolve(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:  # noqa: ARG002
        """The config completed by the data itself; the same data always gives the same. opened: opens a set."""
        return data

    def fit(self, data: DataConfig, model: Callable[[], ModelInput], *, learns: bool) -> DataConfig:  # noqa: ARG002
        """The config completed by the model: the size of its samples. learns: whether labels are learned."""
        if data.img_size is not None:
            return data
        takes = model()
        if takes.words:
            reason = f"the kind of the data must be text, not {self.things}, because {takes.name} reads sentences"
            raise SitusError(reason, field="data.kind")
        if takes.size is None:
            reason = f"img_size: must be set, because {takes.name} has no fixed input size"
            raise SitusError(reason, field="data.img_size")
        return replace(data, img_size=tuple(takes.size))

    def size(self, data: DataConfig) -> tuple[int, int]:
        """Height and width of a model's input."""
        if data.img_size is None:
            raise SitusError("img_size: must be set, because no model determines the size", field="img_size")
        return (data.img_size, data.img_size) if isinstance(data.img_size, int) else data.img_size

    def normalisation(self, data: DataConfig) -> Scale:
        """Mean and standard deviation, with the defaults filled in."""
        return data.mean, data.std

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        """The config with another value of its `reading_option`."""
        raise NotImplementedError

    def unlabelled(self, data: DataConfig) -> DataConfig:
        """The config for reading samples without their labels."""
        return data

    def without_labels(self, data: DataConfig) -> str:  # noqa: ARG002
        """What follows "has no labels" in a sentence."""
        return ""

    # --- exports --------------------------------------------------------------------------------------------------

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """How samples are prepared, for an export under the name of its table: without paths of this machine."""
        return to_dict(self.settings(data)) if self.table else {}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:  # noqa: ARG002
        """The config that `prepared` was made of. data: with the entries of timm or transformers."""
        if not self.table:
            return data
        return replace(data, target=self.targets[0], **{self.table: from_dict(self.Config, table, where=self.table)})

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        """Lines of a model card on its samples."""
        return []

    # --- sets on disk ---------------------------------------------------------------------------------------------

    def is_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        """Whether a file or folder is of this kind, by more than the suffixes of files in it."""
        return False

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        """Whether the columns of parquet files hold its samples. asked: the user asks for this kind."""
        return False

    @abstractmethod
    def splits(self, path: Path, data: DataConfig) -> set[str]:
        """The splits of a set."""

    @abstractmethod
    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        """The samples of a set."""

    def cut(self, source: Source, data: DataConfig) -> Source:  # noqa: ARG002
        """The parts that samples are cut into, after they were assigned to a split."""
        return source

    # --- from a source to batches ---------------------------------------------------------------------------------

    @abstractmethod
    def pipeline(
        self, source: Source, data: DataConfig, augment: AugmentConfig | None, device: torch.device
    ) -> Pipeline:
        """The pipeline from a source to batches. augment: None for evaluation."""


class Measured(Modality):
    """Arrays that are normalised by what is measured on the training split, which goes into an export."""

    @abstractmethod
    def scale_length(self, data: DataConfig) -> int:
        """How many values have a mean and deviation of their own."""

    def normalisation(self, data: DataConfig) -> Scale:
        count = self.scale_length(data)
        return data.mean or (0.0,) * count, data.std or (1.0,) * count

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """With their mean and deviation."""
        mean, std = self.normalisation(data)
        return super().prepared(data) | {"mean": mean, "std": std}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:  # noqa: ARG002
        if missing := [name for name in ("mean", "std") if name not in table]:
            raise SitusError(
                f"config.json: its table situs.{self.table} has no {missing[0]}, which is needed to normalise "
                f"{self.things}; export the model again"
            )
        entries = {name: value for name, value in table.items() if name not in ("mean", "std")}
        scale = {name: tuple(table[name]) for name in ("mean", "std")}
        settings = {self.table: from_dict(self.Config, entries, where=self.table)}
        return replace(data, kind=self.kind, crop_share=1.0, multi_label=False, **scale, **settings)


def things_of(modalities: Sequence[Modality]) -> str:
    """What their samples are called, in a sentence."""
    names = list(dict.fromkeys(modality.things for modality in modalities))
    return ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]


def measure(source: Source, values_of: Callable[[dict[str, Any]], Tensor]) -> tuple[Tensor, Tensor, int]:
    """Mean and deviation [C] over a random choice of 1,000 samples, and the length of the shortest; broken ones are
    left out.

    values_of: of a sample, [C, T]. A constant channel has deviation 1.
    """
    part, reason = Subset(source, 1000), "it is empty"
    total = squares = offset = torch.zeros(0, dtype=torch.float64)
    count, shortest = 0, 0
    for index in range(len(part)):
        try:
            values = values_of(part.read(index)).double()
        except BrokenSampleError as error:
            reason = str(error)
            continue
        if not count:
            total = squares = values.new_zeros(len(values))
            offset = values[:, :1]
        if len(values) != len(total):
            both = f"{source.things} of {len(total)} channels, but {part.key(index)} has {len(values)} channels"
            raise DataError(f"{source.name}: contains {both}")
        values = values - offset  # squares of large numbers would hide a small deviation
        total, squares = total + values.sum(1), squares + values.square().sum(1)
        count, shortest = count + values.shape[1], min(shortest or values.shape[1], values.shape[1])
    if not count:
        raise DataError(f"{source.name}: none of its {source.things} can be read; the last error: {reason}")
    mean = total / count
    std = (squares / count - mean.square()).clamp(min=0).sqrt()
    return mean + offset[:, 0], torch.where(std > 0, std, 1.0), shortest


def grey_levels(inputs: Tensor) -> Tensor:
    """Normalised values as an image in [0, 1]: three deviations below the mean are 0, three above are 1."""
    return (inputs / 6.0 + 0.5).clamp(0.0, 1.0)
