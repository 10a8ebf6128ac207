"""What measurements need of a method beside its loss: that it solves puzzles, or that it hides positions."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Method


class Puzzle(NamedTuple):
    """The positions that a method guesses for the patches of a batch, patches in one order throughout.

    places: [B, K], the true positions of the visible patches. guesses: [B, K], the guessed ones. known: how many
    special patches come first: the context of MP3 (guessed too), the anchors of DropPos (not guessed). asked: index of
    the first patch whose guess counts. grid: (h, w) of the positions. hint_ratio: share of the guessed patches that
    keep their position. ranks: [B, K - asked], rank of the true position.
    """

    places: Tensor
    guesses: Tensor
    known: int
    asked: int
    grid: tuple[int, ...]
    hint_ratio: float = 0.0
    ranks: Tensor | None = None

    @property
    def right(self) -> Tensor:
        """[B, K - asked]: whether a guess is right, of those that count."""
        return (self.guesses == self.places)[:, self.asked :]


class SolvesPuzzles(Method):
    """A method with a position head, which guesses where the patches of a batch were."""

    puzzle_ratios: ClassVar[tuple[str, ...]]
    """Fields of its config that make a puzzle."""

    @abstractmethod
    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """Guesses the positions of a batch's patches, with the draws of its first epoch."""

    @property
    def hint_ratio(self) -> float:
        """The share of the guessed patches that keep their position."""
        return 0.0

    @property
    def trained_ratios(self) -> tuple[float, ...]:
        """Its own values of `puzzle_ratios`."""
        return tuple(getattr(self.config, name) for name in self.puzzle_ratios)

    def at(self, *ratios: float) -> Self:
        """The same weights with other values of `puzzle_ratios`."""
        return self.under(**dict(zip(self.puzzle_ratios, ratios, strict=True)))

    def check_puzzle(self, batch: Batch) -> None:
        """Refuses a batch whose samples differ in length."""
        if self.tokens(batch).real is not None:
            reason = "these samples (sentences, for example) differ in length, so their puzzles have no common shape"
            raise SitusError(f"{type(self).__name__}: {reason}")

    @property
    def chance(self) -> dict[str, float]:
        if self.backbone.input.words:  # samples have different numbers of places
            return {}
        return {"position_accuracy": self.hint_ratio + (1 - self.hint_ratio) / self.backbone.num_tokens}


class HidesPlaces(Method):
    """A method whose step shuffles a share of the patches and gives them one shared vector instead of positions."""

    @property
    @abstractmethod
    def hidden_share(self) -> float:
        """The share."""

    @abstractmethod
    def table_loss(self, hidden: Tensor, when: When) -> Tensor | None:
        """The part of the loss that depends on the position table alone, not on samples; None if there is none.

        hidden: [B, N] bool, the hidden positions.
        """
