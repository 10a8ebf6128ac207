"""What fine-tuning a locked model came to: its settings, the curves of the four ways, and the scores under the lock."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from situs.config import Checked
from situs.data.text import Columns
from situs.errors import SitusError, counted
from situs.limits import Count, Positive
from situs.locks.tuning.paper import RuleCheck
from situs.results import Result, Summary, Table, percent

WAYS = ("normal", "authorised", "unauthorised", "from scratch")
NEAR = 0.01
"""Accuracy below the owner's at which a thief counts as having caught up."""


@dataclass(frozen=True)
class TuningConfig(Checked):
    """How long each way trains, and on how much."""

    method: Literal["supervised", "language"] = "supervised"
    """What is learned: a class for each image or sentence, with a new head, or the next word, with the model's own."""

    count: Count = 1000
    """Labelled images or sentences to fine-tune on; of words the blocks."""

    test: Count = 2000
    """Images, sentences or blocks that the curves are measured on."""

    epochs: Count = 10
    """Passes over them, in each of the four ways."""

    steps: Count | None = None
    """Updates at most, in each of the four ways."""

    batch: Count = 50
    """Samples a step."""

    lr: Positive = 1e-3
    """Peak rate of AdamW."""

    thief_lr: tuple[Positive, ...] = ()
    """Further peak rates that those without the key try: of each way the run of the highest last accuracy on the test
    set counts, so that the lock is not praised for a rate that suits its owner alone. One that breaks off does not."""

    img_size: Count | None = None
    """Side of the images, for a model that is given by its name or its folder; by default its own."""

    longest: Count | None = None
    """Ids of a sentence at most, or of a block of words; by default 128, or what the model was trained with."""

    text: Columns = field(default_factory=Columns)
    """Columns of the sentences, where they are not those that the model remembers."""

    looks: Count = 10
    """Points of a curve."""

    pretrain_epochs: Count = 6
    """Passes over 8,000 of the embedded images to make the model that is locked, where none is given."""

    seed: int = 0
    """Of the new head, the key, and the order of the data."""

    def check(self) -> None:
        if self.batch > self.count:
            raise SitusError(field=("batch", "count"), value=self.batch, allowed=f"at most the {self.count} samples")


@dataclass
class Curve:
    """Steps, and the validation loss and accuracy after each. lr: the peak rate; None: that of the config."""

    steps: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    lr: float | None = None


class Score(NamedTuple):
    """Of one model on the test set. perplexity: exp(loss), which means something of words alone."""

    accuracy: float
    loss: float
    perplexity: float

    @staticmethod
    def of(loss: float, accuracy: float) -> Score:
        return Score(accuracy, loss, math.exp(min(loss, 700.0)))


@dataclass(frozen=True)
class LockTuning(Result):
    """What was found, by way. chance: accuracy of guessing.

    logits_gap: largest difference of the final logits, normal against authorised. weights_gap: likewise of the weights,
    after un-permuting the authorised ones.
    """

    file: ClassVar[str] = "finetuning"

    config: TuningConfig
    about: str
    curves: dict[str, Curve]
    chance: float
    logits_gap: float
    weights_gap: float
    rule: tuple[RuleCheck, ...] = ()
    """The paper's Eq. 6 on the model that was locked."""

    served: dict[str, Score] = field(default_factory=dict)
    """The model that was tuned normally, on the test set: open; locked and opened with its key; locked and run by its
    owner, who permutes the stream; locked and run by others."""

    things: str = "images"
    """What it was tuned on."""

    tries: dict[str, list[Curve]] = field(default_factory=dict)
    """Of each way every run, one a rate; `curves` has the one that counts."""

    notes: tuple[str, ...] = ()
    """What a reader must know of the data."""

    @property
    def words(self) -> bool:
        """Whether the next word was learned."""
        return self.config.method == "language"

    @property
    def withheld(self) -> float | None:
        """The share of what pretraining brought, in accuracy over from scratch, that the unauthorised lack at the end.

        None where pretraining brought nothing.
        """
        owner, thief, scratch = (self.curves[way].accuracy[-1] for way in ("normal", "unauthorised", "from scratch"))
        return (owner - thief) / (owner - scratch) if owner > scratch else None

    def caught_up(self, way: str) -> int | None:
        """The first step measured at which a way, at any rate that it tried, is within `NEAR` of the owner's last
        accuracy; None: never."""
        curves, wanted = self.tries.get(way) or [self.curves[way]], self.curves["normal"].accuracy[-1] - NEAR
        looks = [look for curve in curves for look in zip(curve.steps, curve.accuracy, strict=True)]
        return min((step for step, got in looks if got >= wanted), default=None)

    def owner_sentence(self) -> str:
        """What the owner of a model should read first."""
        owner, thief, scratch = (
            percent(self.curves[way].accuracy[-1]) for way in ("normal", "unauthorised", "from scratch")
        )
        done = "words guessed right" if self.words else "right"
        said = (
            f"With {self.config.count:,} {'' if self.words else 'labelled '}{self.things} its owner gets {owner} "
            f"{done}, a thief without the key {thief}, and training from scratch {scratch}"
        )
        worth = self.curves["normal"].accuracy[-1] - self.curves["from scratch"].accuracy[-1]
        if self.withheld is None or worth < NEAR:
            brought, left = (
                ("nothing", "nothing") if self.withheld is None else ("less than a point", "next to nothing")
            )
            return f"{said}: pretraining brought {brought} here, so that there was {left} to withhold."
        if worth < 2 * self._spread():
            few = f"{self.config.test:,} {self.things} of the test set"
            return f"{said}: {few} are too few to tell what pretraining brought here, or what the lock withholds of it."
        kept = min(1.0, max(0.0, self.withheld))
        said += f": the lock withholds {percent(kept, 0)} of what the pretraining was worth"
        step = self.caught_up("unauthorised")
        if step is None:
            last = counted(self._last(), "updates")
            return f"{said}, and the thief does not come within a point of the owner in {last}."
        return f"{said}; the thief comes within a point of the owner after {counted(step, 'updates')}."

    def _spread(self) -> float:
        """Standard error of what pretraining brought, from how many were tested; 0 of words, which are many."""
        shares = (self.curves[way].accuracy[-1] for way in ("normal", "from scratch"))
        return 0.0 if self.words else (sum(share * (1 - share) for share in shares) / self.config.test) ** 0.5

    def _last(self) -> int:
        return self.curves["unauthorised"].steps[-1]

    def summary(self) -> Summary:
        """The owner's sentence; a row a way; the scores under the lock; the paper's rule for each kind of key."""
        gap = (
            f"Normal and authorised ought to differ by rounding alone: their logits differ by at most "
            f"{self.logits_gap:.1e}, their weights by {self.weights_gap:.1e} after {self.curves['normal'].steps[-1]} "
            f"float32 steps. Chance is {percent(self.chance)}."
        )
        ways = ["Dropout is off in all ways."]
        if self.config.thief_lr:
            rates = ", ".join(f"{rate:g}" for rate in dict.fromkeys((self.config.lr, *self.config.thief_lr)))
            ways.append(
                f"Those without the key tried the rates {rates}; of each way the one of the highest last accuracy on "
                "the test set is shown, which favours them."
            )
        rules = [
            f"The paper's Eq. 6 {'holds' if each.holds else 'fails'} with {each.key}: an error of {each.error:.0e} in "
            f"float64; {each.why}."
            for each in self.rule
        ]
        head = ["way", "accuracy", "loss", *(["perplexity"] if self.words else [])]
        rows = []
        for way, curve in self.curves.items():
            last = Score.of(curve.loss[-1], curve.accuracy[-1])
            more = [f"{last.perplexity:.4g}"] if self.words else []
            rate = "" if curve.lr is None else f" (rate {curve.lr:g})"
            rows.append([way + rate, percent(last.accuracy, 2), f"{last.loss:.4f}", *more])
        tables = [Table(self.about, head, rows)]
        if self.served:
            served = [[name, f"{100 * s.accuracy:.10f} %", f"{s.loss:.10f}"] for name, s in self.served.items()]
            tables.append(Table("Inference after normal fine-tuning", ["the model", "accuracy", "loss"], served))
        return Summary(self.owner_sentence(), tuple(tables), (gap, *ways, *self.notes, *rules))

    def numbers(self) -> dict[str, Any]:
        """The settings, and every curve."""
        numbers = asdict(self)
        del numbers["provenance"]
        numbers["served"] = {name: score._asdict() for name, score in self.served.items()}
        caught = {way: self.caught_up(way) for way in WAYS[2:]}
        last = {way: Score.of(curve.loss[-1], curve.accuracy[-1])._asdict() for way, curve in self.curves.items()}
        said = {"sentence": self.owner_sentence(), "withheld": self.withheld}
        return {**numbers, **said, "caught_up": caught, "last": last}
