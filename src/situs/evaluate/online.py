"""A look at the representation while it is being learned: a hook for the training loop (`probe_every`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from situs.config import Checked
from situs.evaluate.accuracy import hard
from situs.evaluate.features import FeatureSet, Pool, extract
from situs.evaluate.inference import evaluating
from situs.evaluate.knn import knn_accuracy
from situs.evaluate.position import position_accuracy
from situs.limits import Count, Positive
from situs.methods.base import Batch, Method
from situs.train.contract import RunState

Batches = Callable[[], Iterable[Batch]]


@dataclass(frozen=True)
class ProbeConfig(Checked):
    """What is looked at, and how often."""

    every: Count = 10
    """Epochs between two looks."""

    k: Count = 20
    """Neighbours of the kNN classifier."""

    temperature: Positive = 0.07
    """τ of its weights exp(similarity / τ)."""

    pool: Pool = "mean"
    """The mean of the patches, or CLS."""

    precision: str = "fp32"
    """Arithmetic of the forwards: fp32 or bf16."""


class OnlineProbe:
    """kNN accuracy, and position accuracy where there is a position head, of the weights' mean where there is one.

    train, test: give the batches of two sets without augmentation, anew at each call; a few thousand samples are
    enough. Every rank looks at all of them, so that all come to the same numbers and none waits for another.
    """

    def __init__(self, train: Batches, test: Batches, config: ProbeConfig | None = None) -> None:
        self.train, self.test = train, test
        self.config = config or ProbeConfig()

    def after_step(self, state: RunState) -> None:
        """Nothing: a probe costs too much for every step."""

    def after_epoch(self, state: RunState) -> None:
        """Looks after every `every` epochs and after the last."""
        if state.step // state.steps_per_epoch % self.config.every == 0 or state.step == state.total:
            with evaluating(state.method, ema=state.ema):
                state.log(self.look(state.method))

    def look(self, method: Method) -> dict[str, float]:
        """The numbers for this method now: knn_accuracy with labels, position_accuracy_test with a position head."""
        config, found = self.config, {}
        if "tokens" not in method.backbone.refusals:
            train, test = (self._features(method, batches) for batches in (self.train, self.test))
            if train.labels is not None and test.labels is not None:
                k = min(config.k, len(train.labels))
                pairs = (train.features, hard(train.labels), test.features, hard(test.labels))
                found["knn_accuracy"] = knn_accuracy(*pairs, k, config.temperature)
        if method.puzzle_ratios:
            found["position_accuracy_test"] = position_accuracy(method, self.test(), precision=config.precision)
        return found

    def _features(self, method: Method, batches: Batches) -> FeatureSet:
        return extract(
            method.backbone,
            batches(),
            self.config.pool,
            positions=method.sees_positions,
            precision=self.config.precision,
        )
