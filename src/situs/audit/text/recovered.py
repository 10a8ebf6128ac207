"""What an attacker recovers of the sentences behind an upload, compared with the truth.

Beside it: whether an attacker with candidates for a sentence picks the true one, the least that a defence must prevent.
What was sent is compared with the gradients of the batch as it is, and with another word in one of its sentences. Noise
of deviation σ hides which of the two it was only if their gradients differ by less than a few σ over *all* numbers that
are sent; an attack that must find the words loses them far earlier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from situs.audit.attacks.base import Fact
from situs.audit.deadline import Deadline
from situs.audit.defences import Defence, Gradients, NoDefence
from situs.audit.text.victim import Sentence, TextVictim, text_gradients

UNNAMED = -1
"""A token of a sentence whose word the attacker cannot name."""


@dataclass(frozen=True)
class Recovered:
    """words: those that are in the batch, at any place. sentences: whole ones, each confirmed by the gradients of the
    second block; of a batch of one at least the words at places where no other word fits or whose rows match the
    place's, `UNNAMED` between them. facts: ranks and counts. reason: why nothing, or not all, was recovered; partial:
    how far the attack came where it was stopped. placed: (word, place) in an unknown sentence of the batch.
    """

    words: frozenset[int] = frozenset()
    sentences: tuple[Sentence, ...] = ()
    facts: Mapping[str, Fact] = field(default_factory=dict)
    reason: str | None = None
    partial: str | None = None
    placed: frozenset[tuple[int, int]] = frozenset()


class Read(NamedTuple):
    """One sentence and what was recovered of it. name: for a reader. recovered: the sentence matched with it, () if
    none; of a batch whose words are known at places only, those of its words. known: for each token, whether its word
    is known to be in the batch. grouped: whether `recovered` is known to be one sentence. picked: whether an
    attacker picks it among candidates with one word changed; None where that was not tried. tokens: how many there are;
    right: at how many of their places the recovered sentence has the same word.
    """

    name: str
    truth: Sentence
    recovered: Sentence
    known: tuple[bool, ...]
    grouped: bool = True
    picked: bool | None = None

    @property
    def tokens(self) -> int:
        return len(self.truth)

    @property
    def right(self) -> int:
        return _right(self.truth, self.recovered)

    @property
    def whole(self) -> bool:
        return self.grouped and self.truth == self.recovered

    @property
    def scores(self) -> dict[str, float]:
        """By the metrics of the gate."""
        return {
            "words": sum(self.known) / self.tokens,
            "tokens": self.right / self.tokens,
            "sentences": float(self.whole),
            "picked": float(self.whole or bool(self.picked)),
        }


def score(names: Sequence[str], truth: Sequence[Sentence], recovered: Recovered) -> list[Read]:
    """Each true sentence with the recovered one of the pairing that has most tokens right."""
    reads = [Read(name, sentence, (), _known(sentence, recovered)) for name, sentence in zip(names, truth, strict=True)]
    if recovered.sentences:
        right = np.array([[_right(real, other) for other in recovered.sentences] for real in truth])
        for row, column in zip(*linear_sum_assignment(-right), strict=True):
            if right[row, column]:
                reads[row] = reads[row]._replace(recovered=recovered.sentences[column])
    return [max(read, _placed(read, recovered), key=lambda read: (read.right, read.grouped)) for read in reads]


def _placed(read: Read, recovered: Recovered) -> Read:
    """The read with the words that are known at their places, in an unknown sentence of the batch."""
    words = [word if (word, place) in recovered.placed else UNNAMED for place, word in enumerate(read.truth)]
    return read._replace(recovered=tuple(words), grouped=False)


def _right(truth: Sentence, recovered: Sentence) -> int:
    return sum(a == b for a, b in zip(truth, recovered, strict=False))


def _known(truth: Sentence, recovered: Recovered) -> tuple[bool, ...]:
    return tuple(word in recovered.words for word in truth)


# --- candidates ------------------------------------------------------------------------------------------------------


DECOYS, SURE = 3, 0.99
"""Candidates beside the true sentence, each with one other word, and the probability from which one is picked."""


def pick(
    victim: TextVictim,
    upload: Gradients,
    truth: Sequence[Sentence],
    asked: Sequence[int],
    *,
    labels: Sequence[int],
    bound: Defence | None = None,
    seed: int = 0,
    deadline: Deadline | None = None,
) -> dict[int, bool]:
    """Sentence number -> whether an attacker picks it among its decoys, for the numbers `asked`.

    bound: what is done to gradients before noise. The attacker knows the rest of the batch, labels and masked places;
    it takes for noise what the likeliest candidate leaves.
    """

    def left(batch: Sequence[Sentence]) -> float:
        gradients = text_gradients(victim, batch, labels=labels, defence=bound or NoDefence(), seed=seed)
        return sum(
            float((sent - gradients[name].to(sent.dtype)).double().square().sum()) for name, sent in upload.items()
        )

    picked, count = dict[int, bool](), sum(sent.numel() for sent in upload.values())
    chance = torch.Generator().manual_seed(seed)
    real = left(truth) if asked else 0.0
    for number in asked:
        if deadline is not None and deadline.over():
            break
        near = decoys(victim, truth[number], chance)
        others = [left([*truth[:number], other, *truth[number + 1 :]]) for other in near]
        variance = max(min([real, *others]) / count, 1e-300)
        odds = sum(math.exp(min((real - other) / (2 * variance), 700.0)) for other in others)
        picked[number] = bool(others) and 1 / (1 + odds) > SURE
    return picked


def decoys(victim: TextVictim, sentence: Sentence, chance: torch.Generator) -> list[Sentence]:
    """Copies of the sentence with one other word, at different places where it has several."""
    special = set(victim.tokeniser.all_special_ids)
    places = [place for place, word in enumerate(sentence) if word not in special]
    size = victim.backbone.inner.get_input_embeddings().weight.shape[0]
    changed = []
    for at in torch.randperm(len(places), generator=chance).tolist() * DECOYS:
        words = torch.randint(size, (16,), generator=chance).tolist()
        word = next(
            (candidate for candidate in words if candidate not in special and candidate != sentence[places[at]]), None
        )
        if word is not None and len(changed) < DECOYS:
            changed.append((*sentence[: places[at]], word, *sentence[places[at] + 1 :]))
    return changed
