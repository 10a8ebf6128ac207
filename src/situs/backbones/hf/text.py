"""What transformers' text models share as backbones, and their tokenisers.

Their tokens are all ordinary: [CLS] is one of the input ids, so there are no prefix tokens. `grid` is
(length,). The model's own positions hold `length` places; a shorter sentence takes the first ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from situs.backbones.base import Features, InputSpec
from situs.backbones.hf.layers import Head, HFBackbone, fit
from situs.backbones.hf.names import own_state
from situs.core.position import Positions
from situs.core.selection import Tokens
from situs.core.tokens import Grid
from situs.errors import SitusError
from situs.files import missing_reason

TEXT = {"images": "it reads the ids of words"}
"""What every text model refuses, and why."""


MADE = (
    *("position_ids", ".attn.bias", ".attn.masked_bias"),
    *(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
)
"""How tensors of old files end that newer models make themselves: numbers of places, causal masks, rotations."""


class TextBackbone(HFBackbone):
    """What the text models share: ids in, one row of tokens, positions for the first `length` places."""

    kinds: tuple[str, ...] = ("table",)
    refusals = TEXT

    def __init__(self, model: Any, head: Head, size: tuple[int, int] | None = None) -> None:
        longest = model.config.max_position_embeddings - self.first_row(model)
        height, length = size or (1, longest)
        if height != 1 or not 1 <= length <= longest:
            reason = f"img_size={size}: {type(model).__name__} takes a row of 1 to {longest} tokens: give (1, length)"
            raise SitusError(reason, field="img_size")
        super().__init__(model, head, (length,), 0)
        self.input = InputSpec(words=self.inner.get_input_embeddings().num_embeddings)

    @classmethod
    def first_row(cls, model: Any) -> int:  # noqa: ARG003  (a family that numbers otherwise reads it)
        """The row of the model's table that is its first place's."""
        return 0

    @property
    def num_classes(self) -> int:
        return self.model.config.num_labels if self.name.endswith("ForSequenceClassification") else 0

    @property
    def next_words(self) -> bool:
        """Whether its head gives the words to come."""
        return self.name.endswith(("LMHeadModel", "ForCausalLM"))

    def renamed(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return own_state(self.model, {name: value for name, value in state.items() if not name.endswith(MADE)})

    def _length(self, grid: Grid | None) -> int:
        """How many places a grid has, (length,); refused where they are more than the model knows."""
        length = self.num_tokens if grid is None else math.prod(grid)
        if length > self.num_tokens:
            self.own_grid(grid, f"it has only {self.num_tokens} places")
        return length

    def embed(self, x: Tensor) -> Tensor:
        """Ids [B, N] -> word vectors [B, N, D], without position. Of pairs of sentences [B, 2, N], the ids and which of
        the two they stand in; a decoder reads one behind the other and makes no difference."""
        x = x[:, 0] if x.dim() == 3 and x.shape[1] == 2 else x
        if x.dim() != 2 or x.is_floating_point() or x.shape[1] > self.num_tokens:
            raise SitusError(
                f"ids of shape {list(x.shape)} ({x.dtype}): {self.name} takes integers [B, N] "
                f"with N <= {self.num_tokens}",
                field="img_size",
            )
        return self.inner.get_input_embeddings()(x)

    def tokens(self, inputs: Tensor, mask: Tensor | None = None) -> Tokens:
        """Every word of ids as for `embed`, where no mask says which of them are real."""
        ids = inputs[:, 0] if inputs.dim() == 3 else inputs
        real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
        return Tokens(real.shape[1], real, self.special)

    def positions_of(self, tokens: Tokens) -> Positions:
        return self.positions((tokens.total,))

    def ready_to_select(self, kept: int) -> None:
        super().ready_to_select(kept)
        self.require("rows")  # selected tokens stand in random order, which a causal mask would take for theirs

    def ready_to_shuffle(self) -> None:
        self.require("rows")  # a causal mask would give the order away

    def fitted(self, positions: Positions | None, count: int) -> Positions:
        return fit(positions, count, self.num_tokens, self.kinds, self.name)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """The wrapped model's own forward: ids as for `embed` -> logits. mask: [B, N] bool, False for padding."""
        return self.classify(self.encode(self.embed(x), self.positions((x.shape[-1],)), mask=mask))

    def before_head(self, features: Features) -> Features:
        """What the head reads of sentences that are filled up behind their ends."""
        return features


TOKENISERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model")


def open_tokeniser(folder: Path) -> Any:
    """transformers' tokeniser of a model's folder; nothing is fetched."""
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in TOKENISERS):
        raise SitusError(
            f"{folder}: {missing_reason(folder, TOKENISERS[0])}, so texts cannot be tokenised",
            field="texts",
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokeniser fails in as many ways as there are kinds of them
        reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
        raise SitusError(f"{folder}: its tokeniser cannot be read: {reason}", field="texts") from error


def token_ids(folder: Path, texts: list[str], longest: int) -> list[list[int]]:
    """Each text as the ids of its tokens, those that a model's input begins and ends with among them."""
    return open_tokeniser(folder)(texts, truncation=True, max_length=longest)["input_ids"]
