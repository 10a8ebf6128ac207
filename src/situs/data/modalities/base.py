"""What a modality is: everything that the rest of the library must know of one kind of sample, in one place."""

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
"""`data.config.DataConfig`, which holds the settings of every modality and so stands above them."""

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation."""


class Fits(NamedTuple):
    """What a model takes. name: its own. size, channels: of its arrays, None and 0 where nobody knows. words: that it
    knows, 0 of a model of arrays. places: most ids of a sample. home: where its tokeniser lies. next_words: whether it
    is a language model."""

    name: str
    size: tuple[int, ...] | None
    channels: int = 0
    words: int = 0
    places: int = 0
    home: str = ""
    next_words: bool = False


class Modality(ABC):
    """One kind of sample. It has no state: what a user chose stands in `DataConfig`.

    kind: its name in `DataConfig.kind`. targets: what may be known of a sample, as `DataConfig.target` says it. things:
    what samples are called, in the plural; known: what is known of them, where that is more than classes. table,
    Config: the field of `DataConfig` with its own settings, and their class. suffixes: of files that are samples.
    last: its files often lie beside samples of other kinds (tables of sentences), and count only where the user asks
    for this kind or nothing else is there. ids: whether a sample is a row of ids, and not an array [C, H, W]. unused:
    fields of `DataConfig` that mean nothing here. augments, crops: what of `AugmentConfig` is done to its samples
    (None: all). label_fields: what to change where labels are missing.
    """

    kind: ClassVar[str]
    things: ClassVar[str]
    known: ClassVar[str] = ""
    each: ClassVar[str] = ""
    """What has a class, where it is not the sample."""
    targets: ClassVar[tuple[str, ...]] = ("class",)
    table: ClassVar[str] = ""
    Config: ClassVar[type[Checked]] = Checked
    suffixes: ClassVar[frozenset[str]] = frozenset()
    last: ClassVar[bool] = False
    alone: ClassVar[bool] = False
    """Whether its files tell of it only by `lies_at`, because they may lie beside samples of another kind."""
    ids: ClassVar[bool] = False
    pixels: ClassVar[bool] = False
    """Whether a sample is a picture, whose numbers are colours."""
    unused: ClassVar[tuple[str, ...]] = ()
    augments: ClassVar[frozenset[str] | None] = None
    crops: ClassVar[tuple[str, ...]] = ("none", "resized", "pad")
    label_fields: ClassVar[tuple[str, ...]] = ("data",)
    reading: ClassVar[str] = ""
    """What a measurement may say of how samples are read, by its argument; `read_as` takes it."""

    # --- its settings ---------------------------------------------------------------------------------------------

    @property
    def called(self) -> str:
        """Its samples with what is known of them, in words."""
        return f"{self.things} with {self.known}" if self.known else self.things

    def settings(self, data: DataConfig) -> Any:
        """Its own table of a config."""
        return getattr(data, self.table)

    def check(self, data: DataConfig) -> None:
        """Refuses fields that mean nothing to it."""
        for each in fields(data):
            if each.name in self.unused and (value := getattr(data, each.name)) != each.default:
                said = f"{each.name}={value}: is not for {self.called}, which {data.path or 'the set'} holds"
                raise SitusError(said, field=each.name)

    def check_augment(self, augment: AugmentConfig) -> None:
        """Refuses an augmentation that is not done to its samples."""
        for each in fields(augment):
            value = getattr(augment, each.name)
            default = type(value)() if isinstance(value, Checked) else each.default
            if self.augments is not None and each.name not in self.augments and value != default:
                said = f"{each.name}={value}: is not for {self.called}"
                raise SitusError(said, field=f"augment.{each.name}")
        if (self.augments is None or "crop" in self.augments) and augment.crop not in self.crops:
            allowed = f"{', '.join(self.crops[:-1])} or {self.crops[-1]} for {self.called}"
            raise SitusError(field="augment.crop", value=augment.crop, allowed=allowed)

    def settle(self, data: DataConfig, opened: Callable[[DataConfig], Source]) -> DataConfig:  # noqa: ARG002
        """The config with what the data itself says; the same data always gives the same. opened: opens a set."""
        return data

    def fit(self, data: DataConfig, model: Callable[[], Fits], *, learns: bool) -> DataConfig:  # noqa: ARG002
        """The config with what the model decides: the size of its samples. learns: whether labels are learned."""
        if data.img_size is not None:
            return data
        made = model()
        if made.words:
            raise SitusError(
                f"{made.name} reads sentences, and the data is taken for {self.things}: say text", field="data.kind"
            )
        if made.size is None:
            said = f"img_size: {made.name} is made for no size of its own, so one must be given"
            raise SitusError(said, field="data.img_size")
        return replace(data, img_size=tuple(made.size))

    def size(self, data: DataConfig) -> tuple[int, int]:
        """Height and width of what a model sees."""
        if data.img_size is None:
            raise SitusError("img_size: must be given, since no model sets it", field="img_size")
        return (data.img_size, data.img_size) if isinstance(data.img_size, int) else data.img_size

    def normalisation(self, data: DataConfig) -> Scale:
        """Mean and deviation, with the defaults filled in."""
        return data.mean, data.std

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        """The config with another way of reading, as `reading` names it."""
        raise NotImplementedError

    def unlabelled(self, data: DataConfig) -> DataConfig:
        """The config for reading samples alone, where labels are never looked at."""
        return data

    def without_labels(self, data: DataConfig) -> str:  # noqa: ARG002
        """What to say behind "has no labels"."""
        return ""

    # --- what a model says of it ----------------------------------------------------------------------------------

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """How samples are prepared, as an export tells it under the name of its table: no places on any machine."""
        return to_dict(self.settings(data)) if self.table else {}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: Fits) -> DataConfig:  # noqa: ARG002
        """The config that `prepared` tells of. data: with what timm or transformers say."""
        return data

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        """What a model card says of its samples, a line each."""
        return []

    # --- what lies at a path --------------------------------------------------------------------------------------

    def lies_at(self, path: Path, *, multi_label: bool) -> bool:  # noqa: ARG002
        """Whether a file or folder is its own, by more than the suffixes of files in it."""
        return False

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        """Whether the columns of parquet files hold its samples. asked: a user says that they do."""
        return False

    @abstractmethod
    def splits(self, path: Path, data: DataConfig) -> set[str]:
        """The splits of a set."""

    @abstractmethod
    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        """The samples of a set."""

    def cut(self, source: Source, data: DataConfig) -> Source:  # noqa: ARG002
        """What is cut out of the samples, once it is decided which of them belong to a split."""
        return source

    # --- from a source to batches ---------------------------------------------------------------------------------

    @abstractmethod
    def pipeline(
        self, source: Source, data: DataConfig, augment: AugmentConfig | None, device: torch.device
    ) -> Pipeline:
        """Their way to a batch. augment: None for evaluation."""


class Measured(Modality):
    """Arrays that are normalised by what is measured on the training split, and stand in an export with it."""

    @abstractmethod
    def apart(self, data: DataConfig) -> int:
        """How many numbers are normalised apart from each other."""

    def normalisation(self, data: DataConfig) -> Scale:
        count = self.apart(data)
        return data.mean or (0.0,) * count, data.std or (1.0,) * count

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """With their mean and deviation."""
        mean, std = self.normalisation(data)
        return super().prepared(data) | {"mean": mean, "std": std}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: Fits) -> DataConfig:  # noqa: ARG002
        if missing := [name for name in ("mean", "std") if name not in table]:
            said = f"its table situs.{self.table} has no {missing[0]}, by which {self.things} are normalised"
            raise SitusError(f"config.json: {said}; export the model again")
        own = {name: value for name, value in table.items() if name not in ("mean", "std")}
        scale = {name: tuple(table[name]) for name in ("mean", "std")}
        settings = {self.table: from_dict(self.Config, own, where=self.table)}
        return replace(data, kind=self.kind, crop_share=1.0, multi_label=False, **scale, **settings)


def things_of(modalities: Sequence[Modality]) -> str:
    """What they are called, in a sentence."""
    names = list(dict.fromkeys(each.things for each in modalities))
    return ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1]


def measure(source: Source, values_of: Callable[[dict[str, Any]], Tensor]) -> tuple[Tensor, Tensor, int]:
    """Mean and deviation [C] over a random choice of 1,000 samples, and the steps of the shortest; broken ones aside.

    values_of: of a sample, [C, T]. What is the same everywhere has deviation 1.
    """
    part, reason = Subset(source, 1000), "it is empty"
    total = squares = around = least = most = torch.zeros(0, dtype=torch.float64)
    count, shortest = 0, 0
    for index in range(len(part)):
        try:
            values = values_of(part.read(index)).double()
        except BrokenSampleError as error:
            reason = str(error)
            continue
        if not count:
            total = squares = values.new_zeros(len(values))
            around, least, most = values[:, :1], values[:, 0], values[:, 0]
        if len(values) != len(total):
            told = f"{source.things} of {len(total)} and of {len(values)} channels; {part.key(index)} has {len(values)}"
            raise DataError(f"{source.name}: holds {told}")
        least, most = torch.minimum(least, values.amin(1)), torch.maximum(most, values.amax(1))
        values = values - around  # squares of large numbers would leave nothing of a small deviation
        total, squares = total + values.sum(1), squares + values.square().sum(1)
        count, shortest = count + values.shape[1], min(shortest or values.shape[1], values.shape[1])
    if not count:
        raise DataError(f"{source.name}: none of its {source.things} can be read; the last: {reason}")
    mean = total / count
    std = torch.where(least < most, (squares / count - mean.square()).clamp(min=0).sqrt(), 0.0)
    return mean + around[:, 0], torch.where(std > 0, std, 1.0), shortest


def grey_levels(inputs: Tensor) -> Tensor:
    """What is normalised as a picture in [0, 1]: three deviations below the mean are 0, three above are 1."""
    return (inputs / 6.0 + 0.5).clamp(0.0, 1.0)
