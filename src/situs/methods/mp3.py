"""MP3: masked patch position prediction (Zhai et al., 2022, arXiv 2207.07611).

Take the positions away from every patch, let a random context of patches serve as keys and values, and ask every
patch, context included, where it was: one linear classifier over all N places.

Deviations, each from an error in the paper's Algorithm 1: the context is N - int(ηN) patches as the text says (its
`M = int(N*eta)` would leave none at η = 0), and the first of a random order (its indexing composes the order with
itself, which is biased). CLS bears no loss and is always in the context, so that it exists for fine-tuning; the paper
does not say whether it is. A word that stands twice in a sentence is the same token both times, so that the best answer
to either is half right: accuracy on sentences does not reach 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.config import Checked
from situs.core.masking import kept_of
from situs.core.random import uniform
from situs.core.selection import Selection
from situs.core.when import When
from situs.limits import Within
from situs.methods.base import Batch, Draws, Method, Output, Puzzle
from situs.methods.heads import init_classifier, place_ranks, position_accuracy, position_loss
from situs.methods.retired import RETIRED


@dataclass(frozen=True)
class MP3Config(Checked):
    """MP3's own settings."""

    retired: ClassVar = RETIRED["mp3"]

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
    """η: the share of patches that serve only as queries. Paper: .5 on CIFAR-100, .8 Tiny ImageNet, .75 ImageNet."""

    anchor_ratio: Annotated[float, Within("[0, 1)")] = 0.0
    """Share of patches that are told their place. 0 on images; .05 in speech, where the task is too hard without."""


class MP3(Method):
    """`draw` orders the tokens, context first; `forward` reads like Figure 1."""

    Config: ClassVar[type[MP3Config]] = MP3Config
    needs: ClassVar[tuple[str, ...]] = ("tokens", "context")
    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio",)
    names_places: ClassVar[bool] = True
    reads_text: ClassVar[bool] = True

    def __init__(self, backbone: Backbone | nn.Module, config: MP3Config | None = None) -> None:
        super().__init__(backbone, config)
        self.position_head = init_classifier(self.new_head())

    def new_head(self) -> nn.Linear:
        """Reads a token, tells its place."""
        return nn.Linear(self.backbone.out_dim, self.backbone.num_tokens)

    def draw(self, batch: Batch, when: When) -> Draws:
        """order: [B, N], the context's places first. anchors: [B, N] bool in that order, where places are told."""
        tokens = self.tokens(batch)
        order = tokens.shuffled(uniform(when.seed, when.epoch, batch.ids, "mp3.context", (tokens.total,)))
        if not self.config.anchor_ratio:
            return {"order": order}
        chance = uniform(when.seed, when.epoch, batch.ids, "mp3.anchors", (tokens.total,))
        return {"order": order, "anchors": tokens.select(order).some(chance, self.config.anchor_ratio)}

    def forward(self, batch: Batch, draws: Draws) -> Output:
        features, selected = self.encode_drawn(batch, draws)
        start, asked = selected.behind(0)
        logits, places = self.position_head(features.patches[:, start:]), selected.order[:, start:]
        metrics = {"position_accuracy": position_accuracy(logits, places, asked)}
        return Output(position_loss(logits, places, asked), metrics, {"logits": logits.detach(), "places": places})

    def encode_drawn(self, batch: Batch, draws: Draws) -> tuple[Features, Selection]:
        """Features of all tokens, the context in front: without positions their order means nothing, and keys and
        values are then a slice in every layer instead of a gather."""
        selected, told = self.tokens(batch).select(draws["order"]), draws.get("anchors")
        context, forgotten = selected.context(self.config.mask_ratio), None if told is None else ~told
        known = told is not None
        return self.backbone.encode_at(batch.inputs, selected, context, positions=known, forgotten=forgotten), selected

    @property
    def context(self) -> int:
        """M: how many patches serve as keys and values."""
        return kept_of(self.config.mask_ratio, self.backbone.num_tokens)

    @classmethod
    def uses_positions(cls, config: MP3Config) -> bool:
        return config.anchor_ratio > 0

    @property
    def told(self) -> float:
        return self.config.anchor_ratio

    def telling(self, share: float) -> MP3:
        """The same weights with another share of hints, for evaluations; 0: none."""
        return self.under(anchor_ratio=share)

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The context stands first; every patch is asked for."""
        extras = self(self.puzzling(batch), self.draw(batch, When(seed=seed, epoch=0))).extras
        logits, places = extras["logits"], extras["places"]
        return Puzzle(places, logits.argmax(dim=-1), self.context, 0, self.grid, self.told, place_ranks(logits, places))

    def place_logits(self, inputs: Tensor) -> Tensor:
        return self.position_head(self.backbone.encode(self.backbone.embed(inputs), None).patches)
