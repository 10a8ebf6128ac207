"""Sentences: their ids, padded to the longest of the batch, and the mask of the real ones.

A batch is [B, N] int64; for pairs [B, 2, N], the ids and which of the two sentences they belong to. N is a multiple of
8, so that a compiled step meets few lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from situs.config import from_dict
from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import Batch
from situs.data.modalities.base import Modality, ModelInput
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import Source, Wanted, list_shards
from situs.data.sources.labels import is_text
from situs.data.sources.text import PLAIN, SUFFIXES, BlockSource, TextSource, open_text, text_splits
from situs.data.text import COLUMNS, LONGEST, Columns, TextConfig
from situs.errors import DataError, SitusError
from situs.files import absolute

if TYPE_CHECKING:
    from situs.data.config import DataConfig

_MULTIPLE = 8


def text_of(source: Source) -> TextSource | BlockSource:
    """The set of text that a source is, or is a part of."""
    whole = source.origin(0)[0] if len(source) else source
    if not isinstance(whole, (TextSource, BlockSource)) or whole.ids is None or whole.tokeniser is None:
        raise DataError(f"{source.name}: holds no sentences that a tokeniser has read")
    return whole


class TextPipeline(Pipeline):
    """A source of ids ("ids", and "label" where there is one) to batches of them.

    longest: the most ids of a sample. words: the ids themselves are the targets.
    """

    by_rows = False  # each batch has a width of its own
    in_memory = "in memory as ids"

    def __init__(self, source: Source, longest: int, *, training: bool, words: bool) -> None:
        super().__init__(source, training=training)
        whole = text_of(source)
        assert whole.tokeniser is not None
        assert whole.ids is not None
        self.longest, self.words, self.pad = longest, words, whole.tokeniser.pad
        self.row_bytes = 8 * longest * whole.ids.flat.ndim

    @property
    def facts(self) -> dict[str, Any]:
        """The most ids of a sample."""
        return {"longest": self.longest}

    def check_model(self, words: int, name: str) -> None:
        tokeniser = text_of(self.source).tokeniser
        assert tokeniser is not None
        if tokeniser.words > words:
            sizes = f"its tokeniser has {tokeniser.words:,} words, but {name} knows {words:,}"
            reason = f"{tokeniser.folder}: {sizes}; use the tokeniser in the model's own folder"
            raise SitusError(reason, field="data.text.tokeniser")

    def lengths(self) -> Tensor | None:
        """How many ids each sample has, [n]; None for blocks, which are equally long."""
        if self.words:
            return None
        whole = text_of(self.source)
        return torch.tensor([whole.length(self.source.origin(index)[1]) for index in range(len(self.source))])

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """ "ids" ([b, N], of pairs [b, 2, N]), "mask" [b, N], and the labels."""
        lengths = torch.tensor([sample["ids"].shape[-1] for sample in samples])
        width = self.longest if self.words else min(self.longest, -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE)
        ids = torch.full((len(samples), *samples[0]["ids"].shape[:-1], width), self.pad)
        if ids.dim() == 3:  # padding belongs to the first sentence, as in transformers
            ids[:, 1] = 0
        for row, sample in enumerate(samples):
            ids[row, ..., : lengths[row]] = sample["ids"]
        values = {"ids": ids, "mask": torch.arange(width) < lengths[:, None]}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:  # noqa: ARG002
        """A batch; for a language model its ids are the targets, -1 at padding."""
        mask = values["mask"]
        targets = {"label": values["label"]} if "label" in values else {}
        if self.words:
            targets = {"words": torch.where(mask, values["ids"], -1)}
        return Batch(values["ids"], ids, targets, mask)


class Text(Modality):
    """Sentences or pairs of them, each with its class; or one text in blocks, for a language model."""

    kind, things, targets, table, Config = "text", "sentences", ("class", "words"), "text", TextConfig
    low_priority = ids = True
    unused = ("multi_label", "crop_share", "img_size", "channels", "mean", "std")
    augments, reading_option, label_fields = frozenset(), "text", ("data", "data.text.label")

    def fit(self, data: DataConfig, model: Callable[[], ModelInput], *, learns: bool) -> DataConfig:
        """With the model's tokeniser and the most ids of a sample, where they are not set."""
        takes, text = model(), data.text
        if not takes.words:
            raise DataError(f"{takes.name} takes images, but {data.path} holds sentences")
        longest = text.longest or min(LONGEST, takes.places)
        if longest > takes.places:
            allowed = f"at most {takes.places}, the longest input of {takes.name}"
            raise SitusError(field="data.text.longest", value=longest, allowed=allowed)
        tokeniser = absolute(text.tokeniser or takes.home)
        return replace(data, text=replace(text, tokeniser=tokeniser, longest=longest, unlabelled=not learns))

    def size(self, data: DataConfig) -> tuple[int, int]:
        """1, and the most ids of a sample."""
        return 1, data.text.longest or LONGEST

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        columns = value if isinstance(value, Columns) else from_dict(Columns, value, where="text")
        return replace(data, text=columns.over(data.text))

    def unlabelled(self, data: DataConfig) -> DataConfig:
        return replace(data, text=replace(data.text, label=None))

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """The most ids of a sample, and the columns that were set."""
        columns = {name: value for name in COLUMNS if (value := getattr(data.text, name))}
        return {"longest": self.size(data)[1], **columns}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: ModelInput) -> DataConfig:
        longest: int | None = table.get("longest")
        columns: dict[str, Any] = {name: table.get(name) for name in COLUMNS}
        text = TextConfig(tokeniser=model.home, longest=longest or min(LONGEST, model.places), **columns)
        return replace(data, kind="text", target="words" if model.next_words else "class", text=text)

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        assert data is not None
        return [f"Sentences: at most {self.size(data)[1]} ids of the tokeniser beside it"]

    def is_at(self, path: Path, *, multi_label: bool) -> bool:
        """Whether it is a file of text or a folder of tables; with `multi_label` a table is one of labels."""
        if multi_label:
            return False
        if path.is_file():
            return path.suffix in (*SUFFIXES, PLAIN)
        return any(list_shards(path, suffix) for suffix in SUFFIXES)

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return any(is_text(column.type) for column in schema)

    def splits(self, path: Path, data: DataConfig) -> set[str]:
        return text_splits(path, words=data.target == "words")

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return open_text(path, wanted, data.text, words=data.target == "words")

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        training, words = augment is not None, data.target == "words"
        return TextPipeline(source, self.size(data)[1], training=training, words=words)
