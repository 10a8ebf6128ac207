"""Language modelling: each word is predicted from those before it by a causal model's own head.

The loss is the mean over all words of a block but the first, and its exponential the perplexity. A last, shorter block
is padded, and padding adds 0 to the mean of its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from situs.backbones.base import Backbone
from situs.config import Checked
from situs.core.when import When
from situs.data.batch import VOID
from situs.errors import SitusError
from situs.methods.base import Batch, Draws, Method, Output


@dataclass(frozen=True)
class LanguageConfig(Checked):
    """This method has no settings."""


class Language(Method):
    """Cross entropy of the next word. Works on every causal model with a head for words."""

    Config: ClassVar[type[LanguageConfig]] = LanguageConfig
    needs: ClassVar[tuple[str, ...]] = ("tokens",)
    needs_targets: ClassVar[tuple[str, ...]] = ("words",)
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: LanguageConfig | None = None) -> None:
        super().__init__(backbone, config)
        backbone = self.backbone
        if not backbone.next_words:
            raise SitusError(
                f"{backbone.name} has no head for the next word; GPT2LMHeadModel and LlamaForCausalLM, for example, "
                "have one"
            )

    def draw(self, batch: Batch, when: When) -> Draws:
        return {}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        logits = self.backbone(batch.inputs, batch.mask)
        if "words" not in batch.targets:
            raise SitusError("a language model learns from words, and this data set has no words", field="data")
        losses, known = word_losses(logits, batch.targets["words"])
        loss = losses.sum() / known.numel()  # padding counts, so that ranks and micro-batches sum to the whole batch
        with torch.no_grad():
            right = (logits[:, :-1].argmax(dim=-1) == batch.targets["words"][:, 1:]) & known
            accuracy = right.sum() / known.sum().clamp(min=1)
        return Output(loss, {"accuracy": accuracy}, {"logits": logits.detach()})


def word_losses(logits: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each word but the first, [B, N - 1], 0 for padding, and a mask of the words.

    logits: [B, N, V]. words: [B, N], VOID for padding.
    """
    truth = words[:, 1:]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    flat = logits[:, :-1].to(dtype).flatten(0, 1)
    losses = F.cross_entropy(flat, truth.flatten(), ignore_index=VOID, reduction="none")
    return losses.view_as(truth), truth != VOID
