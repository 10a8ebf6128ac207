"""MP3: masked patch position prediction (Zhai et al., 2022, arXiv 2207.07611).

Remove the positions of every patch, use a random context of patches as keys and values, and classify the position of
every patch, context included: one linear classifier over all N positions.

Deviations, each from an error in the paper's Algorithm 1: the context is N - int(ηN) patches as the text says (its
`M = int(N*eta)` would leave none at η = 0), and the first of a random order (its indexing composes the order with
itself, which is biased). CLS has no loss and is always in the context, so it is trained for fine-tuning; the paper
does not say whether CLS is in the context. A word that occurs twice in a sentence is the same token both times, so the
best guess for each occurrence is right half the time. Accuracy on sentences therefore does not reach 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from torch import Tensor, nn

from situs.backbones.base import Backbone, Features
from situs.config import Checked
from situs.core.masking import kept_of
from situs.core.random import uniform
from situs.core.selection import Selection
from situs.core.when import When
from situs.limits import Within
from situs.methods.base import Batch, Draws, Method, Output
from situs.methods.heads import init_classifier, place_ranks, position_accuracy, position_loss
from situs.methods.measured import Puzzle, SolvesPuzzles
from situs.methods.retired import RETIRED


@dataclass(frozen=True)
class MP3Config(Checked):
    """Settings of MP3."""

    retired: ClassVar = RETIRED["mp3"]

    mask_ratio: Annotated[float, Within("[0, 1)")] = 0.75
    """η: fraction of masked patches. They attend to the other patches, but no patch attends to them. The paper uses .5
    on CIFAR-100, .8 on Tiny ImageNet and .75 on ImageNet."""

    anchor_ratio: Annotated[float, Within("[0, 1)")] = 0.0
    """Fraction of patches that keep their position as a hint. The paper uses 0 on images. On speech it uses .05,
    because the task is too hard without hints."""


class DrawnContext(Method):
    """All tokens in a drawn order, of which the first are the keys and values of every layer."""

    Config: ClassVar[type[Any]] = MP3Config
    needs: ClassVar[tuple[str, ...]] = ("tokens", "context")
    reads_text: ClassVar[bool] = True

    def draw(self, batch: Batch, when: When) -> Draws:
        """order: [B, N], the context first. anchors: [B, N] bool in that order, True for patches with a position."""
        tokens = self.tokens(batch)
        order = tokens.shuffled(uniform(when.seed, when.epoch, batch.ids, "mp3.context", (tokens.total,)))
        if not self.config.anchor_ratio:
            return {"order": order}
        noise = uniform(when.seed, when.epoch, batch.ids, "mp3.anchors", (tokens.total,))
        return {"order": order, "anchors": tokens.select(order).some(noise, self.config.anchor_ratio)}

    def encode_drawn(self, batch: Batch, draws: Draws) -> tuple[Features, Selection]:
        """Features of all tokens, the context first: without positions the order does not matter, and keys and values
        are then a slice in every layer instead of a gather."""
        selected, anchors = self.tokens(batch).select(draws["order"]), draws.get("anchors")
        context, forgotten = selected.context(self.config.mask_ratio), None if anchors is None else ~anchors
        positions = anchors is not None
        features = self.backbone.encode_at(batch.inputs, selected, context, positions=positions, forgotten=forgotten)
        return features, selected

    @classmethod
    def uses_positions(cls, config: MP3Config) -> bool:
        return config.anchor_ratio > 0


class MP3(DrawnContext, SolvesPuzzles):
    """`draw` orders the tokens, context first; `forward` reads like Figure 1."""

    puzzle_ratios: ClassVar[tuple[str, ...]] = ("mask_ratio",)

    def __init__(self, backbone: Backbone | nn.Module, config: MP3Config | None = None) -> None:
        super().__init__(backbone, config)
        self.position_head = init_classifier(nn.Linear(self.backbone.out_dim, self.backbone.num_tokens))

    def forward(self, batch: Batch, draws: Draws) -> Output:
        features, selected = self.encode_drawn(batch, draws)
        start, queries = selected.behind(0)
        logits, places = self.position_head(features.patches[:, start:]), selected.order[:, start:]
        metrics = {"position_accuracy": position_accuracy(logits, places, queries)}
        return Output(position_loss(logits, places, queries), metrics, {"logits": logits.detach(), "places": places})

    @property
    def context(self) -> int:
        """M: number of patches that are keys and values."""
        return kept_of(self.config.mask_ratio, self.backbone.num_tokens)

    @property
    def hint_ratio(self) -> float:
        return self.config.anchor_ratio

    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """The context comes first; the position of every patch is predicted."""
        self.check_puzzle(batch)
        extras = self(batch, self.draw(batch, When(seed=seed))).extras
        logits, places = extras["logits"], extras["places"]
        ranks = place_ranks(logits, places)
        return Puzzle(places, logits.argmax(dim=-1), self.context, 0, self.grid, self.hint_ratio, ranks)

    def place_logits(self, inputs: Tensor) -> Tensor:
        """Logits [B, N, N] over the positions of the patches of inputs, by their content alone."""
        return self.position_head(self.backbone.encode(self.backbone.embed(inputs), None).patches)
