"""What came back of each sentence: the only place where what was found is held against the truth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from situs.audit.text.found import UNNAMED, Found
from situs.audit.text.victim import Sentence


class Read(NamedTuple):
    """One sentence and what was found of it. name: for a reader. found: the sentence that was found, () where none is
    its own; of a batch whose words are known at places alone, those of its words. known: of each token, whether the
    attacker knows that its word is in the batch. grouped: whether `found` is known to be one sentence. picked: whether
    one who has candidates with one word changed is sure of the true one; None where that was not tried. tokens: how
    many there are; right: at how many of their places the sentence that was found has the same word.
    """

    name: str
    truth: Sentence
    found: Sentence
    known: tuple[bool, ...]
    grouped: bool = True
    picked: bool | None = None

    @property
    def tokens(self) -> int:
        return len(self.truth)

    @property
    def right(self) -> int:
        return _right(self.truth, self.found)

    @property
    def whole(self) -> bool:
        return self.grouped and self.truth == self.found


def score(names: Sequence[str], truth: Sequence[Sentence], found: Found) -> list[Read]:
    """Each true sentence with the one that was found of it: the pairing that has most tokens right."""
    reads = [Read(name, sentence, (), _known(sentence, found)) for name, sentence in zip(names, truth, strict=True)]
    if found.sentences:
        right = np.array([[_right(real, other) for other in found.sentences] for real in truth])
        for row, column in zip(*linear_sum_assignment(-right), strict=True):
            if right[row, column]:
                reads[row] = reads[row]._replace(found=found.sentences[column])
    return [max(read, _placed(read, found), key=lambda one: (one.right, one.grouped)) for read in reads]


def _placed(read: Read, found: Found) -> Read:
    """With the words of the sentence that are known at their places, in whichever sentence of the batch."""
    words = [word if (word, place) in found.placed else UNNAMED for place, word in enumerate(read.truth)]
    return read._replace(found=tuple(words), grouped=False)


def _right(truth: Sentence, found: Sentence) -> int:
    return sum(a == b for a, b in zip(truth, found, strict=False))


def _known(truth: Sentence, found: Found) -> tuple[bool, ...]:
    return tuple(word in found.words for word in truth)
