"""Words at places from two tables of gradients: a token adds one vector to the row of its word and of its place.

Noise hides which rows are zero, and not which rows have a vector in common. The row of word w is Σ g_t over its tokens,
that of place p the same over the sentences that reach it, each with noise of one deviation, which the rows of words
that are not in the batch tell. A token (w, p) is a column e_w + e_p of a dictionary, of which few are used: they are
added one by one, each time the one that raises the likelihood of both tables most (sparse Bayesian learning). The
vectors have most of their length in few directions, so that directions of like strength count apart.

A head that shares the word table adds Σ_t (p_t - e_y) h_t to it: directions that many rows share, which are left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from scipy.stats import chi2, norm
from torch import Tensor

from situs.audit.attacks.base import rounded_off, steps_off
from situs.audit.client import LEVELS
from situs.audit.deadline import Deadline
from situs.audit.defences import Gradients
from situs.audit.text.recovered import UNNAMED
from situs.audit.text.victim import Sentence, is_tied, word_weight
from situs.backbones.hf.text import TextBackbone

QUIET = 0.1
"""The quantile of a table's rows that measures its noise: at least that share of the rows must hold no word."""

CHANCE, RARE = 1e-6, 1e-3
"""The probability that a table of pure noise has one row that counts as more: of words, and of places."""

LIKELY = 0.5
"""From which probability a word at a place is named."""

MOST, LARGEST, ALIKE = 256, 4096, 4.0
"""Words that are searched together; the most where more of them stand out of the noise; and the largest ratio of
strengths of directions that count together."""


@dataclass(frozen=True)
class Matched:
    """tokens: word, place and the probability that it is this word. words: those whose rows alone are more than noise.

    noise: its deviation as the rows tell it. length: of the longest sentence. tables: whether both were sent. cut:
    whether the search was stopped.
    """

    tokens: tuple[tuple[int, int, float], ...] = ()
    words: frozenset[int] = frozenset()
    noise: float = 0.0
    length: int = 0
    tables: bool = False
    cut: bool = False

    @property
    def sentence(self) -> Sentence:
        """The words of a batch of one in their order, `UNNAMED` where none is likely."""
        at = {place: word for word, place, _ in self.tokens}
        return tuple(at.get(place, UNNAMED) for place in range(self.length))


def place_weight(backbone: TextBackbone) -> str | None:
    """The name of the position table; None for a model without one."""
    table = backbone.positions().table
    whole = None if table is None else table._base if table._base is not None else table
    return next((name for name, parameter in backbone.named_parameters() if parameter is whole), None)


@torch.no_grad()
def match_rows(
    backbone: TextBackbone, upload: Gradients, batch: int, *, steps: bool = False, deadline: Deadline | None = None
) -> Matched:
    """Which words stand at which places, as far as the rows of both tables tell; of the word table alone, which words.

    steps: whether numbers come in even ones.
    """
    if (weight := word_weight(backbone)) not in upload:
        return Matched()
    words = _finite(upload[weight]).double()
    name = place_weight(backbone)
    places = None
    if name is not None and name in upload:
        first = backbone.first_row(backbone.model)
        places = _finite(upload[name]).double()[first : first + backbone.num_tokens]
    coarse = max(_coarse(upload[table], steps) for table in (weight, name) if table is not None and table in upload)
    tied = is_tied(backbone)
    if tied and places is not None:
        kept = _unshared(words)
        words, places = words @ kept, places @ kept
    if not words.shape[1] or (tied and places is None):
        return Matched(tables=places is not None)
    noise = deviation(places if tied and places is not None else words)
    alone = longer(words, max(noise, coarse) if tied else noise)
    named = frozenset[int]() if tied else frozenset(alone.nonzero()[:, 0].tolist())  # a head makes rows long as well
    level = max(noise, coarse)
    if places is None or level == 0:
        return Matched((), named, noise, tables=places is not None)
    length = _length(words, places, level)
    deadline = deadline or Deadline()
    tokens = _tokens(words, places[:length], alone, level, batch, deadline) if length else ()
    return Matched(tokens, named, noise, length, tables=True, cut=deadline.over())


def named_words(backbone: TextBackbone, upload: Gradients) -> frozenset[int]:
    """The words that are in the batch for sure: noise as it is in other rows of the word embedding's gradient would not
    make theirs so long. None where it is not sent, or is the head's too."""
    if (weight := word_weight(backbone)) not in upload or is_tied(backbone):
        return frozenset()
    rows = _finite(upload[weight]).double()
    return frozenset(longer(rows, deviation(rows)).nonzero()[:, 0].tolist())


def _finite(gradient: Tensor) -> Tensor:
    """A gradient with 0 for numbers that overflowed or are not known."""
    return gradient.nan_to_num(0.0, 0.0, 0.0)


def deviation(rows: Tensor) -> float:
    """The deviation of the noise in a table [n, D] of which a tenth of the rows, at least, hold nothing else."""
    energy, channels = rows.square().sum(dim=1), rows.shape[1]
    return math.sqrt(float(energy.quantile(QUIET)) / float(chi2.ppf(QUIET, channels)))


def longer(rows: Tensor, noise: float, chance: float = CHANCE) -> Tensor:
    """Which rows [n, D] are longer than noise makes any of them, but for a small chance: bool [n]."""
    most = float(chi2.isf(chance / len(rows), rows.shape[1]))
    return rows.square().sum(dim=1) > noise**2 * most


def _coarse(gradient: Tensor, steps: bool) -> float:
    """The deviation of what is rounded off the longest row of a gradient."""
    if steps:
        return max(steps_off(gradient), float(gradient.abs().max()) / LEVELS / math.sqrt(12))
    rows = _finite(gradient)
    row = rows[rows.double().norm(dim=1).argmax()]
    return 4 * rounded_off(row, gradient.dtype)  # sums of several numbers are further off


def _unshared(rows: Tensor) -> Tensor:
    """A basis [D, m] of the directions that do not stand out of all the rows [n, D] together, each as long as most."""
    length = rows.norm(dim=1, keepdim=True)
    like = rows * (length.median() / length.clamp(min=1e-300)).clamp(max=1.0)
    values, vectors = torch.linalg.eigh(like.mT @ like / len(rows))
    bulk = float(values[: len(values) // 2].mean())
    return vectors[:, values <= bulk * (1 + math.sqrt(rows.shape[1] / len(rows))) ** 2 * 2]


def _length(words: Tensor, places: Tensor, noise: float) -> int:
    """The places of the longest sentence: up to the last whose row is more than noise, or has a part of a word's."""
    count, size = len(words) * len(places), words.norm(dim=1).clamp(min=1e-300)
    shared = ((words.float() @ places.float().mT).double() / size[:, None]).amax(dim=0) / noise
    able = longer(places, noise, RARE) | (shared > float(norm.isf(RARE / count)))
    return int(able.nonzero().max()) + 1 if bool(able.any()) else 0


def _tokens(
    words: Tensor, places: Tensor, alone: Tensor, noise: float, batch: int, deadline: Deadline
) -> tuple[tuple[int, int, float], ...]:
    """Words at places, with how likely each is. alone: of each word, whether its row is more than noise."""
    size = words.norm(dim=1).clamp(min=1e-300)
    shared = ((words.float() @ places.float().mT).double() / size[:, None]).amax(dim=1)
    count = min(len(words), LARGEST, max(MOST, int(alone.sum())))  # the search keeps matrices of this size
    some = torch.where(alone, shared.abs().max() + size, shared).topk(count).indices
    strong = torch.cat([words[alone], places])
    search = _Search(words[some], places, directions(strong, noise), noise)
    rest = len(words) - count
    return tuple(
        (int(some[word]), place, sure) for word, place, sure in search.run(batch, rest, deadline) if sure > LIKELY
    )


def directions(rows: Tensor, noise: float) -> list[Tensor]:
    """Bases [D, m] of directions in which rows [n, D] have like lengths; the last of those that are noise."""
    channels = rows.shape[1]
    values, vectors = (part.flip(-1) for part in torch.linalg.eigh(rows.mT @ rows))
    above = int((values > noise**2 * (math.sqrt(len(rows)) + math.sqrt(channels)) ** 2).sum())
    ends, start = [0], 0
    for at in range(1, above):
        if at - start >= ALIKE and values[start] > ALIKE * values[at]:
            start = at
            ends += [at]
    ends += [above] * (0 < above < channels) + [channels]
    return [vectors[:, start:end] for start, end in pairwise(ends)]


class _Search:
    """Tokens one after another: the likelihood's inverse covariance C^-1 over all rows X, and C^-1 X, for directions of
    like strength."""

    def __init__(self, words: Tensor, places: Tensor, bases: Sequence[Tensor], noise: float) -> None:
        rows = torch.cat([words, places]) / noise
        self.words, self.places = len(words), len(places)
        self.parts = [(torch.eye(len(rows), dtype=rows.dtype, device=rows.device), rows @ basis) for basis in bases]

    def run(self, batch: int, rest: int, deadline: Deadline) -> list[tuple[int, int, float]]:
        """(word, place, probability), at most `batch` words at a place, until none raises the likelihood by more than
        the choice of it takes. rest: words that are not looked at."""
        tokens, full = list[tuple[int, int, float]](), torch.zeros(self.words, self.places, dtype=torch.bool)
        while len(tokens) < batch * self.places and not deadline.over():
            gain = self._gain().cpu().masked_fill(full, -math.inf)
            word, place = divmod(int(gain.argmax()), self.places)
            column = gain[:, place]
            if not column[word] > math.log(self.words + rest):
                break
            others = torch.cat([column[:word], column[word + 1 :], column.new_full((1,), math.log(max(rest, 1)))])
            odds = float(torch.logsumexp(others, dim=0) - column[word])
            tokens.append((word, place, 1 / (1 + math.exp(min(odds, 700.0)))))
            self._add(word, place)
            full[word, place] = True
            full[:, place] |= int(full[:, place].sum()) >= batch
        return tokens

    def _gain(self) -> Tensor:
        """By how much each token raises the log-likelihood, [words, places]."""
        gain = torch.zeros(self.words, self.places, dtype=self.parts[0][0].dtype, device=self.parts[0][0].device)
        for inverse, seen in self.parts:
            diagonal, power, w = inverse.diagonal(), seen.square().sum(dim=1), self.words
            spread = diagonal[:w, None] + diagonal[None, w:] + 2 * inverse[:w, w:]
            ratio = (power[:w, None] + power[None, w:] + 2 * seen[:w] @ seen[w:].mT) / seen.shape[1] / spread
            gain += seen.shape[1] / 2 * (ratio.clamp(min=1.0) - 1 - ratio.clamp(min=1.0).log())
        return gain

    def _add(self, word: int, place: int) -> None:
        """Takes a token in, with the variance in each part that is most likely."""
        at = self.words + place
        for number, (inverse, seen) in enumerate(self.parts):
            column, vector = inverse[:, word] + inverse[:, at], seen[word] + seen[at]
            spread, power = float(column[word] + column[at]), float(vector.square().mean())
            if power > spread:
                factor = (power - spread) / (power * spread)
                self.parts[number] = (
                    inverse - factor * torch.outer(column, column),
                    seen - factor * torch.outer(column, vector),
                )
