"""What measurements ask of a method beside its loss: that it solves puzzles, that it hides places."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, NamedTuple, Self

from torch import Tensor

from situs.core.when import When
from situs.errors import SitusError
from situs.methods.base import Batch, Method


class Puzzle(NamedTuple):
    """Where a method puts the patches of a batch, patches in one order throughout.

    places: [B, K], where each patch that it saw really was. guesses: [B, K], where it puts it. known: how many come
    first that are special: the context of MP3 (guessed too), the anchors of DropPos (not guessed). asked: the first
    patch whose guess counts. grid: (h, w) of the places. hint_ratio: share of the patches asked that were given their
    place. ranks: [B, K - asked], how many places were held likelier than the true one.
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
    """A method whose position head says where the patches of a batch were."""

    puzzle_ratios: ClassVar[tuple[str, ...]]
    """Fields of its config that say how a puzzle is made."""

    @abstractmethod
    def solve(self, batch: Batch, *, seed: int) -> Puzzle:
        """Puts the patches of a batch where its position head says that they were, by the draws of its first epoch."""

    @property
    def hint_ratio(self) -> float:
        """The share of the patches asked for that its puzzles give their place."""
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
            said = "samples differ in length, as sentences do, so that their puzzles have no common form"
            raise SitusError(f"{type(self).__name__}: {said}")

    @property
    def chance(self) -> dict[str, float]:
        if self.backbone.input.words:  # samples have different numbers of places
            return {}
        return {"position_accuracy": self.hint_ratio + (1 - self.hint_ratio) / self.backbone.num_tokens}


class HidesPlaces(Method):
    """A method whose step shuffles a share of the patches and gives them one shared place."""

    @property
    @abstractmethod
    def hidden_share(self) -> float:
        """The share."""

    @abstractmethod
    def table_loss(self, hidden: Tensor, when: When) -> Tensor | None:
        """What it adds to the loss that no sample decides, but the position table alone; None where there is nothing.

        hidden: [B, N] bool, the places that are hidden.
        """
