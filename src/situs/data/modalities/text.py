"""The way of a sentence: its ids, filled up to the longest of its batch, and the mask that says which are real.

A batch is [B, N] int64; of pairs [B, 2, N], the ids and which of the two sentences they stand in. N is a multiple of 8:
a few lengths are met again and again, which a compiled step knows already.
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
from situs.data.modalities.base import Fits, Modality
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

    longest: that the model takes. words: the ids themselves are what is to be learned.
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
        """How many ids a sample has at most."""
        return {"longest": self.longest}

    def check_model(self, words: int, name: str) -> None:
        """Refuses ids of more words than a model knows."""
        tokeniser = text_of(self.source).tokeniser
        assert tokeniser is not None
        if tokeniser.words > words:
            said = f"its tokeniser has {tokeniser.words:,} words, and {name} knows {words:,}"
            told = f"{tokeniser.folder}: {said}; name the folder of the model's own"
            raise SitusError(told, field="data.text.tokeniser")

    def lengths(self) -> Tensor | None:
        """How many ids each sample has, [n]; those of blocks are alike."""
        if self.words:
            return None
        whole = text_of(self.source)
        return torch.tensor([whole.length(self.source.origin(index)[1]) for index in range(len(self.source))])

    def collate(self, epoch: int, draws: list[int], samples: list[dict[str, Any]]) -> dict[str, Tensor]:  # noqa: ARG002
        """ "ids" ([b, N], of pairs [b, 2, N]), "mask" [b, N], and the labels."""
        lengths = torch.tensor([sample["ids"].shape[-1] for sample in samples])
        width = self.longest if self.words else min(self.longest, -(-int(lengths.max()) // _MULTIPLE) * _MULTIPLE)
        ids = torch.full((len(samples), *samples[0]["ids"].shape[:-1], width), self.pad)
        if ids.dim() == 3:  # what fills up stands in the first sentence, as transformers has it
            ids[:, 1] = 0
        for row, sample in enumerate(samples):
            ids[row, ..., : lengths[row]] = sample["ids"]
        values = {"ids": ids, "mask": torch.arange(width) < lengths[:, None]}
        if "label" in samples[0]:
            values["label"] = torch.tensor([sample["label"] for sample in samples])
        return values

    def finish(self, values: Mapping[str, Tensor], ids: Tensor, noise: Noise) -> Batch:  # noqa: ARG002
        """The words of a language model are its own targets, -1 where there is none."""
        mask = values["mask"]
        targets = {"label": values["label"]} if "label" in values else {}
        if self.words:
            targets = {"words": torch.where(mask, values["ids"], -1)}
        return Batch(values["ids"], ids, targets, mask)


class Text(Modality):
    """Sentences or pairs of them, each with its class; or all words as one text, for a language model."""

    kind, things, targets, table, Config = "text", "sentences", ("class", "words"), "text", TextConfig
    last = ids = True
    unused = ("multi_label", "crop_share", "img_size", "channels", "mean", "std")
    augments, reading, label_fields = frozenset(), "text", ("data", "data.text.label")

    def fit(self, data: DataConfig, model: Callable[[], Fits], *, learns: bool) -> DataConfig:
        """With the tokeniser that reads them and the ids of the longest: the model's own."""
        made, text = model(), data.text
        if not made.words:
            raise DataError(f"{made.name} takes images, and {data.path} holds sentences")
        longest = text.longest or min(LONGEST, made.places)
        if longest > made.places:
            allowed = f"at most {made.places}, the places that {made.name} knows"
            raise SitusError(field="data.text.longest", value=longest, allowed=allowed)
        tokeniser = absolute(text.tokeniser or made.home)
        return replace(data, text=replace(text, tokeniser=tokeniser, longest=longest, unlabelled=not learns))

    def size(self, data: DataConfig) -> tuple[int, int]:
        """1, and the ids of the longest."""
        return 1, data.text.longest or LONGEST

    def read_as(self, data: DataConfig, value: Any) -> DataConfig:
        columns = value if isinstance(value, Columns) else from_dict(Columns, value, where="text")
        return replace(data, text=columns.over(data.text))

    def unlabelled(self, data: DataConfig) -> DataConfig:
        return replace(data, text=replace(data.text, label=None))

    def prepared(self, data: DataConfig) -> dict[str, Any]:
        """How long they may be, and the columns that were asked for."""
        columns = {name: value for name in COLUMNS if (value := getattr(data.text, name))}
        return {"longest": self.size(data)[1], **columns}

    def from_prepared(self, data: DataConfig, table: dict[str, Any], model: Fits) -> DataConfig:
        longest: int | None = table.get("longest")
        columns: dict[str, Any] = {name: table.get(name) for name in COLUMNS}
        text = TextConfig(tokeniser=model.home, longest=longest or min(LONGEST, model.places), **columns)
        return replace(data, kind="text", target="words" if model.next_words else "class", text=text)

    def facts(self, data: DataConfig | None, shape: tuple[int, ...] | None, channels: int) -> list[str]:  # noqa: ARG002
        assert data is not None
        return [f"Sentences: at most {self.size(data)[1]} ids of the tokeniser beside it"]

    def lies_at(self, path: Path, *, multi_label: bool) -> bool:
        """A file of its suffix, and a folder of tables; with `multi_label` a table is one of labels."""
        if multi_label:
            return False
        if path.is_file():
            return path.suffix in (*SUFFIXES, PLAIN)
        return any(list_shards(path, each) for each in SUFFIXES)

    def in_columns(self, schema: Any, *, asked: bool) -> bool:  # noqa: ARG002
        return any(is_text(each.type) for each in schema)

    def splits(self, path: Path, data: DataConfig) -> set[str]:
        return text_splits(path, words=data.target == "words")

    def open(self, path: Path, wanted: Wanted, data: DataConfig) -> Source:
        return open_text(path, wanted, data.text, words=data.target == "words")

    def pipeline(self, source: Source, data: DataConfig, augment: AugmentConfig | None, *_: Any) -> Pipeline:
        training, words = augment is not None, data.target == "words"
        return TextPipeline(source, self.size(data)[1], training=training, words=words)
