"""The way of a sentence: its ids, filled up to the longest of its batch, and the mask that says which are real.

A batch is [B, N] int64; of pairs [B, 2, N], the ids and which of the two sentences they stand in. N is a multiple of 8:
a few lengths are met again and again, which a compiled step knows already.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from situs.data.augment.recipes import AugmentConfig
from situs.data.batch import VOID, Batch
from situs.data.pipeline import Noise, Pipeline
from situs.data.sources.base import Source
from situs.data.sources.text import BlockSource, TextSource
from situs.errors import SitusError

_MULTIPLE = 8


def check_augment(augment: AugmentConfig) -> None:
    """Refuses what is done to images and clips."""
    for each in fields(augment):
        value = getattr(augment, each.name)
        if value != (each.default if each.name != "audio" else type(value)()):
            raise SitusError(f"{each.name}={value}: is not for sentences", field=f"augment.{each.name}")


def text_of(source: Source) -> TextSource | BlockSource:
    """The set of text that a source is, or is a part of."""
    whole = source.origin(0)[0] if len(source) else source
    if not isinstance(whole, (TextSource, BlockSource)) or whole.ids is None or whole.tokeniser is None:
        raise SitusError(f"{source.name}: holds no sentences that a tokeniser has read", field="data")
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
        """The words of a language model are its own targets."""
        mask = values["mask"]
        targets = {"label": values["label"]} if "label" in values else {}
        if self.words:
            targets = {"words": torch.where(mask, values["ids"], VOID)}
        return Batch(values["ids"], ids, targets, mask)
