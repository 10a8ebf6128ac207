"""What came back of each sentence: the only place where what was found is held against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from situs.audit.text.found import Found
from situs.audit.text.victim import Sentence


class Read(NamedTuple):
    """One sentence and what was found of it. name: for a reader. found: the sentence that was found, () where none is
    its own. known: of each token, whether the attacker knows that its word is in the batch. tokens: how many there
    are; right: at how many of their places the sentence that was found has the same word.
    """

    name: str
    truth: Sentence
    found: Sentence
    known: tuple[bool, ...]

    @property
    def tokens(self) -> int:
        return len(self.truth)

    @property
    def right(self) -> int:
        return _right(self.truth, self.found)

    @property
    def whole(self) -> bool:
        return self.truth == self.found


def score(names: Sequence[str], truth: Sequence[Sentence], found: Found) -> list[Read]:
    """Each true sentence with the one that was found of it: the pairing that has most tokens right."""
    reads = [Read(name, sentence, (), _known(sentence, found)) for name, sentence in zip(names, truth, strict=True)]
    if not found.sentences:
        return reads
    right = np.array([[_right(real, other) for other in found.sentences] for real in truth])
    for row, column in zip(*linear_sum_assignment(-right), strict=True):
        if right[row, column]:
            reads[row] = reads[row]._replace(found=found.sentences[column])
    return reads


def _right(truth: Sentence, found: Sentence) -> int:
    return sum(a == b for a, b in zip(truth, found, strict=False))


def _known(truth: Sentence, found: Found) -> tuple[bool, ...]:
    return tuple(word in found.words for word in truth)
